"""Options of a save as one object, which the layers of a save pass on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cairn.storage.arrays.data_files import Compression
from cairn.storage.runs.records.annotations import Better
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = ["SaveOptions"]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of `Checkpointer.save`; its docstring describes each."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    iterators: Mapping[str, Any] | None = None
    model: ModelInfo | None = None
    assets: Mapping[str, bytes] | None = None
    metrics: Mapping[str, Any] | None = None
    better: Mapping[str, Better] | None = None
    labels: Mapping[str, str] | None = None
    overwrite: bool = False
    compression: Compression | None = None
    check: Callable[[], object] | None = None
    deadline: float | None = None
