"""Health of this server's roots: size and age of their index."""

from dataclasses import dataclass
from typing import Literal

from cairn.service.access.callers import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.roots import list_roots
from cairn.service.catalog import queries


@dataclass(frozen=True)
class RootHealth:
    """Health of a root.

    Attributes:
        name, uri, source: See `Root`.
        runs, checkpoints, nbytes: Sums over the listed runs.
        seconds: Age of the index in seconds; None: the root was never scanned.
        problem: Reason why the latest scan failed; None: it did not.
    """

    name: str
    uri: str
    source: Literal["settings", "catalog"]
    runs: int
    checkpoints: int
    nbytes: int
    seconds: float | None
    problem: str | None


def root_health(plane: ControlPlane, caller: Caller) -> list[RootHealth]:
    """Return the health of the caller's roots, from the catalog alone."""
    with plane.catalog.read() as session:
        sums_by_root = queries.root_sums(session)
    health = []
    for root in list_roots(plane, caller):
        sums = sums_by_root.get(root.name)
        health.append(
            RootHealth(
                name=root.name,
                uri=root.uri,
                source=root.source,
                runs=0 if sums is None else sums.runs,
                checkpoints=0 if sums is None else sums.checkpoints,
                nbytes=0 if sums is None else sums.nbytes,
                seconds=None if sums is None else sums.lag(plane.root(root.name)),
                problem=None if sums is None else sums.problem,
            )
        )
    return health
