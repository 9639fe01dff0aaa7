"""Leaves of a load's target that a map makes of a step's leaves. Imports JAX.

Renamed leaves are read as a restore without a map reads them. What operations make is read by
rules, see `restores/rule_leaves.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.interop.conversion.ops import Rename
from cairn.interop.conversion.rules import Rule
from cairn.interop.conversion.tree_map import MappedLeaves, ResolvedMap, TreeMap
from cairn.interop.weights.rule_slices import one_dtype
from cairn.state.checkpointing import trees
from cairn.state.checkpointing.leaf_forms import dtype_name, is_key_dtype
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.restore import FittedItem, fits_as
from cairn.state.checkpointing.restores.rule_leaves import StoredTensors, read_rule
from cairn.state.checkpointing.restores.targets import (
    Casts,
    TargetLeaf,
    cast_values,
    target_leaf,
)
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.reader import CheckpointReader

__all__ = ["MappedItems", "fit_map"]


class MappedItems(NamedTuple):
    """A step and the target that a map makes of it. All paths are "item/path".

    Attributes:
        renamed: for each stored item, its leaves that are renamed or keep their path.
        rules: rules of the other leaves, with the descriptions of these.
        source: the stored leaves of the rules.
        new: values of the leaves that are new.
        problems: what does not fit, one line each; `read` requires none.
    """

    renamed: list[FittedItem]
    rules: list[tuple[Rule, list[TargetLeaf]]]
    source: StoredTensors
    new: dict[str, Any]
    problems: list[str]

    def same(self) -> Any:
        """Return the parts that must be equal on all processes."""
        renamed = [
            [(path, item.name, info.path) for path, info in item.infos.items()]
            for item in self.renamed
        ]
        return {
            "map": [renamed, [repr(rule) for rule, _ in self.rules], sorted(self.new)],
        }

    def read(self) -> dict[str, Any]:
        """Read the leaves, make those of the rules, and return all by path.

        All processes must call this: renamed leaves that several of them hold are read by one.
        """
        values: dict[str, Any] = {}
        for item in self.renamed:
            values |= item.read()
        values |= agreement.all_or_none(self._read_rules)
        return values | self.new

    def _read_rules(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.source.prefetch(name for rule, _ in self.rules for name in rule.tensors)
        for rule, targets in self.rules:
            values |= dict(zip(rule.leaves, read_rule(self.source, rule, targets), strict=True))
        return values


class _Step(NamedTuple):
    """Stored leaves of a step, by "item/path".

    Attributes:
        arrays: item -> its arrays.
        items: the item of each leaf.
        infos: descriptions of the leaves that are arrays.
        fits: what a target of each must fit, see `fits_as`.
        texts: the leaves that are text.
    """

    arrays: dict[str, ItemArrays]
    items: dict[str, str]
    infos: dict[str, LeafInfo]
    fits: dict[str, jax.ShapeDtypeStruct | LeafInfo]
    texts: dict[str, str]


def fit_map(
    reader: CheckpointReader,
    targets: Mapping[str, Any],
    tree_map: TreeMap,
    *,
    casts: Casts,
    where: str,
) -> MappedItems:
    """Compare a step with a target by metadata, through a map; return both with the differences.

    Args:
        reader: reader of the step.
        targets: the target's trees, by item.
        tree_map: the map.
        casts: which leaves may change dtype where the map does not say it.
        where: name of the checkpoint in errors.
    """
    leaves = {
        f"{item}/{path}": leaf
        for item, tree in targets.items()
        for path, leaf in trees.flatten(tree).items()
    }
    step = _stored(reader, leaves)
    described = {
        path: target_leaf(leaf) for path, leaf in leaves.items() if not isinstance(leaf, str)
    }
    resolved = tree_map.resolve(
        {path: tuple(fit.shape) for path, fit in step.fits.items()} | dict.fromkeys(step.texts, ()),
        {path: described[path].shape if path in described else () for path in leaves},
    )
    fitting = _Fitting(step, described, casts, list(resolved.problems))
    for mapped in resolved.leaves:
        fitting.add(mapped)
    new = _new_values(resolved, leaves, described, fitting.problems)
    renamed = [
        FittedItem(
            item,
            arrays,
            {path: step.infos[stored] for path, stored in named.items() if stored in step.infos},
            {path: described[path] for path, stored in named.items() if stored in step.infos},
            {path: step.texts[stored] for path, stored in named.items() if stored in step.texts},
            [],
            where,
        )
        for item, arrays in step.arrays.items()
        if (named := fitting.renamed.get(item))
    ]
    names = {name for rule, _ in fitting.rules for name in rule.tensors}
    source = StoredTensors(
        {name: (step.arrays[step.items[name]], step.infos[name]) for name in sorted(names)}
    )
    return MappedItems(renamed, fitting.rules, source, new, fitting.problems)


def _stored(reader: CheckpointReader, leaves: Mapping[str, Any]) -> _Step:
    step = _Step({}, {}, {}, {}, {})
    for item in reader.items():
        arrays = reader.arrays(item)
        if arrays is None:
            continue
        step.arrays[item] = arrays
        older = arrays.tree.variables
        for path, info in arrays.infos().items():
            name = arrays.tree.current(path)
            if f"{item}/{older.get(path)}" in leaves:  # a target of an older Flax
                name = older[path]
            step.infos[f"{item}/{name}"] = info
            step.fits[f"{item}/{name}"] = fits_as(arrays, info)
        step.texts.update({f"{item}/{path}": text for path, text in reader.texts(item).items()})
        named = [path for path in (*step.infos, *step.texts) if path not in step.items]
        step.items.update(dict.fromkeys(named, item))
    return step


class _Fitting:
    """Comparison of what a map makes with the leaves of a target.

    Attributes:
        renamed: item -> path in the target -> stored path.
        rules: rules of the other leaves, with the descriptions of these.
        problems: what does not fit, one line each.
    """

    def __init__(
        self, step: _Step, targets: Mapping[str, TargetLeaf], casts: Casts, problems: list[str]
    ) -> None:
        self.renamed: dict[str, dict[str, str]] = {}
        self.rules: list[tuple[Rule, list[TargetLeaf]]] = []
        self.problems = problems
        self._step, self._targets, self._casts = step, targets, casts

    def add(self, mapped: MappedLeaves) -> None:
        """Compare some leaves, and add them."""
        casts: Casts = "numbers" if mapped.casts else self._casts
        if isinstance(mapped.rule.op, Rename):
            for path, stored in zip(mapped.rule.leaves, mapped.rule.tensors, strict=True):
                self._rename(path, stored, casts)
        else:
            self._make(mapped, casts)

    def _rename(self, path: str, stored: str, casts: Casts) -> None:
        target = self._targets.get(path)
        if stored in self._step.texts or target is None:
            if target is not None:
                self.problems.append(f"{path}: expected an array, stored text in {stored}")
            elif stored not in self._step.texts:
                self.problems.append(f"{path}: expected text, stored an array in {stored}")
        else:
            of = "" if path == stored else f" in {stored}"
            misfits = target.misfits(self._step.fits[stored], casts)
            self.problems += [f"{path}: {text}{of}" for text in misfits]
        self.renamed.setdefault(self._step.items[stored], {})[path] = stored

    def _make(self, mapped: MappedLeaves, casts: Casts) -> None:
        rule, step = mapped.rule, self._step
        stored = {name: step.fits[name].dtype for name in rule.tensors if name in step.fits}
        name = f"{', '.join(rule.leaves[:3])} from {', '.join(rule.tensors[:3])}"
        kinds = sorted({dtype_name(dtype) for dtype in stored.values()})
        targets = [self._targets[path] for path in rule.leaves if path in self._targets]
        keys = [*stored.values(), *(target.dtype for target in targets)]
        if len(stored) + len(targets) < len(rule.tensors) + len(rule.leaves):
            self.problems.append(f"{name}: expected arrays, found text; it can only be renamed")
        elif any(map(is_key_dtype, keys)):
            self.problems.append(f"{name}: expected numbers, found PRNG keys; rename them only")
        elif mapped.computes and not all(map(is_floating, stored.values())):
            self.problems.append(f"{name}: expected floating numbers, stored {', '.join(kinds)}")
        elif len(kinds) > 1 and not (casts != "none" and all(map(is_floating, stored.values()))):
            self.problems.append(
                f"{name}: expected stored leaves of one dtype, or cast(), found {', '.join(kinds)}"
            )
        else:
            dtype = one_dtype([*stored.values()])
            for path, target in zip(rule.leaves, targets, strict=True):
                described = jax.ShapeDtypeStruct(target.shape, dtype)
                misfits = target.misfits(described, casts)
                self.problems += [f"{path}: {text} in {rule.tensors[0]}" for text in misfits]
            self.rules.append((rule, targets))


def _new_values(
    resolved: ResolvedMap,
    leaves: Mapping[str, Any],
    targets: Mapping[str, TargetLeaf],
    problems: list[str],
) -> dict[str, Any]:
    """Return the values of the leaves that a map calls new; what does not fit is added.

    Functions are only called if all else fits.
    """
    values: dict[str, Any] = {}
    fits = not problems
    for path, value in resolved.new.items():
        if callable(value):
            if not fits:
                continue
            value = value(path, leaves[path])
        target = targets.get(path)
        if target is None:
            if not isinstance(value, str):
                problems.append(f"{path}: expected text, the map has {type(value).__name__}")
            values[path] = value
            continue
        if isinstance(value, str | jax.ShapeDtypeStruct) or value is None:
            problems.append(f"{path}: expected an array, the map has {type(value).__name__}")
            continue
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        misfits = target.misfits(jax.ShapeDtypeStruct(array.shape, array.dtype), "numbers")
        if misfits:
            problems += [f"{path}: {text.replace('stored', 'the map has')}" for text in misfits]
        elif not problems:
            values[path] = target.finish(_placed(target, array, path))
    return values


def _placed(target: TargetLeaf, array: Any, path: str) -> Any:
    """Return an array, in the target's dtype, where the target says."""
    if is_key_dtype(array.dtype):
        return jax.device_put(array, target.sharding)
    if isinstance(array, jax.Array) and array.sharding == target.sharding:
        return array if array.dtype == target.dtype else jnp.astype(array, target.dtype)
    values = np.asarray(array)
    if target.dtype is not None and values.dtype != target.dtype:
        values = cast_values(values, target.dtype, path)
    if target.sharding is None:
        return values
    return target.place(values.shape, values.dtype, lambda index: np.array(values[index]))
