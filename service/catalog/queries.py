"""Queries for pages of the catalog, and their rows in the form of the API."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from types import NoneType
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import (
    ARRAY,
    BindParameter,
    ColumnElement,
    Connection,
    Double,
    Integer,
    Select,
    and_,
    any_,
    bindparam,
    cast,
    func,
    null,
    select,
    tuple_,
)
from sqlalchemy.orm import Session

from cairn.service.catalog.configs import MAX_ENTRIES
from cairn.service.catalog.entries import number_entry, text_entry
from cairn.service.catalog.events.lost_records import problem
from cairn.service.catalog.events.outbox import EventColumns, event_columns
from cairn.service.catalog.models import (
    AliasRow,
    CheckpointRow,
    EventRow,
    RootRow,
    RunMetricRow,
    RunRow,
)
from cairn.service.catalog.search_queries import (
    CHECKPOINTS,
    METRIC_COLUMNS,
    RUNS,
    Key,
    searched_page,
    typed_parameter,
)
from cairn.service.catalog.step_records import state_of
from cairn.service.filters.expressions import Path
from cairn.service.filters.search import Search
from cairn.service.schemas import (
    AVAILABLE,
    Alias,
    Checkpoint,
    CheckpointState,
    Damage,
    Deletion,
    Lineage,
    LostRecord,
    Run,
    RunColumn,
    States,
    plain_number,
)
from cairn.storage.runs.records.annotations import Better
from cairn.storage.runs.records.layout import step_dir
from cairn.storage.store.clock import utc_now
from cairn.storage.store.uri import StoreURI


class RootSums(NamedTuple):
    """Sums over the listed runs of a root.

    Attributes:
        uri: Address of the root at its last scan.
        scanned: Start of the last scan that succeeded.
        problem: Reason why the latest scan failed; None: it did not.
        runs: Number of listed runs.
        checkpoints: Number of listed checkpoints.
        damaged: Number of damaged ones among these.
        nbytes: Size of the listed checkpoints, in bytes.
    """

    uri: str
    scanned: datetime | None
    problem: str | None
    runs: int
    checkpoints: int
    damaged: int
    nbytes: int

    def lag(self, uri: StoreURI) -> float | None:
        """Return the age of the index in seconds; None: never scanned at this address."""
        if self.uri != str(uri) or self.scanned is None:
            return None
        return max(0.0, (utc_now() - self.scanned).total_seconds())


def root_sums(session: Session) -> dict[str, RootSums]:
    """Return the sums of every root that was ever scanned, by name."""
    counted = (
        select(
            RunRow.root,
            func.count().label("runs"),
            *(
                func.coalesce(func.sum(column), 0).label(name)
                for name, column in (
                    ("checkpoints", RunRow.checkpoint_count),
                    ("damaged", RunRow.damaged_count),
                    ("nbytes", RunRow.nbytes),
                )
            ),
        )
        .group_by(RunRow.root)
        .subquery()
    )
    sums = (counted.c.runs, counted.c.checkpoints, counted.c.damaged, counted.c.nbytes)
    query = select(RootRow, *sums).outerjoin(counted, counted.c.root == RootRow.name)
    return {
        root.name: RootSums(
            root.uri, root.scanned, root.problem, *(int(number or 0) for number in numbers)
        )
        for root, *numbers in session.execute(query)
    }


class RunColumns(NamedTuple):
    """Columns of a run that the API shows."""

    id: int
    root: str
    name: str
    uri: str
    created: datetime
    labels: dict[str, str]
    lineage: dict[str, Any] | None
    latest_step: int | None
    checkpoint_count: int
    damaged_count: int
    nbytes: int
    problems: list[str]
    lost_records: list[dict[str, Any]]
    metrics_cut: bool


class CheckpointColumns(NamedTuple):
    """Columns of a checkpoint that the API shows."""

    step: int
    attempt: int
    state: str
    created: datetime | None
    nbytes: int | None
    leaves: int | None
    items: list[str]
    iterators: dict[str, int]
    manifest_digest: str | None
    model_type: str | None
    source: str | None
    labels: dict[str, str]
    metrics: dict[str, float | str]
    better: dict[str, Better]
    verified: datetime | None
    damaged: dict[str, Any] | None
    deletion: dict[str, Any] | None


class RecentStep(NamedTuple):
    """Columns of a step that show a run's pace."""

    step: int
    attempt: int
    state: str
    created: datetime | None
    nbytes: int | None
    is_damaged: bool = False


