"""Conversion of stored deletions and damage to the forms of the API."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from cairn.service.schemas import DAMAGE_SHOWN, CheckpointState, Damage, Deletion
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.annotations import Damage as StoredDamage
from cairn.storage.runs.records.layout import trash_file
from cairn.storage.runs.records.placed import judge_records
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import Tombstone
from cairn.storage.store.clock import from_rfc3339

logger = logging.getLogger(__name__)


def read_deletions(run: Run, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tombstone]:
    """Read the tombstones of these (step, attempt) pairs; log and skip unreadable ones."""
    names = {trash_file(*key): key for key in keys}
    tombstones, unreadable = judge_records(run.objects, names, Tombstone.parse)
    for error in unreadable.values():
        logger.warning("a deletion without its particulars: %s", error)
    return {names[name]: tombstone for name, tombstone in tombstones.items()}


def deletion_body(tombstone: Tombstone) -> Deletion:
    """Return a deletion in the form of the API."""
    return Deletion(
        at=from_rfc3339(tombstone.at),
        expires=from_rfc3339(tombstone.expires),
        by=tombstone.by,
        reason=tombstone.reason,
        removing=tombstone.removing,
    )


def damage_body(damage: StoredDamage) -> Damage:
    """Return damage in the form of the API, with the first leaves and problems only."""
    return Damage(
        at=from_rfc3339(damage.at),
        by=damage.by,
        job=damage.job,
        leaves=list(damage.leaves[:DAMAGE_SHOWN]),
        leaf_count=damage.leaf_count,
        problems=list(damage.problems[:DAMAGE_SHOWN]),
        problem_count=damage.problem_count,
        loads=damage.loads,
    )


def state_of(state: str, damaged: object) -> CheckpointState:
    """Return the state of a step in the API, where damage turns `listed` into `damaged`.

    Args:
        state: State by the store's protocol.
        damaged: Damage that the last verification found; None: none.
    """
    judged = CheckpointState(state)
    is_damaged = judged is CheckpointState.LISTED and damaged is not None
    return CheckpointState.DAMAGED if is_damaged else judged


def verification_of(noted: Annotation, state: str) -> Mapping[str, Any]:
    """Return the results of verifications of a step, as fields of a `Checkpoint`.

    Args:
        noted: Annotation of the step.
        state: State of the step, by the store's protocol or in the API.
    """
    judged = CheckpointState.LISTED if state == CheckpointState.DAMAGED else state
    return {
        "verified": None if noted.verified is None else from_rfc3339(noted.verified),
        "damaged": None if noted.damaged is None else damage_body(noted.damaged),
        "state": state_of(judged, noted.damaged),
    }
