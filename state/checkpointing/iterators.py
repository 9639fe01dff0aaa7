"""Positions in training data: iterator states, saved with a step and set again by a restore.

An iterator is an object with `get_state()` and `set_state(state)`, such as Grain's, or with
`state_dict()` and `load_state_dict(state)`, such as torchdata's StatefulDataLoader. Each process
saves the states of its own iterators. In a job with the same number of processes, each restores its
own. A job with another number can resume if the state is the same on all processes, one index into
the whole data, as with Grain's ElasticIterator; or if the iterator has `set_states(states)` or
`load_state_dicts(states)`, which receive the states of all saving processes, in order. Imports JAX.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax

from cairn.counts import count_text
from cairn.state.checkpointing.iterator_states import (
    NotStorableError,
    state_from_json,
    state_to_json,
)
from cairn.state.checkpointing.processes import agreement, exchange
from cairn.storage.errors import (
    InvalidURIError,
    IteratorMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.layout import iterator_file
from cairn.storage.store.uri import check_segment, is_text

__all__ = [
    "MAX_STATE_BYTES",
    "IteratorState",
    "Positions",
    "capture_states",
    "find_positions",
    "warn_of_left",
]

logger = logging.getLogger("cairn.restore")

MAX_STATE_BYTES: Final = 16 << 20
"""Maximum stored size of one process's states, in bytes."""

_SHOWN_PROBLEMS: Final = 50
_GRAIN_INDEX: Final = "global_next_index"
"""Only key in the state of a Grain iterator whose position is global. See ADR 21."""

_NEXT_STEP: Final = (
    "Name the iterators as they were saved, and restore with as many processes, or with iterators "
    "that can go on with another number: Grain's ElasticIterator, or your own with set_states or "
    "load_state_dicts."
)
_NONE_STORED: Final = (
    "Restore without iterators=, and bring the data there yourself: the step was saved without."
)

_told: set[str] = set()


@dataclass(frozen=True)
class IteratorState:
    """State of an iterator; accepted in place of the iterator in a save.

    Attributes:
        data: the state in its stored form, JSON.
    """

    data: bytes


class _Methods(NamedTuple):
    """Names of the methods that get a state, set it, and set the states of all processes."""

    get: str
    set: str
    set_all: str


_KNOWN: Final = (
    _Methods("get_state", "set_state", "set_states"),
    _Methods("state_dict", "load_state_dict", "load_state_dicts"),
)
_EXPECTED: Final = "get_state and set_state, or state_dict and load_state_dict"


def capture_states(iterators: Mapping[str, Any] | None) -> dict[str, IteratorState]:
    """Return the current states of iterators, by name; empty for None.

    Raises:
        UnsupportedFormatError: `iterators` is no mapping.
        InvalidURIError: a name can't be used.
        UnsupportedLeafError: an object without the methods of an iterator, one iterator with two
            names, a state that can't be stored (all of these are listed), an iterator that fails
            to return its state, or states larger than `MAX_STATE_BYTES`.
    """
    named = _checked_names(iterators)
    problems = [*_twice(named)]
    states: dict[str, IteratorState] = {}
    for name, iterator in named.items():
        if isinstance(iterator, IteratorState):
            states[name] = iterator
            continue
        methods = _methods_of(iterator)
        if methods is None:
            problems.append(f"{name}: expected {_EXPECTED}, found {_kind(iterator)} without")
            continue
        try:
            states[name] = IteratorState(state_to_json(getattr(iterator, methods.get)()))
        except NotStorableError as exc:
            problems += [f"{name}: {problem}" for problem in exc.problems[:_SHOWN_PROBLEMS]]
            left = len(exc.problems) - _SHOWN_PROBLEMS
            problems += [f"{name}: and {left} more"] if left > 0 else []
        except Exception as exc:
            raise UnsupportedLeafError(
                "an iterator did not tell its state",
                path=f"iterators: {name!r}",
                expected=f"{_kind(iterator)}.{methods.get}() to return it",
                found=f"{type(exc).__name__}: {exc}",
                next_step="Mend the iterator, or save without it; nothing was written.",
            ) from exc
    if problems:
        raise UnsupportedLeafError(
            "the position in the data can't be saved",
            path="iterators",
            expected="iterators whose states are numbers, text, bytes, arrays of NumPy, tensors of "
            "PyTorch in host memory, and lists, tuples and dicts of these",
            found=f"{len(problems)} problems",
            next_step="Give such iterators, whose states have arrays in place of JAX's and no "
            "other objects; nothing was written.",
            problems=problems,
        )
    size = sum(len(state.data) for state in states.values())
    if size > MAX_STATE_BYTES:
        raise UnsupportedLeafError(
            "the position in the data is too large",
            path="iterators",
            expected=f"at most {MAX_STATE_BYTES} bytes in each process",
            found=", ".join(f"{name!r}: {len(state.data)}" for name, state in states.items()),
            next_step="Have the iterators keep less than whole examples: shuffle and buffer less, "
            "or tell an index from which the buffer is filled again; nothing was written.",
        )
    return states


