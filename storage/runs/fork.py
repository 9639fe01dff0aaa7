"""Fork: a new run from a copy of another run's step. The two runs share no file.

Data is copied first and the manifest is written last: until then the new run lists no step. Every
copied file is checked, see `step_copy`, so that a damaged step is not forked. To continue a fork
that was interrupted or killed, call it again with the same arguments; copied files are checked and
not copied again. If the fork had finished, the call returns its step and changes nothing, even if
the new run has more steps by now.
"""

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from cairn.storage.errors import (
    CorruptionError,
    FencedError,
    InvalidURIError,
    PreconditionFailedError,
    RunNotFoundError,
)
from cairn.storage.runs.damage import damage_of, refuse_damaged
from cairn.storage.runs.lease import (
    LEASE_TTL_SECONDS,
    begin_attempt,
    holds_lease,
    note_durable,
    read_lease,
    release,
    renew,
)
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.assets import put_assets, read_asset
from cairn.storage.runs.records.attempts import Attempt, ensure_newest, list_attempts
from cairn.storage.runs.records.index_writer import copy_index
from cairn.storage.runs.records.layout import (
    INDEX_FILE,
    LEASE_FILE,
    MANIFESTS,
    RUN_FILE,
    RUN_FOLDERS,
    annotation_file,
    manifest_file,
    step_dir,
    trash_file,
)
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.records.placed import UNREADABLE, place_of, put_record, read_record
from cairn.storage.runs.records.run_info import Lineage
from cairn.storage.runs.records.step_contents import StepContents
from cairn.storage.runs.records.step_index import StepIndex, whole_contents
from cairn.storage.runs.run import Run, refuse_inside_run, refuse_lost_run_record
from cairn.storage.runs.step_copy import CopyReport, copy_step_files
from cairn.storage.runs.step_files import file_places, removed_by_owner
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.writer import publish_manifest, sync_folder
from cairn.storage.store.clock import Clock, utc_now
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX
from cairn.storage.store.files import Files
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI
from cairn.storage.store_checks.record import is_probe_name

__all__ = ["abandon_fork", "fork_run", "refuse_taken"]

_FILES = {RUN_FILE, LEASE_FILE}
_DESPITE_DAMAGE = "despite_damage"


