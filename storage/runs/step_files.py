"""Comparison of a step's files with their records in the manifest. Reads no file contents."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cairn.storage.arrays.chunk_digests import FILE_PREFIX
from cairn.storage.errors import StepNotFoundError
from cairn.storage.runs.records.manifest import ObjectRecord
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.file_checksums import FileChecksum
from cairn.storage.store.files import FileEntry
from cairn.storage.store.uri import StoreURI

__all__ = [
    "FilePlace",
    "file_places",
    "file_problem",
    "is_kept",
    "listed_problems",
    "missing_problem",
    "removed_by_owner",
    "told_problem",
]


class FilePlace(NamedTuple):
    """Folder with files of a step.

    Attributes:
        folder: the folder.
        records: records of the files; their names are relative to the folder.
        is_owners: True if the folder is the owner's of an imported step, who may change it; Cairn
            can't repair files there.
    """

    folder: StoreURI
    records: tuple[ObjectRecord, ...]
    is_owners: bool


def file_places(
    step: StoreURI, records: Iterable[ObjectRecord], source: str | None
) -> list[FilePlace]:
    """Return the folders of a step's files; most files of an imported step are in its owner's.

    Args:
        step: the step's folder in the run.
        records: records of its files.
        source: the owner's folder, from the manifest; None if the step was not imported.

    Raises:
        SourceRefusedError: the step may not be read from there.
    """
    records = tuple(records)
    if source is None:
        return [FilePlace(step, records, is_owners=False)]
    kept = tuple(record for record in records if is_kept(record.name))
    owners = tuple(record for record in records if not is_kept(record.name))
    places = [FilePlace(source_folder(step, source), owners, is_owners=True)]
    return [*places, FilePlace(step, kept, is_owners=False)] if kept else places


def is_kept(name: str) -> bool:
    """Return True if a file of an imported step is in the run: it holds digests of chunks."""
    return name.rpartition("/")[2].startswith(FILE_PREFIX)


def removed_by_owner(source: StoreURI | str) -> StepNotFoundError:
    """Return the error for an imported step whose files are gone."""
    elsewhere = ", or it lies on a disk of another machine" * str(source).startswith("file://")
    return StepNotFoundError(
        "the files of an adopted step are gone",
        path=source,
        expected="the checkpoint that was adopted",
        found=f"nothing: its owner has removed or moved it{elsewhere}",
        next_step="Use another step; delete this one from its run, or put its files back.",
    )


def listed_problems(
    listed: Mapping[str, FileEntry], records: tuple[ObjectRecord, ...]
) -> dict[str, str]:
    """Return one line for each file whose listing differs from its record, by name.

    Args:
        listed: every file of the step's folder, by name.
        records: the manifest's records.
    """
    problems = {}
    for record in records:
        entry = listed.get(record.name)
        if entry is None:
            problems[record.name] = missing_problem(record)
            continue
        problem = told_problem(record, entry.size, entry.crc32c)
        if problem is not None:
            problems[record.name] = problem
    return problems


def told_problem(record: ObjectRecord, size: int, crc32c: str | None) -> str | None:
    """Return the problem with a file as `file_problem` does, from its size and crc32c in a listing.

    A crc32c of None counts as equal.
    """
    checksum = FileChecksum(record.name, size, crc32c or record.crc32c, record.content or "")
    return file_problem(record, checksum)


def missing_problem(record: ObjectRecord) -> str:
    """Return the line about a missing file of a step."""
    return f"{record.name}: missing, {record.size} bytes expected"


def file_problem(record: ObjectRecord, checksum: FileChecksum) -> str | None:
    """Return the problem with a file of a step, in one line; None if it is what was saved."""
    if checksum.size != record.size:
        return f"{record.name}: {checksum.size} bytes, {record.size} expected"
    if checksum.crc32c != record.crc32c:
        return f"{record.name}: crc32c {checksum.crc32c}, {record.crc32c} expected"
    if record.content not in (None, checksum.content):
        return f"{record.name}: {checksum.content}, {record.content} expected"
    return None
