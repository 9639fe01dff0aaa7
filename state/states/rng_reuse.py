"""Warning that each training step draws the same random numbers, as it drops the counters.

A module draws by a key and a counter, and counts on. `state.merge(params)` gives a copy of both, so
that what a loss function counted is lost unless the step takes the copy's variables over as
`graphother`. Nothing else would show it: the loss goes down, with one dropout mask for ever.

Two checks make the warning: a counter moved where the gradients are applied, while the step is
compiled, and the states that the compiled step returns have it unmoved.
"""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from cairn.state.checkpointing.leaf_forms import is_key_dtype

__all__ = ["RngReuse", "Stream", "drawn_streams", "random_streams", "warn_of_reuse"]

Path = tuple[Any, ...]

_MAX_CHECKS: Final = 8
"""Maximum number of checked states: each check waits for the step, and two are enough."""

_INNER: Final = frozenset({"cairn", "jax", "jaxlib", "flax", "contextlib"})
_warned: set[str] = set()


@dataclass(frozen=True)
class Stream:
    """Random stream of a model, as it was when `merge` returned the model.

    Attributes:
        path: of the stream in the model.
        key: its key's variable.
        count: its counter's variable.
        values: the values that the two had.
    """

    path: Path
    key: Any
    count: Any
    values: tuple[Any, Any]

    @property
    def is_drawn_from(self) -> bool:
        """True if numbers were drawn from it, and its key was not replaced."""
        return (
            self.key.get_value() is self.values[0] and self.count.get_value() is not self.values[1]
        )


def random_streams(model: Any) -> list[Stream]:
    """Return the random streams of a model."""
    keys = _by_stream(nnx.state(model, nnx.RngKey))
    counts = _by_stream(nnx.state(model, nnx.RngCount))
    return [
        Stream(path, keys[path], count, (keys[path].get_value(), count.get_value()))
        for path, count in counts.items()
        if path in keys
    ]


def drawn_streams(streams: Iterable[Stream]) -> tuple[Path, ...]:
    """Return the paths of the streams that were drawn from."""
    return tuple(dict.fromkeys(stream.path for stream in streams if stream.is_drawn_from))


class RngReuse:
    """Random draws of a step that the returned state does not carry on; part of its structure.

    Every one equals every other: no step may compile again for it.

    Attributes:
        paths: of the streams.
        graphother_id: the `id` of the `graphother` that lacks them, while the step is compiled.
    """

    def __init__(self, paths: Sequence[Path] = (), graphother_id: int = 0) -> None:
        """Begin without lost streams."""
        self.paths = tuple(paths)
        self.graphother_id = graphother_id
        self._checks_left = _MAX_CHECKS
        self._before: tuple[int, list[bytes]] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RngReuse)

    def __hash__(self) -> int:
        return hash(RngReuse)

    def __repr__(self) -> str:
        return "RngReuse()"

    def check(self, state: Any) -> None:
        """Compare a compiled step's result with the one before; warn if streams did not advance.

        The caller may carry the counters over himself: then they have advanced by the next look.
        """
        if not self._checks_left:
            return
        self._checks_left -= 1
        keys = _by_stream(nnx.filter_state(state.graphother, nnx.RngKey))
        counts = _by_stream(nnx.filter_state(state.graphother, nnx.RngCount))
        variables = [
            part[path].get_value() for path in self.paths for part in (keys, counts) if path in part
        ]
        if not all(map(_is_readable, (state.step, *variables))):
            return  # given to another step, or on other processes' devices
        values = []
        for variable in variables:
            is_key = is_key_dtype(variable.dtype)
            numbers = jax.random.key_data(variable) if is_key else variable
            values.append(_host(numbers).tobytes())
        before, self._before = self._before, (int(_host(state.step).max()), values)
        if before is None or before == self._before:
            return
        self._checks_left = 0
        if before[1] == values:
            warn_of_reuse(self.paths)


def warn_of_reuse(paths: Sequence[Path]) -> None:
    """Warn the caller of the step of lost streams, if any: in a process once of the same ones."""
    names = ", ".join("/".join(map(str, path)) for path in paths)
    if not paths or names in _warned:
        return
    _warned.add(names)
    warnings.warn(
        f"each training step draws the same random numbers from {names}, such as the same dropout "
        "mask: the step does not carry the counters on. Have the loss function return "
        "nnx.split(model, nnx.Param, ...)[2] of the model that it called, and take that over: "
        "state.apply_gradients(grads=grads).replace(graphother=graphother), or with a TrainStep as "
        "'graphother' beside the loss",
        UserWarning,
        stacklevel=_frames_to_caller(),
    )


def _frames_to_caller() -> int:
    """Return the `stacklevel` of the first line that is neither ours nor JAX's."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    return level


def _by_stream(variables: Any) -> dict[Path, Any]:
    """Return variables by the path of their stream."""
    return {path[:-1]: variable for path, variable in nnx.to_flat_state(variables)}


def _is_readable(value: Any) -> bool:
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not value.is_deleted()
        and bool(value.addressable_shards)
    )


def _host(value: jax.Array) -> np.ndarray[Any, Any]:
    """Return this process's first shard of an array."""
    return np.asarray(value.addressable_data(0))