# Prebuilt statements of plain columns: a page of ORM objects takes three times as long.
_RUNS: Final = select(*(getattr(RunRow, name) for name in RunColumns._fields))
_RUN: Final = _RUNS.where(
    RunRow.root == bindparam("root_name"), RunRow.name == bindparam("run_name")
)
_CHECKPOINTS: Final = select(
    *(getattr(CheckpointRow, name) for name in CheckpointColumns._fields)
).where(CheckpointRow.run_id == bindparam("run"))
_IN_STATE: Final = CheckpointRow.state == bindparam("in_state")
_DAMAGED: Final = CheckpointRow.damaged.is_not(None)
_DAMAGED_STEPS: Final = (
    select(CheckpointRow.step, CheckpointRow.attempt)
    .join(RunRow, RunRow.id == CheckpointRow.run_id)
    .where(RunRow.root == bindparam("root_name"), RunRow.name == bindparam("run_name"), _DAMAGED)
)
_STEP: Final = _CHECKPOINTS.where(CheckpointRow.step == bindparam("of_step"))
_RECENT: Final = (
    select(*(getattr(CheckpointRow, name) for name in RecentStep._fields[:-1]), _DAMAGED)
    .join(RunRow, RunRow.id == CheckpointRow.run_id)
    .where(RunRow.root == bindparam("root_name"), RunRow.name == bindparam("run_name"))
    .order_by(CheckpointRow.step.desc(), CheckpointRow.attempt.desc())
    .limit(bindparam("limit"))
)
_ALIAS_NAMES: Final = (
    select(AliasRow.step, AliasRow.attempt, AliasRow.alias)
    .where(
        AliasRow.run_id == bindparam("run"),
        AliasRow.step.between(bindparam("first"), bindparam("last")),
    )
    .order_by(AliasRow.alias)
)
_ALIASES: Final = (
    select(*(getattr(AliasRow, name) for name in Alias.model_fields))
    .where(AliasRow.run_id == bindparam("run"))
    .order_by(AliasRow.alias)
)


def find_run(connection: Connection, root: str, name: str) -> RunColumns | None:
    """Return a run; None: the catalog has no such run."""
    row = connection.execute(_RUN, {"root_name": root, "run_name": name}).first()
    return None if row is None else RunColumns._make(row)


def forks(connection: Connection, roots: Iterable[str], uri: str, limit: int) -> list[RunColumns]:
    """Return the runs that were forked from the run at `uri`, by root and name."""
    parent = text_entry(RunRow.lineage, "run", connection.dialect.name)
    query = _RUNS.where(RunRow.root.in_(list(roots)), parent == uri)
    page = query.order_by(RunRow.root, RunRow.name).limit(limit)
    return [RunColumns._make(row) for row in connection.execute(page)]


def runs_adopting(connection: Connection, roots: Iterable[str], folder: str) -> list[RunColumns]:
    """Return the runs with a step whose files are a folder, or directly in it; by root and name.

    Includes runs that import a single checkpoint of the folder.
    """
    here = (CheckpointRow.source == folder) | CheckpointRow.source.startswith(
        f"{folder}/", autoescape=True
    )
    owners = select(CheckpointRow.run_id).where(here)
    query = _RUNS.where(RunRow.root.in_(list(roots)), RunRow.id.in_(owners))
    page = query.order_by(RunRow.root, RunRow.name)
    return [RunColumns._make(row) for row in connection.execute(page)]


def run_at(connection: Connection, roots: Iterable[str], uri: str) -> RunColumns | None:
    """Return the run at a URI, in some roots; None: there is none."""
    query = _RUNS.where(RunRow.root.in_(list(roots)), RunRow.uri == uri).limit(1)
    row = connection.execute(query).first()
    return None if row is None else RunColumns._make(row)


def recent_steps(connection: Connection, root: str, name: str, limit: int) -> list[RecentStep]:
    """Return the last steps of a run, in any state, highest first."""
    parameters = {"root_name": root, "run_name": name, "limit": limit}
    return [RecentStep._make(row) for row in connection.execute(_RECENT, parameters)]


