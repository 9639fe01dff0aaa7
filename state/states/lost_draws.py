"""Says that training draws the same random numbers in every step, as its step drops the counters.

A module draws by a key and a counter, and counts on. `state.merge(params)` gives a copy of both, so
that what a loss function counted is lost unless the step takes the copy's variables over as
`graphother`. Nothing else would show it: the loss goes down, with one dropout mask for ever.

Whether a counter moved is seen where the gradients are applied, while the step is compiled; whether
it came back unmoved, on the states that the compiled step returns. Only both together are told.
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

__all__ = ["Draws", "Stream", "lost_streams", "say_lost", "streams_of"]

Path = tuple[Any, ...]

_LOOKS: Final = 8
"""States that are looked at, at most: each look waits for the step, and two of them tell."""

_INNER: Final = frozenset({"cairn", "jax", "jaxlib", "flax", "contextlib"})
_told: set[str] = set()


@dataclass(frozen=True)
class Stream:
    """A random stream of a model that `merge` gave, as it was then.

    Attributes:
        path: of the stream in the model.
        key: its key's variable.
        count: its counter's variable.
        given: the values that the two had.
    """

    path: Path
    key: Any
    count: Any
    given: tuple[Any, Any]

    @property
    def is_lost(self) -> bool:
        """True if numbers were drawn from it, and its key was not replaced."""
        return self.key.get_value() is self.given[0] and self.count.get_value() is not self.given[1]


def streams_of(model: Any) -> list[Stream]:
    """Return the random streams of a model."""
    keys = _by_stream(nnx.state(model, nnx.RngKey))
    counts = _by_stream(nnx.state(model, nnx.RngCount))
    return [
        Stream(path, keys[path], count, (keys[path].get_value(), count.get_value()))
        for path, count in counts.items()
        if path in keys
    ]


def lost_streams(streams: Iterable[Stream]) -> tuple[Path, ...]:
    """Return the paths of the streams that were drawn from."""
    return tuple(dict.fromkeys(stream.path for stream in streams if stream.is_lost))


class Draws:
    """Random draws of a step that the returned state does not carry on; part of its structure.

    Every one equals every other: no step may compile again for it.

    Attributes:
        lost: paths of the streams.
        of: the `id` of the `graphother` that lacks them, while the step is compiled.
    """

    def __init__(self, lost: Sequence[Path] = (), of: int = 0) -> None:
        """Begin without lost streams."""
        self.lost = tuple(lost)
        self.of = of
        self._looks = _LOOKS
        self._before: tuple[int, list[bytes]] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draws)

    def __hash__(self) -> int:
        return hash(Draws)

    def __repr__(self) -> str:
        return "Draws()"

    def look(self, state: Any) -> None:
        """Compare a compiled step's result with the one before; warn if streams did not advance.

        The caller may carry the counters over himself: then they have advanced by the next look.
        """
        if not self._looks:
            return
        self._looks -= 1
        keys = _by_stream(nnx.filter_state(state.graphother, nnx.RngKey))
        counts = _by_stream(nnx.filter_state(state.graphother, nnx.RngCount))
        found = [
            part[path].get_value() for path in self.lost for part in (keys, counts) if path in part
        ]
        if not all(map(_is_readable, (state.step, *found))):
            return  # given to another step, or on other processes' devices
        values = [_bits(value) for value in found]
        before, self._before = self._before, (int(_host(state.step).max()), values)
        if before is None or before == self._before:
            return
        self._looks = 0
        if before[1] == values:
            say_lost(self.lost)


def say_lost(lost: Sequence[Path]) -> None:
    """Warn the caller of the step of lost streams, if any: in a process once of the same ones."""
    names = ", ".join("/".join(map(str, path)) for path in lost)
    if not lost or names in _told:
        return
    _told.add(names)
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


def _bits(value: Any) -> bytes:
    if is_key_dtype(value.dtype):
        value = jax.random.key_data(value)
    return _host(value).tobytes()


def _host(value: jax.Array) -> np.ndarray[Any, Any]:
    """Return this process's first shard of an array."""
    return np.asarray(value.addressable_data(0))
