"""Lineage of a run: its parents and its forks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.schemas import Run
from cairn.storage.store.uri import StoreURI

MAX_FORKS: Final = 100
MAX_PARENTS: Final = 20


@dataclass(frozen=True)
class RunLineage:
    """Parents and forks of a run.

    Attributes:
        parents: Ancestors in the catalog, the nearest first.
        forks: Runs that were forked from it, at most `MAX_FORKS`.
        unknown: URI of a further ancestor, which the catalog does not have; None: there is none.
    """

    parents: tuple[Run, ...]
    forks: tuple[Run, ...]
    unknown: str | None = None


def run_lineage(plane: ControlPlane, roots: Mapping[str, StoreURI], run: Run) -> RunLineage:
    """Return the lineage of a run within some roots, from the catalog alone."""
    parents: list[Run] = []
    child, unknown = run, None
    with plane.catalog.query() as connection:
        while child.lineage is not None and len(parents) < MAX_PARENTS:
            row = queries.run_at(connection, roots, child.lineage.run)
            if row is None:
                unknown = child.lineage.run
                break
            child = queries.run(row)
            parents.append(child)
        forks = queries.forks(connection, roots, run.uri, MAX_FORKS)
    return RunLineage(tuple(parents), tuple(map(queries.run, forks)), unknown)
