"""Are the files of a step those that its manifest names? One listing, and the small files read.

The values of the arrays lie in a few large files, whose chunks are checked as they are read. What
leads to them (metadata, the OCDBT manifests and trees, digests, the commit marker) is checked here,
before any of it is believed. Imports no JAX.
"""

from typing import Final

from cairn.storage.arrays import holds_values
from cairn.storage.errors import CorruptionError
from cairn.storage.runs import ObjectRecord, file_problem, listed_problems
from cairn.storage.store import StoreURI, open_files, read_files

__all__ = ["NEXT_STEP", "check_step_files"]

NEXT_STEP: Final = "Restore the files from a backup, or use another step."


def check_step_files(step_uri: StoreURI, objects: tuple[ObjectRecord, ...]) -> None:
    """Compare the files of a step with its manifest: names, sizes, and what is in the small ones.

    All files but those of array values are read; where the listing tells checksums, none is. Files
    that the manifest does not name are left alone: other tools may have put them there.

    Args:
        step_uri: the step's folder.
        objects: those that its manifest names; none says nothing of them.

    Raises:
        CorruptionError: files are missing, cut short, grown or changed; `problems` lists all.
        StoreUnavailableError: the store gives no answer.
    """
    if not objects:
        return
    listed = {entry.name: entry for entry in open_files(step_uri).walk()}
    problems = listed_problems(listed, objects)
    records = {
        record.name: record
        for record in objects
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
            expected=f"the {len(objects)} files that its manifest names",
            found=f"{len(problems)} that are not",
            next_step=NEXT_STEP,
            problems=[problems[name] for name in sorted(problems)],
        )
