"""Placement of a stored step's leaves on a mesh, and the cost of a load; reads no values.

A model's leaves are placed by partition rules, by the decoder's axis names, or else replicated.
All others are placed with the parameter that they mirror, as a load of the whole state does.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from cairn.interop.placement.decoder_axes import PACKED, decoder_axes
from cairn.interop.placement.load_cost import LoadCost, PlacedArray, load_cost
from cairn.interop.placement.mirrors import REPLICATED, mirror
from cairn.interop.placement.process_grid import ProcessGrid
from cairn.interop.placement.rules import (
    DEFAULT_AXIS_RULES,
    AxisRules,
    ResolvedSpec,
    RuleMatch,
    SpecProblem,
    resolve_spec,
)
from cairn.interop.placement.specs import Entries, shard_shape
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.arrays.four_bits import FOUR_BITS
from cairn.storage.arrays.leaf_paths import keys_of
from cairn.storage.runs.records.manifest import LeafRecord

__all__ = ["Layout", "PlannedLeaf", "StepPlan", "plan_step", "readable", "ruled_items"]

MODEL_ITEMS: Final = ("model", "merged")
_KEY_WORD_BYTES: Final = 4


@dataclass(frozen=True)
class Layout:
    """Rules that place a model's leaves.

    Attributes:
        find: looks up the partition rule of a path; None without rules.
        named: the leaves are those of the decoder, whose axes have names.
        axis_rules: mesh axes of each axis name.
        units: number of indivisible units of a named axis.
    """

    find: Callable[[str], RuleMatch] | None = None
    named: bool = False
    axis_rules: AxisRules = field(default_factory=lambda: DEFAULT_AXIS_RULES)
    units: Mapping[str, int] = field(default_factory=dict)


class PlannedLeaf(NamedTuple):
    """Placement of a leaf.

    Attributes:
        record: what is stored.
        dtype: of the loaded leaf.
        rule: that placed it.
        entries: mesh axes of each dimension.
        shard_shape: of each device's shard.
        nbytes: of the whole leaf, as loaded.
        bytes_per_device: of the shard.
        problems: why it cannot be placed so; it is counted without the axes that do not fit.
        unmatched: why a large leaf is whole on every device although nobody asked for that.
    """

    record: LeafRecord
    dtype: str
    rule: str
    entries: Entries
    shard_shape: tuple[int, ...]
    nbytes: int
    bytes_per_device: int
    problems: tuple[SpecProblem, ...] = ()
    unmatched: str | None = None


@dataclass(frozen=True)
class StepPlan:
    """Placement of a step's leaves on a mesh.

    Attributes:
        grid: the mesh.
        leaves: of the items that are loaded, in the order in which they are stored.
        local: the step lies in a folder.
    """

    grid: ProcessGrid
    leaves: tuple[PlannedLeaf, ...]
    local: bool

    @cached_property
    def problems(self) -> list[PlannedLeaf]:
        """The leaves that cannot be placed so."""
        return [leaf for leaf in self.leaves if leaf.problems]

    def bytes_per_device(self, items: Collection[str] | None = None) -> int:
        """Return the bytes of these items' leaves, or of all leaves, on each device."""
        return sum(
            leaf.bytes_per_device
            for leaf in self.leaves
            if items is None or leaf.record.item in items
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def cost(self) -> LoadCost:
        """Cost of a load of the leaves."""
        return load_cost([_array(leaf) for leaf in self.leaves], self.grid, local=self.local)


def plan_step(
    records: Sequence[LeafRecord],
    grid: ProcessGrid,
    layout: Layout,
    *,
    items: Collection[str],
    param_dtype: str | None = None,
    local: bool = False,
) -> StepPlan:
    """Decide where the leaves of a step go.

    Args:
        records: every leaf of it, in the order in which they are stored.
        grid: the mesh.
        layout: rules that place the leaves.
        items: those that are loaded.
        param_dtype: what floating parameters are cast to; None keeps the stored dtypes.
        local: the step lies in a folder.
    """
    planner = _Planner(records, grid, layout, param_dtype)
    leaves = tuple(planner.planned(record) for record in records if record.item in items)
    return StepPlan(grid, leaves, local)


class _Planner:
    """Plans leaves, equal ones once."""

    def __init__(
        self,
        records: Sequence[LeafRecord],
        grid: ProcessGrid,
        layout: Layout,
        param_dtype: str | None,
    ) -> None:
        self._grid, self._layout, self._param_dtype = grid, layout, param_dtype
        items = {record.item for record in records}
        self._models = ruled_items(records)
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {item: {} for item in items}
        for record in records:
            self._shapes[record.item][record.path] = record.shape
        self._known: dict[object, ResolvedSpec] = {}
        model = [record for record in records if record.item == "model"]
        keys = [tuple(record.path.split("/")) for record in model]
        self._records = dict(zip(keys, model, strict=True))
        self._parameters = {
            key: (record.shape, self._model_place(record).entries)
            for key, record in self._records.items()
        }

    def planned(self, record: LeafRecord) -> PlannedLeaf:
        """Return the placement of a leaf."""
        if record.item in self._models:
            placed, dtype = self._model_place(record), self._made_dtype(record)
        else:
            placed, dtype = self._beside(record)
        shard = shard_shape(record.shape, placed.entries, self._grid.sizes)
        itemsize = element_bytes(record, dtype)
        return PlannedLeaf(
            record,
            dtype,
            placed.rule,
            placed.entries,
            shard,
            prod(record.shape) * itemsize,
            prod(shard) * itemsize,
            placed.problems,
            placed.unmatched,
        )

    def _model_place(self, record: LeafRecord) -> ResolvedSpec:
        layout = self._layout
        axes = decoder_axes(record.path, self._shapes[record.item]) if layout.named else None
        match = None if layout.find is None else layout.find(readable(record.path))
        if match is None and not layout.named:
            return ResolvedSpec(REPLICATED, ())
        key = (record.shape, axes, match)
        if key not in self._known:
            self._known[key] = resolve_spec(
                record.shape,
                self._grid.sizes,
                match=match,
                axes=axes,
                axis_rules=layout.axis_rules,
                units=layout.units,
            )
        return self._known[key]

    def _beside(self, record: LeafRecord) -> tuple[ResolvedSpec, str]:
        """Return the place and the dtype of a leaf of another item than the model's."""
        path = tuple(record.path.split("/"))
        mirrored = mirror(path, record.shape, self._parameters, self._grid.sizes)
        parameter = None if mirrored.parameter is None else self._records[mirrored.parameter]
        dtype = record.dtype
        if record.item == "optimizer" and parameter is not None and parameter.dtype == dtype:
            dtype = self._made_dtype(parameter)
        return ResolvedSpec(mirrored.rule, mirrored.entries, (), mirrored.unmatched), dtype

    def _made_dtype(self, parameter: LeafRecord) -> str:
        keys = parameter.path.split("/")
        packed = keys[-1] in PACKED and keys[-3:-1] == ["kernel", "array"]
        floating = parameter.dtype.startswith(("float", "bfloat"))
        cast = self._param_dtype if floating and not packed else None
        return parameter.dtype if cast is None else cast


def ruled_items(records: Iterable[LeafRecord]) -> set[str]:
    """Return the items whose leaves go by rules or axis names: those of models.

    Without a model there is nothing that the others could mirror, and all go by the rules.
    """
    items = {record.item for record in records}
    return items.intersection(MODEL_ITEMS) if "model" in items else items


def readable(path: str) -> str:
    """Return a leaf's path as partition rules see it: a "/" in a key is like any other."""
    return "/".join(keys_of(path))


def element_bytes(record: LeafRecord, dtype: str) -> int:
    """Return the bytes of an element in memory: one at least, and of typed keys all words."""
    if record.is_key:
        return prod(record.key_words) * _KEY_WORD_BYTES
    return int(dtype_named(dtype).itemsize)


def _array(leaf: PlannedLeaf) -> PlacedArray:
    record = leaf.record
    words = record.key_words
    is_key = record.is_key
    stored = _KEY_WORD_BYTES if is_key else element_bytes(record, record.dtype)
    # Two in a byte, along an axis that is even in every shard; without one, a byte each.
    even = any(size % 2 == 0 for size in record.shards or record.shape)
    packed = record.dtype in FOUR_BITS and even
    return PlacedArray(
        record.item,
        (*record.shape, *words),
        leaf.entries,
        (*leaf.shard_shape, *words),
        4 if packed else 8 * stored,
        stored,
        stored if is_key else element_bytes(record, leaf.dtype),
        record.chunks,
        record.shards,
    )
