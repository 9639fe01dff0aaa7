"""Deletions of steps, from their tombstones in the store to the API."""

import logging
from collections.abc import Iterable

from cairn.service.schemas import Deletion
from cairn.storage.runs import Run, Tombstone, judge_records, trash_file
from cairn.storage.store import from_rfc3339

logger = logging.getLogger(__name__)


def read_deletions(run: Run, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tombstone]:
    """The tombstones of these (step, attempt); one that can't be read is logged and left out."""
    names = {trash_file(*key): key for key in keys}
    found, unreadable = judge_records(run.objects, names, Tombstone.parse)
    for error in unreadable.values():
        logger.warning("a deletion without its particulars: %s", error)
    return {names[name]: one for name, one in found.items()}


def deletion_body(tombstone: Tombstone) -> Deletion:
    """A deletion as the API gives it out."""
    return Deletion(
        at=from_rfc3339(tombstone.at),
        expires=from_rfc3339(tombstone.expires),
        by=tombstone.by,
        reason=tombstone.reason,
        removing=tombstone.removing,
    )
