"""Control plane: roots, catalog, jobs and caches that the actions use."""

import contextlib
from dataclasses import dataclass, field

from cairn.service.actions.caches import RECLAIMABLE, STATISTICS, LRUCache, StepCache
from cairn.service.actions.root_policies import PolicyCache
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.roots import Roots
from cairn.service.errors import NotReadyError, UnknownRootError
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.watches import Watches
from cairn.service.settings import Settings
from cairn.storage.arrays.statistics import Statistics
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.runs.run import Run, refuse_lost_run_record
from cairn.storage.store.disk.confinement import safe_join
from cairn.storage.store.uri import StoreURI


@dataclass(frozen=True)
class ControlPlane:
    """Parts of a control plane.

    Attributes:
        settings: Settings of the server.
        roots: Current store roots by name.
        index: Index that keeps the catalog up to date with the store.
        engine: The jobs; None: not launched.
        watches: Watchers of the jobs.
        steps: Cache of opened steps and their differences.
        statistics: Cache of tensor statistics.
        reclaimable: Cache of the bytes that retention would free, by version of a run's rows.
        policies: Cache of the policies that the roots have.
    """

    settings: Settings
    roots: Roots
    index: Index
    engine: Jobs | None
    watches: Watches | None = None
    steps: StepCache = field(default_factory=StepCache)
    statistics: LRUCache[Statistics] = field(default_factory=lambda: LRUCache(STATISTICS))
    reclaimable: LRUCache[int] = field(default_factory=lambda: LRUCache(RECLAIMABLE))
    policies: PolicyCache = field(default_factory=PolicyCache)

    @property
    def catalog(self) -> Catalog:
        """The catalog."""
        return self.index.catalog

    @property
    def jobs(self) -> Jobs:
        """The jobs.

        Raises:
            NotReadyError: Jobs were not launched.
        """
        if self.engine is None:
            raise NotReadyError("the job engine of this server was not launched")
        return self.engine

    @property
    def watching(self) -> Watches:
        """Watchers of the jobs.

        Raises:
            NotReadyError: Jobs were not launched.
        """
        if self.watches is None:
            raise NotReadyError("the job engine of this server was not launched")
        return self.watches

    def root(self, name: str) -> StoreURI:
        """Return the address of a root.

        Raises:
            UnknownRootError: There is no such root.
        """
        uri = self.roots.get(name)
        if uri is None:
            # The message names no other root: the caller may know of this one only.
            raise UnknownRootError(
                f'There is no root "{name}" on this server. `cairn roots` and GET /v1/roots list '
                "the roots that you may use."
            )
        return uri

    def place(self, root: str, run: str) -> StoreURI:
        """Return the address of a run, which need not exist; the store is not read.

        Raises:
            UnknownRootError: There is no such root.
            InvalidURIError: The run's name is invalid, or leads out of the root.
        """
        return safe_join(self.root(root), run)

    def run(self, root: str, run: str) -> Run:
        """Open a run in the store.

        Raises:
            UnknownRootError, InvalidURIError: See `place`.
            RunNotFoundError: The root has no such run.
        """
        return Run.open(self.place(root, run))

    def run_for_repair(self, root: str, run: str) -> Run:
        """Open a run, even one that has lost its `run.json`.

        Raises:
            UnknownRootError, InvalidURIError: See `place`.
            RunNotFoundError: Nothing of a run is there.
        """
        stored_run = Run(self.place(root, run))
        with contextlib.suppress(*UNREADABLE):  # a lost or damaged `run.json` is allowed here
            refuse_lost_run_record(stored_run)
            stored_run.info()
        return stored_run
