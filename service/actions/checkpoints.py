"""Checkpoints: list, get, annotate, delete, undelete.

If the catalog does not know a step, the store is read before a 404.
"""

from collections.abc import Mapping
from typing import Any

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import Key, run_row
from cairn.service.catalog import queries, rows
from cairn.service.catalog.events.lost_records import lost_tombstone
from cairn.service.catalog.queries import RunColumns
from cairn.service.catalog.step_records import deletion_body, read_deletions, verification_of
from cairn.service.errors import InvalidRequestError
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import Checkpoint, CheckpointState, States
from cairn.storage.errors import StepChangedError, StepNotFoundError
from cairn.storage.runs.annotate import annotate_step
from cairn.storage.runs.records.annotations import Annotation, Better
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import delete_step, find_deletable_step, note_lifted, undelete_step
from cairn.storage.store.clock import from_rfc3339


def list_checkpoints(
    plane: ControlPlane,
    root: str,
    run: str,
    search: Search = EVERYTHING,
    *,
    state: States,
    after: Key,
    limit: int,
    refresh: bool,
) -> tuple[list[Checkpoint], Key]:
    """Return a run's next checkpoints, and the key of the next page; (): it is the last page.

    Without an order in `search`, the highest step comes first.

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        search: Filter and order of the checkpoints.
        state: States of the checkpoints to return; each must also pass the filter.
        after: Sort key of the last checkpoint that the client has; if `search` has no order, this
            is its step and attempt. (): start with the first.
        limit: Largest number of checkpoints.
        refresh: Refresh the run first.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    more = limit + 1
    with run_row(plane, root, run, refresh=refresh) as (connection, row):
        if search:
            matches = queries.search_checkpoints(
                connection, row, search, state=state, after=after, limit=more
            )
            steps, keys = [step for step, _ in matches], [key for _, key in matches]
        else:
            steps = queries.checkpoints(connection, row, state=state, before=after, limit=more)
            keys = [(step.step, step.attempt) for step in steps]
        aliases = queries.alias_names(connection, row, steps)
        page = [queries.checkpoint(row, step, aliases) for step in steps[:limit]]
    return page, keys[limit - 1] if len(steps) > limit else ()


def get_checkpoint(
    plane: ControlPlane,
    root: str,
    run: str,
    step: int,
    *,
    attempt: int | None = None,
    refresh: bool,
) -> Checkpoint:
    """Return a step in any state.

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        step: Number of the step.
        attempt: Attempt that saved the step; None: the listed one, or else the last.
        refresh: Refresh the run first.

    Raises:
        RunNotFoundError, StepNotFoundError: There is no such run or step.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with run_row(plane, root, run, refresh=refresh) as (connection, row):
        attempts = queries.attempts(connection, row, step)
        saved = {checkpoint.attempt: checkpoint for checkpoint in attempts}
        listed = [
            checkpoint.attempt
            for checkpoint in attempts
            if checkpoint.state == CheckpointState.LISTED
        ]
        if attempt is None and saved:
            attempt = listed[0] if listed else max(saved)
        if attempt in saved:
            aliases = queries.alias_names(connection, row, attempts)
            return queries.checkpoint(row, saved[attempt], aliases)
    if not refresh:
        return get_checkpoint(plane, root, run, step, attempt=attempt, refresh=True)
    return _from_store(row, Run(plane.place(root, run)), step, attempt)


def annotate_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    labels: Mapping[str, str | None],
    metrics: Mapping[str, float | None],
    better: Mapping[str, Better | None],
    seen: Seen,
    attempt: int | None = None,
) -> Checkpoint:
    """Set labels and metrics of a listed step; its other labels and metrics stay as they are.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A listed step.
        labels: Texts by name; None removes a label.
        metrics: Numbers by name; None removes a metric.
        better: Direction of metrics: lower or higher is better.
        seen: Version of the step that the change is based on.
        attempt: Attempt that must have saved the step; None: any.

    Raises:
        RunNotFoundError, StepNotFoundError: There is no such run or step.
        StepInFlightError: The step is being written.
        StepChangedError: The step is deleted, or about to be; or another attempt than `attempt`
            saved it, or it was saved again just now.
        ResourceChangedError: The step has changed since `seen`.
        UnsupportedFormatError: Invalid labels or metrics; all are listed.
    """
    stored_run = plane.run(root, run)
    current = get_checkpoint(plane, root, run, step, refresh=True)

    def check(noted: Annotation) -> None:
        notes = {"labels": noted.labels, "metrics": noted.metrics, "better": noted.better}
        notes |= verification_of(noted, current.state)
        seen.require(current.model_copy(update=notes))

    detail = {"step": step, "labels": dict(labels), "metrics": _metric_texts(metrics)}
    detail["better"] = dict(better)
    with audited(plane, caller, "checkpoint.annotate", root=root, run=run, **detail) as entry:
        listed = stored_run.step(step)
        require_attempt(stored_run, listed, current.attempt if attempt is None else attempt)
        noted = annotate_step(
            stored_run,
            listed,
            labels=labels,
            metrics=metrics,
            better=better,
            by=caller.name,
            check=check,
        )
        entry.complete(attempt=listed.attempt, after=noted.model_dump(mode="json"))
    return get_checkpoint(plane, root, run, step, refresh=True)


