"""A new run from a step of another: everything the step needs is copied, nothing is shared.

Data first, manifest last: until the manifest is there, the new run lists no step. Whoever is
interrupted starts again with the same arguments; what was copied is not copied again. A fork that
is finished is told again, and nothing is written into a run that has gone on since.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from cairn.storage.errors import CorruptionError, PreconditionFailedError, RunNotFoundError
from cairn.storage.runs.records import (
    COMMIT_FILE,
    LEASE_FILE,
    LEASE_TTL_SECONDS,
    MANIFESTS,
    RUN_FILE,
    RUN_FOLDERS,
    Annotation,
    Attempt,
    Lineage,
    Manifest,
    ObjectRecord,
    annotation_file,
    asset_file,
    begin_attempt,
    ensure_newest,
    list_attempts,
    manifest_file,
    put_record,
    read_asset,
    read_lease,
    read_record,
    release,
    renew,
    step_dir,
    trash_file,
)
from cairn.storage.runs.run import Run, refuse_inside_run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.writer import publish_manifest, sync_folder
from cairn.storage.soundness import is_of_a_probe
from cairn.storage.store import Clock, Files, StoreURI, open_files, utc_now

__all__ = ["abandon_fork", "fork_run"]

_FILES = {RUN_FILE, LEASE_FILE}


def fork_run(
    source: Run,
    step: StepInfo,
    target: StoreURI,
    *,
    by: str,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock = utc_now,
) -> StepInfo:
    """Make the run `target`, whose only step is a copy of `step`; that step.

    If this fork was finished earlier, its step is told again, in the state that it has by now.

    Args:
        source: the run to fork from.
        step: one of its steps.
        target: folder of the new run.
        by: id of the writer that makes the copy; the same when an interrupted fork is taken up.
        progress: called with (bytes copied, bytes in all); what it raises stops the fork.
        clock: tells the time.

    Raises:
        InvalidURIError: no run may begin at `target`, see `Run.create`.
        PreconditionFailedError: `target` is a run already, and not this fork.
        LeaseHeldError: another writer is making or using `target`.
        FencedError: another writer took `target` over meanwhile.
        UnsoundStoreError: the store of `target` does not keep what runs rest on.
        CorruptionError: the step lacks files that its manifest names.
        StoreFullError: no space or quota left.
    """
    manifest = source.manifest(step)
    lineage = Lineage(
        run=str(source.uri),
        step=step.step,
        attempt=step.attempt,
        manifest_digest=manifest.digest(),
    )
    run, finished = _create(source, target, lineage, manifest, by=by, clock=clock)
    if finished is not None:
        return finished
    attempt = _attempt(run, by=by, clock=clock)
    changes = {
        "attempt": attempt.number,
        "writer": by,
        "environment": manifest.unshared_environment,  # a fork copies
    }
    copied = Manifest.model_validate(manifest.model_dump() | changes)  # in the present version
    keeper = _LeaseKeeper(run, attempt, clock)
    _copy_objects(source, step, run, copied, keeper, progress)
    _copy_small(source, step, run, copied)
    sync_folder(run.step_uri(replace(step, attempt=attempt.number)))
    keeper.keep()
    publish_manifest(run.objects, copied, lambda: ensure_newest(run.objects, attempt))
    release(run.objects, attempt, clock=clock)
    return run.step(step.step)


def abandon_fork(target: StoreURI, *, by: str) -> None:
    """Remove what an unfinished fork by `by` left.

    A finished one stays, and so does a run that is no fork, that somebody else has begun to write,
    or that a job holds, be it one of the same id.
    """
    run = Run(target)
    attempts = list_attempts(run.objects)
    owned = bool(attempts) and all(attempt.writer == by for attempt in attempts)
    if owned and _is_fork(run) and _is_free(run, by) and not run.objects.list(MANIFESTS):
        open_files(target.parent).delete_tree(target.name)


def _is_fork(run: Run) -> bool:
    with contextlib.suppress(RunNotFoundError):
        return run.info().lineage is not None
    return False


def _is_free(run: Run, by: str) -> bool:
    """Whether the lease is a fork's, which has no instance as a job's has, or was given back."""
    lease = read_lease(run.objects)
    return lease is None or lease.released or (lease.writer, lease.instance) == (by, "")


class _LeaseKeeper:
    """Renews the lease of an attempt between two files."""

    def __init__(self, run: Run, attempt: Attempt, clock: Clock) -> None:
        self._run = run
        self._attempt = attempt
        self._clock = clock
        self._due: datetime | None = None

    def keep(self) -> None:
        """Renew, if a third of the lease's time has gone since the last renewal.

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
    """The new run, or the one that an earlier fork of the same step left; its step, if finished."""
    info = source.info()
    refuse_inside_run(target)  # what is in the way is not the reason then
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


