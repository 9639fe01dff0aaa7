"""Aliases as the API gives them out, and what becomes of a lost compare-and-swap."""

from cairn.service.errors import AliasMovedError
from cairn.service.http import Expectation
from cairn.service.schemas import Alias
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs import Alias as StoredAlias
from cairn.storage.runs import Run, promote_step
from cairn.storage.runs import delete_alias as delete_in_store
from cairn.storage.store import from_rfc3339


def promote(
    run: Run, step: int, alias: str, *, by: str, reason: str, expect: Expectation
) -> StoredAlias:
    """Point `alias` at a listed step.

    Raises:
        StepNotFoundError: The step is not listed, or was adopted and is gone.
        StepInFlightError: It is being written.
        CorruptionError: It was adopted, and its owner has changed it.
        AliasMovedError: The alias is not as expected.
        StepChangedError: The step was deleted while it was being promoted.
        InvalidURIError: `alias` cannot be an alias.
    """
    try:
        return promote_step(run, step, alias, by=by, reason=reason, expect=expect.sequence)
    except PreconditionFailedError as exc:
        raise alias_moved(exc) from exc


def delete_alias(run: Run, alias: str, *, by: str, expect: int) -> StoredAlias:
    """Delete an alias; its tombstone.

    Raises:
        AliasNotFoundError: There is no such alias.
        AliasMovedError: The alias is not as expected.
    """
    try:
        return delete_in_store(run, alias, by=by, expect=expect)
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