def runs(
    connection: Connection,
    roots: Iterable[str],
    *,
    after: tuple[str | int, ...],
    until: tuple[str | int, ...] = (),
    limit: int,
) -> list[RunColumns]:
    """Return the next runs, by root and name.

    Args:
        connection: Connection to the catalog.
        roots: Names of the roots to read.
        after: Root and name of the last run before this page; (): start with the first.
        until: Root and name of the last run to return; (): no bound.
        limit: Largest number of runs.
    """
    parameters = {"roots": list(roots), "limit": limit}
    parameters |= dict(zip(("after_root", "after_name"), after, strict=False))
    parameters |= dict(zip(("until_root", "until_name"), until, strict=False))
    rows = connection.execute(_run_page(bool(after), bool(until)), parameters)
    return [RunColumns._make(row) for row in rows.all()]


def checkpoints(
    connection: Connection,
    run: RunColumns,
    *,
    state: States,
    before: tuple[str | int, ...],
    limit: int,
) -> list[CheckpointColumns]:
    """Return the next checkpoints before a (step, attempt), highest first.

    Args:
        connection: Connection to the catalog.
        run: Run of the checkpoints.
        state: States to return.
        before: Last (step, attempt) of the page before; (): start with the highest.
        limit: Largest number of checkpoints.
    """
    parameters: dict[str, object] = {
        "run": run.id,
        "limit": limit,
        "in_state": _stored_state(state),
    }
    parameters |= dict(zip(("before_step", "before_attempt"), before, strict=False))
    rows = connection.execute(_checkpoint_page(state, bool(before)), parameters)
    return [CheckpointColumns._make(row) for row in rows.all()]


def search_runs(
    connection: Connection, roots: Iterable[str], search: Search, *, after: Key, limit: int
) -> list[tuple[RunColumns, Key]]:
    """Return the next runs of a search, each with its sort key.

    Args:
        connection: Connection to the catalog.
        roots: Names of the roots to search.
        search: Filter and order.
        after: Sort key of the last run that the client has; (): start with the first.
        limit: Largest number of runs.
    """
    # A filter's values are part of its query: only queries without a filter are kept.
    build = _search_page if search.filter is None else _search_page.__wrapped__
    dialect = connection.dialect.name
    width = len(RunColumns._fields)

    def page(which: _Runs, after: Key, limit: int) -> list[SearchedRun]:
        query = build(search, which, tuple(map(type, after)), dialect)
        parameters = {"roots": list(roots), "limit": limit}
        parameters |= {f"after_{n}": part for n, part in enumerate(after) if part is not None}
        rows = connection.execute(query, parameters).all()  # one by one takes twice as long
        return [(RunColumns._make(row[:width]), tuple(row[width:])) for row in rows]

    first = search.order[0].path if search.order else None
    if first is None or first.field not in METRIC_COLUMNS:
        return page("all", after, limit)
    # Runs with a value come in the order of an index; runs without one are another query.
    rows: list[SearchedRun] = []
    if not after or after[0] is not None:
        rows = page("with the metric", after, limit)
        after = ()
    if len(rows) < limit:
        rows += page("without it", after, limit - len(rows))
    return rows


_Runs = Literal["all", "with the metric", "without it"]
"""Runs of a query: all, or by whether they have a value of the metric that sorts them."""


@lru_cache(maxsize=128)  # to build a query takes longer than to run it
def _search_page(
    search: Search, which: _Runs, after: tuple[type, ...], dialect: str
) -> Select[Any]:
    """Build the query for a page of a search for runs.

    Its parameters are `roots`, `limit`, and `after_0` and so on: the parts of a sort key that have
    a value.

    Args:
        search: Filter and order.
        which: Runs of the query.
        after: Types of the parts of the sort key to start after; (): start with the first run.
        dialect: Name of the database's dialect.
    """
    entries = _RUNS.where(RunRow.root.in_(bindparam("roots", expanding=True)))
    searched = RUNS
    if which != "all":
        metric = search.order[0].path
        column = METRIC_COLUMNS[metric.field]
        has_value = and_(RunMetricRow.name == metric.key, column.is_not(None))
        if which == "with the metric":
            entries = entries.join(RunMetricRow, RunMetricRow.run_id == RunRow.id).where(has_value)
            searched = RUNS._replace(joined={metric: column})
        else:
            entries = entries.where(RunRow.id.not_in(select(RunMetricRow.run_id).where(has_value)))
            searched = RUNS._replace(joined={metric: cast(null(), Double())})
    start = tuple(
        None if kind is NoneType else typed_parameter(f"after_{n}", kind)
        for n, kind in enumerate(after)
    )
    limit: BindParameter[int] = bindparam("limit")
    return searched_page(entries, searched, search, after=start, limit=limit, dialect=dialect)


