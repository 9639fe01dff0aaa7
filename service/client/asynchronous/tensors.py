"""The part of the HTTP client that looks into checkpoints."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

import httpx

from cairn.service.client.asynchronous.download import download
from cairn.service.client.asynchronous.notes import AsyncNotesConnection
from cairn.service.client.protocol import DEFAULT_ROOT, leaf_path, step_path
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
"""For answers that read some gigabytes first."""


class AsyncTensorsConnection(AsyncNotesConnection):
    """A connection with the requests that look into checkpoints."""

    async def tensors(
        self,
        run: str,
        step: int,
        *,
        item: str | None = None,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        page_size: int = 1000,
    ) -> AsyncGenerator[Tensor, None]:
        """The leaves of a checkpoint, by item and path; pages are fetched as needed.

        Args:
            run: Name of the run.
            step: A listed step.
            item: Of this item only.
            prefix: Those whose path begins so.
            root: Name of the run's root.
            page_size: Leaves per request.
        """
        path = f"{step_path(root, run, step)}/tensors"
        async for page in self._pages(
            TensorList, path, item=item, prefix=prefix or None, page_size=page_size
        ):
            for one in page.tensors:
                yield one

    async def tensor_values(
        self,
        run: str,
        step: int,
        path: str,
        *,
        part: str = "",
        item: str = "model",
        root: str = DEFAULT_ROOT,
    ) -> TensorValues:
        """A leaf, or a part of it, as nested lists; at most 65,536 elements.

        Args:
            run: Name of the run.
            step: A listed step.
            path: The leaf's, as `tensors` has it.
            part: As NumPy writes a slice, such as "0:10,:,3"; "": all.
            item: The leaf's.
            root: Name of the run's root.
        """
        leaf = leaf_path(root, run, step, path)
        return await self._get(TensorValues, leaf, item=item, slice=part, format="json")

    async def tensor_statistics(
        self,
        run: str,
        step: int,
        path: str,
        *,
        part: str = "",
        item: str = "model",
        root: str = DEFAULT_ROOT,
    ) -> TensorStatistics:
        """What the elements of a leaf, or of a part of it, are like; arguments as above."""
        leaf = leaf_path(root, run, step, path)
        return await self._get(
            TensorStatistics, leaf, timeout=LONG, item=item, slice=part, stats=True
        )

    async def download_tensor(
        self,
        run: str,
        step: int,
        path: str,
        target: str | os.PathLike[str],
        *,
        part: str = "",
        item: str = "model",
        format: Literal["npy", "safetensors"] = "npy",
        root: str = DEFAULT_ROOT,
    ) -> int:
        """Write a leaf, or a part of it, to a file, which appears once it is whole; its bytes.

        Args:
            run: Name of the run.
            step: A listed step.
            path: The leaf's.
            target: The file.
            part: As for `tensor_values`.
            item: The leaf's.
            format: `npy` has no bfloat16 and no float8; `safetensors` has no complex numbers.
            root: Name of the run's root.

        Raises:
            ServerUnreachableError: The connection broke again and again, also because stored
                values are damaged.
        """
        asked = urlencode({"item": item, "slice": part, "format": format})
        return await download(
            self._http, f"{leaf_path(root, run, step, path)}?{asked}", Path(target)
        )

    async def diff(
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
    ) -> AsyncGenerator[StepDiff, None]:
        """What differs between two checkpoints: pages, which all say the same but for the leaves.

        Args:
            run: Name of the run.
            step: A listed step.
            other: The step that it is compared with.
            other_run: That one's run; None: the same.
            values: Compare the values of leaves that differ.
            item: Name leaves of this item only.
            prefix: Name leaves only whose path begins so.
            root: Name of the run's root.
            other_root: Name of the root of the other run; None: the same.
        """
        async for page in self._pages(
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
        ):
            yield page

    async def plan(
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
        """What a checkpoint needs on a mesh, with all of its leaves; nothing is loaded.

        Args:
            run: Name of the run.
            step: A listed step.
            mesh: Devices along each axis, in the order of the mesh.
            processes: How many processes share the devices.
            rules: Pairs of a regular expression, searched in a leaf's path, and its mesh axes by
                dimension; None: by the axis names of the model's family.
            dtype: Which floating parameters are cast to.
            items: Those to load; None: all of the training state.
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
        asked = {"page_size": str(page_size)}
        while True:
            page = await self._send(StepPlan, "POST", f"{path}?{urlencode(asked)}", body)
            leaves += page.leaves
            if page.next_page_token is None:
                return page.model_copy(update={"leaves": leaves})
            asked["page_token"] = page.next_page_token
