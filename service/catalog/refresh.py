"""Refresh of the catalog from the store: of a run, a root, or everything."""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy.exc import DataError

from cairn.counts import count_text
from cairn.service.catalog import rows
from cairn.service.catalog.change_tokens import change_token
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.roots import drop_index
from cairn.service.catalog.snapshot import take_snapshot
from cairn.service.errors import NotReadyError
from cairn.service.http.limiters import leave_catalog
from cairn.storage.errors import (
    NotFoundError,
    RunNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.runs.run import Run, list_runs
from cairn.storage.store.clock import utc_now
from cairn.storage.store.deadlines import deadline_seconds_left, no_answer_error
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

_SHOWN: Final = 3
RUNS_AT_ONCE: Final = 8
LOOKS_AT_ONCE: Final = 12
"""Unknown runs of one root that are searched in the store at a time."""

FIRST_SCAN_SECONDS: Final = 10
"""Longest time that a request for a list waits for the first scan of a root."""


@dataclass(frozen=True)
class Rebuilt:
    """Numbers of rows after a rebuild."""

    runs: int
    checkpoints: int
    aliases: int


@dataclass
class _Turn:
    """Lock that serializes the refreshes of one run.

    Attributes:
        lock: The lock.
        begun: Ticket of the last refresh that ended without an error; 0: there was none.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: int = 0
    people: int = 0  # threads that hold the lock or wait for it


class Index:
    """Index that keeps the catalog up to date with the store.

    Refreshes of one run do not overlap. Callers that come during a refresh share the next one, so a
    caller never reads data that is older than its own call.

    Attributes:
        scan_seconds: Duration of each root's last scan, in seconds, by the root's name.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.scan_seconds: dict[str, float] = {}
        self._tickets = itertools.count(1)
        self._guard = threading.Lock()
        self._scanning: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._looks: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(LOOKS_AT_ONCE)
        )
        self._turns: dict[tuple[str, StoreURI], _Turn] = {}

    def refresh_run(self, root: str, run: Run, *, anew: bool = False) -> None:
        """Read the changed records of a run.

        If the change token is the same as at the last read, no record is read.

        Args:
            root: Name of the root.
            run: Run to read.
            anew: Read all of its records, even if they have not changed.

        Raises:
            RunNotFoundError: The run is gone, and its rows are deleted.
        """
        leave_catalog()
        with self._turn(root, run.uri, always=anew) as turn:
            while turn is not None and not self._read_run(root, run, anew=anew):
                pass  # compare-and-swap lost: another process wrote, so read again

    def look_for(self, root: str, run: Run) -> None:
        """Read a run that the catalog does not have, unless too many others are being read.

        Raises:
            RunNotFoundError: There is no such run.
            NotReadyError: The store is slow, and too many callers wait for it.
        """
        leave_catalog()
        looks = self._looks[root]
        if not looks.acquire(blocking=False):
            raise NotReadyError(
                f"{run.uri}: not known, and the store is too slow to look for it: {LOOKS_AT_ONCE} "
                "others are being looked for. Try again later.",
            )
        try:
            self.refresh_run(root, run)
        finally:
            looks.release()

    def refresh_runs(self, roots: Mapping[str, StoreURI], runs: Iterable[tuple[str, str]]) -> None:
        """Refresh several runs, given as (root, name), some of them concurrently.

        An unreadable run is logged and stays as it was; the others are read nonetheless.

        Raises:
            StoreUnavailableError: A root does not answer.
        """
        with ThreadPoolExecutor(max_workers=RUNS_AT_ONCE) as pool:
            for _ in pool.map(
                lambda names: self._try_run(names[0], roots[names[0]] / names[1]), runs
            ):
                pass

    def refresh_root(self, root: str, uri: StoreURI, *, emptied: bool = False) -> list[str]:
        """Add the new runs of a root, drop those that are gone, and return the names of all.

        Args:
            root: Name of the root.
            uri: Address of the root.
            emptied: Accept that the root is empty now: its runs were removed on purpose.

        Raises:
            StoreUnavailableError: The root does not answer, or is not where it was.
        """
        # Before the listing: rows that are added after it must not look gone.
        with self.catalog.read() as session:
            folders = {
                name: version.uri for name, version in rows.run_versions(session, root).items()
            }
        indexed = [name for name, at in folders.items() if at == str(uri / name)]
        names = _list_runs(uri, indexed)
        if indexed and not names and not emptied:
            _refuse_gone(uri, indexed)
        there = {name: str(uri / name) for name in names}
        gone = [name for name, at in folders.items() if there.get(name) != at]
        if gone:
            with self.catalog.write() as session:
                rows.delete_runs(session, root, gone)
        new = [(root, name) for name, at in there.items() if folders.get(name) != at]
        self.refresh_runs({root: uri}, new)
        return names

    def refuse_gone(self, root: str, uri: StoreURI) -> None:
        """Raise if a folder that had runs is empty now, so that no new run begins there.

        The folder is probably a mount point whose disk is missing. A new run would be written below
        the mount point, and the other runs would look deleted.

        Raises:
            StoreUnavailableError: The folder is empty, and the catalog has runs in it.
        """
        if uri.scheme != "file" or not _is_empty(uri.local_path):
            return
        with self.catalog.read() as session:
            versions = rows.run_versions(session, root).items()
        if indexed := [name for name, version in versions if version.uri == str(uri / name)]:
            _refuse_gone(uri, indexed)

    def scan(self, root: str, uri: StoreURI) -> None:
        """Scan a root: refresh every run, and record the time.

        Raises:
            StoreUnavailableError: The root does not answer, or is not where it was.
        """
        began, clock = utc_now(), time.monotonic()
        try:
            names = self.refresh_root(root, uri)
            with self.catalog.read() as session:
                versions = rows.run_versions(session, root)
            changed = [
                name for name in names if not _is_unchanged_on_disk(versions.get(name), uri / name)
            ]
            self.refresh_runs({root: uri}, [(root, name) for name in changed])
        except StoreUnavailableError as exc:
            self._note_scan(root, uri, None, str(exc))
            raise
        self._note_scan(root, uri, began, None)
        self.scan_seconds[root] = time.monotonic() - clock

    def scan_in_turn(self, root: str, uri: StoreURI, seconds: float) -> None:
        """Scan a root, unless the last scan began less than `seconds` ago.

        A last scan in the future was recorded by a wrong clock, so the root is scanned then too.

        Raises:
            StoreUnavailableError: The root does not answer, or is not where it was.
        """
        with self._scanning[root]:
            last = self._last_scan(root, uri)
            if last is None or not 0 <= (utc_now() - last).total_seconds() < seconds:
                self.scan(root, uri)

    def ensure_scanned(self, roots: Mapping[str, StoreURI]) -> None:
        """Scan every root that was never scanned: a list must not leave out unknown runs.

        Raises:
            NotReadyError: The scan takes longer than a caller should wait.
            StoreUnavailableError: A root does not answer.
        """
        for root, uri in roots.items():
            if self._last_scan(root, uri) is not None:
                continue
            leave_catalog()
            if not self._scanning[root].acquire(timeout=FIRST_SCAN_SECONDS):
                raise NotReadyError(
                    f"root {root!r}: its runs are being read for the first time. Try again later; "
                    "`/readyz` says when it is done.",
                    headers={"Retry-After": str(FIRST_SCAN_SECONDS)},
                )
            try:
                if self._last_scan(root, uri) is None:
                    self.scan(root, uri)
            finally:
                self._scanning[root].release()

    def rebuild(self, roots: Mapping[str, StoreURI]) -> Rebuilt:
        """Read all roots, as if the catalog had no rows of runs; the audit trail stays.

        Returns:
            The numbers of rows afterwards.

        Raises:
            StoreUnavailableError: A root does not answer.
        """
        roots = dict(roots.items())
        with self.catalog.write() as session:
            rows.keep_roots(session, roots)
        for root, uri in roots.items():
            began = utc_now()
            for name in self.refresh_root(root, uri, emptied=True):
                self._try_run(root, uri / name, anew=True)
            self._note_scan(root, uri, began, None)
        with self.catalog.read() as session:
            return Rebuilt(*rows.count(session))

    def drop(self, root: str) -> None:
        """Delete the index of a root."""
        with self.catalog.write((root, "")) as session:
            drop_index(session, root)
        self.scan_seconds.pop(root, None)

    def _last_scan(self, root: str, uri: StoreURI) -> datetime | None:
        with self.catalog.query() as connection:
            return rows.last_scan(connection, root, uri)

    def _note_scan(
        self, root: str, uri: StoreURI, began: datetime | None, problem: str | None
    ) -> None:
        with self.catalog.write((root, "")) as session:
            rows.write_root(session, root, uri, scanned=began, problem=problem)

    def _try_run(self, root: str, uri: StoreURI, *, anew: bool = False) -> None:
        try:
            self.refresh_run(root, Run(uri), anew=anew)
        except RunNotFoundError:
            return  # deleted since it was listed
        except StoreUnavailableError:
            raise
        except DataError as exc:  # one run's odd data must not block the others
            logger.error("the catalog leaves %s as it was: %s", uri, exc.orig)
        except StorageError as exc:
            logger.warning("the catalog leaves %s as it was: %s", uri, exc)
            with self.catalog.write((root, uri.name)) as session:
                rows.write_problem(session, root, uri, str(exc))

    def _read_run(self, root: str, run: Run, *, anew: bool) -> bool:
        """Write a run's rows from the store; return False if another process wrote them since."""
        name = run.uri.name
        with self.catalog.read() as session:
            version = rows.run_version(session, root, name)
        # Before the records: a change while they are read outdates this token, and the next refresh
        # reads them again.
        stamp = change_token(run.uri)
        if version is not None and not anew and _is_current(version, run, stamp):
            return True
        try:
            info = run.info()
        except RunNotFoundError:
            with self.catalog.write((root, name)) as session:
                if rows.run_version(session, root, name) != version:
                    return False
                rows.delete_runs(session, root, [name])
            raise
        with self.catalog.read() as session:
            same = version is not None and version.is_of(run.uri, info) and not anew
            steps = rows.known_steps(session, root, name) if same else {}
            deletions = rows.seen_deletions(session, root, run.uri, info)
        snapshot = take_snapshot(run, info, steps, deletions)
        with self.catalog.write((root, name)) as session:
            return rows.write_run(session, root, run.uri, snapshot, stamp=stamp, version=version)

    @contextlib.contextmanager
    def _turn(self, root: str, uri: StoreURI, *, always: bool = False) -> Iterator[_Turn | None]:
        """Wait for the run's lock, and hold it during the block.

        Yields None if another caller's refresh began and ended after this call, and `always` is
        false: then there is nothing to do.

        Raises:
            StoreUnavailableError: The request's deadline came before the lock was free.
        """
        with self._guard:
            arrived = next(self._tickets)
            # The first caller creates a lock and the last one removes it: clients choose the names,
            # and must not be able to fill the memory.
            turn = self._turns.setdefault((root, uri), _Turn())
            turn.people += 1
        try:
            began, left = time.monotonic(), deadline_seconds_left()
            if not turn.lock.acquire(timeout=-1 if left is None else left):
                raise no_answer_error(uri, time.monotonic() - began, "none; others wait for it too")
            try:
                if turn.begun > arrived and not always:
                    yield None
                    return
                with self._guard:
                    begun = next(self._tickets)
                yield turn
                turn.begun = begun  # not after an error, so that the next caller tries again
            finally:
                turn.lock.release()
        finally:
            with self._guard:
                turn.people -= 1
                if turn.people == 0:
                    del self._turns[root, uri]


