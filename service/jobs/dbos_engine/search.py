"""Searches of the list of jobs, which DBOS's own interface does not have.

They are read from the tables `workflow_status`, `workflow_input` and `workflow_events`, system
tables that DBOS documents.
"""

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    Dialect,
    Text,
    and_,
    case,
    cast,
    column,
    func,
    select,
    table,
    type_coerce,
)
from sqlalchemy.types import TypeDecorator

from cairn.service.catalog.search_queries import Key, Searched, SortKey, searched_page
from cairn.service.filters.fields import OPERATION_FIELDS
from cairn.service.filters.search import Search
from cairn.service.jobs.dbos_engine.database import (
    CONNECT_SECONDS,
    PROGRESS_EVENT,
    autocommit_engine,
    is_sqlite,
)
from cairn.service.jobs.records import PART, STATES, WORKFLOW_PREFIX, moment, workflow_name

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_JSON: Final = "portable_json"
"""DBOS's name of the serialization that all of Cairn's jobs have."""


class Milliseconds(TypeDecorator[datetime]):
    """Column type of an instant that is stored as milliseconds since 1970."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """Convert to milliseconds, rounded down."""
        return None if value is None else (value - _EPOCH) // timedelta(milliseconds=1)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        """Convert from milliseconds."""
        return None if value is None else moment(value)


class JobSearch:
    """Searches in the tables of a database of jobs.

    Args:
        url: URL of DBOS's database; its tables exist.
    """

    def __init__(self, url: str) -> None:
        sqlite = is_sqlite(url)
        self._engine = autocommit_engine(
            url, connect_seconds=CONNECT_SECONDS, pool_pre_ping=not sqlite
        )
        schema = None if sqlite else "dbos"
        self._jobs = table(
            "workflow_status",
            column("workflow_uuid", Text()),
            column("name", Text()),
            column("status", Text()),
            column("authenticated_user", Text()),
            column("created_at", Milliseconds()),
            column("updated_at", Milliseconds()),
            column("inputs", Text()),
            column("serialization", Text()),
            schema=schema,
        )
        self._inputs = table(
            "workflow_input",
            column("workflow_uuid", Text()),
            column("inputs", Text()),
            schema=schema,
        )
        self._events = table(
            "workflow_events",
            column("workflow_uuid", Text()),
            column("key", Text()),
            column("value", Text()),
            column("serialization", Text()),
            schema=schema,
        )
        self._searched = self._fields()

    def page(
        self, search: Search, *, roots: Collection[str] | None, after: Key, limit: int
    ) -> tuple[list[str], Key]:
        """Return the ids of the next jobs of a search, and the sort key of the last; (): no more.

        Args:
            search: Filter and order; newest first if it has no order.
            roots: Only jobs of these roots; None: of any, or of none.
            after: Sort key of the last job that the client has; (): start with the first.
            limit: Largest number of jobs.
        """
        jobs, inputs = self._jobs.c, self._inputs.c
        is_operation = jobs.name.startswith(WORKFLOW_PREFIX, autoescape=True)
        entries = (
            select(jobs.workflow_uuid)
            .outerjoin_from(self._jobs, self._inputs, inputs.workflow_uuid == jobs.workflow_uuid)
            .where(is_operation, jobs.name != workflow_name(PART))
        )
        if roots is not None:
            entries = entries.where(self._searched.columns["root"].in_([*roots]))
        query = searched_page(
            entries,
            self._searched,
            search,
            after=after,
            limit=limit + 1,
            dialect=self._engine.dialect.name,
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        page = [row[0] for row in rows[:limit]]
        return page, tuple(rows[limit - 1][1:]) if len(rows) > limit else ()

    def progress(self, operations: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Return the progress of some operations by id; those without any are left out."""
        events = self._events.c
        query = select(events.workflow_uuid, events.value).where(
            events.workflow_uuid.in_([*operations]),
            events.key == PROGRESS_EVENT,
            events.serialization == _JSON,
        )
        with self._engine.connect() as connection:
            return {name: json.loads(text) or {} for name, text in connection.execute(query)}

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()

    def _fields(self) -> Searched:
        jobs = self._jobs.c
        columns = {
            "kind": func.substr(jobs.name, len(WORKFLOW_PREFIX) + 1, type_=Text()),
            "state": case(
                {status: state.value for status, state in STATES.items()}, value=jobs.status
            ),
            "root": self._requested("root"),
            "run": self._requested("run"),
            "step": self._number(self._requested("step")),
            "caller": func.coalesce(jobs.authenticated_user, self._requested("by")),
            "format": self._requested("options", "format"),
            "dtype": self._requested("options", "dtype"),
            "created": jobs.created_at,
            "updated": jobs.updated_at,
        }
        last = {
            "created": SortKey(jobs.created_at, descending=True),
            # Several jobs may begin within a millisecond.
            "id": SortKey(jobs.workflow_uuid, descending=True),
        }
        present = frozenset({"kind", "state", "created", "updated"})
        return Searched(OPERATION_FIELDS, columns, last, present)

    def _requested(self, *path: str) -> ColumnElement[Any]:
        """Return a member of the request of a job, as text; null if the request lacks it."""
        jobs, inputs = self._jobs.c, self._inputs.c
        # Newer versions of DBOS keep the input in a table of its own.
        text = case(
            (jobs.serialization == _JSON, func.coalesce(inputs.inputs, jobs.inputs, type_=Text()))
        )
        whole = type_coerce(text, JSON()) if self._is_sqlite else cast(text, JSON())
        member: ColumnElement[Any] = whole[("positionalArgs", 0, *path)].as_string()
        return member

    def _number(self, text: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return a text as an integer; null if it is none, as another release may write it."""
        if self._is_sqlite:
            is_number = and_(text != "", ~text.op("GLOB", return_type=Boolean())("*[^0-9]*"))
        else:
            is_number = text.op("~", return_type=Boolean())("^[0-9]{1,18}$")
        return case((is_number, cast(text, BigInteger())))

    @property
    def _is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"
