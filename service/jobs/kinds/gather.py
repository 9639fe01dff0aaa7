"""Gather job: exports chosen items of any checkpoint as one safetensors file.

Tensors are named by item and path, such as "model/layers/0/mlp/kernel". The model's family may be
unknown.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.tensor_streams import float_dtype
from cairn.interop.errors import ArgumentError
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.context import JobKind
from cairn.service.jobs.kinds.export_job import (
    ExportContent,
    abandon_export,
    leave_export,
    run_export,
    write_part,
)
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.safetensors.writer import TensorSource, plan_shards

KIND: Final = "gather"
RULE_VERSION: Final = 1
FILE_PREFIX: Final = "gathered"
MODEL: Final = "model"
"""Item that is meant where none is named."""

_ONE_FILE: Final = 1 << 62


def gather_options(items: list[str] | None, dtype: str | None) -> dict[str, Any]:
    """Return the options in the canonical form; without items if the step decides on them.

    Raises:
        InvalidRequestError: The dtype is unknown.
    """
    _dtype(dtype)
    return {"dtype": dtype} if items is None else {"items": sorted({*items}), "dtype": dtype}


def with_items(run: Run, step: StepInfo, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that identify the artifact, with the items to gather.

    Raises:
        InvalidRequestError: An item has no arrays in this step, or no item has.
    """
    arrays = sorted({leaf.item for leaf in run.contents(step).leaves})
    items = options.get("items") or ([MODEL] if MODEL in arrays else arrays)
    unknown = [item for item in items if item not in arrays]
    if unknown or not items:
        raise InvalidRequestError(
            f"items: expected some of step {step.step} that hold arrays "
            f"({', '.join(arrays) or 'it has none'}), "
            f"found {', '.join(map(repr, unknown)) or 'none'}"
        )
    return {**options, "items": items}


def _plan(
    run: Run, manifest: Manifest, reader: CheckpointReader, options: Mapping[str, Any]
) -> ExportContent:
    target = _dtype(options["dtype"])
    sources = [
        _source(reader, item, info, target)
        for item in options["items"]
        for info in reader.leaves(item).values()
    ]
    shards = tuple(plan_shards(sources, _ONE_FILE, prefix=FILE_PREFIX))
    metadata = {
        "format": "np",
        "cairn.run": run.uri.name,
        "cairn.step": str(manifest.step),
        "cairn.manifest": manifest.digest(),
    }
    return ExportContent(shards, metadata, {})


def _source(
    reader: CheckpointReader, item: str, info: LeafInfo, target: np.dtype[Any] | None
) -> TensorSource:
    dtype = target if target is not None and is_floating(info.dtype) else info.dtype

    def blocks(max_bytes: int) -> Iterator[np.ndarray]:
        stored = max(1, max_bytes * info.dtype.itemsize // max(dtype.itemsize, info.dtype.itemsize))
        for block in reader.iter_blocks(item, info.path, max_bytes=stored):
            yield block.astype(dtype, copy=False)

    return TensorSource(f"{item}/{info.path}", info.shape, dtype, blocks)


def _dtype(name: str | None) -> np.dtype[Any] | None:
    try:
        return float_dtype(name, argument="dtype")
    except ArgumentError as exc:
        raise InvalidRequestError(f"body.{exc}") from exc


GATHER: Final = JobKind(
    KIND,
    partial(run_export, plan=_plan),
    abandon_export,
    part=partial(write_part, plan=_plan),
    leave=leave_export,
)
