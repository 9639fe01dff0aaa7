"""Listing what plain Orbax has saved in a run.

Clients say no URIs that lead elsewhere: a folder counts if it lies in a root that they may use.
"""

from typing import Final

from cairn.service.access import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.starting import Start
from cairn.service.catalog import lies_within, queries
from cairn.service.errors import AlreadyAdoptedError, FolderRefusedError, RunExistsError
from cairn.service.jobs import adopt
from cairn.service.schemas import AdoptRequest, Operation
from cairn.storage import adoption
from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.runs import Run
from cairn.storage.store import StoreURI, parse_uri

_SHOWN: Final = 10


def adopt_folder(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    wanted: AdoptRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to list the checkpoints of a folder in a run. Nothing in the folder is changed.

    Raises:
        UnknownRootError: There is no such root.
        InvalidURIError: No run can be there, or the folder's name can't be, or is a run's.
        InvalidRequestError: The model is none that can be found.
        FolderRefusedError: The folder is in no root that the caller may use.
        NotFoundError, NotACheckpointError: There is no checkpoint of Orbax there.
        AlreadyAdoptedError: Another run adopts the folder.
        RunExistsError: There is a run of that name which does not.
        StoreUnavailableError: A store does not answer.
        NotReadyError, IdempotencyKeyReusedError: As `Start`.
    """
    target = plane.place(root, wanted.run)
    folder = _folder(plane, caller, root, wanted.folder)
    request = adopt.adopt_request(
        root=root, run=wanted.run, folder=folder, step=wanted.step, model=wanted.model
    )
    briefly = {} if wanted.model is None else {"model": wanted.model.config.get("model_type")}
    start = Start(plane, caller, root, adopt.KIND, "run.adopt", idempotency_key, briefly)
    if known := start.repeated({**request, "step": wanted.step, "model": request.get("model")}):
        return known
    if not start.is_key_used():
        adopt.model_of(request)
        plane.index.refuse_gone(root, plane.root(root))
        _check(plane, caller, target, folder, wanted.step)
    return start.make(request)


def _check(
    plane: ControlPlane, caller: Caller, target: StoreURI, folder: StoreURI, step: int | None
) -> None:
    """Refuse what can't be, before anything is made."""
    try:
        adoption.check_adoption(folder, target, step=step)
    except PreconditionFailedError as exc:
        raise RunExistsError(str(exc)) from exc
    _refuse_adopted(plane, caller, target, folder)


def _folder(plane: ControlPlane, caller: Caller, root: str, text: str) -> StoreURI:
    """The folder that a caller means; nothing of it is read but where its links lead."""
    absolute = text.startswith("/") or "://" in text
    folder = parse_uri(text) if absolute else plane.root(root) / text.strip("/")
    visible = caller.visible(plane.roots)
    if lies_within(folder, visible.values()):
        return folder
    named = [f"{name} ({uri})" for name, uri in visible.items()]
    more = f", and {len(named) - _SHOWN} more" * (len(named) > _SHOWN)
    raise FolderRefusedError(
        f"{folder}: expected a folder in one of the roots {', '.join(named[:_SHOWN])}{more}, found "
        "one in none of them. Have a root added that it lies in, or adopt it with `cairn adopt` "
        "where it is."
    )


def _refuse_adopted(
    plane: ControlPlane, caller: Caller, target: StoreURI, folder: StoreURI
) -> None:
    roots = caller.visible(plane.roots)
    with plane.catalog.query() as connection:
        found = queries.runs_adopting(connection, roots, str(folder))
    for known in found:
        if known.uri != str(target) and _adopts(known.uri, folder):
            raise AlreadyAdoptedError(
                f"{folder}: expected a folder that no other run adopts, found that "
                f"{known.root}/{known.name} does. Adopt it under that name to list what is new.",
                extra={"root": known.root, "run": known.name},
            )


def _adopts(uri: str, folder: StoreURI) -> bool:
    """Whether a run adopts all of a folder, not a checkpoint in it."""
    try:
        return Run(parse_uri(uri)).info().adopts == str(folder)
    except StorageError:  # it can't be read, so nobody knows
        return False
