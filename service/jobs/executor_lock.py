"""One live process per executor id: two would take each other's jobs up, and leave them behind."""

import fcntl
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from cairn.service.errors import SettingsError
from cairn.service.jobs.errors import JobsBusyError


class ExecutorLock:
    """Held from `acquire` to `release`; the system releases it for a process that dies.

    Args:
        folder: The data folder, which exists.
        executor_id: Name of the job worker.
    """

    def __init__(self, folder: Path, executor_id: str) -> None:
        # Any text may be an executor id, and no file name.
        name = hashlib.sha256(executor_id.encode()).hexdigest()[:16]
        self._path = folder / f"executor-{name}.lock"
        self._executor_id = executor_id
        self._file: BinaryIO | None = None

    def acquire(self) -> None:
        """Take it.

        Raises:
            JobsBusyError: Another process has it.
            SettingsError: The data folder cannot be written.
        """
        try:
            file = self._path.open("a+b")
        except OSError as exc:
            raise SettingsError(
                f"CAIRN_DATA_DIR: {self._path} cannot be opened: {exc}. Point it at a folder that "
                "this user may write."
            ) from exc
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            file.seek(0)
            holder = file.read(32).decode("ascii", "replace").strip() or "unknown"
            file.close()
            raise JobsBusyError(
                f"{self._path.parent}: expected no running control plane with executor id "
                f"{self._executor_id!r} on this data folder, found process {holder}. End it, or "
                "give this one a data folder of its own (--data-dir, CAIRN_DATA_DIR)."
            ) from exc
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file

    def release(self) -> None:
        """Give it back; fine if it is not held. The file stays: removing it would race."""
        if self._file is not None:
            self._file.close()
            self._file = None