def _finished(run: Run, manifest: Manifest, *, by: str, clock: Clock) -> StepInfo | None:
    """The step that this fork published earlier, whatever became of it and of the run since."""
    for attempt in run.attempts():
        if attempt.writer != by:
            return None  # the fork's attempt comes first
        key = manifest.step, attempt.number
        deleted = run.objects.read(trash_file(*key)) is not None
        found = read_record(run.objects, manifest_file(*key), Manifest)
        if found is None and not deleted:
            continue
        if found is not None:
            own = found[0]
            if (own.created, own.objects) != (manifest.created, manifest.objects):
                return None  # a job of the same id has saved this step
        lease = read_lease(run.objects)
        if lease is not None and not lease.released:
            release(run.objects, attempt, clock=clock)  # interrupted right before; else another's
        state = run.state_of(*key)
        return next(iter(run.described([(key, state)])), StepInfo(*key, state))
    return None


def _is_unfinished(run: Run, *, by: str) -> bool:
    """Whether nobody has used the run but one interrupted fork by `by`, which may go on."""
    attempts = run.attempts()
    mine = len(attempts) <= 1 and all(attempt.writer == by for attempt in attempts)
    return mine and not run.published() and not run.trashed()


def _refuse_foreign(target: StoreURI) -> None:
    """A fork that is given up removes its folder: it must not begin in one of something else."""
    foreign = [
        entry.name
        for entry in open_files(target).list()
        if entry.name not in _FILES
        and f"{entry.name}/" not in RUN_FOLDERS
        and not is_of_a_probe(entry.name)
    ]
    if foreign:
        raise PreconditionFailedError(
            "the folder is in use",
            path=target,
            expected="no folder of this name, or a run",
            found=", ".join(foreign[:5]),
            next_step="Choose another name.",
        )


def _attempt(run: Run, *, by: str, clock: Clock) -> Attempt:
    """The attempt that an interrupted fork began, or a new one."""
    begun = run.attempts()
    if begun and begun[0].writer == by:
        return begun[0]
    return begin_attempt(run.objects, writer=by, base_step=-1, clock=clock)


def _copy_objects(
    source: Run,
    step: StepInfo,
    run: Run,
    manifest: Manifest,
    keeper: _LeaseKeeper,
    progress: Callable[[int, int], None] | None,
) -> None:
    origin = open_files(source.step_uri(step))
    target = open_files(run.uri / step_dir(manifest.attempt, manifest.step))
    present = {entry.name: entry.size for entry in origin.walk()}
    records = _records(manifest, present, origin.uri)
    done, total = 0, sum(record.size for record in records)
    copied = {entry.name: entry.size for entry in target.walk()}
    for record in records:
        keeper.keep()
        if copied.get(record.name) != record.size:
            origin.copy(record.name, target, record.name)
            _check_copy(target, record)
        done += record.size
        if progress is not None:
            progress(done, total)


def _records(manifest: Manifest, present: dict[str, int], path: StoreURI) -> list[ObjectRecord]:
    """What to copy, the items' commit markers after all they stand for, and the step's last.

    Raises:
        CorruptionError: the manifest names files that are missing or of another size.
    """
    wrong = [
        f"{record.name} ({present.get(record.name, 'none')} of {record.size} bytes)"
        for record in manifest.objects
        if present.get(record.name) != record.size
    ]
    if wrong:
        raise CorruptionError(
            "the step is damaged",
            path=path,
            expected="every file that its manifest names, of the size it names",
            found=f"{len(wrong)} that are not: {'; '.join(wrong[:5])}{'; …' * (len(wrong) > 5)}",
            next_step="Fork from another step, or restore the files from a backup.",
        )
    records = [ObjectRecord(name=name, size=size) for name, size in present.items()]
    return sorted(records, key=lambda record: (_marks(record.name), record.name))


def _marks(name: str) -> int:
    """What a file says is complete: 2 the step, 1 an item of it, 0 nothing."""
    parts = name.split("/")
    return 0 if parts[-1] != COMMIT_FILE or len(parts) > 2 else 3 - len(parts)


def _check_copy(target: Files, record: ObjectRecord) -> None:
    size = target.stat(record.name).size
    if size != record.size:
        raise CorruptionError(
            "the copy is not whole",
            path=target.uri / record.name,
            expected=f"{record.size} bytes",
            found=f"{size}",
            next_step="Start the fork again.",
        )


def _copy_small(source: Run, step: StepInfo, run: Run, manifest: Manifest) -> None:
    """Assets, and the labels and metrics of the step."""
    for asset in manifest.assets:
        run.objects.write(asset_file(asset.sha256), read_asset(source.objects, asset))
    found = read_record(source.objects, annotation_file(step.step, step.attempt), Annotation)
    if found is not None:
        put_record(run.objects, annotation_file(manifest.step, manifest.attempt), found[0])
