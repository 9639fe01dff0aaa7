"""Import of the checkpoints in a folder of plain Orbax, as steps of a run.

The folder must be in the run's root, or in a folder that an administrator allows for that root.
"""

from typing import Final

from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.errors import AlreadyAdoptedError, RunExistsError
from cairn.service.jobs.kinds import adopt
from cairn.service.schemas import AdoptRequest, Operation
from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.orbax_import.adopt import check_adoption
from cairn.storage.runs.run import Run
from cairn.storage.store.disk.confinement import safe_join, source_folder
from cairn.storage.store.uri import StoreURI, parse_uri

_SHOWN: Final = 10


def adopt_folder(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    body: AdoptRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to import the checkpoints of a folder into a run; the folder is not changed.

    Raises:
        UnknownRootError: There is no such root.
        InvalidURIError: The run's name or the folder's is invalid, or the folder is a run.
        InvalidRequestError: The model is unknown.
        SourceRefusedError: The folder is neither in the root nor in a folder that is allowed for
            it.
        NotFoundError, NotACheckpointError: The folder has no checkpoint of Orbax.
        AlreadyAdoptedError: Another run has imported the folder.
        RunExistsError: A run of that name exists, and has not imported the folder.
        StoreUnavailableError: A store does not answer.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    target = plane.place(root, body.run)
    is_absolute = body.folder.startswith("/") or "://" in body.folder
    place = parse_uri(body.folder) if is_absolute else plane.root(root) / body.folder.strip("/")
    folder = source_folder(plane.root(root), str(place))
    request = adopt.adopt_request(
        root=root, run=body.run, folder=folder, step=body.step, model=body.model
    )
    briefly = {} if body.model is None else {"model": body.model.config.get("model_type")}
    start = JobStart(plane, caller, root, adopt.KIND, "run.adopt", idempotency_key, briefly)
    if operation := start.earlier_operation(
        {**request, "step": body.step, "model": request.get("model")}
    ):
        return operation
    if not start.is_key_used():
        adopt.model_of(request)
        plane.index.refuse_gone(root, plane.root(root))
        try:
            check_adoption(folder, target, step=body.step)
        except PreconditionFailedError as exc:
            raise RunExistsError(str(exc)) from exc
        _refuse_adopted_elsewhere(plane, caller, target, folder)
    return start.submit(request)


def _refuse_adopted_elsewhere(
    plane: ControlPlane, caller: Caller, target: StoreURI, folder: StoreURI
) -> None:
    roots = caller.visible(plane.roots)
    with plane.catalog.query() as connection:
        rows = queries.runs_adopting(connection, roots, str(folder))
    for row in rows:
        if row.uri == str(target):
            continue
        try:
            adopts = Run(safe_join(roots[row.root], row.name)).info().adopts
        except StorageError:  # unreadable: unknown, so do not block the import
            continue
        if adopts == str(folder):  # all of the folder, and not just one checkpoint in it
            raise AlreadyAdoptedError(
                f"{folder} is imported already, as the run {row.root}/{row.name}. Import it under "
                "that name to list new steps.",
                extra={"root": row.root, "run": row.name},
            )
