"""Keeps the catalog equal to the store: one run, the runs of a root, or everything."""

import contextlib
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from cairn.service.catalog import rows
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.snapshot import take_snapshot
from cairn.service.catalog.stamps import Stamp, take_stamp
from cairn.storage.errors import (
    NotFoundError,
    RunNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.runs import Run, list_runs
from cairn.storage.store import StoreURI

logger = logging.getLogger(__name__)

RUNS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild found in the store."""

    runs: int
    checkpoints: int
    aliases: int


@dataclass
class _Turn:
    """The refreshes of one thing, one at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: int = 0
    stamp: Stamp | None = None
    revision: int | None = None


class Index:
    """Brings the catalog up to date with the store.

    Refreshes of one run do not overlap, and callers that come while one is under way share the
    next: what a caller reads afterwards is never older than its own call.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._tickets = itertools.count(1)
        self._guard = threading.Lock()
        self._turns: defaultdict[tuple[str, StoreURI], _Turn] = defaultdict(_Turn)

    def refresh_run(self, root: str, run: Run) -> None:
        """Read one run anew. Only new manifests are opened; nothing is if its folders rest.

        Raises:
            RunNotFoundError: It is gone; so are its rows now.
        """
        with self._turn(root, run.uri) as turn:
            if turn is None:
                return
            stamp = take_stamp(run.uri)
            with self.catalog.read() as session:
                row = rows.find_run(session, root, run.uri.name)
                ours = row is not None and row.revision == turn.revision
                if ours and stamp is not None and stamp == turn.stamp:
                    return
            turn.revision = self._read_run(root, run)
            turn.stamp = stamp if stamp is not None and stamp.settled else None

    def refresh_runs(self, roots: Mapping[str, StoreURI], runs: Iterable[tuple[str, str]]) -> None:
        """Read several runs, given as (root, name), anew, some at a time.

        One that cannot be read is logged and stays as it was; the others do not suffer from it.

        Raises:
            StoreUnavailableError: A root does not answer.
        """
        with ThreadPoolExecutor(max_workers=RUNS_AT_ONCE) as pool:
            for _ in pool.map(lambda one: self._try_run(one[0], roots[one[0]] / one[1]), runs):
                pass

    def refresh_root(self, root: str, uri: StoreURI) -> list[str]:
        """Take in runs that are new in a root, and drop those that are gone; names of all.

        Raises:
            StoreUnavailableError: The root does not answer.
        """
        with self.catalog.read() as session:  # first: what is known later may be newer than a list
            known = rows.run_uris(session, root)
        try:
            names = list_runs(uri)
        except NotFoundError as exc:
            raise StoreUnavailableError(
                "the root does not exist",
                path=uri,
                expected="a bucket that this server may list",
                found="none",
                next_step="Create it, or correct CAIRN_ROOT.",
            ) from exc
        there = {name: str(uri / name) for name in names}
        gone = [name for name, at in known.items() if there.get(name) != at]
        if gone:
            with self.catalog.write() as session:
                rows.delete_runs(session, root, gone)
        new = [(root, name) for name, at in there.items() if known.get(name) != at]
        self.refresh_runs({root: uri}, new)
        return names

    def rebuild(self, roots: Mapping[str, StoreURI]) -> Rebuilt:
        """Read everything anew; the audit trail stays.

        Raises:
            StoreUnavailableError: A root does not answer.
        """
        with self.catalog.write() as session:
            rows.keep_roots(session, roots)
        for root, uri in roots.items():
            for name in self.refresh_root(root, uri):
                self._try_run(root, uri / name, anew=True)
        with self.catalog.read() as session:
            return Rebuilt(*rows.count(session))

    def _try_run(self, root: str, uri: StoreURI, *, anew: bool = False) -> None:
        try:
            if not anew:
                self.refresh_run(root, Run(uri))
                return
            with self._turn(root, uri, always=True):
                self._read_run(root, Run(uri), anew=True)
        except RunNotFoundError:
            return  # deleted since it was listed
        except StoreUnavailableError:
            raise
        except StorageError as exc:
            logger.warning("the catalog leaves %s as it was: %s", uri, exc)

    def _read_run(self, root: str, run: Run, *, anew: bool = False) -> int:
        """Make the rows of a run what the store says; their revision."""
        try:
            info = run.info()
        except RunNotFoundError:
            with self.catalog.write() as session:
                rows.delete_runs(session, root, [run.uri.name])
            raise
        with self.catalog.read() as session:
            known = set() if anew else rows.known_keys(session, root, run.uri, info)
        snapshot = take_snapshot(run, info, known)
        with self.catalog.write() as session:
            return rows.write_run(session, root, run.uri, snapshot)

    @contextlib.contextmanager
    def _turn(self, root: str, uri: StoreURI, *, always: bool = False) -> Iterator[_Turn | None]:
        """This caller's turn, or None if somebody began and ended one after this call came in."""
        with self._guard:
            arrived = next(self._tickets)
            turn = self._turns[root, uri]
        with turn.lock:
            if turn.begun > arrived and not always:
                yield None
                return
            with self._guard:
                begun = next(self._tickets)
            yield turn
            turn.begun = begun  # not reached after an error: the next caller tries for itself
