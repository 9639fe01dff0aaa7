"""Is a file of a step the one that the manifest names? Judged by its record; nothing is read."""

from collections.abc import Mapping

from cairn.storage.runs.records import ObjectRecord
from cairn.storage.store import Entry, FileChecksum

__all__ = ["file_problem", "listed_problems", "missing_problem", "told_problem"]


def listed_problems(
    listed: Mapping[str, Entry], records: tuple[ObjectRecord, ...]
) -> dict[str, str]:
    """What a listing alone shows to be wrong, one line per file, by name.

    Args:
        listed: every file of the step's folder, by name.
        records: the manifest's.
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
    """As `file_problem`, of what the store tells of a file; what it does not tell is right."""
    found = FileChecksum(record.name, size, crc32c or record.crc32c, record.content_sum or "")
    return file_problem(record, found)


def missing_problem(record: ObjectRecord) -> str:
    """That a file of a step is not there, in one line."""
    return f"{record.name}: missing, {record.size} bytes expected"


def file_problem(record: ObjectRecord, found: FileChecksum) -> str | None:
    """What is wrong with a file of a step, in one line; None if it is what was saved."""
    if found.size != record.size:
        return f"{record.name}: {found.size} bytes, {record.size} expected"
    if found.crc32c is not None and record.crc32c not in (None, found.crc32c):
        return f"{record.name}: crc32c {found.crc32c}, {record.crc32c} expected"
    if record.content_sum not in (None, found.content):
        return f"{record.name}: {found.content}, {record.content_sum} expected"
    return None
