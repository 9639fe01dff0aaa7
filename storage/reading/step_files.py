"""Comparison of a step's files with its manifest: one listing, and reads of the small files.

The values of the arrays lie in a few large files, whose chunks are checked as they are read. The
files that lead to them (metadata, the OCDBT manifests and trees, digests, the commit marker) are
checked here, before any of them is used.
"""

from typing import Final

from cairn.counts import count_text
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.errors import CorruptionError
from cairn.storage.runs.records.manifest import ObjectRecord
from cairn.storage.runs.step_files import (
    FilePlace,
    file_places,
    file_problem,
    listed_problems,
    removed_by_owner,
)
from cairn.storage.store.bounds import DEFAULT_BOUND, bound_of
from cairn.storage.store.file_checksums import read_files
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["NEXT_STEP", "check_step_files"]

NEXT_STEP: Final = "Restore the files from a backup, or use another step."
CHANGED_NEXT: Final = (
    "Its owner has changed them since: use another step, or adopt the folder into a new run."
)


def check_step_files(
    step_uri: StoreURI, objects: tuple[ObjectRecord, ...], source: str | None = None
) -> None:
    """Compare a step's files with its manifest: names, sizes, and the content of small ones.

    All files are read except those of array values, and large ones of other kinds; none is read if
    the listing has checksums. Files that the manifest does not name are ignored: other tools may
    have put them there.

    Args:
        step_uri: the step's folder.
        objects: the files that its manifest names; if empty, nothing is checked.
        source: the owner's folder, if the step was imported.

    Raises:
        StepNotFoundError: the step was imported, and its owner has removed it.
        CorruptionError: files are missing, cut short, grown or changed; `problems` lists all.
        StoreUnavailableError: the store gives no answer.
    """
    if not objects:
        return
    problems: dict[str, str] = {}
    for place in file_places(step_uri, objects, source):
        problems |= _problems(place)
    if problems:
        raise CorruptionError(
            f"files of the step are not what was {'saved' if source is None else 'adopted'}",
            path=source or step_uri,
            expected=f"the {count_text(len(objects), 'file')} that its manifest names",
            found=count_text(len(problems), "that is not", "that are not"),
            next_step=NEXT_STEP if source is None else CHANGED_NEXT,
            problems=[problems[name] for name in sorted(problems)],
        )


def _problems(place: FilePlace) -> dict[str, str]:
    """Return the problems of the files of one folder, by name."""
    listed = {entry.name: entry for entry in open_files(place.folder).walk()}
    if place.is_owners and not listed:
        raise removed_by_owner(place.folder)
    problems = listed_problems(listed, place.records)
    # TensorStore reads Orbax's own files without a bound: refuse large ones here.
    for record in place.records:
        bound = bound_of(record.name)
        if bound is not DEFAULT_BOUND and record.size > bound.max_bytes:
            expected = f"{bound.max_bytes} bytes at most for a {bound.kind}"
            problems[record.name] = f"{record.name}: {record.size} bytes, {expected}"
    records = {
        record.name: record
        for record in place.records
        if record.name not in problems
        and listed[record.name].crc32c is None
        and not is_data_file(record.name)
        # Larger files are of kinds that are never read whole.
        and record.size <= bound_of(record.name).max_bytes
    }
    for checksum in read_files(place.folder, records):
        problem = file_problem(records[checksum.name], checksum)
        if problem is not None:
            problems[checksum.name] = problem
    return problems