def delete_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    attempt: int | None,
    reason: str,
    grace: float,
) -> Checkpoint:
    """Delete a step; `undelete_checkpoint` restores it until the grace time is over.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A listed or superseded step.
        attempt: Attempt that saved the step; None: the listed one.
        reason: Reason of the deletion.
        grace: Seconds during which the step can be undeleted.

    Raises:
        RunNotFoundError: There is no such run.
        StepNotFoundError: There is no such step, or it was deleted already.
        StepInFlightError: The step is being written.
        StepInUseError: An alias names it, the run's writer would resume from it, or a promotion or
            a rollback is about to use it.
    """
    stored_run = plane.run(root, run)
    detail = {"step": step, "attempt": attempt, "reason": reason}
    with audited(plane, caller, "checkpoint.delete", root=root, run=run, **detail) as entry:
        info = find_deletable_step(stored_run, step, attempt)
        tombstone = delete_step(stored_run, info, by=caller.name, reason=reason, grace=grace)
        entry.complete(attempt=info.attempt, expires=tombstone.expires)
    return get_checkpoint(plane, root, run, info.step, attempt=info.attempt, refresh=True)


def undelete_checkpoint(
    plane: ControlPlane, caller: Caller, root: str, run: str, step: int, attempt: int | None
) -> Checkpoint:
    """Undelete a step.

    If the store has lost the tombstone, the step is listed already. Then it is recorded that the
    step was undeleted, and the loss is no longer reported.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A deleted step.
        attempt: Attempt to undelete, if several were deleted.

    Raises:
        RunNotFoundError: There is no such run.
        StepNotFoundError: The step is not deleted, or its files are being removed already.
        InvalidRequestError: Several attempts were deleted, and the request names none.
    """
    stored_run = plane.run(root, run)
    detail = {"step": step, "attempt": attempt}
    with audited(plane, caller, "checkpoint.undelete", root=root, run=run, **detail) as entry:
        with plane.catalog.query() as connection:
            lost = rows.lost_deletions(connection, root, run, step)
        deleted = {number for saved, number in stored_run.trashed() if saved == step}
        chosen = _deleted_attempt(stored_run, step, attempt, sorted(deleted | lost.keys()))
        if chosen in deleted:
            undelete_step(stored_run, step, chosen)
        else:
            note_lifted(stored_run, (step, chosen), lost_tombstone(lost[chosen]))
        entry.complete(attempt=chosen)
    return get_checkpoint(plane, root, run, step, attempt=chosen, refresh=True)


def require_attempt(run: Run, listed: StepInfo, attempt: int | None) -> None:
    """Raise unless a listed step was saved by `attempt`; with None, any attempt is accepted.

    Raises:
        StepChangedError: Another attempt saved it.
    """
    if attempt in (None, listed.attempt):
        return
    raise StepChangedError(
        "the step was saved anew",
        path=run.step_uri(listed),
        expected=f"step {listed.step} of attempt {attempt}, as it was seen",
        found=f"that of attempt {listed.attempt}",
        next_step="Look at the new one, and ask again if it is what you want.",
    )


def _from_store(row: RunColumns, run: Run, step: int, attempt: int | None) -> Checkpoint:
    """Return a step that the catalog leaves out because its manifest is unreadable.

    Raises:
        StorageError: `attempt` is None, and the listed step is unreadable.
    """
    if attempt is None:
        return _body(row, run, run.step(step))  # raises, unless the step was published just now
    deletions = read_deletions(run, [(step, attempt)])
    is_listed = run.step_attempts().get(step) == attempt
    kept = StepState.LISTED if is_listed else StepState.SUPERSEDED
    body = _body(row, run, StepInfo(step, attempt, StepState.TRASHED if deletions else kept))
    tombstone = deletions.get((step, attempt))
    deletion = None if tombstone is None else deletion_body(tombstone)
    return body.model_copy(update={"deletion": deletion})


def _body(row: RunColumns, run: Run, info: StepInfo) -> Checkpoint:
    return Checkpoint(
        root=row.root,
        run=row.name,
        step=info.step,
        attempt=info.attempt,
        state=CheckpointState(info.state.value),
        uri=info.source or str(run.step_uri(info)),
        created=None if info.created is None else from_rfc3339(info.created),
        bytes=info.nbytes,
        leaves=None,
        items=[],
        iterators={},
        manifest_digest=info.manifest_digest,
        model_type=None,
        aliases=[],
        labels={},
        metrics={},
        better={},
    )


def _metric_texts(metrics: Mapping[str, float | None]) -> dict[str, Any]:
    """Return metrics in their stored form, with text for NaN, which JSON lacks."""
    kept = {name: value for name, value in metrics.items() if value is not None}
    numbers: dict[str, Any] = Annotation(metrics=kept).model_dump(mode="json")["metrics"]
    return dict.fromkeys(metrics) | numbers


def _deleted_attempt(run: Run, step: int, attempt: int | None, deleted: list[int]) -> int:
    if attempt is None and len(deleted) > 1:
        raise InvalidRequestError(
            f"body.attempt: step {step} was saved and deleted more than once. Choose one of the "
            f"attempts {', '.join(map(str, deleted))}."
        )
    if not deleted or (attempt is not None and attempt not in deleted):
        name = f"step {step}" if attempt is None else f"step {step} of attempt {attempt}"
        listed = run.step_attempts().get(step)
        present = [f"attempt {number} of it in the trash" for number in deleted]
        present += [] if listed is None else [f"step {step} of attempt {listed} listed"]
        raise StepNotFoundError(
            "no such deleted step",
            path=run.uri,
            expected=f"{name} in the trash",
            found=", ".join(present) or "none",
            next_step="List the checkpoints with state trashed: what is not there was never "
            "deleted, or is gone for good.",
        )
    return deleted[0] if attempt is None else attempt
