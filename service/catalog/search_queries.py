"""Translation of searches to SQL: conditions, order, and the start of a page.

Text of a request reaches the database as a parameter, never as SQL. A condition is true or false,
never null: without a value it is false, and `NOT` makes it true.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Select,
    Text,
    and_,
    bindparam,
    case,
    collate,
    false,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import aliased
from sqlalchemy.types import TypeEngine

from cairn.service.catalog.entries import (
    has_entries,
    number_entry,
    scalar_entries,
    text_entry,
    written_entries,
)
from cairn.service.catalog.models import (
    AliasRow,
    AuditRow,
    CheckpointRow,
    RunMetricRow,
    RunRow,
)
from cairn.service.filters.expressions import All, AnyOf, Comparison, Expression, Has, Not, Path
from cairn.service.filters.fields import (
    AUDIT_FIELDS,
    CHECKPOINT_FIELDS,
    METRIC_FIELDS,
    RUN_FIELDS,
    Field,
    Kind,
)
from cairn.service.filters.search import Search
from cairn.service.schemas import CheckpointState

Key = tuple[Any, ...]
"""Sort key of the last entry before a page; (): the page is the first."""

LONGEST_SORTED_TEXT: Final = 128
"""Length to which text is cut for sorting, in characters: page tokens include sort keys."""

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], ColumnElement[bool]]]] = {
    "=": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


class SortKey(NamedTuple):
    """Sort key of a list.

    Attributes:
        value: SQL expression of an entry's value.
        descending: Large values come first.
        missing: Some entries have no value; they come last.
    """

    value: Any
    descending: bool = False
    missing: bool = False


class Searched(NamedTuple):
    """Fields of a list, and their SQL expressions.

    Attributes:
        fields: Fields of its entries.
        columns: Columns by field, except fields of kind `NAMES`.
        last: Sort keys by field that make the order total: no two entries are equal in all of them.
        present: Fields of which every entry has a value.
        sets: For each field of kind `NAMES`: an entry's key, the query of the keys of entries that
            have a name, and the column of that name.
        derived: For fields whose values are in another table: a function that returns the SQL
            expression of an entry's value with a name.
        named: For these fields: a function that returns the condition that an entry has a value
            with a name; None: with any name.
        joined: Values of members whose table the list's query joins, so that all its entries have
            them.
    """

    fields: Mapping[str, Field]
    columns: Mapping[str, Any]
    last: Mapping[str, SortKey]
    present: frozenset[str]
    sets: Mapping[str, tuple[Any, Any, Any]] = MappingProxyType({})
    derived: Mapping[str, Callable[[str], ColumnElement[Any]]] = MappingProxyType({})
    named: Mapping[str, Callable[[str | None], ColumnElement[bool]]] = MappingProxyType({})
    joined: Mapping[Path, ColumnElement[Any]] = MappingProxyType({})


_STATE: Final = case(
    (
        and_(
            CheckpointRow.state == CheckpointState.LISTED.value, CheckpointRow.damaged.is_not(None)
        ),
        literal(CheckpointState.DAMAGED.value, Text()),
    ),
    else_=CheckpointRow.state,
)
"""State as the API has it (`state_of`)."""

CHECKPOINTS: Final = Searched(
    CHECKPOINT_FIELDS,
    {
        "step": CheckpointRow.step,
        "attempt": CheckpointRow.attempt,
        "state": _STATE,
        "created": CheckpointRow.created,
        "verified": CheckpointRow.verified,
        "bytes": CheckpointRow.nbytes,
        "leaves": CheckpointRow.leaves,
        "model_type": CheckpointRow.model_type,
        "labels": CheckpointRow.labels,
        "metrics": CheckpointRow.metrics,
        "better": CheckpointRow.better,
    },
    {
        "step": SortKey(CheckpointRow.step, descending=True),
        "attempt": SortKey(CheckpointRow.attempt, descending=True),
    },
    frozenset({"step", "attempt", "state"}),
    {
        "aliases": (
            tuple_(CheckpointRow.step, CheckpointRow.attempt),
            # One query for all aliases of the run: a subquery per step takes far longer.
            select(AliasRow.step, AliasRow.attempt).where(AliasRow.run_id == bindparam("run")),
            AliasRow.alias,
        )
    },
)
METRIC_COLUMNS: Final[Mapping[str, Any]] = MappingProxyType(
    {"metrics": RunMetricRow.last, "best": RunMetricRow.best}
)
"""Columns of `run_metrics` by the field of a run."""


def _metric_of(field: str) -> Callable[[str], ColumnElement[Any]]:
    def value(name: str) -> ColumnElement[Any]:
        metric = aliased(RunMetricRow)  # a list that is sorted by a metric joins the table itself
        query = select(getattr(metric, METRIC_COLUMNS[field].key))
        query = query.where(metric.run_id == RunRow.id, metric.name == _bound(name))
        return query.correlate(RunRow).scalar_subquery()

    return value


def _has_metric(field: str) -> Callable[[str | None], ColumnElement[bool]]:
    def condition(name: str | None) -> ColumnElement[bool]:
        metric = aliased(RunMetricRow)
        runs = select(metric.run_id)
        if field == "best":
            runs = runs.where(metric.best.is_not(None))
        if name is not None:
            runs = runs.where(metric.name == _bound(name))
        present: ColumnElement[bool] = RunRow.id.in_(runs)
        return present

    return condition


RUNS: Final = Searched(
    RUN_FIELDS,
    {
        "root": RunRow.root,
        "name": RunRow.name,
        "created": RunRow.created,
        "bytes": RunRow.nbytes,
        "latest_step": RunRow.latest_step,
        "checkpoint_count": RunRow.checkpoint_count,
        "labels": RunRow.labels,
        "config": RunRow.config,
    },
    {"root": SortKey(RunRow.root), "name": SortKey(RunRow.name)},
    frozenset({"root", "name", "created", "bytes", "checkpoint_count"}),
    {
        "aliases": (RunRow.id, select(AliasRow.run_id), AliasRow.alias),
        "states": (RunRow.id, select(CheckpointRow.run_id), _STATE),
    },
    {field: _metric_of(field) for field in METRIC_FIELDS},
    {field: _has_metric(field) for field in METRIC_FIELDS},
)
AUDIT: Final = Searched(
    AUDIT_FIELDS,
    {
        "at": AuditRow.at,
        "caller": AuditRow.actor,
        "action": AuditRow.action,
        "root": AuditRow.root,
        "run": AuditRow.run,
        "outcome": AuditRow.outcome,
    },
    {"id": SortKey(AuditRow.id, descending=True)},
    frozenset({"at", "caller", "action", "root", "run"}),
)


def searched_page(
    entries: Select[Any],
    of: Searched,
    search: Search,
    *,
    after: Key,
    limit: int | BindParameter[int],
    dialect: str,
) -> Select[Any]:
    """Build the query for a page of a search; the columns of the sort key follow the entry's.

    Args:
        entries: Query of the list.
        of: Fields of the list.
        search: Filter and order.
        after: Sort key of the last entry that the client has, or parameters in place of its values
            (`typed_parameter`); (): start with the first.
        limit: Largest number of entries.
        dialect: Name of the database's dialect.
    """
    keys = _sort_keys(of, search, dialect)
    parts = [key.value.label(f"key_{n}") for n, key in enumerate(keys)]
    page = entries.add_columns(*parts)
    if search.filter is not None:
        page = page.where(_holds(search.filter, of, dialect))
    if after:
        page = page.where(_comes_after(keys, after))
    for key, part in zip(keys, parts, strict=True):
        direction = part.desc() if key.descending else part.asc()
        page = page.order_by(direction.nulls_last() if key.missing else direction)
    return page.limit(limit)


def _sort_keys(of: Searched, search: Search, dialect: str) -> list[SortKey]:
    keys = []
    for term in search.order:
        is_missing = term.path.field not in of.present and term.path not in of.joined
        if len(term.field.sorted_as) > 1:
            entries = scalar_entries if term.field.kind is Kind.SCALAR else written_entries
            column = of.columns[term.path.field]
            values = list(entries(column, term.path.key or "", dialect))
        else:
            values = [_value(of, term.path, dialect)]
        for value, python in zip(values, term.field.sorted_as, strict=True):
            if python is str:
                value = func.substr(value, 1, LONGEST_SORTED_TEXT, type_=Text())
                if dialect == "postgresql":
                    value = collate(value, "C")  # by code point, as in SQLite
            keys.append(SortKey(value, term.descending, is_missing))
    named = {term.path.field for term in search.order}
    return keys + [key for name, key in of.last.items() if name not in named]


def _comes_after(keys: Sequence[SortKey], last: Key) -> ColumnElement[bool]:
    """Return the condition that an entry comes after a sort key, whose own entry may be gone."""
    # A lexicographic comparison, spelled out: SQL's row values allow neither mixed directions nor
    # null.
    ways: list[ColumnElement[bool]] = []
    same: list[ColumnElement[bool]] = []
    # Follows from the ways; without it an index is read from its start for each page.
    start: ColumnElement[bool] = true()
    for key, part in zip(keys, last, strict=True):
        if part is None:  # missing values come last: only ties can follow
            same.append(key.value.is_(None))
            continue
        part = _bound(part)
        later = key.value < part if key.descending else key.value > part
        if not same and not key.missing:
            start = key.value <= part if key.descending else key.value >= part
        ways.append(and_(*same, or_(later, key.value.is_(None)) if key.missing else later))
        same.append(key.value == part)
    return and_(start, or_(false(), *ways))


def _bound(value: Any) -> Any:
    """Return a query parameter with the type of the value, not of the column.

    A parameter of the column's type would cut text, and could not have large integers.
    """
    kind = _PARAMETER_TYPES.get(type(value))
    return value if kind is None else literal(value, kind)


def typed_parameter(name: str, kind: type) -> BindParameter[Any]:
    """Return a named query parameter for values of a type, as `_bound` does for a value."""
    return bindparam(name, type_=_PARAMETER_TYPES.get(kind))


_PARAMETER_TYPES: Final[Mapping[type, TypeEngine[Any]]] = {str: Text(), int: BigInteger()}


def _holds(expression: Expression, of: Searched, dialect: str) -> ColumnElement[bool]:
    """Return a filter as an SQL condition."""
    match expression:
        case Not(part=part):
            return not_(_holds(part, of, dialect))
        case All(parts=parts):
            return and_(true(), *(_holds(part, of, dialect) for part in parts))
        case AnyOf(parts=parts):
            return or_(false(), *(_holds(part, of, dialect) for part in parts))
        case Has(path=path, member=member):
            return _has(of, path, member, dialect)
        case Comparison(path=path, operator=operator, value=value):
            compared = _value(of, path, dialect)
            if of.fields[path.field].kind is Kind.SCALAR:
                number, text = scalar_entries(of.columns[path.field], path.key or "", dialect)
                compared = text if isinstance(value, str) else number
            condition = _OPERATORS[operator](compared, _bound(value))
            return func.coalesce(condition, false())


def _has(of: Searched, path: Path, member: str | None, dialect: str) -> ColumnElement[bool]:
    field = of.fields[path.field]
    if field.kind is Kind.NAMES:
        own, all_named, name = of.sets[path.field]
        if member is not None:
            all_named = all_named.where(name == _bound(member))
        named: ColumnElement[bool] = own.in_(all_named)
        return named
    if path.field in of.named:
        return of.named[path.field](path.key)
    column = of.columns[path.field]
    if member is not None:  # `LIKE` ignores case in SQLite, but not in PostgreSQL
        within = func.lower(column).contains(member.lower(), autoescape=True)
        return func.coalesce(within, false())
    if not field.keyed:
        present: ColumnElement[bool] = column.is_not(None)
        return and_(present, column != "") if field.kind is Kind.TEXT else present
    if path.key is None:
        return has_entries(column)
    return text_entry(column, path.key, dialect).is_not(None)  # as text, since NaN is a value too


def _value(of: Searched, path: Path, dialect: str) -> Any:
    if path in of.joined:
        return of.joined[path]
    if path.field in of.derived:
        return of.derived[path.field](path.key or "")
    column = of.columns[path.field]
    if path.key is None:
        return column
    if of.fields[path.field].kind is Kind.NUMBER:
        return number_entry(column, path.key, dialect)
    return text_entry(column, path.key, dialect)