SearchedRun = tuple[RunColumns, Key]
"""Run of a search, and its sort key."""


def run_cells(
    connection: Connection, runs: Sequence[RunColumns], columns: Sequence[Path]
) -> list[list[RunColumn]]:
    """Return the values of some columns for each of some runs.

    Args:
        connection: Connection to the catalog.
        runs: Rows of the runs.
        columns: Members of the keyed fields of runs.
    """
    if not columns:
        return [[] for _ in runs]
    names = {path.key for path in columns if path.field in METRIC_COLUMNS}
    metrics = _run_metrics(connection, runs, names) if names else {}
    configs: dict[int, dict[str, float | str]] = {}
    if any(path.field == "config" for path in columns):
        configs = run_configs(connection, runs)
    by_column: list[list[RunColumn]] = []
    for path in columns:
        key, text = path.key or "", path.text
        if path.field == "labels":
            cells = [RunColumn(field=text, value=run.labels.get(key)) for run in runs]
        elif path.field == "config":
            cells = [_config_cell(text, key, configs.get(run.id, {})) for run in runs]
        else:
            of_run = metrics.get(key, {})
            is_best = path.field == "best"
            cells = [_metric_cell(text, of_run.get(run.id), run, is_best=is_best) for run in runs]
        by_column.append(cells)
    return [list(cells) for cells in zip(*by_column, strict=True)]


class MetricColumns(NamedTuple):
    """Columns of a run's metric that lists show."""

    last: float | None
    last_step: int
    best: float | None
    best_step: int | None
    better: Better | None


_METRICS: Final = select(
    RunMetricRow.run_id,
    RunMetricRow.name,
    *(getattr(RunMetricRow, field) for field in MetricColumns._fields),
).where(RunMetricRow.name.in_(bindparam("names", expanding=True)))

# A parameter for each of a hundred runs takes longer than the query: SQLite has the numbers in the
# query's text, PostgreSQL in one array, so that it has the text prepared.
_METRICS_OF_RUNS: Final = {
    "sqlite": _METRICS.where(
        RunMetricRow.run_id.in_(bindparam("runs", expanding=True, literal_execute=True))
    ),
    "postgresql": _METRICS.where(
        RunMetricRow.run_id == any_(bindparam("runs", type_=ARRAY(Integer)))
    ),
}


def _run_metrics(
    connection: Connection, runs: Sequence[RunColumns], names: Collection[str | None]
) -> dict[str, dict[int, MetricColumns]]:
    """Return the metrics of some runs by name and run."""
    metrics: dict[str, dict[int, MetricColumns]] = {}
    parameters = {"runs": [run.id for run in runs], "names": list(names)}
    for row in connection.execute(_METRICS_OF_RUNS[connection.dialect.name], parameters).all():
        metrics.setdefault(row[1], {})[row[0]] = MetricColumns._make(row[2:])
    return metrics


def _config_cell(text: str, key: str, config: Mapping[str, float | str]) -> RunColumn:
    is_cut = len(config) >= MAX_ENTRIES  # of exactly so many entries none may be left out
    return RunColumn(field=text, value=config.get(key), unknown=is_cut and key not in config)


def _metric_cell(
    text: str, metric: MetricColumns | None, run: RunColumns, *, is_best: bool
) -> RunColumn:
    if metric is None:
        return RunColumn(field=text, unknown=run.metrics_cut)
    if is_best:
        value = None if metric.best is None else plain_number(metric.best)
        return RunColumn(field=text, value=value, step=metric.best_step, better=metric.better)
    value = "nan" if metric.last is None else plain_number(metric.last)
    return RunColumn(field=text, value=value, step=metric.last_step, better=metric.better)