def fork_run(
    source: Run,
    step: StepInfo,
    target: StoreURI,
    *,
    by: str,
    progress: Callable[[int, int], None] | None = None,
    despite_damage: str | None = None,
    clock: Clock = utc_now,
) -> StepInfo:
    """Create the run `target`, whose only step is a copy of `step`; return that step.

    The copy contains what was saved: the files that the step's manifest names, its assets, labels
    and metrics. Other files in the step's folder were put there later and can't be checked, so they
    are not copied. A step that is deleted or superseded meanwhile is still copied while its bytes
    exist.

    `copied` of the returned step says what was checked. If this fork finished earlier, its step is
    returned again, in its present state, with what was checked then.

    Args:
        source: the run to fork from.
        step: a step of that run.
        target: folder of the new run.
        by: id of the writer that makes the copy; use the same to continue an interrupted fork.
        progress: called with (bytes copied, bytes in all); if it raises, the fork stops.
        despite_damage: why the step is forked though it is damaged; the copy's manifest records it.
            Files that are not what was saved are never copied. The copy also counts as damaged
            until it is verified.
        clock: returns the current time in UTC.

    Raises:
        StepDamagedError: the step's last verification has failed, and no reason is given.
        InvalidURIError: no run may begin at `target`, see `Run.create`, or it is inside the source.
        PreconditionFailedError: `target` is already a run, and not this fork.
        LeaseHeldError: another writer is making or using `target`.
        FencedError: another writer took `target` over meanwhile.
        StoreCheckError: the store of `target` does not keep the promises that runs depend on.
        CorruptionError: files of the step are missing or damaged; `problems` names them all. Or the
            step's manifest, an asset or its labels are damaged, or a copy is though its source is
            not.
        StepNotFoundError: the step has no manifest, or its bytes were removed meanwhile.
        StoreFullError: no space or quota left.
    """
    manifest, damage = source.objects.gather(
        lambda: source.manifest(step), lambda: damage_of(source, (step.step, step.attempt))
    )
    lineage = Lineage(
        run=str(source.uri),
        step=step.step,
        attempt=step.attempt,
        manifest_digest=manifest.digest(),
    )
    if damage is not None:
        earlier = _finished_earlier(target, lineage, manifest, by=by, clock=clock)
        if earlier is not None:  # the damage was noted after that fork
            return earlier
    refuse_damaged(source, step, despite_damage=despite_damage, damage=damage)
    contents = whole_contents(source.objects, manifest)
    run, finished = _create(source, target, lineage, manifest, by=by, clock=clock)
    if finished is not None:
        return finished
    attempt = _attempt(run, by=by, clock=clock)
    keeper = _LeaseKeeper(run, attempt, clock)
    keeper.keep()
    # The small files first: if they are wrong, the fork fails before the large copy.
    _copy_small(source, step, run, manifest, attempt)

    def tell(done: int, total: int) -> None:
        keeper.keep()
        if progress is not None:
            progress(done, total)

    folder = run.uri / step_dir(attempt.number, step.step)
    try:
        report = _copy_files(source.step_uri(step), manifest, contents, open_files(folder), tell)
    except CorruptionError:
        source.manifest(step)  # raises StepNotFoundError if the step was removed meanwhile
        raise
    changes = {
        "attempt": attempt.number,
        "writer": by,
        "environment": manifest.environment  # kept, since a fork copies
        | report.noted()
        | ({} if damage is None else {_DESPITE_DAMAGE: despite_damage}),
    }
    if manifest.plain is not None:
        changes["plain"] = manifest.plain.model_copy(update={"source": None})
    # Validated again, so that it is written in the present version of the format.
    copied = Manifest.model_validate(
        manifest.model_dump(by_alias=True, exclude={"index"}) | changes
    )
    if isinstance(contents, StepIndex):
        name = f"{step_dir(attempt.number, step.step)}/{INDEX_FILE}"
        data, copied = copy_index(contents, copied, place_of(run.objects, name))
        run.objects.write(name, data)
    # The data must be durable before the manifest that lists the step.
    sync_folder(folder)
    keeper.keep()
    publish_manifest(run.objects, copied, lambda: ensure_newest(run.objects, attempt))
    note_durable(run.objects, attempt, step.step)
    # Only after publishing: a process that took the lease earlier may not have seen the step.
    _ensure_held(run, attempt)
    release(run.objects, attempt, clock=clock)
    return replace(run.step(step.step), copied=report)


def refuse_taken(target: StoreURI) -> None:
    """Raise PreconditionFailedError if no fork can begin at `target`.

    It is for callers that check long before the copy; `fork_run` checks again.

    Args:
        target: folder of the new run.

    Raises:
        PreconditionFailedError: there is a run, remains of one, or something else.
    """
    _refuse_foreign(target)
    run = Run(target)
    try:
        refuse_lost_run_record(run)
    except CorruptionError as exc:
        raise PreconditionFailedError(
            "the name is taken",
            path=target,
            expected="no run",
            found="one that has lost its record",
            next_step="Choose another name.",
        ) from exc
    if run.objects.read(RUN_FILE) is not None:
        raise PreconditionFailedError(
            "the name is taken",
            path=target,
            expected="no run",
            found="one",
            next_step="Choose another name.",
        )


def _copy_files(
    step: StoreURI,
    manifest: Manifest,
    contents: StepContents,
    target: Files,
    tell: Callable[[int, int], None],
) -> CopyReport:
    """Copy the files of a step, from all its folders, into one folder; return what was checked."""
    places = file_places(step, contents.objects, manifest.source)
    total = sum(record.size for place in places for record in place.records)
    before = 0
    reports = []

    def tell_all(done: int, of: int) -> None:
        tell(before + done, total or of)

    for place in places:
        if place.is_owners and not open_files(place.folder).list():
            raise removed_by_owner(place.folder)
        reports.append(copy_step_files(open_files(place.folder), target, place.records, tell_all))
        before += reports[-1].nbytes
    return reports[0].with_others(reports[1:])