@dataclass(frozen=True)
class Positions:
    """Iterators, and the stored states that they are to be set to.

    Attributes:
        where: the step that stores the states, for errors.
        states: for each name: the iterator, the name of its method that sets a state, the state.
    """

    where: str
    states: Mapping[str, tuple[Any, str, Any]]

    def same(self) -> dict[str, list[str]]:
        """Return the part that must be equal on all processes: the names of the iterators."""
        return {"iterators": sorted(self.states)}

    def set(self) -> None:
        """Set the iterators to their states; call this after all else in a restore has succeeded.

        All processes of a job must call this.

        Raises:
            IteratorMismatchError: an iterator on this or another process refused its state.
        """
        if self.states:
            agreement.all_or_none(self._set)

    def _set(self) -> None:
        for name, (iterator, method, state) in self.states.items():
            try:
                getattr(iterator, method)(state)
            except Exception as exc:
                raise IteratorMismatchError(
                    "an iterator did not take its state",
                    path=f"{self.where}: {name}",
                    expected=f"{_kind(iterator)}.{method}() to take what was saved",
                    found=f"{type(exc).__name__}: {exc}",
                    next_step="Make the iterator as it was made for the run that saved it, of the "
                    "same data; iterators set before this one have moved.",
                ) from exc


def find_positions(
    reader: CheckpointReader, iterators: Mapping[str, Any] | None, where: str
) -> Positions:
    """Read a step's states for these iterators and check that they fit; set no iterator.

    Args:
        reader: reader of the step.
        iterators: the iterators to set, by name; None or fewer than the step has are allowed.
        where: the step, for errors.

    Raises:
        UnsupportedFormatError: `iterators` is no mapping, or a newer release wrote a state.
        InvalidURIError: a name can't be used.
        IteratorMismatchError: the step has no iterator of a name, an object has no methods to set
            its state, or an iterator can't resume with another number of processes; all are listed.
        CorruptionError: a stored state is damaged.
        StoreUnavailableError: the store does not respond.
    """
    named = _checked_names(iterators)
    stored = reader.iterators
    problems = [*_twice(named)]
    states: dict[str, tuple[Any, str, Any]] = {}
    for name, iterator in named.items():
        methods = _methods_of(iterator)
        if name not in stored:
            problems.append(f"{name}: the step has no iterator of this name")
        elif methods is None:
            problems.append(f"{name}: expected {_EXPECTED}, found {_kind(iterator)} without")
        elif problem := _misfit(reader, name, iterator, methods):
            problems.append(problem)
        elif not problems:
            states[name] = (iterator, *_state(reader, name, iterator, methods))
    if problems:
        names = [f"{name} of {count_text(count, 'process')}" for name, count in stored.items()]
        raise IteratorMismatchError(
            "the data can't go on where the step was saved",
            path=where,
            expected=f"iterators as the step has them: {', '.join(names) or 'none'}",
            found=f"{len(problems)} problems",
            next_step=_NEXT_STEP if stored else _NONE_STORED,
            problems=problems,
        )
    return Positions(where, states)


