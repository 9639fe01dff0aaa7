"""Creation of runs before their jobs start."""

from collections.abc import Mapping

from cairn.service.access.callers import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.listing import get_run
from cairn.service.actions.plane import ControlPlane
from cairn.service.errors import RunExistsError
from cairn.service.schemas import Run
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs import run as run_runs


def create_run(
    plane: ControlPlane, caller: Caller, root: str, run: str, labels: Mapping[str, str]
) -> Run:
    """Create a run without steps, which a later training job writes to.

    Raises:
        UnknownRootError: There is no such root.
        InvalidURIError: The run's name is invalid.
        RunExistsError: The store has a run of this name.
        StoreUnavailableError: The root is not where it was, or does not answer.
        UnsupportedFormatError: Invalid labels; all are listed.
    """
    place = plane.place(root, run)
    with audited(plane, caller, "run.create", root=root, run=run, labels=dict(labels)) as entry:
        plane.index.refuse_gone(root, plane.root(root))
        try:
            made = run_runs.create_run(place, labels=labels)
        except PreconditionFailedError as exc:
            raise RunExistsError(str(exc)) from exc
        entry.complete(after=made.info().labels)
    return get_run(plane, root, run, refresh=True)
