"""Reads and writes of the catalog's rows of runs, without access to the store."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, update
from sqlalchemy.orm import Session

from cairn.service.catalog.events.changes import (
    Seen,
    Step,
    Subject,
    Verification,
    alias_gone,
    alias_moved,
    step_states,
    verifications,
)
from cairn.service.catalog.events.lost_records import lost_alias, seen_alias
from cairn.service.catalog.events.outbox import NewEvent, publish_all
from cairn.service.catalog.external_changes import (
    Position,
    is_deletion_explained,
    is_move_explained,
    is_move_recorded,
    last_alias_deletion,
    record_deletion,
    record_move,
)
from cairn.service.catalog.models import AliasRow, CheckpointRow, RootRow, RunRow
from cairn.service.catalog.run_metrics import StepMetrics, write_run_metrics
from cairn.service.catalog.snapshot import Columns, Key, Snapshot, Stamps
from cairn.service.schemas import CheckpointState, LostRecord
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.runs.records.layout import alias_file
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.store.clock import from_rfc3339, utc_now
from cairn.storage.store.uri import StoreURI

_KNOWN: Final = (RunRow.revision, RunRow.stamp, RunRow.due, RunRow.created, RunRow.uri)
# Prebuilt statement, which every promotion uses.
_ALIAS: Final = (
    select(
        *(RunRow.id.label("run_id"), RunRow.created, RunRow.lost_records),
        *(AliasRow.id, AliasRow.sequence, AliasRow.step),
    )
    .outerjoin(
        AliasRow, and_(AliasRow.run_id == RunRow.id, AliasRow.alias == bindparam("of_alias"))
    )
    .where(RunRow.root == bindparam("root_name"), RunRow.name == bindparam("run_name"))
)
_LOST: Final = select(RunRow.lost_records).where(
    RunRow.root == bindparam("root_name"), RunRow.name == bindparam("run_name")
)
_REVISE: Final = update(RunRow).where(RunRow.id == bindparam("of_run"))
_ADD_ALIAS: Final = insert(AliasRow)
_MOVE_ALIAS: Final = update(AliasRow).where(AliasRow.id == bindparam("row"))
_DELETE_ALIAS: Final = delete(AliasRow).where(AliasRow.id == bindparam("row"))

_REVISION_BITS: Final = 62
FRESH: Final = timedelta(hours=1)
"""Largest age of a change that becomes an event at the first scan of a root."""

_AT_ONCE: Final = 500  # row ids in one statement


def find_run(session: Session, root: str, name: str) -> RunRow | None:
    """Return the row of a run; None: there is none."""
    return session.scalar(select(RunRow).where(RunRow.root == root, RunRow.name == name))


def count(session: Session) -> tuple[int, int, int]:
    """Return the numbers of runs, checkpoints and aliases."""
    runs, checkpoints, aliases = (
        session.scalar(select(func.count()).select_from(table)) or 0
        for table in (RunRow, CheckpointRow, AliasRow)
    )
    return runs, checkpoints, aliases


@dataclass(frozen=True)
class RowVersion:
    """Version of a run's rows.

    Attributes:
        revision: Revision of the rows.
        stamp: Change token of the run before it was read; None: unknown.
        due: Time from which the rows are outdated, even if the store does not change.
        created: Time when the run was made.
        uri: Folder of the run.
    """

    revision: int
    stamp: str | None
    due: datetime | None
    created: datetime
    uri: str

    def is_now(self, uri: StoreURI, stamp: str | None) -> bool:
        """Return whether the rows are up to date, given the current change token of the run."""
        rests = stamp is not None and (self.uri, self.stamp) == (str(uri), stamp)
        return rests and (self.due is None or utc_now() < self.due)

    def is_of(self, uri: StoreURI, info: RunInfo) -> bool:
        """Return whether the rows are of this run, and not of a deleted one with the same name."""
        return self.uri == str(uri) and self.created == from_rfc3339(info.created)


def run_version(session: Session, root: str, name: str) -> RowVersion | None:
    """Return the version of a run's rows; None: there are none."""
    query = select(*_KNOWN).where(RunRow.root == root, RunRow.name == name)
    row = session.execute(query).first()
    return None if row is None else RowVersion(*row)


def run_versions(session: Session, root: str) -> dict[str, RowVersion]:
    """Return the version of each run's rows in a root, by name."""
    query = select(RunRow.name, *_KNOWN).where(RunRow.root == root)
    return {row[0]: RowVersion(*row[1:]) for row in session.execute(query)}