def abandon_fork(target: StoreURI, *, by: str) -> None:
    """Remove what an unfinished fork by `by` left.

    A finished fork is not touched, nor a run that is not a fork, that another writer has begun to
    write, or whose lease a job holds, even a job with the same id.
    """
    run = Run(target)
    attempts = list_attempts(run.objects)
    if not attempts or any(attempt.writer != by for attempt in attempts):
        return
    lineage = None
    with contextlib.suppress(RunNotFoundError, *UNREADABLE):
        lineage = run.info().lineage
    if lineage is None:
        return
    lease = read_lease(run.objects)
    # The lease was given back, or is a fork's, which has no instance.
    is_free = lease is None or lease.released or (lease.writer, lease.instance) == (by, "")
    if is_free and not run.objects.list(MANIFESTS):
        open_files(target.parent).delete_tree(target.name)


class _LeaseKeeper:
    """Renewal of an attempt's lease between two files."""

    def __init__(self, run: Run, attempt: Attempt, clock: Clock) -> None:
        self._run = run
        self._attempt = attempt
        self._clock = clock
        self._due: datetime | None = None

    def keep(self) -> None:
        """Renew the lease if a third of its time has passed since the last renewal.

        Raises:
            FencedError: another writer took the run over.
        """
        now = self._clock()
        if self._due is None or now >= self._due:
            renew(self._run.objects, self._attempt, clock=self._clock)
            self._due = now + timedelta(seconds=LEASE_TTL_SECONDS / 3)


def _create(
    source: Run, target: StoreURI, lineage: Lineage, manifest: Manifest, *, by: str, clock: Clock
) -> tuple[Run, StepInfo | None]:
    """Return the new run, or the one that an earlier call left, and its step or None."""
    info = source.info()
    refuse_inside_run(target)  # checked first, so that the error names the real reason
    _refuse_inside(source, target)
    _refuse_foreign(target)
    try:
        created = Run.create(
            target,
            labels=info.labels,
            lineage=lineage,
            config_digest=info.config_digest,
            environment=info.environment,
            exist_ok=False,
            clock=clock,
        )
    except PreconditionFailedError:
        run = Run.open(target, clock=clock)
        if run.info().lineage != lineage:
            raise
        finished = _finished(run, manifest, by=by, clock=clock)
        if finished is None and not _is_unfinished(run, by=by):
            raise
        return run, finished
    return created, None


def _finished_earlier(
    target: StoreURI, lineage: Lineage, manifest: Manifest, *, by: str, clock: Clock
) -> StepInfo | None:
    """Return the step of the run `target` if this fork finished there before, else None."""
    run = Run(target, clock=clock)
    with contextlib.suppress(RunNotFoundError, *UNREADABLE):
        if run.info().lineage == lineage:
            return _finished(run, manifest, by=by, clock=clock)
    return None


def _finished(run: Run, manifest: Manifest, *, by: str, clock: Clock) -> StepInfo | None:
    """Return the step that this fork published, also if deleted or superseded by now; or None."""
    last = None
    for attempt in itertools.takewhile(lambda attempt: attempt.writer == by, run.attempts()):
        key = manifest.step, attempt.number
        deleted = run.objects.read(trash_file(*key)) is not None
        stored = read_record(run.objects, manifest_file(*key), Manifest)
        if stored is None and not deleted:
            continue
        report = None
        if stored is not None:
            own = stored[0]
            if _told_of_files(own) != _told_of_files(manifest):
                break  # a job of the same id has saved this step
            report = CopyReport.of(own.environment)
        state = run.state_of(*key)
        info = next(iter(run.described([(key, state)])), StepInfo(*key, state))
        last = attempt, replace(info, copied=report)
    if last is None or (last[1].state is StepState.SUPERSEDED and _is_unfinished(run, by=by)):
        return None  # or another call of this fork has superseded it, and was interrupted
    lease = read_lease(run.objects)
    if lease is not None and not lease.released:
        # This fork was interrupted right before; no-op if the lease is another's.
        release(run.objects, last[0], clock=clock)
    run.objects.sync(MANIFESTS)
    return last[1]


