"""Comparison of runs: `/compare/runs`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field

from cairn.service.access.permission import Reader
from cairn.service.actions import run_comparison, tensors
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.run_comparison import ComparedRuns, RunName
from cairn.service.actions.step_meta import read_meta
from cairn.service.dashboard import addresses
from cairn.service.dashboard.charts.curves import MAX_CURVES, MAX_POINTS, sample_extremes, smooth
from cairn.service.dashboard.charts.differences import EntryTable, entry_table, flatten
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.rendering import HEADERS, page
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.dependencies import PlaneDependency
from cairn.service.errors import ServiceError
from cairn.service.schemas import PLAIN_PATTERN, Run
from cairn.storage.errors import StorageError

MAX_NAMES: Final = 200
"""Largest number of runs in the address of the page; the first `MAX_CURVES` are shown."""

router: Final = page_router()
store_router: Final = page_router(StorePage)

Names = Annotated[
    list[Annotated[str, Field(max_length=300, pattern=PLAIN_PATTERN)]] | None,
    Query(alias="run", max_length=MAX_NAMES),
]
Metric = Annotated[str, Query(max_length=256, pattern=PLAIN_PATTERN)]
Weight = Annotated[float, Query(ge=0, le=0.99, allow_inf_nan=False)]


@router.get("/compare/runs")
def compare_runs_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    run: Names = None,
    metric: Metric = "",
    smoothing: Weight = 0.0,
    x: Literal["step", "time"] = "step",
    log: bool = False,
    equal: bool = False,
) -> HTMLResponse:
    """Show curves of a metric of several runs, and what differs between them."""
    names = list(dict.fromkeys(map(_split, run or ())))
    shown = names[:MAX_CURVES]
    readable = [name for name in shown if name[0] in caller.visible(plane.roots)]
    compared = run_comparison.compare_runs(plane, readable)
    metrics = compared.metrics
    # A metric that none of the runs has is shown as such: an address says what it is about.
    chosen = metric or next(iter(metrics), "")
    runs = [entry.run for entry in compared.runs]
    kept = {"metric": metric, "smoothing": smoothing or "", "x": x if x != "step" else ""}
    return page(
        request,
        "compare/runs.html",
        runs=runs,
        missing=[*compared.missing, *(name for name in shown if name not in readable)],
        left_out=len(names) - len(shown),
        most=MAX_CURVES,
        tables=_tables(compared, is_equal_shown=equal),
        metrics=metrics if not chosen or chosen in metrics else [chosen, *metrics],
        better=compared.better,
        is_cut=compared.is_cut,
        most_points=MAX_POINTS,
        asked={"metric": chosen, "smoothing": smoothing, "x": x, "log": log, "equal": equal},
        address=_address("/compare/runs", runs, **kept, log="true" if log else ""),
        meta_address=_address("/compare/runs/meta", runs, equal="true" if equal else ""),
        several_roots=len({entry.root for entry in runs}) > 1,
    )


@router.get("/ui/{root}/{run}/curve")
def curve(
    caller: Reader,
    request: RunRequestDependency,
    metric: Metric = "",
    smoothing: Weight = 0.0,
) -> JSONResponse:
    """Return a metric of a run for a chart: at most 2,000 points, as JSON.

    The values are smoothed over all points before the points to draw are chosen.
    """
    whole = run_comparison.run_curve(request.plane, *request.names, metric)
    values = [value for _, _, value in whole.points]
    smoothed = smooth(values, smoothing)
    chosen = sample_extremes(values, MAX_POINTS)
    drawn = {
        "steps": [whole.points[at][0] for at in chosen],
        "seconds": [whole.points[at][1] for at in chosen],
        "values": [values[at] for at in chosen],
        "smoothed": [smoothed[at] for at in chosen],
        "count": len(values),
        "not_finite": whole.not_finite,
        "is_cut": whole.is_cut,
    }
    return JSONResponse(drawn, headers=HEADERS)


@store_router.get("/compare/runs/meta")
def meta_part(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    run: Names = None,
    equal: bool = False,
) -> HTMLResponse:
    """Show what differs in the JSON that was saved with the latest step of each run."""
    names = list(dict.fromkeys(map(_split, run or ())))[:MAX_CURVES]
    readable = [name for name in names if name[0] in caller.visible(plane.roots)]
    runs = run_comparison.runs_named(plane, readable)
    sides, notes = [], []
    for one in runs:
        side, note = _meta(plane, one)
        sides.append(side)
        notes += [f"{one.name}: {note}"] if note else []
    table = entry_table("Saved metadata (meta)", sides, is_equal_shown=equal)
    heads = [(one.name, addresses.run(one.root, one.name)) for one in runs]
    return page(request, "compare/meta.html", table=table, heads=heads, notes=notes)


def _meta(plane: ControlPlane, run: Run) -> tuple[Mapping[str, Any], str]:
    """Return the entries of the `meta` of a run's latest step, and why there are not all."""
    if run.latest_step is None:
        return {}, ""
    try:
        step = tensors.open_step(plane, run.root, run.name, run.latest_step)
        meta = read_meta(step)
    except (StorageError, ServiceError) as error:
        return {}, str(error)
    if meta.is_too_large:
        return {}, f"{meta.nbytes:,} bytes are too many to show"
    return flatten(meta.without_config(step))


def _split(name: str) -> RunName:
    root, _, run = name.partition("/")
    return root, run


def _tables(compared: ComparedRuns, *, is_equal_shown: bool) -> list[EntryTable]:
    runs = compared.runs
    sides: list[tuple[str, list[Mapping[str, Any]]]] = [
        ("Best value", [entry.best for entry in runs]),
        ("Last value", [entry.last for entry in runs]),
        ("Labels", [entry.run.labels for entry in runs]),
        ("Configuration", [entry.config for entry in runs]),
    ]
    return [
        entry_table(
            title,
            entries,
            is_equal_shown=is_equal_shown,
            better=compared.better if title.endswith("value") else None,
        )
        for title, entries in sides
    ]


def _address(path: str, runs: Sequence[Run], **query: object) -> str:
    names = [("run", f"{run.root}/{run.name}") for run in runs]
    return f"{path}?{urlencode([*names, *((name, text) for name, text in query.items() if text)])}"
