"""Lost records: this catalog has seen them, and the store now has an older version or none.

A restored backup, a copied folder, or a store that loses accepted writes can cause this. Then an
alias is back at an earlier step, or a deleted step is listed again. Nothing in the store refers to
these records, so only a catalog that saw the newer version can detect the loss. Pure.
"""

from collections.abc import Mapping
from typing import Any

from cairn.service.catalog.models import AliasRow
from cairn.service.schemas import LostRecord
from cairn.storage.runs.records.aliases import Alias, AliasEvent
from cairn.storage.runs.records.layout import alias_file, trash_file
from cairn.storage.runs.trash import Tombstone
from cairn.storage.store.clock import from_rfc3339, rfc3339


def seen_alias(row: AliasRow) -> LostRecord:
    """Return the record of an alias that the catalog's row was made from."""
    return LostRecord(
        record=alias_file(row.alias),
        alias=row.alias,
        step=row.step,
        attempt=row.attempt,
        manifest_digest=row.manifest_digest,
        sequence=row.sequence,
        by=row.by,
        reason=row.reason,
        at=row.at,
    )


def seen_deletion(key: tuple[int, int], deletion: Mapping[str, Any]) -> LostRecord:
    """Return the tombstone of a (step, attempt) that the catalog's `deletion` was made from."""
    step, attempt = key
    said = {name: deletion[name] for name in ("by", "reason", "at", "expires")}
    fields = {"record": trash_file(step, attempt), "step": step, "attempt": attempt, **said}
    return LostRecord.model_validate({**fields, "deleted": True})


def lost_alias(seen: LostRecord, now: Alias | None) -> LostRecord | None:
    """Return the lost record of an alias; None: the store has the seen record or a later one.

    Args:
        seen: Last record that was seen.
        now: Stored record; None: there is none, or it is unreadable.
    """
    live = None if now is None or now.deleted else now
    if live is None and seen.deleted:
        return None
    if now is not None and now.sequence > (seen.sequence or 0):
        return None
    if live is not None and not seen.deleted and _position(live) == _position(seen):
        return None
    step, sequence = (None, None) if live is None else (live.step, live.sequence)
    return seen.model_copy(update={"stored_step": step, "stored_sequence": sequence})


def _position(alias: Alias | LostRecord) -> tuple[int | str | None, ...]:
    return alias.sequence, alias.step, alias.attempt, alias.manifest_digest


def is_lifted(lost: LostRecord, lifted: Tombstone | None) -> bool:
    """Return whether an undelete removed the tombstone: then the store has not lost it.

    Args:
        lost: Tombstone that the store no longer has.
        lifted: Tombstone that the last undelete of the step removed; None: there was no undelete.
    """
    return lifted is not None and from_rfc3339(lifted.at) == lost.at


def alias_event(lost: LostRecord) -> AliasEvent:
    """Return a lost record as the last event of the alias, for its history."""
    return AliasEvent(
        step=lost.step,
        attempt=lost.attempt,
        manifest_digest=lost.manifest_digest,
        by=lost.by,
        reason=lost.reason,
        at=rfc3339(lost.at),
        sequence=lost.sequence or 1,
        deleted=lost.deleted,
    )


def lost_tombstone(lost: LostRecord) -> Tombstone:
    """Return a lost tombstone as a record; an unknown expiry is the time of the deletion."""
    expires = lost.at if lost.expires is None else lost.expires
    return Tombstone(at=rfc3339(lost.at), expires=rfc3339(expires), by=lost.by, reason=lost.reason)


def problem(root: str, run: str, lost: LostRecord) -> str:
    """Describe a lost record, and the two commands that resolve it."""
    flag = "" if root == "default" else f" --root {root}"
    by = f"by {lost.by}, " if lost.by else ""
    when = f"{by}{lost.at:%Y-%m-%d %H:%M} UTC"
    if lost.alias is None:
        step = f"{run}/steps/{lost.step} --attempt {lost.attempt}{flag}"
        return (
            f"{lost.record}: step {lost.step} of attempt {lost.attempt} was deleted ({when}), and "
            "its tombstone is lost: nobody has taken the deletion back. `cairn delete "
            f"{step}` deletes it again, `cairn undelete {step}` keeps it."
        )
    seen = "deleted" if lost.deleted else f"at step {lost.step}"
    now = "gone" if lost.stored_step is None else f"at step {lost.stored_step}"
    move = "" if lost.stored_sequence is None else f" (move {lost.stored_sequence})"
    keep = f"deleting {lost.alias} keeps it gone"
    if lost.stored_step is not None:
        keep = f"`cairn promote {run} {lost.stored_step} {lost.alias}{flag}` keeps it there"
    back = f"`cairn promote {run} {lost.step} {lost.alias}{flag}` puts it back"
    if lost.deleted:
        back = f"Deleting {lost.alias} puts that right"
    return (
        f"{lost.record}: this server saw {lost.alias} {seen} (move {lost.sequence}, {when}), and "
        f"now it is {now}{move}: an older record is in the place of the newer. {back}, {keep}."
    )
