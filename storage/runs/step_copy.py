"""Copies of a step's files; every copy is compared with the manifest's record.

Several files are copied at once, in bounded memory, by the operating system or the store. A copy on
a disk is read back while it is still in the page cache. A bucket reports the crc32c of the copy;
there, small files are read back too if a crc32c does not distinguish their contents (see
`ContentSum`).
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from cairn.counts import count_text
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.errors import CorruptionError, NotFoundError
from cairn.storage.runs.records.layout import COMMIT_FILE
from cairn.storage.runs.records.manifest import ObjectRecord
from cairn.storage.runs.step_files import (
    file_problem,
    listed_problems,
    missing_problem,
    told_problem,
)
from cairn.storage.store.file_checksums import read_file
from cairn.storage.store.files import Files

__all__ = ["CopyReport", "copy_step_files"]

_DISK_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_NETWORK_THREADS: Final = 8
_TOLD_SECONDS: Final = 1.0
_ENTRY: Final = "copied"


@dataclass(frozen=True)
class CopyReport:
    """Summary of the checks of a copy's files against their records in the manifest.

    Attributes:
        files: number of files: all that the manifest names.
        nbytes: sum of their sizes in bytes.
        how: what was compared with the records, for people.
    """

    files: int
    nbytes: int
    how: str

    def noted(self) -> dict[str, Any]:
        """Return the entry for the `environment` of the copy's manifest."""
        return {_ENTRY: asdict(self)}

    def with_others(self, others: "Iterable[CopyReport]") -> "CopyReport":
        """Return the sum of this report and those of other folders of the same step."""
        reports = [self, *others]
        return CopyReport(
            files=sum(report.files for report in reports),
            nbytes=sum(report.nbytes for report in reports),
            how="; ".join(dict.fromkeys(report.how for report in reports)),
        )

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> "CopyReport | None":
        """Return the report in a manifest's `environment`; None if the step is not a copy."""
        try:
            return _REPORT.validate_python(environment.get(_ENTRY))
        except ValidationError:
            return None


_REPORT: Final = TypeAdapter(CopyReport)


def copy_step_files(
    origin: Files,
    target: Files,
    records: tuple[ObjectRecord, ...],
    tell: Callable[[int, int], None],
) -> CopyReport:
    """Copy the files of a step, check every copy, and return what was checked.

    A file that exists already is checked too, and copied only if it is wrong. Once a file of the
    source turns out to be damaged, nothing more is copied; the remaining files are only checked, so
    that the error can name all damaged ones.

    Args:
        origin: the step's folder.
        target: the folder of the copy; temporary files of killed copies in it are removed.
        records: the files, as the manifest records them. Other files in `origin` are not part of
            the step, and are not copied.
        tell: called about once a second, and after each file, with (bytes done, bytes in all). If
            it raises, copying stops once the files under way are done.

    Raises:
        CorruptionError: files of the source are missing or damaged, all of them in `problems`; or a
            copy is wrong though its source is not.
        StoreFullError: no space or quota left.
        StoreUnavailableError: a store gives no answer.
    """
    listed = {entry.name: entry for entry in origin.walk()}
    problems = listed_problems(listed, records)
    sound = [record for record in records if record.name not in problems]
    done, total = 0, sum(record.size for record in sound)
    copy = _Copy(origin, target, damaged=bool(problems))
    on_disk = origin.uri.scheme == target.uri.scheme == "file"
    pool = ThreadPoolExecutor(
        _DISK_THREADS if on_disk else _NETWORK_THREADS, thread_name_prefix="cairn-copy"
    )
    try:
        for together in _in_order(sound):
            for record, future in [(record, pool.submit(copy.file, record)) for record in together]:
                while not wait([future], _TOLD_SECONDS).done:
                    tell(done, total)
                problem = future.result()
                if problem is not None:
                    problems[record.name] = problem
                done += record.size
                tell(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        raise CorruptionError(
            "the step is damaged",
            path=origin.uri,
            expected=f"the {count_text(len(records), 'file')} that its manifest names",
            found=count_text(len(problems), "that is not", "that are not"),
            next_step="`cairn verify` says what they hit. Fork from another step, or restore the "
            "files from a backup.",
            problems=[problems[name] for name in sorted(problems)],
        )
    for folder in sorted({record.name.rpartition("/")[0] for record in records}):
        # Temporary files that a killed copy left.
        target.sweep(folder)
    return CopyReport(files=len(records), nbytes=total, how=copy.how())


def _in_order(records: Iterable[ObjectRecord]) -> Iterable[list[ObjectRecord]]:
    """Yield groups of files to copy together, largest first; markers follow the files they mark.

    A copy that is killed at any moment therefore never looks complete.
    """

    def marks(record: ObjectRecord) -> int:
        """Return what the file marks as complete: 2 for the step, 1 for an item, 0 for nothing."""
        parts = record.name.split("/")
        return 0 if parts[-1] != COMMIT_FILE or len(parts) > 2 else 3 - len(parts)

    ordered = sorted(records, key=lambda record: (marks(record), -record.size, record.name))
    return [list(together) for _, together in itertools.groupby(ordered, marks)]


class _Copy:
    """Copy of a step that is running. Safe for use by many threads."""

    def __init__(self, origin: Files, target: Files, *, damaged: bool) -> None:
        self._origin = origin
        self._target = target
        self._before = {entry.name: entry.size for entry in target.walk()}
        self._damaged = threading.Event()
        if damaged:
            self._damaged.set()
        self._told = self._read = False

    def how(self) -> str:
        """Return what was compared with the records."""
        if self._told:
            return "the store's crc32c of the copy" + "; small files read" * self._read
        return "crc32c and content sum of the copied bytes"

    def file(self, record: ObjectRecord) -> str | None:
        """Copy a file and check the copy; return the problem with the source, in one line, or None.

        Raises:
            CorruptionError: the copy is wrong, though the source is not.
        """
        if self._damaged.is_set():
            return self._problem(self._origin, record)
        wrong = self._wrong_copy(record)
        if wrong is None:
            return None
        problem = self._problem(self._origin, record)
        if problem is not None:
            self._damaged.set()
            return problem
        raise CorruptionError(
            "the copy is not what was copied",
            path=self._target.uri / record.name,
            expected="the bytes of the source, which are right",
            found=wrong,
            next_step="Start the fork again; if it fails again, mend the store.",
        )

    def _wrong_copy(self, record: ObjectRecord) -> str | None:
        """Copy a file unless an intact copy exists; return the problem with the copy, or None."""
        try:
            there = self._before.get(record.name) == record.size
            # A complete file of an earlier, interrupted copy.
            if there and self._problem(self._target, record) is None:
                return None
            self._origin.copy(record.name, self._target, record.name)
        except NotFoundError:  # it was removed after it was listed
            return missing_problem(record)
        return self._problem(self._target, record)

    def _problem(self, files: Files, record: ObjectRecord) -> str | None:
        """Return the problem with a file in `files`, in one line, or None."""
        try:
            if record.content is None or is_data_file(record.name):
                stat = files.stat(record.name)
                if stat.crc32c is not None:
                    self._told = True
                    return told_problem(record, stat.size, stat.crc32c)
            # Small files are read back: a crc32c alone may not distinguish their contents.
            self._read = True
            return file_problem(record, read_file(files, record.name))
        except NotFoundError:
            return missing_problem(record)
