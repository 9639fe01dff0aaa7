"""Actions on roots: list, add and remove them at run time.

Callers that are limited to some roots may not add or remove any, since roots concern all callers.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.operations import UNFINISHED
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import roots
from cairn.service.errors import FixedRootError, RootInUseError, RootRefusedError
from cairn.service.filters.search import EVERYTHING
from cairn.service.schemas import Root
from cairn.storage.errors import NotFoundError
from cairn.storage.runs.records.layout import RUN_FILE
from cairn.storage.store.disk.confinement import is_within
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

_SHOWN: Final = 5
_AT_A_TIME: Final = 1000
"""Operations that are read at a time."""


def list_roots(plane: ControlPlane, caller: Caller) -> list[Root]:
    """Return the caller's roots, those of the settings first."""
    return [_body(plane, name, uri) for name, uri in caller.visible(plane.roots).items()]


def get_root(plane: ControlPlane, name: str) -> Root:
    """Return a root.

    Raises:
        UnknownRootError: There is no such root.
    """
    return _body(plane, name, plane.root(name))


def add_root(
    plane: ControlPlane, caller: Caller, name: str, uri: str, *, adopt_from: Sequence[str] = ()
) -> Root:
    """Add a root, for all processes of this catalog; nothing is written to its store.

    Args:
        plane: The control plane.
        caller: Caller who adds it.
        name: Name of the root.
        uri: Address of the root.
        adopt_from: Folders outside the root that records of its runs may name.

    Raises:
        InvalidURIError, RootRefusedError: The address is invalid, or not allowed.
        RootTakenError: A root has this name, or is at, around or inside this address.
        StoreUnavailableError: The store does not answer.
    """
    place = _parsed(uri)
    sources = [_parsed(folder) for folder in adopt_from]
    added = Root(name=name, uri=str(place), source="catalog", adopt_from=[*map(str, sources)])
    detail: dict[str, Any] = {"uri": str(place)}
    if sources:
        detail["adopt_from"] = added.adopt_from
    with audited(plane, caller, "root.add", root=name, **detail) as entry:
        for folder in (place, *sources):
            _check_allowed(plane, folder)
        _check_usable(place)
        plane.roots.add(name, place, adopt_from=sources, by=caller.name, now=datetime.now(UTC))
        entry.complete(before=None, after=added.model_dump())
    return added


def remove_root(plane: ControlPlane, caller: Caller, name: str) -> None:
    """Remove an added root and its index; its store stays as it is.

    If the settings have the name too, the settings' root is served again.

    Raises:
        UnknownRootError: There is no such root.
        FixedRootError: The root comes from the settings, and nobody has added it.
        RootInUseError: Operations on the root have not ended.
        NotReadyError: Jobs were not launched.
    """
    fixed = plane.roots.is_of_settings(name)
    added = roots.added_root(plane.catalog, name) is not None
    if not added:
        plane.root(name)  # raises, unless the settings name it
    with audited(plane, caller, "root.remove", root=name) as entry:
        if not added:
            raise FixedRootError(
                f"Root {name!r} is named by the settings. Remove it from CAIRN_ROOTS, and restart "
                "the servers."
            )
        if not fixed:
            _refuse_root_in_use(plane, name)
        row = plane.roots.remove(name)
        before = Root(name=name, uri=row.uri, source="catalog", adopt_from=row.adopt_from)
        entry.complete(before=before.model_dump(), after=None)


def _body(plane: ControlPlane, name: str, uri: StoreURI) -> Root:
    source = "settings" if plane.roots.is_of_settings(name) else "catalog"
    _, *sources = uri.confinement.sources if uri.confinement else (uri,)
    adopt_from = [*map(str, sources)]
    return Root.model_validate(
        {"name": name, "uri": str(uri), "source": source, "adopt_from": adopt_from}
    )


def _parsed(uri: str) -> StoreURI:
    place = parse_uri(uri)
    if place.scheme == "memory":
        raise RootRefusedError(
            f"{place} is this process's memory, which workers can't read. Give a folder, gs:// "
            "or s3://."
        )
    if place.scheme == "file" and not uri.startswith(("/", "file:")):
        raise RootRefusedError(
            f"{uri!r} is a relative path. Give an absolute one: /path or file:///path."
        )
    return place


def _check_allowed(plane: ControlPlane, place: StoreURI) -> None:
    if (setting := plane.settings.database_in(place)) is not None:
        raise RootRefusedError(
            f"{place} has the server's databases in it ({setting}), and a run there could link to "
            "them. Give another folder."
        )
    allowed = plane.settings.roots_within
    if allowed is not None and not is_within(place, map(parse_uri, allowed)):
        places = f"only in {' or '.join(allowed)}" if allowed else "nowhere"
        raise RootRefusedError(
            f"{place} is not allowed: roots may be added {places} (CAIRN_ROOTS_WITHIN). Choose "
            "another place, or have the settings changed."
        )


def _check_usable(place: StoreURI) -> None:
    """Raise unless an address exists, is readable, and is no run."""
    if place.scheme == "file":
        path = place.local_path
        if not os.path.isdir(path):
            problem = "is a file" if os.path.exists(path) else "does not exist on the server"
            raise RootRefusedError(f"{place} {problem}. Create the folder, or mount it.")
        if not os.access(path, os.R_OK | os.X_OK):
            raise RootRefusedError(
                f"The server may not read {place}. Give its user the permission."
            )
    try:
        names = {entry.name for entry in open_files(place).list()}
    except NotFoundError as exc:
        raise RootRefusedError(
            f"There is no bucket at {place} that the server can list. Create it."
        ) from exc
    if RUN_FILE in names:
        raise RootRefusedError(f"{place} is a run. Give the folder that it is in.")


def _refuse_root_in_use(plane: ControlPlane, name: str) -> None:
    search = EVERYTHING.among(UNFINISHED).equal(root=name)
    page, after = plane.jobs.list(search, limit=_AT_A_TIME)
    operations = [operation.id for operation in page]
    while after:
        page, after = plane.jobs.list(search, after=after, limit=_AT_A_TIME)
        operations += [operation.id for operation in page]
    if operations:
        more = f", and {len(operations) - _SHOWN} more" * (len(operations) > _SHOWN)
        raise RootInUseError(
            f"Root {name!r} has operations that have not ended: "
            f"{', '.join(operations[:_SHOWN])}{more}. Cancel them, or wait for their end.",
            extra={"operations": operations},
        )
