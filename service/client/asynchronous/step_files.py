"""The part of the HTTP client that lists and downloads the files of checkpoints."""

import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from cairn.counts import count_text
from cairn.service.client.asynchronous.checked_file import fetch_checked, is_as_recorded
from cairn.service.client.asynchronous.download import blocks
from cairn.service.client.asynchronous.tensors import AsyncTensorsConnection
from cairn.service.client.protocol.paths import DEFAULT_ROOT, file_path, plain_parts, step_path
from cairn.service.errors import DownloadError, ProblemResponseError
from cairn.service.schemas import StepFile, StepFileList
from cairn.storage.arrays.orbax_tree import JSON_FILES

_SUMMED_BYTES: Final = 1 << 20
_SHOWN: Final = 3


class AsyncStepFilesConnection(AsyncTensorsConnection):
    """Connection with the requests for the files of checkpoints."""

    async def step_files(
        self,
        run: str,
        step: int,
        *,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        page_size: int = 1000,
    ) -> AsyncGenerator[StepFile, None]:
        """Yield the files of a checkpoint, by name; pages are fetched as needed.

        Args:
            run: Name of the run.
            step: A listed step.
            prefix: Only files whose name begins with this, such as `model/`.
            root: Name of the run's root.
            page_size: Files per request.
        """
        path = f"{step_path(root, run, step)}/files"
        async for page in self._pages(StepFileList, path, page_size=page_size):
            for file in page.files:
                if file.name.startswith(prefix):
                    yield file

    async def json_item(
        self,
        run: str,
        step: int,
        item: str,
        *,
        max_bytes: int = 1 << 20,
        root: str = DEFAULT_ROOT,
    ) -> Any:
        """Return a JSON item of a checkpoint, such as `meta`; None if it has no such item.

        Args:
            run: Name of the run.
            step: A listed step.
            item: Name of the item.
            max_bytes: Largest size of the item.
            root: Name of the run's root.

        Raises:
            DownloadError: The item is larger, or is no JSON.
            ProblemResponseError: The item is damaged in the store.
        """
        for name in JSON_FILES:
            path, content = file_path(root, run, step, f"{item}/{name}"), b""
            try:
                async for block in blocks(self._http, path, 0):
                    content += block
                    if len(content) > max_bytes:
                        raise DownloadError(
                            f"{run}, step {step}: item {item} is more than {max_bytes} bytes of "
                            "JSON. Download its file."
                        )
            except ProblemResponseError as exc:
                if exc.status == HTTPStatus.NOT_FOUND:
                    continue
                raise
            try:
                return json.loads(content)
            except ValueError as exc:
                raise DownloadError(f"{run}, step {step}: item {item} is no JSON: {exc}") from exc
        return None

    async def download_step(
        self,
        run: str,
        step: int,
        folder: str | os.PathLike[str],
        *,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        tell: Callable[[int, int], None] | None = None,
    ) -> list[StepFile]:
        """Copy the files of a checkpoint into a folder that plain Orbax reads; return the files.

        Each file is streamed, compared with its size and CRC-32C, and appears only when it is
        complete. Repeat the call to resume: files that are there and correct are read, not fetched.
        With `prefix`, a folder with other parts of another step is refused.

        Args:
            run: Name of the run.
            step: A listed step.
            folder: Target folder; created if missing. Other files in it stay.
            prefix: Only files whose name begins with this, such as `model/`.
            root: Name of the run's root.
            tell: Progress callback with the bytes so far and the total.

        Raises:
            DownloadError: The bytes differ from the saved ones, another process writes the file, no
                file's name begins with `prefix`, or the folder has other parts of another step.
            OSError: The disk is full, or writing is not permitted.
            ProblemResponseError: There is no such step, or a file is damaged in the store.
            ServerUnreachableError: A connection broke five times without a byte in between.
        """
        listed = [entry async for entry in self.step_files(run, step, root=root)]
        files = [entry for entry in listed if entry.name.startswith(prefix)]
        if not files:
            raise DownloadError(
                f"{run}, step {step}: expected files whose names begin with {prefix!r}, found "
                "none. `step_files` lists them."
            )
        others = [entry for entry in listed if not entry.name.startswith(prefix)]
        await _refuse_mixed(others, Path(folder), f"{run}, step {step}")
        before, total = 0, sum(entry.bytes for entry in files)
        for file in files:

            def tell_all(done: int, before: int = before) -> None:
                if tell is not None:
                    tell(before + done, total)

            await self._download_file(root, run, step, file, Path(folder), tell_all)
            tell_all(file.bytes)
            before += file.bytes
        return files

    async def _download_file(
        self,
        root: str,
        run: str,
        step: int,
        file: StepFile,
        folder: Path,
        tell: Callable[[int], None],
    ) -> None:
        """Download one file, unless the folder has a correct copy."""
        target = folder.joinpath(*plain_parts(file.name))
        if await is_as_recorded(target, file.bytes, file.crc32c):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        path = file_path(root, run, step, file.name)
        await fetch_checked(
            lambda start: blocks(self._http, path, start),
            part,
            size=file.bytes,
            crc32c=file.crc32c,
            name=f"{run}, step {step}: {file.name}",
            tell=tell,
        )
        part.replace(target)


async def _refuse_mixed(others: Sequence[StepFile], folder: Path, name: str) -> None:
    """Refuse a folder that has files of another step beside the requested ones.

    Large files are compared by size only: the small files, which differ in each step, are
    compared by checksum and reveal another step.

    Raises:
        DownloadError: The folder has such files; the message names them.
    """
    wrong = []
    for file in others:
        path = folder.joinpath(*plain_parts(file.name))
        if not path.is_file():
            continue
        if file.bytes > _SUMMED_BYTES:
            same = path.stat().st_size == file.bytes
        else:
            same = await is_as_recorded(path, file.bytes, file.crc32c)
        if not same:
            wrong.append(file.name)
    if wrong:
        shown = ", ".join(wrong[:_SHOWN]) + ("" if len(wrong) <= _SHOWN else ", …")
        raise DownloadError(
            f"{name}: expected in {folder} nothing of another step, found "
            f"{count_text(len(wrong), 'file')} of another: {shown}. Give each step a folder of its "
            "own, or download all of this one."
        )
