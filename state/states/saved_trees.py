"""Trees that a `RunSaver` saves as it saves a state: `{"model": model, "optimizer": optimizer}`."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import jax

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.state.checkpointing.modules import any_module, as_items, nnx_kinds, open_modules
from cairn.state.checkpointing.save_handle import SaveHandle
from cairn.storage.arrays.data_files import Compression
from cairn.storage.runs.records.annotations import Better
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = [
    "SavedTrees",
    "StateOrTrees",
    "are_marked",
    "is_equal",
    "leaves_of",
    "mark_of",
    "reference_to",
]


class Saveable(Protocol):
    """A state that can be saved: an `EasyDeLState` or a `TrainState`."""

    @property
    def step(self) -> Any:
        """Number of optimizer steps taken."""

    def save_state(self, save_directory: str, /, **options: Any) -> SaveHandle:
        """Start a save, and return its handle."""


class SavedTrees:
    """Trees that `Checkpointer.save` takes, with the methods of a state that a `RunSaver` calls.

    Args:
        items: trees by name, or one tree; see `Checkpointer.save`.
    """

    def __init__(self, items: Any) -> None:
        self.items = items

    @property
    def step(self) -> int:
        """Refuse to give a number: trees have none.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            path="step",
            expected="the number of the step: trees by name have none of their own",
            found="None",
            next_step="call step(items, step=n), and save(items, step=n)",
        )

    def save_state(
        self,
        save_directory: str,
        /,
        *,
        step: SupportsIndex | None,
        metrics: Mapping[str, Any] | None,
        labels: Mapping[str, str] | None,
        extras: Mapping[str, Any] | None,
        better: Mapping[str, Better] | None = None,
        iterators: Mapping[str, Any] | None = None,
        model: ModelInfo | None = None,
        assets: Mapping[str, bytes] | None = None,
        overwrite: bool = False,
        compression: Compression | None = None,
        check: Callable[[], object] | None = None,
        deadline: float | None = None,
        verbose: bool = False,
    ) -> SaveHandle:
        """Start a save by the run's `Checkpointer`, whose `save` describes the arguments.

        `extras` is its `meta`. It prints nothing, whatever `verbose` says.
        """
        return Checkpointer.for_run(save_directory).save(
            self.step if step is None else step,
            self.items,
            meta=extras or {},
            metrics=metrics,
            better=better,
            labels=labels,
            iterators=iterators,
            model=model,
            assets=assets,
            overwrite=overwrite,
            compression=compression,
            check=check,
            deadline=deadline,
        )


StateOrTrees = Saveable | SavedTrees
"""State, or trees by name, that a `RunSaver` saves."""


def leaves_of(state: StateOrTrees | None) -> list[Any]:
    """Return the leaves of a state, or of trees; none if the state is None."""
    if not isinstance(state, SavedTrees):
        return jax.tree.leaves(state)
    leaves = jax.tree.leaves(state.items)
    if any_module(leaves):  # of the kind whose Variables JAX doesn't see
        leaves = jax.tree.leaves(open_modules(as_items(state.items).trees).trees)
    return leaves


def reference_to(state: StateOrTrees) -> Callable[[], StateOrTrees | None]:
    """Return a function that returns the state, or None once it is gone. It keeps no array alive.

    The dict that names trees lives for one call, so the reference is to the arrays and modules in
    it. A module whose arrays have been replaced since, by a training step, is gone too.
    """
    if not isinstance(state, SavedTrees):
        return weakref.ref(state)
    kinds = nnx_kinds()
    nodes, structure = jax.tree.flatten(state.items, is_leaf=lambda node: isinstance(node, kinds))
    node_marks, leaf_marks = [*map(mark_of, nodes)], [*map(mark_of, leaves_of(state))]

    def referent() -> SavedTrees | None:
        present = [mark() if isinstance(mark, weakref.ref) else mark for mark in node_marks]
        if any(node is None for node in present):
            return None
        trees = SavedTrees(jax.tree.unflatten(structure, present))
        return trees if are_marked(leaves_of(trees), leaf_marks) else None

    return referent


def mark_of(leaf: Any) -> Any:
    """Return a mark that identifies a leaf without keeping its array alive."""
    try:
        return weakref.ref(leaf)
    except TypeError:  # a number
        return leaf


def are_marked(leaves: Sequence[Any], marks: Sequence[Any]) -> bool:
    """Return whether these are the leaves that the marks are of: the same arrays, equal numbers."""
    return len(leaves) == len(marks) and all(
        mark() is leaf if isinstance(mark, weakref.ref) else is_equal(mark, leaf)
        for leaf, mark in zip(leaves, marks, strict=True)
    )


def is_equal(first: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN."""
    try:
        return bool(first is other or first == other or (first != first and other != other))
    except (TypeError, ValueError):  # arrays of several numbers
        return False