def run_rows(
    connection: Connection, names: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], RunColumns]:
    """Return runs by (root, name); those that the catalog does not have are left out."""
    if not names:
        return {}
    query = _RUNS.where(tuple_(RunRow.root, RunRow.name).in_(names))
    rows = map(RunColumns._make, connection.execute(query))
    return {(row.root, row.name): row for row in rows}


def metric_names(connection: Connection, roots: Iterable[str], part: str, limit: int) -> list[str]:
    """Return the names of metrics of runs in some roots that contain a text, in any case."""
    query = (
        select(RunMetricRow.name)
        .distinct()
        .join(RunRow, RunRow.id == RunMetricRow.run_id)
        .where(
            RunRow.root.in_(list(roots)),
            func.lower(RunMetricRow.name).contains(part.lower(), autoescape=True),
        )
        .order_by(RunMetricRow.name)
        .limit(limit)
    )
    return list(connection.scalars(query))


def entry_names(connection: Connection, roots: Iterable[str], field: str, runs: int) -> list[str]:
    """Return the names of labels, or of config entries, of the newest runs in some roots.

    Args:
        connection: Connection to the catalog.
        roots: Names of the roots.
        field: "labels" or "config".
        runs: Number of runs to read.
    """
    query = (
        select(getattr(RunRow, field))
        .where(RunRow.root.in_(list(roots)))
        .order_by(RunRow.id.desc())
        .limit(runs)
    )
    return sorted({name for entries in connection.scalars(query) for name in entries})


class MetricPoint(NamedTuple):
    """Value of a metric at a listed step; None: it is NaN.

    Attributes:
        created: Time of the save.
    """

    step: int
    created: datetime | None
    value: float | None


def metric_points(
    connection: Connection, run: RunColumns, name: str, limit: int
) -> list[MetricPoint]:
    """Return the values of a metric at the first `limit` listed steps that have it, by step."""
    dialect = connection.dialect.name
    query = (
        select(
            CheckpointRow.step,
            CheckpointRow.created,
            number_entry(CheckpointRow.metrics, name, dialect),
        )
        .where(
            CheckpointRow.run_id == run.id,
            CheckpointRow.state == CheckpointState.LISTED.value,
            text_entry(CheckpointRow.metrics, name, dialect).is_not(None),
        )
        .order_by(CheckpointRow.step)
        .limit(limit)
    )
    return [MetricPoint._make(row) for row in connection.execute(query)]


class RunMetric(NamedTuple):
    """Metric of a run; see `RunMetricRow`."""

    run_id: int
    name: str
    last: float | None
    last_step: int
    better: Better | None
    best: float | None
    best_step: int | None


def run_metrics(connection: Connection, runs: Sequence[RunColumns], limit: int) -> list[RunMetric]:
    """Return the metrics of some runs, by name; `limit`: largest number of rows."""
    query = (
        select(*(getattr(RunMetricRow, field) for field in RunMetric._fields))
        .where(RunMetricRow.run_id.in_([run.id for run in runs]))
        .order_by(RunMetricRow.name, RunMetricRow.run_id)
        .limit(limit)
    )
    return [RunMetric._make(row) for row in connection.execute(query)]


def run_configs(
    connection: Connection, runs: Sequence[RunColumns]
) -> dict[int, dict[str, float | str]]:
    """Return the configs of some runs by the ids of their rows."""
    query = select(RunRow.id, RunRow.config).where(RunRow.id.in_([run.id for run in runs]))
    return {row.id: row.config for row in connection.execute(query)}


def common_metrics(
    connection: Connection, runs: Sequence[RunColumns], limit: int
) -> list[tuple[str, bool]]:
    """Return the metrics that most of some runs have, and whether any of them has a best value."""
    number = func.count()
    query = (
        select(RunMetricRow.name, func.count(RunMetricRow.best))
        .where(RunMetricRow.run_id.in_([run.id for run in runs]))
        .group_by(RunMetricRow.name)
        .order_by(number.desc(), RunMetricRow.name)
        .limit(limit)
    )
    return [(name, best > 0) for name, best in connection.execute(query)]


