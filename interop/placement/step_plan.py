"""Placement of a stored step's leaves on a mesh, and the cost of a load; reads no values.

A model's leaves are placed by partition rules, by the decoder's axis names, or automatically. Other
leaves are placed like the parameter that they mirror, as in a load of the whole state.
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
        find: returns the partition rule of a path; None: there are no rules.
        named: whether the model is the decoder, whose axes have names.
        axis_rules: mesh axes of each logical axis name.
        units: number of indivisible units (such as heads) of a logical axis.
    """

    find: Callable[[str], RuleMatch] | None = None
    named: bool = False
    axis_rules: AxisRules = field(default_factory=lambda: DEFAULT_AXIS_RULES)
    units: Mapping[str, int] = field(default_factory=dict)


class PlannedLeaf(NamedTuple):
    """Placement of a leaf.

    Attributes:
        record: description of the stored leaf.
        dtype: dtype of the loaded leaf.
        rule: name of the rule that placed it, as in `ResolvedSpec`.
        entries: mesh axes of each dimension.
        shard_shape: shape of each device's shard.
        nbytes: bytes of the whole leaf, as loaded.
        bytes_per_device: bytes of a shard.
        problems: mesh axes that do not fit; sizes are computed without these axes.
        unmatched: why a large leaf is replicated without a rule that says so; None: it is not.
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
        leaves: leaves of the loaded items, in the order in which they are stored.
        local: whether the step is in a folder, not in a bucket.
    """

    grid: ProcessGrid
    leaves: tuple[PlannedLeaf, ...]
    local: bool

    @cached_property
    def problems(self) -> list[PlannedLeaf]:
        """Leaves that can't be placed as requested."""
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
    """Return the placement of a step's leaves.

    Args:
        records: every leaf of the step, in the order in which they are stored.
        grid: the mesh and its processes.
        layout: rules that place the leaves.
        items: names of the items that are loaded.
        param_dtype: dtype to which floating parameters are cast; None: they keep the stored dtypes.
        local: whether the step is in a folder, not in a bucket.
    """
    planner = _Planner(records, grid, layout, param_dtype)
    leaves = tuple(planner.planned(record) for record in records if record.item in items)
    return StepPlan(grid, leaves, local)


class _Planner:
    """Planner of a step's leaves; it places equal leaves only once."""

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
        """Return the placement and loaded dtype of a leaf that is not a model's."""
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
    """Return the items whose leaves are placed by rules or axis names: those of models.

    These are all items if there is no model, whose parameters other items could mirror.
    """
    items = {record.item for record in records}
    return items.intersection(MODEL_ITEMS) if "model" in items else items


def readable(path: str) -> str:
    """Return a leaf's path as partition rules match it: with "/" inside keys unescaped."""
    return "/".join(keys_of(path))


def element_bytes(record: LeafRecord, dtype: str) -> int:
    """Return the bytes of an element in memory; of a typed key, the bytes of all its words."""
    if record.is_key:
        return prod(record.key_words) * _KEY_WORD_BYTES
    return int(dtype_named(dtype).itemsize)


def _array(leaf: PlannedLeaf) -> PlacedArray:
    record = leaf.record
    words = record.key_words
    is_key = record.is_key
    stored = _KEY_WORD_BYTES if is_key else element_bytes(record, record.dtype)
    # Two elements share a byte along an axis of even size; without one, each takes a byte.
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
