"""Schedules and retention policies, which act on runs again and again.

Every server checks what is due. Each operation has an idempotency key made of the policy, the
moment and the run. So of many servers, and of one that was restarted, only one starts it. No client
can use such a key.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from cairn.service.access.callers import Caller
from cairn.service.actions.automations import MAY_PASS, follow_moves, forget_removed
from cairn.service.actions.clean_up import apply_retention, collect_garbage
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import ActivePolicy, in_force
from cairn.service.actions.runs import list_runs
from cairn.service.actions.verify import verify_run
from cairn.service.errors import ServiceError
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.jobs.kinds import gc, retention, verify
from cairn.service.jobs.records import operation_id, operation_key
from cairn.service.policies import Automation, Retention, Schedule
from cairn.service.schemas import ApplyRetentionRequest, Scope
from cairn.storage.errors import StorageError
from cairn.storage.store.clock import from_rfc3339, utc_now
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
"""Interval between two checks of the clock."""

FOLLOW_SECONDS: Final = 1.0
"""Interval between two checks for moved aliases, if there are automations."""

FORGET_SECONDS: Final = 3600.0
"""Interval between two removals of what is stored of removed automations."""

LATE: Final = timedelta(hours=1)
"""Age from which a missed moment is skipped, after a time without any server."""

_RUNS_AT_ONCE: Final = 1000

TimedPolicy = ActivePolicy[Schedule] | ActivePolicy[Retention]


def start_due(plane: ControlPlane, active: TimedPolicy, due: datetime) -> tuple[int, bool]:
    """Start the operations that a policy has due at a moment, except those started before.

    An error of one run is logged, and the other runs go on.

    Returns:
        The number of started operations, and whether they are complete: False if a store did not
        answer, so that operations may be missing.

    Raises:
        SQLAlchemyError: A database does not answer.
    """
    by = Caller(name=active.caller, scope=Scope.ADMIN)
    started = 0
    problems: list[Exception] = []
    for root, uri in plane.roots.items():
        if not active.is_for_root(root):
            continue
        with _log_failure(f"{by.name}: {root}", problems):
            for run in runs_of(plane, active, root, uri):
                with _log_failure(f"{by.name}: {root}/{run}", problems):
                    key = f"{due:%Y-%m-%dT%H:%MZ}/{run}"
                    started += _start(plane, by, active.policy, root, run, key)
    return started, not any(isinstance(problem, MAY_PASS) for problem in problems)


@contextlib.contextmanager
def _log_failure(where: str, problems: list[Exception]) -> Iterator[None]:
    """Run the block; log an error that prevents a start, and add it to `problems`.

    Args:
        where: Policy and root or run, for the log.
        problems: List to add the error to.
    """
    try:
        yield
    except (StorageError, ServiceError) as exc:
        problems.append(exc)
        logger.warning("%s: not started: %s", where, exc)


def _start(
    plane: ControlPlane, by: Caller, policy: Schedule | Retention, root: str, run: str, key: str
) -> bool:
    """Start an operation unless it was started before; return whether it was started now.

    Raises:
        IdempotencyKeyReusedError: Another operation has its key; the audit trail has that too.
    """
    if isinstance(policy, Retention):
        kind = retention.KIND
    else:
        kind = verify.KIND if policy.action == "verify" else gc.KIND
    with contextlib.suppress(OperationNotFoundError):
        operation = plane.jobs.get(operation_id(operation_key(by.name, root, key)))
        place = tuple(operation.request.get(name) for name in ("root", "run"))
        if (operation.kind, *place) == (kind, root, run):
            return False
    if isinstance(policy, Retention):
        body = ApplyRetentionRequest(policy=policy.policy, dry_run=False)
        apply_retention(plane, by, root, run, body, idempotency_key=key)
    elif policy.action == "verify":
        verify_run(plane, by, root, run, steps=policy.steps, idempotency_key=key)
    else:
        collect_garbage(plane, by, root, run, dry_run=False, idempotency_key=key)
    return True


def runs_of(
    plane: ControlPlane, active: ActivePolicy[Any], root: str, uri: StoreURI
) -> Iterator[str]:
    """Yield the names of a root's runs that a policy is for, after a refresh.

    Raises:
        StoreUnavailableError: The store does not answer.
    """
    after: tuple[str | int, ...] = ()
    while True:
        look = not after
        page, last = list_runs(plane, {root: uri}, after=after, limit=_RUNS_AT_ONCE, refresh=look)
        yield from (run.name for run in page if active.is_for(run.root, run.name))
        if not last:
            return
        after = last


class Scheduler:
    """Thread that starts the due operations of schedules, retention policies and automations."""

    def __init__(self, plane: ControlPlane, *, clock: Callable[[], datetime] = utc_now) -> None:
        """Prepare the thread for the policies in force."""
        self._plane = plane
        self._clock = clock
        self._done: dict[tuple[str, str], datetime] = {}
        self._forget_next = 0.0  # monotonic clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cairn-scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for operations that are being started."""
        self._stop.set()
        self._thread.join(LOOK_SECONDS)  # bounded, since the database may be silent

    def look(self) -> int:
        """Start due operations, and return their number.

        A moment at which a store did not answer is tried again in the next call. A policy of a root
        acts on no moment before it was set.
        """
        now, started = self._clock(), 0
        policies: list[TimedPolicy] = [
            *in_force(self._plane, Schedule, max_age=LOOK_SECONDS / 2),
            *in_force(self._plane, Retention),
        ]
        for active in policies:
            try:
                started += self._start_due(active, now)
            except SQLAlchemyError:
                raise
            except Exception:  # whatever a root's policy leads to, it ends no other
                logger.exception("%s: what is due was not started", active.caller)
        return started

    def _start_due(self, active: TimedPolicy, now: datetime) -> int:
        # croniter's `get_prev` excludes the moment itself.
        due = active.policy.due(now + timedelta(microseconds=1))
        name = active.policy.kind, active.key
        if self._done.get(name) == due or now - due > LATE or self._stop.is_set():
            return 0
        if active.stored is not None and due < from_rfc3339(active.stored.record.at):
            return 0
        count, whole = start_due(self._plane, active, due)
        if whole:
            self._done[name] = due
        return count

    def _watch(self) -> None:
        while not self._stop.is_set():
            pause = LOOK_SECONDS
            try:
                self.look()
                if time.monotonic() >= self._forget_next:
                    self._forget_next = time.monotonic() + FORGET_SECONDS
                    forget_removed(self._plane)
                if in_force(self._plane, Automation, max_age=None):
                    pause = FOLLOW_SECONDS
                    follow_moves(self._plane)
            except (StorageError, SQLAlchemyError, ServiceError) as exc:
                logger.warning("what is due was not started: %s", exc)
            except Exception:  # the thread must survive: the next try may succeed
                logger.exception("what is due was not started")
            self._stop.wait(pause)
