"""Space that runs use in the store."""

from collections.abc import Collection

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.catalog.step_records import state_of
from cairn.service.schemas import RunUsage, StepUsage
from cairn.storage.runs.run import Run
from cairn.storage.runs.usage import run_usage
from cairn.storage.store.clock import from_rfc3339


def get_usage(plane: ControlPlane, root: str, run: str) -> RunUsage:
    """Measure the space that a run uses now, in the store.

    Raises:
        UnknownRootError, RunNotFoundError: There is no such run.
        UnsupportedFormatError, CorruptionError: Records that determine the states of steps are
            damaged.
        StoreUnavailableError: The store does not answer.
    """
    stored_run = plane.run(root, run)
    with plane.catalog.query() as connection:
        damaged = queries.damaged_steps(connection, root, run)
    return usage_of(stored_run, root, damaged)


def usage_of(run: Run, root: str, damaged: Collection[tuple[int, int]] = ()) -> RunUsage:
    """Measure the space that an opened run uses.

    Args:
        run: The run.
        root: Name of its root.
        damaged: (step, attempt) of steps that are known to be damaged.
    """
    usage = run_usage(run)
    return RunUsage(
        root=root,
        run=run.uri.name,
        bytes=usage.nbytes,
        files=usage.files,
        uses={str(use): size for use, size in usage.uses.items()},
        garbage=usage.garbage,
        steps=[
            StepUsage(
                step=step.step,
                attempt=step.attempt,
                state=state_of(step.state.value, (step.step, step.attempt) in damaged or None),
                created=None if step.created is None else from_rfc3339(step.created),
                bytes=step.nbytes,
                added=step.added,
                own=step.own,
            )
            for step in usage.steps
        ],
    )