def _told_of_files(manifest: Manifest) -> tuple[object, ...]:
    """Return the fields that a step's manifest and that of its copy have in common."""
    index = manifest.index
    counts = None if index is None else (index.files, index.nbytes, index.leaves)
    return manifest.created, manifest.inline_objects, counts


def _is_unfinished(run: Run, *, by: str) -> bool:
    """Return True if only interrupted forks by `by` have used the run: a fork may continue."""
    lease = read_lease(run.objects)
    is_a_jobs = lease is not None and not lease.released and lease.instance != ""
    mine = not is_a_jobs and all(attempt.writer == by for attempt in run.attempts())
    return mine and not run.step_attempts() and not run.trashed()


def _ensure_held(run: Run, attempt: Attempt) -> None:
    """Raise FencedError unless the next process to take the lease will see the published step.

    Raises:
        FencedError: another call took the lease before, and may supersede the step.
    """
    if not holds_lease(run.objects, attempt):
        raise FencedError(
            "this fork is being replaced",
            path=run.uri,
            expected=f"the lease of attempt {attempt.number} of {attempt.writer}",
            found="another call's, which makes the copy anew",
            next_step="Leave it to the other call; started again, this one tells its step.",
        )


def _refuse_foreign(target: StoreURI) -> None:
    """Raise if the folder has files of other origin: `abandon_fork` removes the whole folder."""
    foreign = []
    for entry in open_files(target).list():
        name = entry.name.removesuffix(LOCK_SUFFIX)  # left by a write that was killed
        if not (name in _FILES or f"{name}/" in RUN_FOLDERS or is_probe_name(name)):
            foreign.append(entry.name)
    if foreign:
        raise PreconditionFailedError(
            "the folder is in use",
            path=target,
            expected="no folder of this name, or a run",
            found=", ".join(foreign[:5]),
            next_step="Choose another name.",
        )


def _refuse_inside(source: Run, target: StoreURI) -> None:
    """Raise InvalidURIError if `target` is inside the source.

    Removing the source's folder must not remove the fork.
    """
    names = [str(source.uri), str(target)]
    if source.uri.scheme == target.scheme == "file":  # resolves symbolic links
        names = [os.path.realpath(uri.local_path) for uri in (source.uri, target)]
    if names[1].startswith(f"{names[0]}/"):
        raise InvalidURIError(
            "not a place for a fork",
            path=target,
            expected="a folder outside of the run that is forked",
            found=f"one in {source.uri}",
            next_step="Choose a name beside the run.",
        )


def _attempt(run: Run, *, by: str, clock: Clock) -> Attempt:
    """Return the attempt that an interrupted fork began, if it has the lease; else a new one."""
    begun, lease = run.attempts(), read_lease(run.objects)
    if begun and lease is not None:
        holder = lease.writer, lease.attempt, lease.instance
        if holder == (by, begun[-1].number, ""):
            return begun[-1]

    def base_step() -> int:
        """Raise, with the lease held, if another writer has begun or saved meanwhile."""
        if run.attempts() == begun and _is_unfinished(run, by=by):
            return -1
        raise PreconditionFailedError(
            "the run was taken meanwhile",
            path=run.uri,
            expected=f"a run that only {by} has begun to write",
            found="attempts or steps of somebody else, or of another call of this fork",
            next_step="Start the fork again, which tells its step if it is finished; else choose "
            "another name.",
        )

    return begin_attempt(run.objects, writer=by, base_step=base_step, clock=clock)


def _copy_small(
    source: Run, step: StepInfo, run: Run, manifest: Manifest, attempt: Attempt
) -> None:
    """Copy the assets of the step, and its labels and metrics.

    Raises:
        CorruptionError: an asset or its copy is missing or damaged, or the labels are damaged.
    """
    for asset in manifest.assets:
        put_assets(run.objects, {asset.name: read_asset(source.objects, asset)})
        read_asset(run.objects, asset)
    stored = read_record(source.objects, annotation_file(step.step, step.attempt), Annotation)
    if stored is not None:
        put_record(run.objects, annotation_file(step.step, attempt.number), stored[0])
