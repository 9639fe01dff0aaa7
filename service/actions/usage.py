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
    found = plane.run(root, run)
    with plane.catalog.query() as connection:
        damaged = queries.damaged_steps(connection, root, run)
    return usage_of(found, root, damaged)


def usage_of(run: Run, root: str, damaged: Collection[tuple[int, int]] = ()) -> RunUsage:
    """Measure the space that an opened run uses.

    Args:
        run: The run.
        root: Name of its root.
        damaged: (step, attempt) of steps that are known to be damaged.
    """
    found = run_usage(run)
    return RunUsage(
        root=root,
        run=run.uri.name,
        bytes=found.nbytes,
        files=found.files,
        uses={str(use): size for use, size in found.uses.items()},
        garbage=found.garbage,
        steps=[
            StepUsage(
                step=one.step,
                attempt=one.attempt,
                state=state_of(one.state.value, (one.step, one.attempt) in damaged or None),
                created=None if one.created is None else from_rfc3339(one.created),
                bytes=one.nbytes,
                added=one.added,
                own=one.own,
            )
            for one in found.steps
        ],
    )
