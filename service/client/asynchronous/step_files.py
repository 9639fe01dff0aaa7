"""What a client asks about the files of a checkpoint: which there are, and a copy of them."""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Final

from cairn.service.client.asynchronous.checked_file import fetch_checked, is_as_recorded
from cairn.service.client.asynchronous.download import blocks
from cairn.service.client.asynchronous.tensors import AsyncTensorsConnection
from cairn.service.client.protocol import DEFAULT_ROOT, file_path, plain_parts, step_path
from cairn.service.errors import DownloadError
from cairn.service.schemas import StepFile, StepFileList

_SUMMED_BYTES: Final = 1 << 20
_SHOWN: Final = 3


class AsyncStepFilesConnection(AsyncTensorsConnection):
    """A connection with the requests for the files of checkpoints."""

    async def step_files(
        self,
        run: str,
        step: int,
        *,
        prefix: str = "",
        root: str = DEFAULT_ROOT,
        page_size: int = 1000,
    ) -> AsyncGenerator[StepFile, None]:
        """The files of a checkpoint, by name; pages are fetched as needed.

        Args:
            run: Name of the run.
            step: A listed step.
            prefix: Those whose name begins so, such as `model/`.
            root: Name of the run's root.
            page_size: Files per request.
        """
        path = f"{step_path(root, run, step)}/files"
        async for page in self._pages(StepFileList, path, page_size=page_size):
            for one in page.files:
                if one.name.startswith(prefix):
                    yield one

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
        """Copy the files of a checkpoint into a folder, which plain Orbax reads; which they are.

        Each is streamed, compared with its size and CRC-32C, and appears once it is whole. The same
        call again goes on where one broke off: what is there and right is read, not fetched. A part
        of one step does not come beside parts of another.

        Args:
            run: Name of the run.
            step: A listed step.
            folder: Is made if it is not there; other files in it stay.
            prefix: Only files whose name begins so, such as `model/`.
            root: Name of the run's root.
            tell: Is told how many bytes are there, and of how many.

        Raises:
            DownloadError: What came is not what was saved, another process writes the file, no
                file's name begins with `prefix`, or the folder has other parts of another step.
            OSError: The disk is full, or does not let us write.
            ProblemResponseError: There is no such step, or a file is damaged in the store.
            ServerUnreachableError: A connection broke five times without a byte in between.
        """
        known = [one async for one in self.step_files(run, step, root=root)]
        files = [one for one in known if one.name.startswith(prefix)]
        if not files:
            raise DownloadError(
                f"{run}, step {step}: expected files whose names begin with {prefix!r}, found "
                "none. `step_files` lists them."
            )
        others = [one for one in known if not one.name.startswith(prefix)]
        await _refuse_mixed(others, Path(folder), f"{run}, step {step}")
        before, total = 0, sum(one.bytes for one in files)
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
        """Have one file in the folder as it was saved."""
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
    """Refuse a folder whose files beside those that are asked for are of another step.

    Of large ones the size says it, and the small ones beside them, which differ with each step.

    Raises:
        DownloadError: It has such files; they are named.
    """
    wrong = []
    for one in others:
        path = folder.joinpath(*plain_parts(one.name))
        if not path.is_file():
            continue
        if one.bytes > _SUMMED_BYTES:
            same = path.stat().st_size == one.bytes
        else:
            same = await is_as_recorded(path, one.bytes, one.crc32c)
        if not same:
            wrong.append(one.name)
    if wrong:
        shown = ", ".join(wrong[:_SHOWN]) + ("" if len(wrong) <= _SHOWN else ", …")
        raise DownloadError(
            f"{name}: expected in {folder} nothing of another step, found {len(wrong)} files that "
            f"are not this one's: {shown}. Give each step a folder of its own, or download all of "
            "this one."
        )
