"""Listing of a run's checkpoints in its store, without a control plane."""

from cairn.service.catalog import queries
from cairn.service.catalog.snapshot import take_snapshot
from cairn.service.catalog.step_records import state_of
from cairn.service.schemas import AVAILABLE, Checkpoint, CheckpointState, Run
from cairn.storage.runs import run as stored
from cairn.storage.store.clock import from_rfc3339

_AVAILABLE = (CheckpointState.LISTED, CheckpointState.DAMAGED)


def stored_checkpoints(uri: str, state: str) -> tuple[Run, list[Checkpoint]]:
    """Read a run's checkpoints, highest step first, and the run, under its URI, with its problems.

    Args:
        uri: URI or path of the run's folder.
        state: State of the checkpoints to return, `available` or `all`.

    Raises:
        StorageError: There is no such run, or the store does not answer.
    """
    stored_run = stored.Run.open(uri)
    snapshot = take_snapshot(stored_run, stored_run.info(), {})
    steps = [
        queries.CheckpointColumns(
            step=key[0],
            attempt=key[1],
            state=snapshot.states[key],
            **{name: value for name, value in columns.items() if name != "stamps"},
        )
        for key, columns in sorted(snapshot.changed.items(), reverse=True)
    ]
    judged = [(step, state_of(step.state, step.damaged)) for step in steps]
    listed = [step for step, judgement in judged if judgement in _AVAILABLE]
    row = queries.RunColumns(
        id=0,
        root=str(stored_run.uri.parent),
        name=stored_run.uri.name,
        uri=str(stored_run.uri),
        created=from_rfc3339(snapshot.info.created),
        labels={},
        lineage=None,
        latest_step=listed[0].step if listed else None,
        checkpoint_count=len(listed),
        damaged_count=sum(step.damaged is not None for step in listed),
        nbytes=sum(step.nbytes or 0 for step in listed),
        problems=list(snapshot.problems),
        lost_records=[],
        metrics_cut=False,
    )
    aliases: dict[tuple[int, int], list[str]] = {}
    for alias in snapshot.aliases:
        if not alias.deleted:
            aliases.setdefault((alias.step, alias.attempt), []).append(alias.alias)
    shown = [
        queries.checkpoint(row, step, aliases)
        for step, judgement in judged
        if state in ("all", judgement) or (state == AVAILABLE and judgement in _AVAILABLE)
    ]
    return queries.run(row._replace(name=uri)), shown