def _is_unchanged_on_disk(version: rows.RowVersion | None, run: StoreURI) -> bool:
    """Return whether a run is on a disk, and its change token shows no change since the last read.

    In a bucket this returns False: the token takes requests there.
    """
    return (
        version is not None
        and run.scheme == "file"
        and _is_current(version, Run(run), change_token(run))
    )


def _is_current(version: rows.RowVersion, run: Run, stamp: str | None) -> bool:
    """Return whether the catalog's rows of a run are up to date.

    A writer that dies in the middle of a step changes only its lease, which the change token does
    not cover. So a run with an unfinished step must also have a live lease.

    Args:
        version: Version of the rows.
        run: The run.
        stamp: Current change token of the run; None: unknown.
    """
    if not version.is_now(run.uri, stamp):
        return False
    if version.due is None:
        return True
    with contextlib.suppress(*UNREADABLE):
        lease = read_lease(run.objects)
        return lease is not None and lease.is_alive(utc_now())
    return False


def _list_runs(uri: StoreURI, names: list[str]) -> list[str]:
    try:
        return list_runs(uri, known=names)
    except NotFoundError as exc:
        raise StoreUnavailableError(
            "the root does not exist",
            path=uri,
            expected="a bucket that this server may list",
            found="none",
            next_step="Create it, or correct CAIRN_ROOT.",
        ) from exc


def _is_empty(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def _refuse_gone(uri: StoreURI, names: list[str]) -> None:
    """Raise if a root that had runs is empty now: it was moved, or is not mounted.

    Raises:
        StoreUnavailableError: The root is empty.
    """
    if open_files(uri).list():
        return
    shown = ", ".join(sorted(names)[:_SHOWN])
    raise StoreUnavailableError(
        "the root is not where it was",
        path=uri,
        expected=f"{count_text(len(names), 'run')}: {shown}{', …' * (len(names) > _SHOWN)}",
        found="nothing",
        next_step="Mount it, or correct CAIRN_ROOT; if they were deleted on purpose, run `cairn "
        "index rebuild`.",
    )
