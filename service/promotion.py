"""Promotes a step: moves an alias in the store, and takes it back if the step went meanwhile."""

from cairn.service.errors import AliasMovedError, StepChangedError
from cairn.service.preconditions import Expectation
from cairn.service.schemas import Alias
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs import Alias as StoredAlias
from cairn.storage.runs import Run, manifest_file, trash_file
from cairn.storage.store import from_rfc3339


def promote(
    run: Run, step: int, alias: str, *, by: str, reason: str, expect: Expectation
) -> StoredAlias:
    """Point `alias` at a listed step, by the store's own compare-and-swap.

    Raises:
        StepNotFoundError: The step is not listed.
        StepInFlightError: It is being written.
        AliasMovedError: The alias is not as expected.
        StepChangedError: The step was deleted while it was being promoted; the alias is as before,
            or gone if the step that it named is deleted too.
        InvalidURIError: `alias` cannot be an alias.
    """
    found = run.step(step)
    before = run.aliases.get(alias)
    try:
        moved = run.aliases.move(
            alias,
            step=found.step,
            attempt=found.attempt,
            manifest_digest=found.manifest_digest,
            by=by,
            reason=reason,
            expect=expect.sequence,
        )
    except PreconditionFailedError as exc:
        raise alias_moved(exc) from exc
    # A deletion looks at the aliases after it has laid its tombstone, and we look at the tombstones
    # after we have moved the alias: one of the two sees the other. A tombstone that has done its
    # work is gone again, and the manifest went before it.
    if _is_going(run, moved):
        _back_out(run, moved, before, by=by)
        raise StepChangedError(
            f"{run.uri}: step {step} was deleted while it was being promoted; {alias!r} is as it "
            "was before, or gone if its step from before is deleted too. Undelete the step first, "
            "or promote another."
        )
    return moved


def delete_alias(run: Run, alias: str, *, by: str, expect: int) -> StoredAlias:
    """Delete an alias, by the store's own compare-and-swap; the tombstone.

    Raises:
        AliasNotFoundError: There is no such alias.
        AliasMovedError: The alias is not as expected.
    """
    try:
        return run.aliases.delete(alias, expect=expect, by=by)
    except PreconditionFailedError as exc:
        raise alias_moved(exc) from exc


def alias_moved(exc: PreconditionFailedError) -> AliasMovedError:
    """The problem of a lost compare-and-swap, with the alias as it is now."""
    current = exc.current if isinstance(exc.current, StoredAlias) else None
    value = None if current is None else alias_body(current).model_dump(mode="json")
    return AliasMovedError(str(exc), extra={"current": value})


def alias_body(alias: StoredAlias) -> Alias:
    """An alias as the API gives it out."""
    return Alias(
        alias=alias.alias,
        step=alias.step,
        attempt=alias.attempt,
        manifest_digest=alias.manifest_digest,
        by=alias.by,
        reason=alias.reason,
        at=from_rfc3339(alias.at),
        sequence=alias.sequence,
    )


def _is_going(run: Run, alias: StoredAlias) -> bool:
    """True if the step that the alias names is deleted, or gone."""
    key = alias.step, alias.attempt
    if run.objects.read(trash_file(*key)) is not None:
        return True
    return run.objects.read(manifest_file(*key)) is None


def _back_out(run: Run, moved: StoredAlias, before: StoredAlias | None, *, by: str) -> None:
    """Undo our own move; if somebody has moved the alias since, theirs stays.

    The step from before may have been deleted too, once no alias named it: then none is left.
    """
    reason = f"step {moved.step} was deleted while it was being promoted"
    try:
        if before is None or _is_going(run, before):
            run.aliases.delete(moved.alias, expect=moved.sequence, by=by, reason=reason)
            return
        back = run.aliases.move(
            moved.alias,
            step=before.step,
            attempt=before.attempt,
            manifest_digest=before.manifest_digest,
            by=by,
            reason=reason,
            expect=moved.sequence,
        )
        if _is_going(run, before):
            reason = f"step {before.step} was deleted while the alias was brought back to it"
            run.aliases.delete(back.alias, expect=back.sequence, by=by, reason=reason)
    except PreconditionFailedError:
        return
