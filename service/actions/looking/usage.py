"""What runs take in the store."""

from cairn.service.actions.plane import ControlPlane
from cairn.service.schemas import CheckpointState, RunUsage, StepUsage
from cairn.storage.runs import Run, run_usage
from cairn.storage.store import from_rfc3339


def get_usage(plane: ControlPlane, root: str, run: str) -> RunUsage:
    """What a run takes now, counted in the store.

    Raises:
        UnknownRootError, RunNotFoundError: There is no such run.
        UnsupportedFormatError, CorruptionError: Records that steps are judged by are damaged.
        StoreUnavailableError: The store does not answer.
    """
    return usage_of(plane.run(root, run), root)


def usage_of(run: Run, root: str) -> RunUsage:
    """The same, of a run in a store."""
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
                state=CheckpointState(one.state.value),
                created=None if one.created is None else from_rfc3339(one.created),
                bytes=one.nbytes,
                added=one.added,
                own=one.own,
            )
            for one in found.steps
        ],
    )
