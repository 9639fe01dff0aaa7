"""Load of any tree that was saved to a run. Imports JAX.

The target describes the result: its containers, modules and Python types, and the shape, dtype and
sharding of each leaf. All differences from the stored tree are found before any value is read.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple, SupportsIndex, get_args

import jax

from cairn.counts import count_text
from cairn.interop.conversion.tree_map import TreeMap
from cairn.state.checkpointing import trees
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.iterators import Positions, find_positions, warn_of_left
from cairn.state.checkpointing.mapped_items import MappedItems, fit_map
from cairn.state.checkpointing.modules import OpenedItems, as_items, open_modules
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.restore import FittedItem, fit_item
from cairn.state.checkpointing.restores.targets import Casts
from cairn.state.checkpointing.skipped_steps import record_skipped
from cairn.storage.arrays.orbax_tree import META_ITEM
from cairn.storage.errors import InvalidURIError, LeafNotFoundError, PolicyError, TreeMismatchError
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.damage import OnDamage, damaged_steps
from cairn.storage.runs.records.layout import BEST, CheckpointRef, check_step, parse_ref
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.uri import StoreURI

__all__ = ["StepChoice", "agreed_checkpoint", "agreed_step", "check_on_damage", "load"]

StepChoice = SupportsIndex | str | None
"""A step's number, "best:METRIC" (also with ":min" or ":max"), an alias, or None for the latest."""


