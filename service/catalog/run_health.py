"""Queries for the health of runs: ends of their jobs, and steps for retention policies."""

from collections.abc import Collection, Iterable
from datetime import datetime
from itertools import groupby
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, select

from cairn.service.catalog.models import AliasRow, CheckpointRow, EventRow, RunRow
from cairn.service.schemas import CheckpointState, EventKind
from cairn.storage.runs.retention import StepFacts

ENDS: Final = 40
"""Largest number of a run's last ended jobs that are read."""

_JOB_ENDS: Final = (
    select(EventRow.detail)
    .where(
        EventRow.root == bindparam("root_name"),
        EventRow.run == bindparam("run_name"),
        EventRow.kind == EventKind.JOB_ENDED.value,
    )
    .order_by(EventRow.sequence.desc())
    .limit(ENDS)
)


class Version(NamedTuple):
    """Version of a run's rows.

    Attributes:
        id: Id of the run.
        revision: Revision, which changes at every write of its rows.
    """

    id: int
    revision: int


class SizedStep(NamedTuple):
    """Listed step, as retention sees it.

    Attributes:
        facts: Facts that a retention policy needs.
        nbytes: Size of its files in bytes.
    """

    facts: StepFacts
    nbytes: int


def job_ends(connection: Connection, root: str, run: str) -> list[dict[str, Any]]:
    """Return the published ends of a run's last jobs, newest first."""
    parameters = {"root_name": root, "run_name": run}
    return [row.detail for row in connection.execute(_JOB_ENDS, parameters)]


def run_versions(
    connection: Connection, runs: Collection[tuple[str, str]]
) -> dict[tuple[str, str], Version]:
    """Return the versions of some runs, by root and name."""
    names = {name for _, name in runs}
    query = select(RunRow.root, RunRow.name, RunRow.id, RunRow.revision)
    rows = connection.execute(query.where(RunRow.name.in_(names)))
    versions = {(row.root, row.name): Version(row.id, row.revision) for row in rows}
    return {run: versions[run] for run in runs if run in versions}


def aliases(
    connection: Connection, runs: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Return names and steps of the aliases of some runs, by root and name."""
    query = (
        select(RunRow.root, RunRow.name, AliasRow.alias, AliasRow.step)
        .join(RunRow, RunRow.id == AliasRow.run_id)
        .where(RunRow.name.in_({name for _, name in runs}))
        .order_by(AliasRow.alias)
    )
    aliases: dict[tuple[str, str], list[tuple[str, int]]] = {run: [] for run in runs}
    for root, name, alias, step in connection.execute(query):
        if (root, name) in aliases:
            aliases[root, name].append((alias, step))
    return aliases


def listed_steps(
    connection: Connection, runs: Iterable[int], *, with_notes: bool
) -> dict[int, list[SizedStep]]:
    """Return the listed steps of some runs, by run id; runs without steps are left out.

    Args:
        connection: Connection to the catalog.
        runs: Ids of runs.
        with_notes: Read labels and metrics too, which takes longer.
    """
    columns: list[Any] = [CheckpointRow.run_id, CheckpointRow.step, CheckpointRow.attempt]
    columns += [CheckpointRow.created, CheckpointRow.nbytes]
    columns.append(CheckpointRow.damaged.is_not(None).label("is_damaged"))
    if with_notes:
        columns += [CheckpointRow.metrics, CheckpointRow.labels, CheckpointRow.better]
    query = (
        select(*columns)
        .where(
            CheckpointRow.run_id.in_(list(runs)),
            CheckpointRow.state == CheckpointState.LISTED.value,
        )
        .order_by(CheckpointRow.run_id, CheckpointRow.step)
    )
    rows = connection.execute(query)
    return {run: list(map(_sized, steps)) for run, steps in groupby(rows, lambda row: row.run_id)}


def alias_targets(
    connection: Connection, runs: Iterable[int]
) -> dict[int, dict[str, tuple[int, int]]]:
    """Return the (step, attempt) that each alias names, by run id."""
    targets: dict[int, dict[str, tuple[int, int]]] = {}
    query = select(AliasRow.run_id, AliasRow.alias, AliasRow.step, AliasRow.attempt)
    for row in connection.execute(query.where(AliasRow.run_id.in_(list(runs)))):
        targets.setdefault(row.run_id, {})[row.alias] = row.step, row.attempt
    return targets


def _sized(row: Any) -> SizedStep:
    created: datetime = row.created  # not null: a listed step has a manifest
    notes = {}
    if hasattr(row, "metrics"):
        metrics = {name: float(value) for name, value in row.metrics.items()}
        notes = {"metrics": metrics, "labels": row.labels, "better": row.better}
    facts = StepFacts(row.step, row.attempt, created, damaged=row.is_damaged, **notes)
    return SizedStep(facts, row.nbytes or 0)
