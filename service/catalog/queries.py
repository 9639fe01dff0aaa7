"""Pages of the catalog, as the API gives them out."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session, defer

from cairn.service.catalog.models import AliasRow, CheckpointRow, RootRow, RunRow
from cairn.service.schemas import Alias, Checkpoint, CheckpointState, Deletion, Lineage, Run
from cairn.storage.runs import step_dir
from cairn.storage.store import StoreURI, utc_now


class RootSums(NamedTuple):
    """What the catalog knows of a root.

    Attributes:
        uri: Where it was when it was looked at.
        scanned: When the last look began that came to an end.
        problem: Why the last one did not.
        runs: That are listed.
        checkpoints: That are listed.
    """

    uri: str
    scanned: datetime | None
    problem: str | None
    runs: int
    checkpoints: int

    def lag(self, uri: StoreURI) -> float | None:
        """How far behind it is, in seconds; None: it was never looked at where it is now."""
        if self.uri != str(uri) or self.scanned is None:
            return None
        return max(0.0, (utc_now() - self.scanned).total_seconds())


def root_sums(session: Session) -> dict[str, RootSums]:
    """Every root that was ever looked at, by name."""
    counted = (
        select(
            RunRow.root,
            func.count().label("runs"),
            func.sum(RunRow.checkpoint_count).label("checkpoints"),
        )
        .group_by(RunRow.root)
        .subquery()
    )
    query = select(RootRow, counted.c.runs, counted.c.checkpoints).outerjoin(
        counted, counted.c.root == RootRow.name
    )
    return {
        root.name: RootSums(root.uri, root.scanned, root.problem, runs or 0, checkpoints or 0)
        for root, runs, checkpoints in session.execute(query)
    }


def run_names(
    session: Session, roots: Iterable[str], after: tuple[str | int, ...], limit: int
) -> list[tuple[str, str]]:
    """(root, name) of the next runs after a given one, by root and name; (): from the first."""
    query = select(RunRow.root, RunRow.name).where(RunRow.root.in_(list(roots)))
    if after:
        query = query.where(tuple_(RunRow.root, RunRow.name) > after)
    query = query.order_by(RunRow.root, RunRow.name).limit(limit)
    return [(root, name) for root, name in session.execute(query)]


def runs(session: Session, names: Iterable[tuple[str, str]]) -> list[Run]:
    """These runs, by root and name."""
    query = (
        select(RunRow)
        .where(tuple_(RunRow.root, RunRow.name).in_(list(names)))
        .order_by(RunRow.root, RunRow.name)
    )
    return [run(row) for row in session.scalars(query)]


def checkpoint_rows(
    session: Session,
    run: RunRow,
    *,
    state: CheckpointState | None,
    before: tuple[str | int, ...],
    limit: int,
) -> list[CheckpointRow]:
    """The next checkpoints before a given (step, attempt), highest first.

    Args:
        session: Of the catalog.
        run: Whose checkpoints.
        state: Only those in this state; None: in any.
        before: Where the page before ended; (): from the highest.
        limit: At most this many.
    """
    query = select(CheckpointRow).where(CheckpointRow.run_id == run.id)
    query = query.options(defer(CheckpointRow.stamps))  # of the refresh only
    if state is not None:
        query = query.where(CheckpointRow.state == state.value)
    if before:
        query = query.where(tuple_(CheckpointRow.step, CheckpointRow.attempt) < before)
    query = query.order_by(CheckpointRow.step.desc(), CheckpointRow.attempt.desc()).limit(limit)
    return list(session.scalars(query))


def step_rows(session: Session, run: RunRow, step: int) -> list[CheckpointRow]:
    """Every attempt at one step."""
    query = select(CheckpointRow).where(CheckpointRow.run_id == run.id, CheckpointRow.step == step)
    return list(session.scalars(query))


def alias_names(
    session: Session, run: RunRow, checkpoints: Iterable[CheckpointRow]
) -> dict[tuple[int, int], list[str]]:
    """Aliases of a run, sorted, by the (step, attempt) of those of its checkpoints."""
    steps = {row.step for row in checkpoints}
    query = select(AliasRow.step, AliasRow.attempt, AliasRow.alias).where(
        AliasRow.run_id == run.id, AliasRow.step.in_(steps)
    )
    named: dict[tuple[int, int], list[str]] = {}
    for step, attempt, alias in session.execute(query.order_by(AliasRow.alias)):
        named.setdefault((step, attempt), []).append(alias)
    return named


def aliases(session: Session, run: RunRow) -> list[Alias]:
    """Aliases of a run, by name."""
    query = select(AliasRow).where(AliasRow.run_id == run.id).order_by(AliasRow.alias)
    return [
        Alias(
            alias=row.alias,
            step=row.step,
            attempt=row.attempt,
            manifest_digest=row.manifest_digest,
            by=row.by,
            reason=row.reason,
            at=row.at,
            sequence=row.sequence,
            audited=row.audited,
        )
        for row in session.scalars(query)
    ]


def checkpoint(
    run: RunRow, row: CheckpointRow, named: Mapping[tuple[int, int], list[str]]
) -> Checkpoint:
    """One checkpoint as the API gives it out.

    Args:
        run: Its run.
        row: The checkpoint.
        named: Aliases by the (step, attempt) that they name.
    """
    return Checkpoint(
        root=run.root,
        run=run.name,
        step=row.step,
        attempt=row.attempt,
        state=CheckpointState(row.state),
        uri=row.source or f"{run.uri}/{step_dir(row.attempt, row.step)}",
        created=row.created,
        bytes=row.nbytes,
        leaves=row.leaves,
        items=row.items,
        iterators=row.iterators,
        manifest_digest=row.manifest_digest,
        model_type=row.model_type,
        aliases=named.get((row.step, row.attempt), []),
        labels=row.labels,
        metrics={name: float(value) for name, value in row.metrics.items()},
        deletion=None if row.deletion is None else Deletion.model_validate(row.deletion),
    )


def run(row: RunRow) -> Run:
    """One run as the API gives it out."""
    return Run(
        root=row.root,
        name=row.name,
        uri=row.uri,
        created=row.created,
        labels=row.labels,
        lineage=None if row.lineage is None else Lineage.model_validate(row.lineage),
        latest_step=row.latest_step,
        checkpoint_count=row.checkpoint_count,
        bytes=row.nbytes,
        problems=row.problems,
    )
