"""Options of a save, which its layers pass on whole. Imports no JAX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from cairn.storage.arrays.value_files import Compression
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = ["SaveOptions"]

_NO_META: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of `Checkpointer.save`, which describes each."""

    meta: Mapping[str, Any] = _NO_META
    iterators: Mapping[str, Any] | None = None
    model: ModelInfo | None = None
    assets: Mapping[str, bytes] | None = None
    metrics: Mapping[str, Any] | None = None
    labels: Mapping[str, str] | None = None
    overwrite: bool = False
    compression: Compression | None = None
    check: Callable[[], object] | None = None
    deadline: float | None = None
