"""Steps of a control plane, for the commands that show a checkpoint's contents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cairn.service.client.client import Client
from cairn.service.command.addresses import resolve_step
from cairn.service.schemas import (
    Checkpoint,
    PlanRequest,
    StepDiff,
    StepPlan,
    Tensor,
    TensorStatistics,
    TensorValues,
)


class ServedStep:
    """Listed step of a control plane; it has the interface of `stored_steps.StoredStep`."""

    def __init__(self, client: Client, checkpoint: str, root: str | None) -> None:
        """Find the step of an address.

        Raises:
            AddressError: The text is not an address, or several roots have the run.
            NoCheckpointError: The run has no checkpoint yet.
            ProblemResponseError: There is no such run or alias.
        """
        place = resolve_step(client, checkpoint, root)
        self._client, self._root = client, place.root
        self._run, self._step = place.run, place.step

    def noted(self) -> Checkpoint:
        """Return the step as the API returns it: state, size, aliases, labels, metrics."""
        return self._client.checkpoint(self._run, self._step, root=self._root, refresh=True)

    def tensors(self, item: str | None, prefix: str) -> Iterator[Tensor]:
        """Yield the step's leaves, by item and path."""
        return self._client.tensors(
            self._run, self._step, item=item, prefix=prefix, root=self._root
        )

    def json_item(self, item: str) -> Any:
        """Return a JSON item of the step; None if it has no such item."""
        return self._client.json_item(self._run, self._step, item, root=self._root)

    def values(self, path: str, item: str | None, part: str) -> TensorValues:
        """Read the values of a leaf, or of a part of it."""
        return self._client.tensor_values(
            self._run, self._step, path, part=part, item=item, root=self._root
        )

    def statistics(self, path: str, item: str | None, part: str) -> TensorStatistics:
        """Compute statistics of a leaf's values, or of a part of them."""
        return self._client.tensor_statistics(
            self._run, self._step, path, part=part, item=item, root=self._root
        )

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
        return self._client.download_tensor(
            self._run, self._step, path, target, part=part, item=item, format=kind, root=self._root
        )

    def plan(self, request: PlanRequest) -> StepPlan:
        """Plan a load of the step on a mesh: placement, bytes per device, reads."""
        return self._client.plan(
            self._run,
            self._step,
            request.mesh.axes,
            processes=request.mesh.processes,
            rules=request.rules,
            dtype=request.dtype,
            items=request.items,
            root=self._root,
        )

    def diff(self, other: "ServedStep", values: bool, item: str | None, prefix: str) -> StepDiff:
        """Compare this step with another one.

        Args:
            other: Step to compare with.
            values: Compare the values of leaves that differ.
            item: Only leaves of this item; None: of all.
            prefix: Only leaves whose path begins with this text.
        """
        first, *more = self._client.diff(
            self._run,
            self._step,
            other._step,
            other_run=other._run,
            values=values,
            item=item,
            prefix=prefix,
            root=self._root,
            other_root=other._root,
        )
        named = [
            *first.differences,
            *(difference for page in more for difference in page.differences),
        ]
        return first.model_copy(update={"differences": named, "next_page_token": None})