def known_steps(session: Session, root: str, name: str) -> dict[Key, Stamps]:
    """Return the change tokens of the records of each step of a run, by (step, attempt)."""
    query = (
        select(CheckpointRow.step, CheckpointRow.attempt, CheckpointRow.stamps)
        .join(RunRow, RunRow.id == CheckpointRow.run_id)
        .where(RunRow.root == root, RunRow.name == name)
    )
    return {(step, attempt): stamps for step, attempt, stamps in session.execute(query)}


def seen_deletions(
    session: Session, root: str, uri: StoreURI, info: RunInfo
) -> dict[Key, Mapping[str, Any]]:
    """Return the last seen content of a run's tombstones, lost ones included."""
    run = find_run(session, root, uri.name)
    if run is None or (run.uri, run.created) != (str(uri), from_rfc3339(info.created)):
        return {}
    query = select(CheckpointRow.step, CheckpointRow.attempt, CheckpointRow.deletion).where(
        CheckpointRow.run_id == run.id, CheckpointRow.state == CheckpointState.TRASHED
    )
    lost = _lost_records(run.lost_records).values()
    seen: dict[Key, Mapping[str, Any]] = {
        (record.step, record.attempt): record.model_dump()
        for record in lost
        if record.alias is None
    }
    seen |= {
        (step, attempt): deletion
        for step, attempt, deletion in session.execute(query)
        if deletion is not None
    }
    return seen


def alias_seen(
    connection: Connection, root: str, run: str, alias: str
) -> tuple[int | None, LostRecord | None]:
    """Return the sequence number of an alias, and its lost record.

    The number is None if the alias is unknown; the record is None if the store has lost nothing.
    """
    rows = connection.execute(_ALIAS, {"root_name": root, "run_name": run, "of_alias": alias})
    row = rows.first()
    if row is None:
        return None, None
    return row.sequence, _lost_records(row.lost_records).get(alias_file(alias))


def lost_deletions(connection: Connection, root: str, run: str, step: int) -> dict[int, LostRecord]:
    """Return the lost tombstones of a step, by attempt."""
    stored = connection.execute(_LOST, {"root_name": root, "run_name": run}).scalar()
    lost = _lost_records(stored or []).values()
    return {
        record.attempt: record for record in lost if record.alias is None and record.step == step
    }


def _lost_records(stored: Iterable[Mapping[str, Any]]) -> dict[str, LostRecord]:
    return {record.record: record for record in map(LostRecord.model_validate, stored)}


def _stored(lost: Mapping[str, LostRecord]) -> list[dict[str, Any]]:
    return [lost[name].model_dump(mode="json") for name in sorted(lost)]


def delete_runs(session: Session, root: str, names: Iterable[str]) -> None:
    """Delete runs, with their checkpoints and aliases."""
    for name in names:
        session.execute(delete(RunRow).where(RunRow.root == root, RunRow.name == name))


def keep_roots(session: Session, roots: Iterable[str]) -> None:
    """Delete all roots but these from the catalog, with their runs."""
    kept = list(roots)
    session.execute(delete(RunRow).where(RunRow.root.not_in(kept)))
    session.execute(delete(RootRow).where(RootRow.name.not_in(kept)))


def find_root(session: Session, name: str) -> RootRow | None:
    """Return the row of a root; None: it was never scanned."""
    return session.get(RootRow, name)


_LAST_SCAN: Final = select(RootRow.scanned).where(
    RootRow.name == bindparam("root_name"), RootRow.uri == bindparam("root_uri")
)


def last_scan(connection: Connection, name: str, uri: StoreURI) -> datetime | None:
    """Return the start of a root's last scan; None: it was never scanned at this address."""
    return connection.scalar(_LAST_SCAN, {"root_name": name, "root_uri": str(uri)})


def write_root(
    session: Session, name: str, uri: StoreURI, *, scanned: datetime | None, problem: str | None
) -> None:
    """Record a scan of a root.

    Args:
        session: Session of the catalog, for writing.
        name: Name of the root.
        uri: Address of the root.
        scanned: Start of the scan; None: it failed, and the time of the last success stays.
        problem: Reason why it failed.
    """
    row = session.get(RootRow, name)
    if row is None:
        row = RootRow(name=name, uri=str(uri), scanned=None)
        session.add(row)
    if row.uri != str(uri):
        row.uri, row.scanned = str(uri), None
    row.problem = problem
    if scanned is not None:
        row.scanned = scanned


