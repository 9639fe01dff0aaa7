"""Warning about training steps that all use the same random numbers, such as one dropout mask.

A module makes random numbers from a key and a counter, which it increases. `state.merge(params)`
returns a module with a copy of both. If the training step does not store the copy's variables as
the new state's `graphother`, the new counter is lost. Nothing else would show it.

The warning needs two observations: while the step is compiled, a counter was increased before
gradients are applied; and the states that the compiled step returns have the old counter.
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
"""Maximum number of states to check. Each check waits for the step; usually two are enough."""

_INNER: Final = frozenset({"cairn", "jax", "jaxlib", "flax", "contextlib"})
_warned: set[str] = set()


@dataclass(frozen=True)
class Stream:
    """Random stream of a model that `merge` returned.

    Attributes:
        path: path of the stream in the model.
        key: variable of the key.
        count: variable of the counter.
        values: values of key and counter when `merge` returned.
    """

    path: Path
    key: Any
    count: Any
    values: tuple[Any, Any]

    @property
    def is_drawn_from(self) -> bool:
        """True if the counter has changed and the key has not: random numbers were drawn."""
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
    """Record of random streams whose new counters a compiled step may lose.

    It is a static field of states. All instances are equal, so that it causes no new compilation.

    Attributes:
        paths: paths of the streams.
        graphother_id: while the step is compiled, `id` of the `graphother` without new counters.
    """

    def __init__(self, paths: Sequence[Path] = (), graphother_id: int = 0) -> None:
        """Make a record; without arguments, one of no streams."""
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
        """Compare a compiled step's result with the previous one; warn if counters are the same.

        The caller may also store the new counters after the step; then the next result has them.
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
            return  # donated to another step, or on devices of other processes
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
    """Warn that steps lose the counters of these streams; once per process for the same streams.

    Nothing happens if there are no paths. The warning names the line that called the step.
    """
    names = ", ".join("/".join(map(str, path)) for path in paths)
    if not paths or names in _warned:
        return
    _warned.add(names)
    # The first frame outside of Cairn, JAX and Flax; level 1 is this function.
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"each training step draws the same random numbers from {names}, such as the same dropout "
        "mask: the step does not carry the counters on. Have the loss function return "
        "nnx.split(model, nnx.Param, ...)[2] of the model that it called, and take that over: "
        "state.apply_gradients(grads=grads).replace(graphother=graphother), or with a TrainStep as "
        "'graphother' beside the loss",
        UserWarning,
        stacklevel=level,
    )


def _by_stream(variables: Any) -> dict[Path, Any]:
    """Return the variables of an NNX state by the path of their stream, one per stream."""
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