def search_checkpoints(
    connection: Connection,
    run: RunColumns,
    search: Search,
    *,
    state: States,
    after: Key,
    limit: int,
) -> list[tuple[CheckpointColumns, Key]]:
    """Return the next checkpoints of a search, each with its sort key.

    Args:
        connection: Connection to the catalog.
        run: Run of the checkpoints.
        search: Filter and order.
        state: States of the checkpoints to return; each must also pass the filter.
        after: Sort key of the last checkpoint that the client has; (): start with the first.
        limit: Largest number of checkpoints.
    """
    entries = _CHECKPOINTS.where(*_conditions(state))
    dialect = connection.dialect.name
    page = searched_page(entries, CHECKPOINTS, search, after=after, limit=limit, dialect=dialect)
    parameters = {"run": run.id, "in_state": _stored_state(state)}
    width = len(CheckpointColumns._fields)
    return [
        (CheckpointColumns._make(row[:width]), tuple(row[width:]))
        for row in connection.execute(page, parameters)
    ]


def damaged_steps(connection: Connection, root: str, name: str) -> set[tuple[int, int]]:
    """Return the (step, attempt) of every damaged step of a run."""
    rows = connection.execute(_DAMAGED_STEPS, {"root_name": root, "run_name": name})
    return {(step, attempt) for step, attempt in rows}


def attempts(connection: Connection, run: RunColumns, step: int) -> list[CheckpointColumns]:
    """Return the checkpoints with a step number, one for each attempt at it."""
    rows = connection.execute(_STEP, {"run": run.id, "of_step": step})
    return [CheckpointColumns._make(row) for row in rows.all()]


def alias_names(
    connection: Connection, run: RunColumns, checkpoints: Sequence[CheckpointColumns]
) -> dict[tuple[int, int], list[str]]:
    """Return the aliases of some checkpoints of a run, sorted, by (step, attempt).

    Args:
        connection: Connection to the catalog.
        run: Run of the aliases.
        checkpoints: Checkpoints to read aliases for.
    """
    if not checkpoints:
        return {}
    steps = [checkpoint.step for checkpoint in checkpoints]
    first, last = min(steps), max(steps)
    named: dict[tuple[int, int], list[str]] = {}
    parameters = {"run": run.id, "first": first, "last": last}
    for step, attempt, alias in connection.execute(_ALIAS_NAMES, parameters):
        named.setdefault((step, attempt), []).append(alias)
    return named


@cache
def _run_page(after: bool, until: bool) -> Select[Any]:
    key = tuple_(RunRow.root, RunRow.name)
    page = _RUNS.where(RunRow.root.in_(bindparam("roots", expanding=True)))
    if after:
        page = page.where(key > tuple_(bindparam("after_root"), bindparam("after_name")))
    if until:
        page = page.where(key <= tuple_(bindparam("until_root"), bindparam("until_name")))
    return page.order_by(RunRow.root, RunRow.name).limit(bindparam("limit"))


_NEWEST_EVENT: Final = select(func.max(EventRow.id))


@cache
def _event_page(in_roots: bool, of_run: bool, of_kind: bool) -> Select[Any]:
    page = select(*event_columns).where(EventRow.id > bindparam("after"))
    if in_roots:
        page = page.where(EventRow.root.in_(bindparam("roots", expanding=True)))
    if of_run:
        page = page.where(EventRow.run == bindparam("of_run"))
    if of_kind:
        page = page.where(EventRow.kind == bindparam("of_kind"))
    return page.order_by(EventRow.id).limit(bindparam("limit"))


def _conditions(state: States) -> list[ColumnElement[bool]]:
    """Return the SQL conditions of a state; damaged steps are stored as `listed`."""
    match state:
        case "all":
            return []
        case CheckpointState.LISTED:
            return [_IN_STATE, CheckpointRow.damaged.is_(None)]
        case CheckpointState.DAMAGED:
            return [_IN_STATE, _DAMAGED]
        case _:
            return [_IN_STATE]


def _stored_state(state: States) -> str:
    is_listed = state in (AVAILABLE, CheckpointState.DAMAGED)
    return CheckpointState.LISTED.value if is_listed else str(state)