def write_run(
    session: Session,
    root: str,
    uri: StoreURI,
    snapshot: Snapshot,
    *,
    stamp: str | None,
    version: RowVersion | None,
) -> bool:
    """Update the rows of a run from a snapshot, and publish the events of the changes.

    Args:
        session: Session of the catalog, for writing.
        root: Name of the root.
        uri: Address of the run.
        snapshot: Content of the store.
        stamp: Change token of the run before the snapshot.
        version: Version of the rows before the snapshot.

    Returns:
        False if another process has written the rows since `version`, perhaps from a newer
        snapshot; nothing is changed then.
    """
    if run_version(session, root, uri.name) != version:
        return False
    lost = _lost_aliases(session, root, uri, snapshot)
    run = _fill_run(session, root, uri, snapshot)
    _write_config(run, snapshot)
    changed, moved, judged = _write_checkpoints(session, run, snapshot)
    if changed:
        _add_up(session, run)
    first = version is None or not version.is_of(uri, snapshot.info)
    look = 0 if version is None else version.revision
    gone = [*_lost_alias_records(session, run, snapshot, first=first), *snapshot.lost_deletions]
    run.lost_records = _stored({entry.record: entry for entry in gone})
    renamed, happened = _write_aliases(session, run, snapshot, look=look, first=first, lost=lost)
    changed |= renamed
    verified = verifications(_subject(run), judged)
    happened = [*step_states(_subject(run), moved), *verified, *happened]
    if first and happened and not _is_watched(session, root, uri):
        # The first scan of a root also finds old runs, whose history gets no events.
        since = utc_now() - FRESH
        happened = [entry for entry in happened if entry.when is not None and entry.when >= since]
    session.flush()
    publish_all(session.connection(), root, uri.name, happened)
    run.stamp, run.due = stamp, snapshot.due
    if changed or session.is_modified(run):
        run.revision = _new_revision()
    return True


def _is_watched(session: Session, root: str, uri: StoreURI) -> bool:
    """Return whether the root was scanned before, so that an unknown run in it is a new one."""
    row = find_root(session, root)
    return row is not None and row.uri == str(uri.parent) and row.scanned is not None


def _subject(run: RunRow) -> Subject:
    return Subject(run.root, run.name, run.created)


def write_problem(session: Session, root: str, uri: StoreURI, problem: str) -> None:
    """Record why a run is unreadable, and keep its rows as they are."""
    row = find_run(session, root, uri.name)
    if row is not None and row.uri == str(uri) and row.problems != [problem]:
        row.problems, row.stamp, row.revision = [problem], None, _new_revision()


def _new_revision() -> int:
    # Random, so that a deleted run's revision never returns.
    return secrets.randbits(_REVISION_BITS)


def _add_up(session: Session, run: RunRow) -> None:
    listed = session.execute(
        select(
            func.max(CheckpointRow.step),
            func.count(),
            func.count().filter(CheckpointRow.damaged.is_not(None)),
            func.coalesce(func.sum(CheckpointRow.nbytes), 0),
        ).where(CheckpointRow.run_id == run.id, CheckpointRow.state == CheckpointState.LISTED)
    ).one()
    latest, number, damaged, nbytes = listed
    run.latest_step, run.checkpoint_count, run.nbytes = latest, number, int(nbytes or 0)
    run.damaged_count = damaged


