"""Promotion: an alias moves to a step, which is held meanwhile so that no deletion of it begins."""

from typing import SupportsIndex

from cairn.storage.runs.records import (
    Alias,
    AliasWriter,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import held

__all__ = ["delete_alias", "promote_step"]


def promote_step(
    run: Run, step: SupportsIndex, alias: str, *, by: str = "", reason: str = "", expect: int | None
) -> Alias:
    """Point `alias` at a listed step, if it is still as the caller last saw it.

    Args:
        run: the run.
        step: one of its listed steps.
        alias: the alias.
        by: who asks.
        reason: why.
        expect: the alias's sequence last seen; None: it must not exist (deleted is not existing).

    Raises:
        StepNotFoundError: the step is not listed.
        StepInFlightError: it is being written.
        PreconditionFailedError: the alias changed; `current` is the `Alias` or None.
        StepChangedError: the step was deleted meanwhile, or is about to be; the alias is as before.
        InvalidURIError: `alias` can't be an alias, or `step` is no step's number.
    """
    info = run.step(step)
    with held(run, (info.step, info.attempt), by=by, reason=f"promote it to {alias!r}"):
        return AliasWriter(run.objects, run.clock).move(
            alias,
            step=info.step,
            attempt=info.attempt,
            manifest_digest=info.manifest_digest,
            by=by,
            reason=reason,
            expect=expect,
        )


def delete_alias(run: Run, alias: str, *, by: str = "", reason: str = "", expect: int) -> Alias:
    """Delete an alias that is still as last seen; its tombstone, which keeps the history.

    Raises:
        AliasNotFoundError: there is no such alias.
        PreconditionFailedError: it changed; `current` is the `Alias`.
    """
    return AliasWriter(run.objects, run.clock).delete(alias, by=by, reason=reason, expect=expect)
