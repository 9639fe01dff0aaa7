"""Promotion: an alias moves to a step, which is held meanwhile so that no deletion of it begins."""

from typing import SupportsIndex

from cairn.storage.errors import CorruptionError
from cairn.storage.runs.records import (
    Alias,
    AliasWriter,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_files import file_places, listed_problems, removed_by_owner
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.trash import held
from cairn.storage.store import open_files

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
        StepNotFoundError: the step is not listed; or it was adopted, and its owner has removed it.
        StepInFlightError: it is being written.
        CorruptionError: it was adopted, and a listing shows that its owner has changed it.
        PreconditionFailedError: the alias changed; `current` is the `Alias` or None.
        StepChangedError: the step was deleted meanwhile, or is about to be; the alias is as before.
        InvalidURIError: `alias` can't be an alias, or `step` is no step's number.
    """
    info = run.step(step)
    _refuse_changed(run, info)
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


def _refuse_changed(run: Run, info: StepInfo) -> None:
    """Raise if an adopted step is not there any more as it was; nothing is read but names."""
    if info.source is None:
        return
    place, *_ = file_places(run.step_uri(info), run.manifest(info).inline_objects, info.source)
    listed = {entry.name: entry for entry in open_files(place.folder).walk()}
    if not listed:
        raise removed_by_owner(place.folder)
    problems = listed_problems(listed, place.records)
    if problems:
        raise CorruptionError(
            "files of the step are not what was adopted",
            path=place.folder,
            expected=f"the {len(place.records)} files that its manifest names",
            found=f"{len(problems)} that are not",
            next_step="Use another step, or adopt the folder into a new run.",
            problems=[problems[name] for name in sorted(problems)],
        )
