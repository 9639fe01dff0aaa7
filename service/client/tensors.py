# Made of asynchronous/tensors.py by `python scripts/sync_client.py`: change that one.
"""The part of the HTTP client that reads the leaves of checkpoints."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import httpx

from cairn.service.client.changes import ChangesConnection
from cairn.service.client.download import download
from cairn.service.client.protocol.paths import DEFAULT_ROOT, leaf_path, step_path
from cairn.service.client.protocol.requests import without_none
from cairn.service.schemas import (
    PlannedLeaf,
    StepDiff,
    StepPlan,
    Tensor,
    TensorList,
    TensorStatistics,
    TensorValues,
)

LONG: httpx.Timeout = httpx.Timeout(60.0, read=600.0)
"""Timeout for requests for which the server reads some gigabytes before it answers."""


class TensorsConnection(ChangesConnection):
    """Connection with the requests that read the leaves of checkpoints."""

    def tensors(
        self,
        run: str,
        step: int,
        *,
        item: str | None = None,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        page_size: int = 1000,
    ) -> Iterator[Tensor]:
        """Yield the leaves of a checkpoint, by item and path; pages are fetched as needed.

        Args:
            run: Name of the run.
            step: A listed step.
            item: Only leaves of this item.
            prefix: Only leaves whose path begins with this.
            root: Name of the run's root.
            page_size: Leaves per request.
        """
        path = f"{step_path(root, run, step)}/tensors"
        for page in self._pages(
            TensorList, path, item=item, prefix=prefix or None, page_size=page_size
        ):
            yield from page.tensors

    def tensor_values(
        self,
        run: str,
        step: int,
        path: str,
        *,
        part: str = "",
        item: str | None = None,
        root: str = DEFAULT_ROOT,
    ) -> TensorValues:
        """Return a leaf, or a slice of it, as nested lists of at most 65,536 elements.

        Args:
            run: Name of the run.
            step: A listed step.
            path: Path of the leaf, from `tensors`.
            part: Slice in NumPy's notation, such as "0:10,:,3"; "" for all.
            item: Item of the leaf; None: `model`, or the only item that holds arrays.
            root: Name of the run's root.
        """
        leaf = leaf_path(root, run, step, path)
        return self._get(TensorValues, leaf, item=item, slice=part, format="json")

    def tensor_statistics(
        self,
        run: str,
        step: int,
        path: str,
        *,
        part: str = "",
        item: str | None = None,
        root: str = DEFAULT_ROOT,
    ) -> TensorStatistics:
        """Return statistics of a leaf, or of a slice; arguments as in `tensor_values`."""
        leaf = leaf_path(root, run, step, path)
        return self._get(TensorStatistics, leaf, timeout=LONG, item=item, slice=part, stats=True)

    def download_tensor(
        self,
        run: str,
        step: int,
        path: str,
        target: str | os.PathLike[str],
        *,
        part: str = "",
        item: str | None = None,
        format: Literal["npy", "safetensors"] = "npy",
        root: str = DEFAULT_ROOT,
    ) -> int:
        """Write a leaf, or a slice of it, to a file; return the file's size in bytes.

        The file appears only when it is complete.

        Args:
            run: Name of the run.
            step: A listed step.
            path: Path of the leaf.
            target: File to write.
            part: Slice, as in `tensor_values`.
            item: Item of the leaf; None: `model`, or the only item that holds arrays.
            format: `npy` has no bfloat16 and no float8; `safetensors` has no complex numbers.
            root: Name of the run's root.

        Raises:
            ServerUnreachableError: The connection broke repeatedly. The cause may also be damage in
                the
                store: the server then breaks the connection.
        """
        query = urlencode(without_none({"item": item, "slice": part, "format": format}))
        return download(self._http, f"{leaf_path(root, run, step, path)}?{query}", Path(target))

    def diff(
        self,
        run: str,
        step: int,
        other: int,
        *,
        other_run: str | None = None,
        values: bool = False,
        item: str | None = None,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        other_root: str | None = None,
    ) -> Iterator[StepDiff]:
        """Compare two checkpoints; yield the comparison in pages, each with the next leaves.

        Args:
            run: Name of the run.
            step: A listed step.
            other: Step to compare with.
            other_run: Run of the other step; None for `run`.
            values: Compare the values of leaves that differ.
            item: Only leaves of this item.
            prefix: Only leaves whose path begins with this.
            root: Name of the run's root.
            other_root: Name of the root of the other run; None for `root`.
        """
        yield from self._pages(
            StepDiff,
            f"{step_path(root, run, step)}:diff",
            timeout=LONG,
            other=other,
            other_run=other_run,
            other_root=other_root,
            values=values,
            item=item,
            prefix=prefix or None,
            page_size=1000,
        )

    def plan(
        self,
        run: str,
        step: int,
        mesh: Mapping[str, int],
        *,
        processes: int = 1,
        rules: Sequence[tuple[str, Sequence[str | Sequence[str] | None]]] | None = None,
        dtype: str | None = None,
        items: Sequence[str] | None = None,
        root: str = DEFAULT_ROOT,
        page_size: int = 10_000,
    ) -> StepPlan:
        """Plan a checkpoint on a mesh, with all of its leaves; nothing is loaded.

        Args:
            run: Name of the run.
            step: A listed step.
            mesh: Number of devices along each axis, in the order of the mesh.
            processes: Number of processes that share the devices.
            rules: Pairs of a regular expression, searched in a leaf's path, and its mesh axes by
                dimension; None for the axis names of the model's family.
            dtype: Dtype that floating parameters are cast to.
            items: Items to load; None for all of the training state.
            root: Name of the run's root.
            page_size: Leaves per request.
        """
        body = {
            "mesh": {"axes": dict(mesh), "processes": processes},
            "rules": None if rules is None else [[text, list(spec)] for text, spec in rules],
            "dtype": dtype,
            "items": None if items is None else list(items),
        }
        path = f"{step_path(root, run, step)}:plan"
        leaves: list[PlannedLeaf] = []
        query = {"page_size": str(page_size)}
        while True:
            page = self._send(StepPlan, "POST", f"{path}?{urlencode(query)}", body)
            leaves += page.leaves
            if page.next_page_token is None:
                return page.model_copy(update={"leaves": leaves})
            query["page_token"] = page.next_page_token
