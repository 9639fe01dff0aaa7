"""Schedules of the settings, which act on runs again and again.

Every server checks what is due. Each operation has an idempotency key made of the schedule, the
moment and the run. So of many servers, and of one that was restarted, only one starts it. No client
can use such a key.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from cairn.service.access.callers import Caller
from cairn.service.actions.automations import MAY_PASS, follow_moves
from cairn.service.actions.clean_up import apply_retention, collect_garbage
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import list_runs
from cairn.service.actions.verify import verify_run
from cairn.service.errors import ServiceError
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.jobs.kinds import gc, retention, verify
from cairn.service.jobs.records import operation_id, operation_key
from cairn.service.schemas import ApplyRetentionRequest, ScheduledAction, ScheduleState, Scope
from cairn.service.settings import Schedule
from cairn.storage.errors import StorageError
from cairn.storage.store.clock import utc_now
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
"""Interval between two checks of the clock."""

FOLLOW_SECONDS: Final = 1.0
"""Interval between two checks for moved aliases, if there are automations."""

LATE: Final = timedelta(hours=1)
"""Age from which a missed moment is skipped, after a time without any server."""

_RUNS_AT_ONCE: Final = 1000

_KINDS: Final = {
    ScheduledAction.VERIFY: verify.KIND,
    ScheduledAction.COLLECT_GARBAGE: gc.KIND,
    ScheduledAction.APPLY_RETENTION: retention.KIND,
}


def list_schedules(
    plane: ControlPlane, caller: Caller, *, now: datetime | None = None
) -> list[ScheduleState]:
    """Return the schedules for the caller's roots, by name, with their last and next moments."""
    visible = caller.visible(plane.roots)
    moment = now or utc_now()
    return [
        ScheduleState(
            **schedule.model_dump(include={"name", "cron", "action", "root", "run"}),
            last_due=_due(schedule, moment),
            next_due=_due(schedule, moment, ahead=True),
        )
        for schedule in sorted(plane.settings.schedules, key=lambda schedule: schedule.name)
        if caller.roots is None or any(fnmatchcase(root, schedule.root) for root in visible)
    ]


def start_due(plane: ControlPlane, schedule: Schedule, due: datetime) -> tuple[int, bool]:
    """Start the operations that a schedule has due at a moment, except those started before.

    An error of one run is logged, and the other runs go on.

    Returns:
        The number of started operations, and whether they are complete: False if a store did not
        answer, so that operations may be missing.

    Raises:
        SQLAlchemyError: A database does not answer.
    """
    by = Caller(name=f"schedule:{schedule.name}", scope=Scope.ADMIN)
    started = 0
    problems: list[Exception] = []
    for root, uri in plane.roots.items():
        if not fnmatchcase(root, schedule.root):
            continue
        with _log_failure(f"{schedule.name}: {root}", problems):
            for run in _runs(plane, schedule, root, uri):
                with _log_failure(f"{schedule.name}: {root}/{run}", problems):
                    key = f"{due:%Y-%m-%dT%H:%MZ}/{run}"
                    started += _start(plane, by, schedule, root, run, key)
    return started, not any(isinstance(problem, MAY_PASS) for problem in problems)


@contextlib.contextmanager
def _log_failure(where: str, problems: list[Exception]) -> Iterator[None]:
    """Run the block; log an error that prevents a start, and add it to `problems`.

    Args:
        where: Schedule and root or run, for the log.
        problems: List to add the error to.
    """
    try:
        yield
    except (StorageError, ServiceError) as exc:
        problems.append(exc)
        logger.warning("schedule %s: not started: %s", where, exc)


def _start(
    plane: ControlPlane, by: Caller, schedule: Schedule, root: str, run: str, key: str
) -> bool:
    """Start an operation unless it was started before; return whether it was started now.

    Raises:
        IdempotencyKeyReusedError: Another operation has its key; the audit trail has that too.
    """
    with contextlib.suppress(OperationNotFoundError):
        operation = plane.jobs.get(operation_id(operation_key(by.name, root, key)))
        place = tuple(operation.request.get(name) for name in ("root", "run"))
        if (operation.kind, *place) == (_KINDS[schedule.action], root, run):
            return False
    if schedule.action is ScheduledAction.VERIFY:
        verify_run(plane, by, root, run, steps=schedule.steps, idempotency_key=key)
    elif schedule.action is ScheduledAction.COLLECT_GARBAGE:
        collect_garbage(plane, by, root, run, dry_run=False, idempotency_key=key)
    elif schedule.policy is not None:
        body = ApplyRetentionRequest(policy=schedule.policy, dry_run=False)
        apply_retention(plane, by, root, run, body, idempotency_key=key)
    return True


def _runs(plane: ControlPlane, schedule: Schedule, root: str, uri: StoreURI) -> Iterator[str]:
    """Yield the names of a root's runs that a schedule is for, after a refresh."""
    after: tuple[str | int, ...] = ()
    while True:
        look = not after
        page, last = list_runs(plane, {root: uri}, after=after, limit=_RUNS_AT_ONCE, refresh=look)
        yield from (run.name for run in page if schedule.is_for(run.root, run.name))
        if not last:
            return
        after = last


def _due(schedule: Schedule, now: datetime, *, ahead: bool = False) -> datetime:
    """Return the last due moment of a schedule or, with `ahead`, the next."""
    from croniter import croniter  # loaded only if there are schedules

    moments = croniter(schedule.cron, now.astimezone(UTC), ret_type=datetime)
    due: datetime = moments.get_next() if ahead else moments.get_prev()
    return due


class Scheduler:
    """Thread that starts the due operations of schedules and those of automations."""

    def __init__(self, plane: ControlPlane, *, clock: Callable[[], datetime] = utc_now) -> None:
        """Prepare the thread for the settings' schedules and automations."""
        self._plane = plane
        settings = plane.settings
        self._needed = bool(settings.schedules or settings.automations)
        self._pause = FOLLOW_SECONDS if settings.automations else LOOK_SECONDS
        self._clock = clock
        self._done: dict[str, datetime] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cairn-scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread, if there are schedules or automations."""
        if self._needed:
            self._thread.start()

    def close(self) -> None:
        """Stop, and wait for operations that are being started."""
        self._stop.set()
        if self._needed:
            self._thread.join(LOOK_SECONDS)  # bounded, since the database may be silent

    def look(self) -> int:
        """Start due operations, and return their number.

        A moment at which a store did not answer is tried again in the next call.
        """
        now, started = self._clock(), 0
        for schedule in self._plane.settings.schedules:
            # croniter's `get_prev` excludes the moment itself.
            due = _due(schedule, now + timedelta(microseconds=1))
            if self._done.get(schedule.name) == due or now - due > LATE or self._stop.is_set():
                continue
            count, whole = start_due(self._plane, schedule, due)
            started += count
            if whole:
                self._done[schedule.name] = due
        return started

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                if self._plane.settings.automations:
                    follow_moves(self._plane)
            except (StorageError, SQLAlchemyError, ServiceError) as exc:
                logger.warning("what is due was not started: %s", exc)
            except Exception:  # the thread must survive: the next try may succeed
                logger.exception("what is due was not started")
            self._stop.wait(self._pause)