def warn_of_left(
    reader: CheckpointReader, iterators: Mapping[str, Any] | None, *, where: str
) -> None:
    """Warn, once per step, that the step has positions in data which are not restored.

    Args:
        reader: reader of the step.
        iterators: the iterators that are restored; {} means none on purpose: no warning.
        where: the step, for the warning.
    """
    left = sorted(reader.iterators.keys() - (iterators or {}).keys())
    asked_for_none = iterators is not None and not iterators
    if not left or asked_for_none or where in _told or not exchange.is_primary():
        return
    _told.add(where)
    logger.warning(
        "%s has the position of %s, which is not restored: give iterators= to go on with the data "
        "where the step was saved, or iterators={} to begin anew.",
        where,
        ", ".join(left),
    )


def _misfit(reader: CheckpointReader, name: str, iterator: Any, methods: _Methods) -> str | None:
    """Return why an iterator can't resume with this job's number of processes; None if it can."""
    saved, now = reader.iterators[name], jax.process_count()
    if saved == now or callable(getattr(iterator, methods.set_all, None)):
        return None
    lead = f"{name}: saved by {saved} processes, now {now}"
    is_grain = any(kind.__module__.partition(".")[0] == "grain" for kind in type(iterator).__mro__)
    if not is_grain:
        return f"{lead}: {_kind(iterator)} has no {methods.set_all}"
    if not _is_global(getattr(iterator, methods.get)()):
        return f"{lead}: {_kind(iterator)} is not of an ElasticIterator"
    if len(set(reader.iterator_states(name))) > 1 or not _is_global(_read(reader, name, [0])[0]):
        return f"{lead}: the states of the {saved} are not one index into the whole data"
    return None


def _state(
    reader: CheckpointReader, name: str, iterator: Any, methods: _Methods
) -> tuple[str, Any]:
    """Return the name of the iterator's method to call, and the state or states to call it with."""
    saved = reader.iterators[name]
    if saved != jax.process_count() and callable(getattr(iterator, methods.set_all, None)):
        return methods.set_all, _read(reader, name, range(saved))
    process = int(jax.process_index()) if saved == jax.process_count() else 0
    (state,) = _read(reader, name, [process])
    return methods.set, state


def _read(reader: CheckpointReader, name: str, processes: Sequence[int]) -> list[Any]:
    """Return an iterator's states that these processes saved, in the order of `processes`."""
    count = reader.iterators[name]
    return [
        state_from_json(data, path=reader.uri / iterator_file(name, process, count))
        for process, data in zip(processes, reader.iterator_states(name, processes), strict=True)
    ]


def _is_global(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() == {_GRAIN_INDEX}


def _methods_of(iterator: Any) -> _Methods | None:
    """Return the names of an iterator's methods for its state; None if it has none of them."""
    for methods in _KNOWN:
        if all(callable(getattr(iterator, name, None)) for name in (methods.get, methods.set)):
            return methods
    return None


def _checked_names(iterators: Mapping[str, Any] | None) -> dict[str, Any]:
    if iterators is None:
        return {}
    if not isinstance(iterators, Mapping):
        raise UnsupportedFormatError(
            "an argument of another type",
            path="iterators",
            expected='iterators by name, such as {"train": iterator}',
            found=_kind(iterators),
            next_step="Give each a name; nothing was changed.",
        )
    for name in iterators:
        if not is_text(name):
            raise InvalidURIError(
                "invalid name of an iterator",
                path=f"iterators: {name!r}",
                expected="text that UTF-8 has a form for",
                found=type(name).__name__,
                next_step='Name each iterator, such as {"train": iterator}.',
            )
        check_segment(name, within=f"iterator {name!r}")
    return dict(iterators)


def _twice(iterators: Mapping[str, Any]) -> list[str]:
    """Return a line for each name whose iterator also has an earlier name."""
    first: dict[int, str] = {}
    named = ((name, first.setdefault(id(iterator), name)) for name, iterator in iterators.items())
    return [f"{name}: the very iterator that is {other}" for name, other in named if name != other]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
