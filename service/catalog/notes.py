"""What is noted of steps, from records in the store to the API: deletions and damage."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from cairn.service.schemas import DAMAGE_SHOWN, CheckpointState, Damage, Deletion
from cairn.storage.runs import Annotation, Run, Tombstone, judge_records, trash_file
from cairn.storage.runs import Damage as StoredDamage
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


def damage_body(damage: StoredDamage) -> Damage:
    """Return damage as the API gives it out: it names the first leaves and problems."""
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
    """Return the state of a step as the API gives it out: damage turns `listed` into `damaged`.

    Args:
        state: as the store's protocol judges it.
        damaged: what the last verification found to be wrong with it; None: nothing.
    """
    judged = CheckpointState(state)
    is_damaged = judged is CheckpointState.LISTED and damaged is not None
    return CheckpointState.DAMAGED if is_damaged else judged


def verification_of(noted: Annotation, state: str) -> Mapping[str, Any]:
    """Return what verifications have found of a step, as fields of a `Checkpoint`.

    Args:
        noted: what is noted of the step.
        state: where it stands, by the store's protocol or as the API has it.
    """
    judged = CheckpointState.LISTED if state == CheckpointState.DAMAGED else state
    return {
        "verified": None if noted.verified is None else from_rfc3339(noted.verified),
        "damaged": None if noted.damaged is None else damage_body(noted.damaged),
        "state": state_of(judged, noted.damaged),
    }
