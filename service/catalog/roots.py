"""All roots by name: those of the settings, and those that were added at run time.

Added roots are in the catalog only, for all servers and workers that share it. The settings win: an
added root with a name of the settings is ignored.
"""

import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AddedRootRow, AutomationRow, RootRow, RunRow
from cairn.service.errors import RootTakenError, UnknownRootError
from cairn.storage.errors import InvalidURIError
from cairn.storage.store.disk.confinement import real_prefix, with_confinement
from cairn.storage.store.uri import StoreURI, parse_uri

CACHE_SECONDS: Final = 1.0
"""Age up to which a process uses the added roots that it has read."""

_TABLE: Final = ("", "roots")
"""Root and run of the lock under which roots are added and removed; see `Catalog.write`."""

_ADDED: Final = select(AddedRootRow.name, AddedRootRow.uri, AddedRootRow.adopt_from).order_by(
    AddedRootRow.name
)


class Roots(Mapping[str, StoreURI]):
    """Current roots by name. Safe for use by many threads.

    Roots of the settings come first, and need no database. For an unknown name the catalog is read
    at once, by one short query, and a miss is not cached. A removed root is noticed up to
    `CACHE_SECONDS` later.
    """

    def __init__(
        self,
        catalog: Catalog,
        of_settings: Mapping[str, StoreURI],
        *,
        changed: Callable[[int], None] | None = None,
    ) -> None:
        """Combine the roots of the settings and of the catalog.

        Args:
            catalog: Catalog with the added roots.
            of_settings: Roots of the settings.
            changed: Callback with the number of roots, after some were added or removed.
        """
        self._catalog = catalog
        self._own = dict(of_settings)
        self._changed = changed
        self._lock = threading.Lock()
        self._added: dict[str, StoreURI] = {}
        self._read = float("-inf")

    def __getitem__(self, name: str) -> StoreURI:
        """Return the address of a root.

        Raises:
            KeyError: There is no such root.
            SQLAlchemyError: The settings have no such root, and the catalog does not answer.
        """
        if name in self._own:
            return self._own[name]
        now = time.monotonic()
        added = self._since(now - CACHE_SECONDS)
        return (added if name in added else self._since(now))[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names, those of the settings first."""
        return iter(self._all())

    def __len__(self) -> int:
        """Return the number of roots."""
        return len(self._all())

    def items(self) -> ItemsView[str, StoreURI]:
        """Return a snapshot of all roots: one may be removed during the iteration."""
        return self._all().items()

    def is_of_settings(self, name: str) -> bool:
        """Return whether the settings have this root."""
        return name in self._own

    def add(
        self,
        name: str,
        uri: StoreURI,
        *,
        adopt_from: Sequence[StoreURI] = (),
        by: str,
        now: datetime,
    ) -> None:
        """Add a root, for all processes that share the catalog.

        Args:
            name: Name of the root.
            uri: Address of the root.
            adopt_from: Folders outside the root that records of its runs may name.
            by: Name of the caller who adds it.
            now: Current time.

        Raises:
            RootTakenError: A root has this name, or is at, around or inside this address.
        """
        with self._changing() as session:
            added = _places(session.execute(_ADDED).all())
            others = {**self._own, **{k: v for k, v in added.items() if k not in self._own}}
            if name in others:
                source = "in the settings" if name in self._own else "added before"
                raise RootTakenError(
                    f"There is a root {name!r} already, {source}: {others[name]}. Choose another "
                    "name."
                )
            if overlap := overlap_of(uri, others):
                raise RootTakenError(
                    f"Roots may not overlap: {uri} is {overlap}. Choose another place."
                )
            session.add(
                AddedRootRow(
                    name=name,
                    uri=str(uri),
                    adopt_from=[*map(str, adopt_from)],
                    created=now,
                    created_by=by,
                )
            )

    def remove(self, name: str) -> AddedRootRow:
        """Remove an added root and its index; its store stays untouched.

        If the settings have the name too, the index stays.

        Raises:
            UnknownRootError: No root was added under that name.
        """
        with self._changing() as session:
            row = session.get(AddedRootRow, name)
            if row is None:
                raise UnknownRootError(f"There is no added root {name!r}.")
            session.delete(row)
            if name not in self._own:
                drop_index(session, name)
            return row

    @contextmanager
    def _changing(self) -> Iterator[Session]:
        try:
            with self._catalog.write(_TABLE) as session:
                yield session
        finally:
            with self._lock:
                self._read = float("-inf")  # invalidate: this process sees its own change at once

    def _all(self) -> dict[str, StoreURI]:
        with suppress(SQLAlchemyError):  # callers that need more of the catalog report an outage
            self._since(time.monotonic() - CACHE_SECONDS)
        return {**self._own, **{k: v for k, v in self._added.items() if k not in self._own}}

    def _since(self, moment: float) -> dict[str, StoreURI]:
        """Return the added roots, as read from the catalog at this moment or later.

        Of several threads that need a new read, only one reads.

        Args:
            moment: Reading of the monotonic clock, in seconds.

        Raises:
            SQLAlchemyError: The catalog does not answer.
        """
        if self._read < moment:
            with self._lock:
                if self._read < moment:
                    self._read_added()
        return self._added

    def _read_added(self) -> None:
        began, before = time.monotonic(), self._added
        try:
            with self._catalog.query() as connection:
                added = _places(connection.execute(_ADDED).all())
        finally:
            # Even after an error, so that only one caller waits for a silent catalog.
            self._read = began
        self._added = added
        if added.keys() != before.keys() and self._changed is not None:
            self._changed(len(self._own.keys() | added.keys()))


def added_root(catalog: Catalog, name: str) -> AddedRootRow | None:
    """Return the root that was added under a name; None: there is none."""
    with catalog.read() as session:
        return session.get(AddedRootRow, name)


def drop_index(session: Session, root: str) -> None:
    """Delete the index of a root, and the positions of its automations."""
    of_root = AutomationRow.name.startswith(f"{root}/", autoescape=True)
    session.execute(delete(AutomationRow).where(of_root))
    session.execute(delete(RunRow).where(RunRow.root == root))
    session.execute(delete(RootRow).where(RootRow.name == root))


def _places(rows: Iterable[Any]) -> dict[str, StoreURI]:
    """Return the addresses by name; leave out those that this version of Cairn cannot open."""
    places: dict[str, StoreURI] = {}
    for name, uri, adopt_from in rows:
        with suppress(InvalidURIError):  # `cairn doctor` reports these
            places[name] = with_confinement(parse_uri(uri), map(parse_uri, adopt_from))
    return places


def overlap_of(uri: StoreURI, others: Mapping[str, StoreURI]) -> str:
    """Describe how an address and those of other roots contain each other; "": they do not."""
    here = _place(uri)
    overlaps = []
    for name, other in others.items():
        there = _place(other)
        if here == there:
            overlaps.append(f"where root {name!r} is")
        elif here.startswith(there):
            overlaps.append(f"in root {name!r}, {other}")
        elif there.startswith(here):
            overlaps.append(f"around root {name!r}, {other}")
    return " and ".join(overlaps)


def _place(uri: StoreURI) -> str:
    """Return a canonical text for a folder, with a slash at its end."""
    return f"{uri.scheme}:{real_prefix(uri)}"
