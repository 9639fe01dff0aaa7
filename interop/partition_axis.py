"""Mesh axes that split each logical axis of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError

__all__ = ["MESH_AXES", "AxisEntry", "PartitionAxis", "entry_axes"]

MESH_AXES = ("dp", "fsdp", "tp", "sp")
"""Data parallel, fully sharded data parallel, tensor parallel, sequence parallel."""

AxisEntry = str | tuple[str, ...] | None
"""Mesh axis that splits a dimension, or several together; None: the dimension is not split."""


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a spec names; () for None."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


@dataclass(frozen=True)
class PartitionAxis:
    """Mesh axes that split each logical axis of a model; frozen, hashable, JSON in and out.

    A parameter's dimensions have logical names, such as ("embed", "mlp"). One mesh axis splits at
    most one dimension of a leaf: the first that maps to it. In attention, queries (batch, sequence,
    heads, head size), and keys and values (batch, key sequence, key/value heads, head size) get
    sharding constraints of the same kind.

    Attributes:
        vocab_axis: vocabulary, "vocab".
        hidden_state_axis: width of the residual stream, "embed".
        mlp_intermediate_axis: inner width of the feed-forward layers, "mlp".
        head_axis: query heads, "heads".
        key_head_axis: key and value heads, "kv_heads".
        attention_dim_axis: size of one head, "head_dim".
        expert_axis: experts, "experts".
        layer_axis: layers, where a model stacks them, "layers".
        norm_axis: scales of the norms, "norm".
        position_axis: learned positions, "positions".
        batch_axis: rows of a batch; attention only.
        sequence_axis: tokens of the queries; attention only.
        key_sequence_axis: tokens of keys and values; attention only.
    """

    LOGICAL_NAMES: ClassVar[Mapping[str, str]] = {
        "vocab_axis": "vocab",
        "hidden_state_axis": "embed",
        "mlp_intermediate_axis": "mlp",
        "head_axis": "heads",
        "key_head_axis": "kv_heads",
        "attention_dim_axis": "head_dim",
        "expert_axis": "experts",
        "layer_axis": "layers",
        "norm_axis": "norm",
        "position_axis": "positions",
    }

    vocab_axis: AxisEntry = "tp"
    hidden_state_axis: AxisEntry = "fsdp"
    mlp_intermediate_axis: AxisEntry = "tp"
    head_axis: AxisEntry = "tp"
    key_head_axis: AxisEntry = "tp"
    attention_dim_axis: AxisEntry = None
    expert_axis: AxisEntry = None
    layer_axis: AxisEntry = None
    norm_axis: AxisEntry = None
    position_axis: AxisEntry = None
    batch_axis: AxisEntry = ("dp", "fsdp")
    sequence_axis: AxisEntry = "sp"
    key_sequence_axis: AxisEntry = None

    def __post_init__(self) -> None:
        problems = []
        for name, value in self.to_dict().items():
            entry = tuple(value) if isinstance(value, list) else value
            names = (entry,) if isinstance(entry, str) else entry
            if names is not None and not _are_names(names):
                problems.append(f"{name}: expected a mesh axis, several or None, found {value!r}")
            object.__setattr__(self, name, entry)
        if problems:
            raise ArgumentError(
                count_text(len(problems), "field names no mesh axes", "fields name no mesh axes"),
                path="PartitionAxis",
                next_step='give names such as "tp" or ("dp", "fsdp")',
                problems=problems,
            )

    def axis_rules(self) -> dict[str, AxisEntry]:
        """Return the mesh axes for each logical name of a parameter's dimension."""
        return {name: getattr(self, field) for field, name in self.LOGICAL_NAMES.items()}

    def unknown_axes(self, mesh_axes: Iterable[str]) -> list[str]:
        """Return a line for each mesh axis that a field names and that is not in `mesh_axes`."""
        axes = tuple(mesh_axes)
        problems = []
        for field, entry in self.to_dict().items():
            problems += [
                f"{field} names mesh axis {name!r}"
                for name in entry_axes(entry)
                if name not in axes
            ]
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return the value of every field, by its name."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionAxis:
        """Return the PartitionAxis whose `to_dict` returned `data`, perhaps read back from JSON.

        Raises:
            ArgumentError: a field is unknown (the known ones are listed), or its value is no mesh
                axes.
        """
        names = [entry.name for entry in dataclasses.fields(cls)]
        unknown = sorted(set(data) - set(names))
        if unknown:
            raise ArgumentError(
                path="partition_axis",
                expected=f"fields among {', '.join(names)}",
                found=f"unknown: {', '.join(unknown)}",
            )
        return cls(**data)


def _are_names(names: object) -> bool:
    return (
        isinstance(names, tuple)
        and bool(names)
        and all(isinstance(name, str) and name for name in names)
        and len(set(names)) == len(names)
    )
