"""What the actions work with: roots, catalog, jobs."""

import contextlib
from dataclasses import dataclass, field

from cairn.service.actions.looked_into import RECLAIMABLE, STATISTICS, Known, OpenSteps
from cairn.service.catalog import Catalog, Index, Roots
from cairn.service.errors import NotReadyError, UnknownRootError
from cairn.service.jobs import Jobs, Watches
from cairn.service.settings import Settings
from cairn.storage.arrays import Statistics
from cairn.storage.runs import UNREADABLE, Run, refuse_headless
from cairn.storage.store import StoreURI, confine


@dataclass(frozen=True)
class ControlPlane:
    """The parts of a control plane.

    Attributes:
        settings: Its own.
        roots: Store roots by name, as they are now.
        index: What brings the catalog up to date with the store.
        engine: The jobs; None: not launched.
        watches: Whoever watches them.
        steps: What steps hold that were looked into, and how they differ.
        statistics: Those of tensors that were asked for.
        reclaimable: Bytes that retention would free of runs, by what tells their rows apart.
    """

    settings: Settings
    roots: Roots
    index: Index
    engine: Jobs | None
    watches: Watches | None = None
    steps: OpenSteps = field(default_factory=OpenSteps)
    statistics: Known[Statistics] = field(default_factory=lambda: Known(STATISTICS))
    reclaimable: Known[int] = field(default_factory=lambda: Known(RECLAIMABLE))

    @property
    def catalog(self) -> Catalog:
        """The catalog."""
        return self.index.catalog

    @property
    def jobs(self) -> Jobs:
        """The jobs.

        Raises:
            NotReadyError: They were not launched.
        """
        if self.engine is None:
            raise NotReadyError("the job engine of this server was not launched")
        return self.engine

    @property
    def watching(self) -> Watches:
        """Whoever watches the jobs.

        Raises:
            NotReadyError: They were not launched.
        """
        if self.watches is None:
            raise NotReadyError("the job engine of this server was not launched")
        return self.watches

    def root(self, name: str) -> StoreURI:
        """The folder of a root.

        Raises:
            UnknownRootError: There is no such root.
        """
        found = self.roots.get(name)
        if found is None:
            # Whoever asks may have been given this name, and no other.
            raise UnknownRootError(
                f"root {name!r}: expected one of this server's, found none of that name. "
                "`cairn roots` and GET /v1/roots list those that you may use."
            )
        return found

    def place(self, root: str, run: str) -> StoreURI:
        """Where a run is, or would be; the store is not asked.

        Raises:
            UnknownRootError: There is no such root.
            InvalidURIError: The name is not one, or leads out of the root.
        """
        return confine(self.root(root), run)

    def run(self, root: str, run: str) -> Run:
        """A run, opened in the store.

        Raises:
            UnknownRootError, InvalidURIError: As `place`.
            RunNotFoundError: The root has no such run.
        """
        return Run.open(self.place(root, run))

    def run_of_any_kind(self, root: str, run: str) -> Run:
        """A run, also one that has lost its `run.json`.

        Raises:
            UnknownRootError, InvalidURIError: As `place`.
            RunNotFoundError: There is nothing of a run.
        """
        found = Run(self.place(root, run))
        with contextlib.suppress(*UNREADABLE):  # `run.json` is lost, or damaged
            refuse_headless(found)
            found.info()
        return found
