"""What the commands look into that show what is inside of a checkpoint of a control plane."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cairn.service.client.addresses import Address
from cairn.service.client.client import Client
from cairn.service.client.finding import find_step
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
    """A listed step, as `stored_steps.StoredStep` is one."""

    def __init__(self, client: Client, checkpoint: str, root: str) -> None:
        """Of an address.

        Raises:
            AddressError: It is none.
            NoCheckpointError: The run has no checkpoint yet.
            ProblemResponseError: There is no such run or alias.
        """
        self._client, self._root = client, root
        self._run, self._step = find_step(client, Address.parse(checkpoint), root)

    def noted(self) -> Checkpoint:
        """What is known of it as a whole."""
        return self._client.checkpoint(self._run, self._step, root=self._root, refresh=True)

    def tensors(self, item: str | None, prefix: str) -> Iterator[Tensor]:
        """Its leaves, by item and path."""
        return self._client.tensors(
            self._run, self._step, item=item, prefix=prefix, root=self._root
        )

    def values(self, path: str, item: str, part: str) -> TensorValues:
        """A leaf, or a part of it."""
        return self._client.tensor_values(
            self._run, self._step, path, part=part, item=item, root=self._root
        )

    def statistics(self, path: str, item: str, part: str) -> TensorStatistics:
        """What the elements of a leaf, or of a part of it, are like."""
        return self._client.tensor_statistics(
            self._run, self._step, path, part=part, item=item, root=self._root
        )

    def save(
        self, path: str, item: str, part: str, kind: Literal["npy", "safetensors"], target: Path
    ) -> int:
        """Write a leaf, or a part of it, to a file, which appears once it is whole; its bytes."""
        return self._client.download_tensor(
            self._run, self._step, path, target, part=part, item=item, format=kind, root=self._root
        )

    def plan(self, wanted: PlanRequest) -> StepPlan:
        """What it needs on a mesh."""
        return self._client.plan(
            self._run,
            self._step,
            wanted.mesh.axes,
            processes=wanted.mesh.processes,
            rules=wanted.rules,
            dtype=wanted.dtype,
            items=wanted.items,
            root=self._root,
        )

    def diff(self, other: "ServedStep", values: bool, item: str | None, prefix: str) -> StepDiff:
        """What differs from this in another step."""
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
        named = [*first.differences, *(one for page in more for one in page.differences)]
        return first.model_copy(update={"differences": named, "next_page_token": None})
