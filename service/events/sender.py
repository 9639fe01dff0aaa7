"""Sender of events: one of the processes that share a catalog, with a thread for each receiver."""

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.retention import prune_events
from cairn.service.catalog.models import WebhookRow
from cairn.service.catalog.roots import Roots
from cairn.service.errors import SettingsError, TargetRefusedError
from cairn.service.events.deliveries import (
    Due,
    event_body,
    next_due,
    note_try,
    take_up,
    waiting_webhooks,
)
from cairn.service.events.detector import EventDetector
from cairn.service.events.http_post import PostFailedError, post
from cairn.service.events.signatures import signed_headers
from cairn.service.events.targets import parse_target
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.errors import JobsBusyError
from cairn.service.jobs.worker_names import WorkerName, name_at
from cairn.service.policies import Automation
from cairn.service.schemas import DeliveryState, DeliveryTry
from cairn.service.settings import Settings
from cairn.storage.store.clock import utc_now

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval between two checks for deliveries."""

NOTICE_SECONDS = 4.0
"""Interval between two checks of jobs and roots."""

ASK_SECONDS = 5.0
"""Interval at which the other processes check whether the sending one is gone."""

PRUNE_SECONDS = 600.0
"""Interval between two searches for old events, in seconds.

While there are old events, each check for deliveries removes a batch.
"""

AT_ONCE: Final = 8
"""Largest number of receivers that get a message at the same time."""

IN_A_ROW: Final = 100
"""Largest number of messages to one receiver before others get theirs."""

STOP_SECONDS: Final = 20.0

RETRY_SECONDS: tuple[float, ...] = (5, 30, 120, 600, 1800, 7200, 14400, 21600, 43200)
"""Seconds from each try of a delivery to the next, before jitter: more than a day in all.

After the last try, the delivery is given up.
"""

_SPREAD: Final = 0.3


class Sender:
    """Sender of events in threads of its own; it waits while another process of the catalog sends.

    Args:
        settings: Settings of the server.
        catalog: Catalog with events and webhooks.
        jobs: Jobs whose ends are events.
    """

    def __init__(self, settings: Settings, catalog: Catalog, jobs: Jobs) -> None:
        self._catalog = catalog
        self._networks = settings.networks
        roots = Roots(catalog, settings.root_uris)
        self._detector = EventDetector(catalog, jobs, roots, scans=settings.scan_seconds > 0)
        self._prune_next = 0.0  # monotonic clock
        self._kept = timedelta(days=settings.event_days)
        self._automations = [
            policy.name for policy in settings.policies if isinstance(policy, Automation)
        ]
        self._name = _name_of(settings)
        self._has_name = False
        self._busy: set[str] = set()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cairn-webhook")
        self._thread = threading.Thread(target=self._run, name="cairn-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for messages that are being sent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self._pool.shutdown(cancel_futures=True)
        self._name.release()

    def _run(self) -> None:
        noticed = 0.0
        while not self._stop.is_set():
            if not self._take_name():
                self._stop.wait(ASK_SECONDS)
                continue
            if time.monotonic() - noticed > NOTICE_SECONDS:
                self._log_errors(lambda: self._detector.index(utc_now()))
                self._log_errors(lambda: self._detector.jobs(utc_now()))
                noticed = time.monotonic()
            self._log_errors(self._start_deliveries)
            if self._kept and time.monotonic() >= self._prune_next:
                self._log_errors(self._prune)
            self._stop.wait(POLL_SECONDS)

    def _prune(self) -> None:
        """Remove a batch of old events; if there was one, the next check removes another."""
        self._prune_next = time.monotonic() + PRUNE_SECONDS
        if prune_events(self._catalog, utc_now() - self._kept, self._automations):
            self._prune_next = 0.0

    def _take_name(self) -> bool:
        """Return whether this process is the sending one; if none is, try to become it."""
        if self._has_name:
            return True
        try:
            self._name.release()  # a session that was cut may still be open
            self._name.acquire(self._lose_name)
        except JobsBusyError:
            return False
        except SettingsError:
            logger.warning("events wait: the catalog's database does not answer")
            return False
        self._has_name = True
        return True

    def _lose_name(self) -> None:
        self._has_name = False

    def _start_deliveries(self) -> None:
        """Start a thread for each webhook that has work and no thread yet."""
        with self._catalog.query() as connection:
            waiting = waiting_webhooks(connection, utc_now())
        for webhook in waiting:
            with self._guard:
                if webhook in self._busy:
                    continue
                self._busy.add(webhook)
            self._pool.submit(self._serve, webhook)

    def _serve(self, webhook: str) -> None:
        try:
            self._log_errors(lambda: self._deliver(webhook))
        finally:
            with self._guard:
                self._busy.discard(webhook)

    def _deliver(self, webhook: str) -> None:
        """Add deliveries for new events, and try those that are due."""
        take_up(self._catalog, webhook, utc_now())
        for _ in range(IN_A_ROW):
            if self._stop.is_set() or not self._has_name:
                return
            with self._catalog.read() as session:
                row = session.get(WebhookRow, webhook)
                due = next_due(session.connection(), webhook, utc_now())
            if row is None or due is None:
                return
            tried = self._try(row, due)
            again = None
            if tried.error is not None and due.attempts < len(RETRY_SECONDS):
                # The jitter spreads deliveries that failed at the same time.
                jitter = 1 + _SPREAD * (2 * random.random() - 1)
                again = timedelta(seconds=RETRY_SECONDS[due.attempts] * jitter)
            state = note_try(self._catalog, due, tried, again=again)
            if state is DeliveryState.DEAD:
                logger.warning(
                    "webhook %s: event %s is given up: %s", webhook, due.event.uid, tried.error
                )

    def _try(self, row: WebhookRow, due: Due) -> DeliveryTry:
        began, clock = utc_now(), time.monotonic()
        status: int | None = None
        error: str | None = None
        event = event_body(due.event).model_dump(mode="json")
        message = {"type": event["kind"], "timestamp": event["at"], "data": event}
        body = json.dumps(message).encode()
        headers = signed_headers(row.secret, due.event.uid, int(began.timestamp()), body)
        try:
            target = parse_target(row.url, self._networks)
            status = post(target, headers, body, self._networks)
        except (TargetRefusedError, PostFailedError) as exc:
            error = str(exc)
        else:
            if not 200 <= status < 300:
                error = f"expected a status from 200 to 299, found {status}"
        seconds = round(time.monotonic() - clock, 3)
        return DeliveryTry(at=began, seconds=seconds, status=status, error=error)

    def _log_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SQLAlchemyError as exc:
            logger.warning("events wait for the database: %s", exc)
            self._stop.wait(POLL_SECONDS)
        except Exception:  # the thread must survive: the next try may succeed
            logger.exception("events wait")
            self._stop.wait(POLL_SECONDS)


def _name_of(settings: Settings) -> WorkerName:
    """Return the lock of the sending process: a file beside the catalog, or in its database."""
    url = make_url(settings.database_url)
    place = Path(url.database).absolute() if url.database else settings.data_dir
    folder = place.parent if url.database else place
    return name_at(settings.database_url, folder, f"events of {place.name}")