def load(
    reference: StoreURI | str | os.PathLike[str],
    target: Any,
    *,
    step: StepChoice = None,
    only: str | re.Pattern[str] | Callable[[str], bool] | None = None,
    map: TreeMap | None = None,
    cast: bool = False,
    iterators: Mapping[str, Any] | None = None,
    damaged: OnDamage = "refuse",
) -> Any:
    """Load a step of a run into the target's structure; all processes of a job must call this.

    Args:
        reference: "run", "run@alias", "run@best:METRIC" or "run/steps/N", such as
            "gs://bucket/runs/my-run".
        target: the items as given to `Checkpointer.save`, or a tree of equal structure: modules,
            `nnx.State`, optax states, any pytree. Each of its leaves says what is returned in its
            place. For a `jax.ShapeDtypeStruct` or a `jax.Array` it is an array of the same
            sharding (without one, on the first local device) and the same weak type; for a NumPy
            array, a NumPy scalar or a Python number it is one of these. The target is not changed.
        step: the step, if the reference names only the run: its number, an alias, "best:METRIC"
            (in the direction that the steps record), "best:METRIC:min" or "best:METRIC:max"; None
            for the latest.
        only: the leaves to load; all others stay as in the target. A regular expression that
            matches somewhere in their paths, such as "model/layers/0/kernel", or a predicate on a
            path.
        map: the stored leaves that each leaf of the target is made of, if these differ in names or
            shapes: renamed, stacked, split, transposed; and which leaves are new. None: all have
            the paths and shapes that they were saved with. Not together with `only`. Each process
            reads what its shards need; host memory beside the leaves is a few times 64 MiB, unless
            no axis divides the leaves of a rule along chunks of the stored ones.
        cast: allow leaves to change dtype: from floating to floating, and from integer to any
            integer dtype that can hold all stored values. Otherwise dtypes must be equal.
        iterators: iterators of training data, by name, as given to `save`. Once all else is
            loaded, each process sets its own, in place, to their positions at the time of the
            save. If another number of processes saved the step, only Grain's ElasticIterator can
            resume, and iterators with `set_states(states)` or `load_state_dicts(states)`, which
            receive the states of all saving processes, in order. None restores no positions, and
            warns once if the target has all items and the step has positions; {} restores none
            without a warning.
        damaged: what to do if the latest or best step, not one that you name, has a record of
            damage. "refuse" raises. "skip" loads the next step that is not damaged; this process's
            next save into the run then continues from the newest undamaged step, and supersedes
            the damaged ones above.

    Returns:
        Containers and modules like the target's, with the saved values.

    Raises:
        InvalidURIError: the reference is malformed, or names a step and `step` is given.
        NotFoundError: there is no such run, step, alias or item, or no step has this metric.
        StepDamagedError: the latest or best step is damaged, and `damaged` is "refuse"; the
            message names a step to load instead.
        PolicyError: "best:METRIC" was given without ":min" or ":max", and no step records which
            is better; or `damaged` is neither "refuse" nor "skip"; or `map` is given with `only`.
        LeafNotFoundError: `only` is an expression that matches no leaf.
        TreeMismatchError: leaves are missing, unexpected, or of another shape or dtype, or a
            sharding does not divide its leaf; the differences of all items are listed. With `map`
            also: a stored leaf that is used twice, or neither used nor left out, a leaf of the
            target that is made twice or not at all, or whose shape does not follow. Or, with
            `cast`, a stored integer does not fit the target's dtype.
        IteratorMismatchError: the step has no iterator of a name, or an iterator can't resume with
            this number of processes: all are listed, and none is set. Or an iterator refuses its
            state; those set before it have moved.
        UnsupportedFormatError: the target is no tree.
        CorruptionError: stored bytes fail their checksum; names the leaf or the file.
        StoreUnavailableError: the store does not respond.
    """

    def same_checkpoint(named: tuple[CheckpointRef, int | str | None]) -> dict[str, str]:
        ref, choice = named
        return {"reference": str(ref), "step": repr(choice), "damaged": damaged}

    ref, choice = agreement.all_or_none(
        _named, reference, step, same=same_checkpoint, error=InvalidURIError
    )
    if isinstance(choice, str) and choice.startswith(BEST):
        ref = replace(ref, best=choice.removeprefix(BEST))
    elif isinstance(choice, str):
        ref = replace(ref, alias=choice)
    elif choice is not None:
        ref = replace(ref, step=choice)
    run, info = agreed_checkpoint(ref, damaged=damaged)
    with pause_gc():
        # An error on one process is raised on all: none may wait for one that has stopped.
        fitted = agreement.all_or_none(
            *(_fitted, run, info, target, only, map, cast, iterators),
            same=_Fitted.same,
            error=TreeMismatchError,
        )
        filled = dict(fitted.opened.trees)
        for name, new in fitted.read().items():
            tree = filled[name]
            leaves = [new.get(path, leaf) for path, leaf in trees.flatten(tree).items()]
            filled[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        restored = fitted.target.close(fitted.opened.close(filled))
        fitted.positions.set()
        return restored


class _Fitted(NamedTuple):
    """A load's target with the step's items and iterator states that fit it.

    Attributes:
        target: the target's trees, by name.
        opened: the same trees with each module replaced by its state.
        items: the step's items, fitted to the target's trees.
        mapped: the step, fitted to the target's trees by a map; None: there is no map.
        positions: the iterators to set, with their states.
    """

    target: OpenedItems
    opened: OpenedItems
    items: list[FittedItem]
    mapped: MappedItems | None
    positions: Positions

    def same(self) -> dict[str, Any]:
        """Return the parts that must be equal on all processes: the paths of items, iterators."""
        return {
            "target": [(item.name, sorted(item.targets)) for item in self.items],
            "map": None if self.mapped is None else self.mapped.same(),
            **self.positions.same(),
        }

    def read(self) -> dict[str, dict[str, Any]]:
        """Return what is read, by item and path. All processes must call this."""
        if self.mapped is None:
            return {item.name: item.read() for item in self.items}
        values: dict[str, dict[str, Any]] = {}
        for full, value in self.mapped.read().items():
            name, _, path = full.partition("/")
            values.setdefault(name, {})[path] = value
        return values


def agreed_step(find: Callable[[], StepInfo]) -> StepInfo:
    """Call `find` on process 0 only, and return its step on all processes.

    If each process asked for the latest step, the answers could differ. All processes of a job must
    call this.

    Raises:
        StorageError: `find` raised on process 0; raised on every process.
    """
    return _step_info(agreement.agree(lambda: asdict(find())))


def agreed_checkpoint(ref: CheckpointRef, *, damaged: OnDamage = "refuse") -> tuple[Run, StepInfo]:
    """Resolve the reference on process 0; return the run and the step on all processes.

    All processes of a job must call this; only process 0 reads the store.

    Args:
        ref: the reference, equal on all processes.
        damaged: what to do if the latest or best step is damaged; see `load`.

    Raises:
        PolicyError: `damaged` is neither "refuse" nor "skip".
        StorageError: there is no such run or step on process 0; raised on every process.
    """
    check_on_damage(damaged)

    def resolved() -> dict[str, Any]:
        run = Run.look_up(ref.run)
        info = resolve_step(run, ref, damaged=damaged)
        if damaged == "skip" and (ref.step, ref.alias) == (None, None):
            above = [key for key in run.step_attempts().items() if key[0] > info.step]
            record_skipped(ref.run, damaged_steps(run, above))  # process 0 alone begins attempts
        return {"step": asdict(info), "run": run.id}

    checkpoint = agreement.agree(resolved)
    return Run(ref.run).expected(checkpoint["run"]), _step_info(checkpoint["step"])


def check_on_damage(damaged: Any) -> None:
    """Check the argument `damaged` of a load.

    Raises:
        PolicyError: it is not one of `OnDamage`.
    """
    if damaged not in get_args(OnDamage):
        raise PolicyError(
            "not what can be done with a damaged step",
            path="damaged",
            expected=" or ".join(map(repr, get_args(OnDamage))),
            found=repr(damaged),
            next_step="Leave it out to refuse the step; a damaged step is loaded by its number.",
        )


def _step_info(step: Mapping[str, Any]) -> StepInfo:
    return StepInfo(**{**step, "state": StepState(step["state"])})


def _named(
    reference: StoreURI | str | os.PathLike[str], step: StepChoice
) -> tuple[CheckpointRef, int | str | None]:
    ref = parse_ref(reference)
    if step is None:
        return ref, None
    if (ref.alias, ref.step, ref.best) != (None, None, None):
        raise InvalidURIError(
            "the step is named twice",
            path="step",
            expected=f"no step= with {str(reference)!r}, which names one",
            found=repr(step),
            next_step="Leave one of them out.",
        )
    if not isinstance(step, str):
        return ref, check_step(step)
    return ref, None if step == "latest" else step


def _fitted(
    run: Run,
    info: StepInfo,
    target: Any,
    only: str | re.Pattern[str] | Callable[[str], bool] | None,
    tree_map: TreeMap | None,
    cast: bool,
    iterators: Mapping[str, Any] | None,
) -> _Fitted:
    """Return the target's trees with the step's items and iterator states that fit them.

    Raises:
        TreeMismatchError: the step does not fit the target; all differences are listed.
        LeafNotFoundError: `only` is an expression that matches no leaf.
        IteratorMismatchError: the step's iterator states do not fit the iterators.
    """
    if tree_map is not None:
        _check_map(tree_map, only)
    named = as_items(target)
    opened = open_modules(named.trees)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info), whole=only is None)
    where = f"{run.uri}, step {info.step}"
    casts: Casts = "numbers" if cast else "none"
    pattern: re.Pattern[str] | None = None
    choose: Callable[[str], object] | None = None
    if callable(only):
        choose = only
    elif only is not None:
        pattern = _pattern(only)
        choose = pattern.search
    fitted: list[FittedItem] = []
    problems: list[str] = []
    mapped: MappedItems | None = None
    if tree_map is not None:
        mapped = fit_map(reader, opened.trees, tree_map, casts=casts, where=where)
        problems += mapped.problems
    for name, tree in opened.trees.items() if mapped is None else ():
        chosen = None if choose is None else _of(name, choose)
        if pattern is not None and not any(map(_of(name, pattern.search), trees.flatten(tree))):
            continue
        if name not in reader.names():
            problems.append(f"{name}: expected by the target, no item of this step")
            continue
        item = fit_item(reader, name, tree, casts=casts, where=where, chosen=chosen)
        problems += [f"{name}/{problem}" for problem in item.problems]
        fitted.append(item)
    if problems:
        expected = f"items {', '.join(opened.trees)}, as the target has them"
        next_step = "Build the target as it was saved, or load another step."
        if mapped is not None:
            expected = "each leaf of the target once, each stored leaf used once or in `left_out`"
            next_step = "Correct the map."
        raise TreeMismatchError(
            "the step does not fit the target",
            path=where,
            expected=expected,
            found=f"items {', '.join(reader.names())}, {count_text(len(problems), 'difference')}",
            next_step=next_step,
            problems=problems,
        )
    if pattern is not None and not fitted:
        paths = [
            f"{name}/{path}" for name, tree in opened.trees.items() for path in trees.flatten(tree)
        ]
        raise LeafNotFoundError(
            "no leaf of the target has such a path",
            path=where,
            expected=f"paths in which {pattern.pattern!r} has a match",
            found=f"paths such as {', '.join(map(repr, paths[:3]))}",
            next_step="Correct only=, or leave it out to load everything.",
        )
    positions = find_positions(reader, iterators, where)
    # Whoever loads a part, such as the model to evaluate it, does not go on with the data.
    if only is None and opened.trees.keys() >= {*reader.names()} - {META_ITEM}:
        warn_of_left(reader, iterators, where=where)
    return _Fitted(named, opened, fitted, mapped, positions)


def _check_map(tree_map: Any, only: object) -> None:
    """Check the argument `map` of a load.

    Raises:
        PolicyError: it is no `TreeMap`, or `only` is given too.
    """
    if not isinstance(tree_map, TreeMap) or only is not None:
        is_map = isinstance(tree_map, TreeMap)
        raise PolicyError(
            "not what a load can do",
            path="map",
            expected="no only= beside it" if is_map else "a TreeMap",
            found=repr(only) if is_map else type(tree_map).__name__,
            next_step="Leave only= out; the map names what is `left_out` and what is `new`."
            if is_map
            else "Write TreeMap({...}).",
        )


def _of(item: str, choose: Callable[[str], object]) -> Callable[[str], object]:
    return lambda path: choose(f"{item}/{path}")


def _pattern(only: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(only)
    except (re.error, TypeError) as exc:
        raise PolicyError(
            "this is no regular expression",
            path="only",
            expected="one, such as 'model/.*kernel'",
            found=repr(only),
            next_step=f"Correct it: {exc}.",
        ) from exc
