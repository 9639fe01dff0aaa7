"""Are the files of a step those that its manifest names? One listing, and the small files read.

The values of the arrays lie in a few large files, whose chunks are checked as they are read. What
leads to them (metadata, the OCDBT manifests and trees, digests, the commit marker) is checked here,
before any of it is believed. Imports no JAX.
"""

import re
from collections.abc import Mapping
from typing import Final

from cairn.storage.arrays import VALUE_FOLDER
from cairn.storage.errors import CorruptionError
from cairn.storage.runs import Manifest, ObjectRecord
from cairn.storage.store import Entry, FileChecksum, StoreURI, open_files, read_files

__all__ = ["NEXT_STEP", "check_step_files", "file_problem", "holds_values", "listed_problems"]

NEXT_STEP: Final = "Restore the files from a backup, or use another step."
_VALUES: Final = re.compile(rf"[^/]+/(ocdbt\.process_[^/]+/)?(d|{VALUE_FOLDER})/[^/]+")
"""As Orbax calls the folders, and as Cairn does."""


def check_step_files(step_uri: StoreURI, manifest: Manifest) -> None:
    """Compare the files of a step with its manifest: names, sizes, and what is in the small ones.

    All files but those of array values are read; where the listing tells checksums, none is. Files
    that the manifest does not name are left alone: other tools may have put them there.

    Args:
        step_uri: the step's folder.
        manifest: its manifest. One that names no files says nothing of them.

    Raises:
        CorruptionError: files are missing, cut short, grown or changed; `problems` lists all.
        StoreUnavailableError: the store gives no answer.
    """
    if not manifest.objects:
        return
    listed = {entry.name: entry for entry in open_files(step_uri).walk()}
    problems = listed_problems(listed, manifest.objects)
    records = {
        record.name: record
        for record in manifest.objects
        if record.name not in problems
        and record.crc32c is not None
        and listed[record.name].crc32c is None
        and not holds_values(record.name)
    }
    for found in read_files(step_uri, records):
        problem = file_problem(records[found.name], found)
        if problem is not None:
            problems[found.name] = problem
    if problems:
        raise CorruptionError(
            "files of the step are not what was saved",
            path=step_uri,
            expected=f"the {len(manifest.objects)} files that its manifest names",
            found=f"{len(problems)} that are not",
            next_step=NEXT_STEP,
            problems=[problems[name] for name in sorted(problems)],
        )


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
            problems[record.name] = f"{record.name}: missing, {record.size} bytes expected"
            continue
        # What the listing does not tell is taken to be right.
        found = FileChecksum(
            record.name, entry.size, entry.crc32c or record.crc32c, record.content_sum or ""
        )
        problem = file_problem(record, found)
        if problem is not None:
            problems[record.name] = problem
    return problems


def file_problem(record: ObjectRecord, found: FileChecksum) -> str | None:
    """What is wrong with a file of a step, in one line; None if it is what was saved."""
    if found.size != record.size:
        return f"{record.name}: {found.size} bytes, {record.size} expected"
    if found.crc32c is not None and record.crc32c not in (None, found.crc32c):
        return f"{record.name}: crc32c {found.crc32c}, {record.crc32c} expected"
    if record.content_sum not in (None, found.content):
        return f"{record.name}: {found.content}, {record.content_sum} expected"
    return None


def holds_values(name: str) -> bool:
    """True for a file of a step that holds elements of arrays, by its name."""
    return _VALUES.fullmatch(name) is not None