@cache
def _checkpoint_page(state: States, before: bool) -> Select[Any]:
    page = _CHECKPOINTS.where(*_conditions(state))
    if before:
        key = tuple_(CheckpointRow.step, CheckpointRow.attempt)
        page = page.where(key < tuple_(bindparam("before_step"), bindparam("before_attempt")))
    order = (CheckpointRow.step.desc(), CheckpointRow.attempt.desc())
    return page.order_by(*order).limit(bindparam("limit"))


def aliases(connection: Connection, run: RunColumns) -> list[Alias]:
    """Return the aliases of a run, by name."""
    rows = connection.execute(_ALIASES, {"run": run.id})
    return [Alias(**row._asdict()) for row in rows]


def newest_event(connection: Connection) -> int:
    """Return the id of the newest event; 0: there is none."""
    return connection.scalar(_NEWEST_EVENT) or 0


def events(
    connection: Connection,
    *,
    after: int = 0,
    roots: Iterable[str] | None = None,
    run: str | None = None,
    kind: str | None = None,
    limit: int = 1000,
) -> list[EventColumns]:
    """Return the next events, in the order in which they were noticed.

    Args:
        connection: Connection to the catalog.
        after: Id of the last event that the client has; 0: start with the first.
        roots: Return only events of these roots; None: of all.
        run: Return only events of runs of this name; "": of the roots themselves; None: of all.
        kind: Return only events of this kind; None: of all.
        limit: Largest number of events.
    """
    conditions = {
        "after": after,
        "limit": limit,
        "roots": None if roots is None else list(roots),
        "of_run": run,
        "of_kind": kind,
    }
    parameters = {name: value for name, value in conditions.items() if value is not None}
    page = _event_page(roots is not None, run is not None, kind is not None)
    return [EventColumns._make(row) for row in connection.execute(page, parameters)]


def last_events(connection: Connection, root: str, kind: str, *, limit: int) -> list[EventColumns]:
    """Return the last events of a kind in a root, newest first."""
    page = select(*event_columns).where(EventRow.root == root, EventRow.kind == kind)
    rows = connection.execute(page.order_by(EventRow.id.desc()).limit(limit))
    return [EventColumns._make(row) for row in rows]


def checkpoint(
    run: RunColumns, row: CheckpointColumns, named: Mapping[tuple[int, int], list[str]]
) -> Checkpoint:
    """Return a checkpoint in the form of the API.

    Args:
        run: Run of the checkpoint.
        row: Row of the checkpoint.
        named: Aliases by (step, attempt).
    """
    return Checkpoint(
        root=run.root,
        run=run.name,
        step=row.step,
        attempt=row.attempt,
        state=state_of(row.state, row.damaged),
        uri=row.source or f"{run.uri}/{step_dir(row.attempt, row.step)}",
        created=row.created,
        bytes=row.nbytes,
        leaves=row.leaves,
        items=row.items,
        iterators=row.iterators,
        manifest_digest=row.manifest_digest,
        model_type=row.model_type,
        aliases=named.get((row.step, row.attempt), []),
        labels=row.labels,
        metrics={name: float(value) for name, value in row.metrics.items()},
        better=row.better,
        verified=row.verified,
        damaged=None if row.damaged is None else Damage.model_validate(row.damaged),
        deletion=None if row.deletion is None else Deletion.model_validate(row.deletion),
    )


def run(row: RunColumns, cells: Sequence[RunColumn] = ()) -> Run:
    """Return a run in the form of the API, with the values of the columns that were asked for."""
    lost = [LostRecord.model_validate(record) for record in row.lost_records]
    return Run(
        root=row.root,
        name=row.name,
        uri=row.uri,
        created=row.created,
        labels=row.labels,
        lineage=None if row.lineage is None else Lineage.model_validate(row.lineage),
        latest_step=row.latest_step,
        checkpoint_count=row.checkpoint_count,
        damaged_count=row.damaged_count,
        bytes=row.nbytes,
        problems=[*row.problems, *(problem(row.root, row.name, record) for record in lost)],
        lost_records=lost,
        columns=list(cells),
        metrics_cut=row.metrics_cut,
    )
