"""Steps of a store, for the commands that show a checkpoint's contents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cairn.service.actions.caches import OpenStep, StepCache
from cairn.service.actions.diffs import DiffSelection, DiffSide, diff_steps
from cairn.service.actions.plans import plan_step
from cairn.service.actions.step_meta import read_meta
from cairn.service.actions.tensors import item_of, list_tensors, statistics_of, tensor_values
from cairn.service.catalog.step_records import verification_of
from cairn.service.client.whole_file import whole_file
from cairn.service.errors import DownloadError
from cairn.service.schemas import (
    Checkpoint,
    PlanRequest,
    StepDiff,
    StepName,
    StepPlan,
    Tensor,
    TensorStatistics,
    TensorValues,
)
from cairn.storage.arrays.orbax_tree import META_ITEM
from cairn.storage.reading.tensor_parts import TensorPart
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.resolution import resolve_checkpoint
from cairn.storage.store.clock import from_rfc3339

_STEPS = StepCache()


class StoredStep:
    """Listed step of a store, read without a control plane."""

    def __init__(self, checkpoint: str) -> None:
        """Find the step of a URI or path that ends with an alias or a step.

        Raises:
            StorageError: There is no such step.
        """
        self.run, self.info = resolve_checkpoint(checkpoint, damaged=None)

    def noted(self) -> Checkpoint:
        """Return the step in the form of the API: state, size, aliases, labels, metrics."""
        manifest, entries = self.run.manifest(self.info), annotation_of(self.run, self.info)
        aliases = self.run.aliases.list()
        index = manifest.index
        return Checkpoint(
            **self._name.model_dump(include={"root", "run", "step"}),
            attempt=self.info.attempt,
            uri=self.info.source or str(self.run.step_uri(self.info)),
            created=from_rfc3339(manifest.created),
            bytes=manifest.nbytes,
            leaves=len(manifest.inline_leaves) if index is None else index.leaves,
            items=list(manifest.items),
            iterators=manifest.iterators,
            manifest_digest=self.info.manifest_digest,
            model_type=None if manifest.model is None else manifest.model.model_type,
            aliases=[
                alias.alias
                for alias in aliases
                if (alias.step, alias.attempt) == (self.info.step, self.info.attempt)
            ],
            labels=entries.labels,
            metrics=entries.metrics,
            better=entries.better,
            **verification_of(entries, self.info.state.value),
        )

    def tensors(self, item: str | None, prefix: str) -> Iterator[Tensor]:
        """Yield the step's leaves, by item and path."""
        after, more = 0, True
        while more:
            page, more = list_tensors(self._open, item=item, prefix=prefix, after=after, limit=1000)
            yield from page
            after += len(page)

    def json_item(self, item: str) -> Any:
        """Return a JSON item of the step; None if it has no such item."""
        step = self._open
        meta, plain = read_meta(step), step.manifest.plain
        if meta.is_too_large:
            raise DownloadError(f"{step.uri}: {meta.nbytes} bytes of JSON. Download its files.")
        if plain is None or {*plain.json_files} == {META_ITEM}:
            return meta.tree if item == META_ITEM else None
        return meta.tree.get(item)

    def values(self, path: str, item: str | None, part: str) -> TensorValues:
        """Read the values of a leaf, or of a part of it."""
        return tensor_values(self._part(path, item, part))

    def statistics(self, path: str, item: str | None, part: str) -> TensorStatistics:
        """Compute statistics of a leaf's values, or of a part of them."""
        tensor_part = self._part(path, item, part)
        return statistics_of(tensor_part, tensor_part.statistics())

    def save(
        self,
        path: str,
        item: str | None,
        part: str,
        kind: Literal["npy", "safetensors"],
        target: Path,
    ) -> int:
        """Write a leaf, or a part of it, to a file; return its size in bytes.

        The file appears once it is complete.
        """
        file = self._part(path, item, part).file(kind)
        with whole_file(target) as stream:
            stream.writelines(file.blocks())
        return file.nbytes

    def plan(self, request: PlanRequest) -> StepPlan:
        """Plan a load of the step on a mesh: placement, bytes per device, reads."""
        uri = f"{self.run.uri}/steps/{self.info.step}"
        return plan_step(self._open, self._name, uri, request, after=0, limit=None)[0]

    def diff(self, other: "StoredStep", values: bool, item: str | None, prefix: str) -> StepDiff:
        """Compare this step with another one; arguments as in `ServedStep.diff`."""
        return diff_steps(self._side, other._side, DiffSelection(item, prefix, values))[0]

    @property
    def _open(self) -> OpenStep:
        return _STEPS.open(self.run, self.info)

    @property
    def _name(self) -> StepName:
        return StepName(root=str(self.run.uri.parent), run=self.run.uri.name, step=self.info.step)

    @property
    def _side(self) -> DiffSide:
        return DiffSide.of(self._name, self.run, self.info, _STEPS)

    def _part(self, path: str, item: str | None, part: str) -> TensorPart:
        step = self._open
        return TensorPart.of(step.reader(), item_of(step, item), path, part)
