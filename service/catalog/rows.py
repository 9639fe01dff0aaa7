"""Reads and writes the catalog's rows of runs; knows nothing of the store."""

import secrets
from collections.abc import Collection, Iterable
from typing import Final

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from cairn.service.catalog.models import AliasRow, CheckpointRow, RunRow
from cairn.service.catalog.snapshot import Checkpoint, Key, Snapshot
from cairn.service.schemas import CheckpointState
from cairn.storage.runs import Alias, Annotation, RunInfo
from cairn.storage.store import StoreURI, from_rfc3339

_REVISION_BITS: Final = 62


def find_run(session: Session, root: str, name: str) -> RunRow | None:
    """The row of a run."""
    return session.scalar(select(RunRow).where(RunRow.root == root, RunRow.name == name))


def run_uris(session: Session, root: str) -> dict[str, str]:
    """URI of every known run of a root, by name."""
    query = select(RunRow.name, RunRow.uri).where(RunRow.root == root)
    return dict(session.execute(query).all())


def count(session: Session) -> tuple[int, int, int]:
    """Runs, checkpoints and aliases."""
    runs, checkpoints, aliases = (
        session.scalar(select(func.count()).select_from(table)) or 0
        for table in (RunRow, CheckpointRow, AliasRow)
    )
    return runs, checkpoints, aliases


def known_keys(session: Session, root: str, uri: StoreURI, info: RunInfo) -> set[Key]:
    """The manifests of a run that are in the catalog; none if it is another run of that name."""
    run = find_run(session, root, uri.name)
    if run is None or not _same(run, uri, info):
        return set()
    query = select(CheckpointRow.step, CheckpointRow.attempt).where(CheckpointRow.run_id == run.id)
    return set(session.execute(query))


def delete_runs(session: Session, root: str, names: Iterable[str]) -> None:
    """Drop runs, with their checkpoints and aliases."""
    for name in names:
        session.execute(delete(RunRow).where(RunRow.root == root, RunRow.name == name))


def keep_roots(session: Session, roots: Iterable[str]) -> None:
    """Drop the runs of all other roots."""
    session.execute(delete(RunRow).where(RunRow.root.not_in(list(roots))))


def write_run(session: Session, root: str, uri: StoreURI, snapshot: Snapshot) -> int:
    """Make the rows of one run equal to a snapshot of it; their new revision.

    Whoever finds another revision than it wrote knows that another process wrote since, perhaps
    from an older snapshot.
    """
    run = _write_info(session, root, uri, snapshot)
    _write_checkpoints(session, run, snapshot)
    write_aliases(session, run, snapshot.aliases)
    listed = session.execute(
        select(
            func.max(CheckpointRow.step),
            func.count(),
            func.coalesce(func.sum(CheckpointRow.nbytes), 0),
        ).where(CheckpointRow.run_id == run.id, CheckpointRow.state == CheckpointState.LISTED)
    ).one()
    run.latest_step, run.checkpoint_count, run.nbytes = listed
    run.revision = secrets.randbits(_REVISION_BITS)  # never one of a row that had this name
    return run.revision


def write_aliases(session: Session, run: RunRow, aliases: Collection[Alias]) -> None:
    """Make the alias rows of a run equal to these."""
    present = {
        row.alias: row for row in session.scalars(select(AliasRow).where(AliasRow.run_id == run.id))
    }
    for alias in aliases:
        row = present.pop(alias.alias, None)
        if row is None:
            row = AliasRow(run_id=run.id, alias=alias.alias)
            session.add(row)
        _fill_alias(row, alias)
    for row in present.values():
        session.delete(row)


def write_alias(session: Session, run: RunRow, alias: Alias) -> None:
    """Note where one alias points now, or that it was deleted."""
    row = session.scalar(
        select(AliasRow).where(AliasRow.run_id == run.id, AliasRow.alias == alias.alias)
    )
    if row is not None and row.sequence >= alias.sequence:
        return  # a refresh has seen a later move already
    if alias.deleted:
        if row is not None:
            session.delete(row)
        return
    if row is None:
        row = AliasRow(run_id=run.id, alias=alias.alias)
        session.add(row)
    _fill_alias(row, alias)


def write_annotations(
    session: Session, annotated: Iterable[tuple[CheckpointRow, Annotation]]
) -> None:
    """Note labels and metrics that have changed in the store."""
    for row, annotation in annotated:
        session.execute(
            update(CheckpointRow)
            .where(CheckpointRow.id == row.id)
            .values(**annotation.model_dump(mode="json"))
        )


def _write_info(session: Session, root: str, uri: StoreURI, snapshot: Snapshot) -> RunRow:
    info = snapshot.info
    row = find_run(session, root, uri.name)
    if row is not None and not _same(row, uri, info):
        session.delete(row)
        session.flush()
        row = None
    if row is None:
        row = RunRow(
            root=root,
            name=uri.name,
            uri=str(uri),
            created=from_rfc3339(info.created),
            latest_step=None,
            checkpoint_count=0,
            nbytes=0,
            problems=[],
            revision=0,
        )
        session.add(row)
    row.labels = info.labels
    row.problems = list(snapshot.problems)
    row.lineage = None if info.lineage is None else info.lineage.model_dump(mode="json")
    session.flush()
    return row


def _same(row: RunRow, uri: StoreURI, info: RunInfo) -> bool:
    """Whether a row is of this run, and not of a deleted one that had its name."""
    return row.uri == str(uri) and row.created == from_rfc3339(info.created)


def _write_checkpoints(session: Session, run: RunRow, snapshot: Snapshot) -> None:
    present = {
        (step, attempt): (row_id, state)
        for row_id, step, attempt, state in session.execute(
            select(
                CheckpointRow.id, CheckpointRow.step, CheckpointRow.attempt, CheckpointRow.state
            ).where(CheckpointRow.run_id == run.id)
        )
    }
    stale = [row_id for key, (row_id, _) in present.items() if key not in snapshot.states]
    stale += [present[key][0] for key in snapshot.added if key in present]
    for row_id in stale:
        session.execute(delete(CheckpointRow).where(CheckpointRow.id == row_id))
    moved = [
        {"id": present[key][0], "state": state.value}
        for key, state in snapshot.states.items()
        if key in present and key not in snapshot.added and present[key][1] != state.value
    ]
    if moved:
        session.execute(update(CheckpointRow), moved)
    added = [
        _values(run, checkpoint, snapshot.states[key], snapshot.annotations[key])
        for key, checkpoint in snapshot.added.items()
    ]
    if added:
        session.execute(insert(CheckpointRow), added)


def _values(
    run: RunRow, checkpoint: Checkpoint, state: CheckpointState, annotation: Annotation
) -> dict[str, object]:
    return {
        "run_id": run.id,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "state": state.value,
        "created": checkpoint.created,
        "nbytes": checkpoint.nbytes,
        "leaves": checkpoint.leaves,
        "items": list(checkpoint.items),
        "iterators": dict(checkpoint.iterators),
        "manifest_digest": checkpoint.manifest_digest,
        "model_type": checkpoint.model_type,
        "source": checkpoint.source,
        **annotation.model_dump(mode="json"),
    }


def _fill_alias(row: AliasRow, alias: Alias) -> None:
    row.step, row.attempt = alias.step, alias.attempt
    row.manifest_digest = alias.manifest_digest
    row.by, row.reason = alias.by, alias.reason
    row.at = from_rfc3339(alias.at)
    row.sequence = alias.sequence