def _write_aliases(
    session: Session,
    run: RunRow,
    snapshot: Snapshot,
    *,
    look: int,
    first: bool,
    lost: Collection[str],
) -> tuple[bool, list[NewEvent]]:
    """Update the rows of aliases; return whether any changed, and the events.

    Args:
        session: Session of the catalog, for writing.
        run: Run of the aliases.
        snapshot: Content of the store.
        look: See `alias_moved`.
        first: This is the run's first refresh: its aliases get no `outside` entries.
        lost: Aliases whose records were unreadable at the last refresh: they get none either if
            they are new in the catalog.
    """
    changed = False
    happened: list[NewEvent] = []
    present = {
        row.alias: row for row in session.scalars(select(AliasRow).where(AliasRow.run_id == run.id))
    }
    for alias in snapshot.aliases:
        if alias.deleted:
            continue
        row = present.pop(alias.alias, None)
        before = None if row is None else Position.of(row)
        seen = None if row is None else Seen(row.sequence, row.step)
        if row is None:
            row = AliasRow(run_id=run.id, alias=alias.alias)
            session.add(row)
        for column, entry in _alias_values(alias).items():
            setattr(row, column, entry)
        changed |= session.is_modified(row)
        if before == Position.of(alias):
            continue
        happened += alias_moved(_subject(run), alias, seen, look=look)
        noted = before is None and is_move_recorded(session, run, row)
        if is_move_explained(session, run, row, before):
            row.audited = True
        elif before is None and not noted and (first or alias.alias in lost):
            row.audited = None
        else:
            row.audited = False
            if not noted:
                step = None if before is None else before.step
                record_move(session, run, row, step)
    for row in present.values():
        # An unreadable record is no deletion, so it gets no event and no audit entry.
        lost_now = row.alias in snapshot.unreadable_aliases
        if not lost_now and not is_deletion_explained(session, run, row):
            record_deletion(session, run, row)
        if not lost_now:
            seen = Seen(row.sequence, row.step)
            happened.append(alias_gone(_subject(run), row.alias, seen))
        session.delete(row)
    return changed or bool(present), happened


def _lost_alias_records(
    session: Session, run: RunRow, snapshot: Snapshot, *, first: bool
) -> Iterator[LostRecord]:
    """Yield aliases of which the store has an older record than the catalog has seen, or none.

    At the `first` refresh of a run, deletions in the audit trail do not count as seen.
    """
    rows = session.scalars(select(AliasRow).where(AliasRow.run_id == run.id))
    seen = {row.alias: seen_alias(row) for row in rows}
    lost = _lost_records(run.lost_records).values()
    seen |= {record.alias: record for record in lost if record.alias is not None}
    now = {alias.alias: alias for alias in snapshot.aliases}
    for name in now.keys() - seen.keys():
        if first or now[name].deleted:
            continue
        if (deletion := last_alias_deletion(session, run, name)) is not None:
            seen[name] = deletion
    for name, record in seen.items():
        if (missed := lost_alias(record, now.get(name))) is not None:
            yield missed


def _lost_aliases(session: Session, root: str, uri: StoreURI, snapshot: Snapshot) -> list[str]:
    """Return the aliases that are readable now, but were not at the last refresh."""
    row = find_run(session, root, uri.name)
    problems = [] if row is None or row.uri != str(uri) else row.problems
    return [
        alias.alias
        for alias in snapshot.aliases
        if not alias.deleted
        and any(f"{uri / alias_file(alias.alias)}" in problem for problem in problems)
    ]


def write_alias(connection: Connection, root: str, run: str, alias: Alias) -> None:
    """Record the new position of an alias, or its deletion; ignore an unknown run."""
    names = {"root_name": root, "run_name": run, "of_alias": alias.alias}
    row = connection.execute(_ALIAS, names).first()
    if row is None:
        return
    seen: int | None = row.sequence  # None: the run has no such alias
    run_id, row_id, step = row.run_id, row.id, row.step
    if seen is not None and seen >= alias.sequence:
        return  # a refresh has seen this move, or a later one
    lost = _lost_records(row.lost_records)
    missed = lost.get(alias_file(alias.alias))
    if missed is not None and lost_alias(missed, alias) is None:
        del lost[missed.record]
    # A new revision: a refresh that has read the store before this move must read it again.
    connection.execute(
        _REVISE, {"of_run": run_id, "revision": _new_revision(), "lost_records": _stored(lost)}
    )
    values = {**_alias_values(alias), "audited": True}
    if alias.deleted:
        connection.execute(_DELETE_ALIAS, {"row": row_id})
    elif seen is None:
        connection.execute(_ADD_ALIAS, {"run_id": run_id, "alias": alias.alias, **values})
    else:
        connection.execute(_MOVE_ALIAS, {"row": row_id, **values})
    before = None if seen is None else Seen(seen, step)
    happened = alias_moved(Subject(root, run, row.created), alias, before)
    publish_all(connection, root, run, happened)


def _fill_run(session: Session, root: str, uri: StoreURI, snapshot: Snapshot) -> RunRow:
    info = snapshot.info
    row = find_run(session, root, uri.name)
    if row is not None and (row.uri, row.created) != (str(uri), from_rfc3339(info.created)):
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
            damaged_count=0,
            nbytes=0,
            problems=[],
            config={},
            metrics_cut=False,
            lost_records=[],
            revision=0,
        )
        session.add(row)
    row.labels = info.labels
    row.problems = list(snapshot.problems)
    row.lineage = None if info.lineage is None else info.lineage.model_dump(mode="json")
    if session.is_modified(row):
        row.revision = _new_revision()
    session.flush()
    return row


def _write_config(run: RunRow, snapshot: Snapshot) -> None:
    if snapshot.config is None:
        return
    (step, attempt), config = snapshot.config
    if (attempt, step) >= (run.config_attempt or 0, run.config_step or 0):
        run.config, run.config_attempt, run.config_step = config, attempt, step


def _write_checkpoints(
    session: Session, run: RunRow, snapshot: Snapshot
) -> tuple[bool, list[Step], list[Verification]]:
    """Update the rows of a run's steps from a snapshot.

    Returns:
        Whether anything changed, the steps with a new state, and the steps that have become damaged
        or are no longer damaged.
    """
    columns_seen = ("id", "step", "attempt", "state", "damaged")
    rows = session.execute(
        select(*(getattr(CheckpointRow, name) for name in columns_seen)).where(
            CheckpointRow.run_id == run.id
        )
    ).all()
    present = {(row.step, row.attempt): (row.id, row.state) for row in rows}
    damaged = {(row.step, row.attempt): row.damaged for row in rows if row.damaged is not None}
    changed = False
    before: list[StepMetrics] = []
    after: list[StepMetrics] = []
    added: list[Columns] = []
    updates: dict[int, Columns] = {}
    for key, state in snapshot.states.items():
        columns = {"state": state.value, **snapshot.changed.get(key, {})}
        if key not in present:
            added.append({"run_id": run.id, "step": key[0], "attempt": key[1], **columns})
            if state is CheckpointState.LISTED:
                after.append(StepMetrics(key[0], columns["metrics"], columns["better"]))
        elif key in snapshot.changed or present[key][1] != state.value:
            updates[present[key][0]] = columns
    for some in _parts(list(updates)):
        for row in session.scalars(select(CheckpointRow).where(CheckpointRow.id.in_(some))):
            before += _listed_metrics(row)
            for name, value in updates[row.id].items():
                setattr(row, name, value)
            after += _listed_metrics(row)
            changed |= session.is_modified(row)
    gone = [row_id for key, (row_id, _) in present.items() if key not in snapshot.states]
    for some in _parts(gone):
        kept = (CheckpointRow.state, CheckpointRow.step, CheckpointRow.metrics)
        query = select(*kept, CheckpointRow.better).where(CheckpointRow.id.in_(some))
        for old in session.execute(query):
            before += _listed_metrics(old)
        session.execute(delete(CheckpointRow).where(CheckpointRow.id.in_(some)))
    if added:
        session.execute(insert(CheckpointRow), added)
    if write_run_metrics(session, run.id, before, after):
        run.metrics_cut = True
    moved = {
        key
        for key, state in snapshot.states.items()
        if key not in present or present[key][1] != state.value
    }
    judged = [
        Verification(*key, damaged.get(key), columns["damaged"], columns["verified"])
        for key, columns in snapshot.changed.items()
        if "damaged" in columns and (key in damaged) != (columns["damaged"] is not None)
    ]
    return changed or bool(gone or added), _steps(session, run, moved), judged


def _listed_metrics(row: Any) -> list[StepMetrics]:
    """Return the metrics of a step, as they count for those of its run: if it is listed."""
    if row.state != CheckpointState.LISTED:
        return []
    return [StepMetrics(row.step, row.metrics, row.better)]


def _steps(session: Session, run: RunRow, keys: Collection[Key]) -> list[Step]:
    """Return the columns of some steps that their events need."""
    if not keys:
        return []
    query = select(*(getattr(CheckpointRow, name) for name in Step._fields))
    lowest, highest = min(keys)[0], max(keys)[0]
    of_run = query.where(
        CheckpointRow.run_id == run.id, CheckpointRow.step.between(lowest, highest)
    )
    steps = (Step._make(row) for row in session.execute(of_run))
    return [step for step in steps if (step.step, step.attempt) in keys]


def _parts(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]


def _alias_values(alias: Alias) -> Columns:
    return {
        "step": alias.step,
        "attempt": alias.attempt,
        "manifest_digest": alias.manifest_digest,
        "by": alias.by,
        "reason": alias.reason,
        "at": from_rfc3339(alias.at),
        "sequence": alias.sequence,
    }
