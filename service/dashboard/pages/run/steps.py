"""Steps, metric curves and labels of a run: `/ui/{root}/{run}`."""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from fastapi import Query
from fastapi.responses import HTMLResponse, JSONResponse

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import activity, failures, runs, verify
from cairn.service.actions.plane import ControlPlane
from cairn.service.dashboard.charts.timeline import timeline
from cairn.service.dashboard.damage import damage_job, newest_sound
from cairn.service.dashboard.form_fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import HEADERS
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.dependencies import Filter, OrderBy, PageToken
from cairn.service.filters.expressions import quote
from cairn.service.filters.fields import CHECKPOINT_FIELDS
from cairn.service.filters.search import Search
from cairn.service.http.preconditions import Seen
from cairn.service.routes.checkpoints import page_of_checkpoints
from cairn.service.schemas import (
    AVAILABLE,
    AnnotateRunRequest,
    Checkpoint,
    CheckpointState,
    States,
    VerifyRunRequest,
)

ROWS: Final = 40
MARKS: Final = 150
DAMAGED: Final = 3
"""Largest number of damaged steps that the page names at its top."""

COLUMNS: Final = 6
CURVES: Final = 12
POINTS: Final = 1000
_MAX_READ: Final = 20_000

router: Final = page_router()

StateFilter = Annotated[States, Query(alias="state")]


@router.get("/ui/{root}/{run}")
def run_page(
    caller: Reader,
    request: RunRequestDependency,
    state: StateFilter = "all",
    filter: Filter = "",
    order_by: OrderBy = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show the steps of a run, and the curves of its metrics."""
    search = Search.parse(filter, order_by, CHECKPOINT_FIELDS)
    listed = page_of_checkpoints(
        request.plane, *request.names, state, ROWS, page_token, search=search
    )
    last = page_of_checkpoints(request.plane, *request.names, "all", MARKS, None).checkpoints
    run = runs.get_run(request.plane, *request.names, refresh=False)
    damaged = []
    if run.damaged_count:
        wrong = CheckpointState.DAMAGED
        damaged = page_of_checkpoints(
            request.plane, *request.names, wrong, DAMAGED, None
        ).checkpoints
    names = metric_names([*listed.checkpoints, *last])
    better = {
        name: mode for checkpoint in reversed(last) for name, mode in checkpoint.better.items()
    }
    return request.render(
        "run/steps.html",
        run=run,
        activity=activity.run_activity(request.plane, [run])[0],
        failures=failures.run_failures(request.plane, [run])[0],
        damaged=[(checkpoint, damage_job(request, caller, checkpoint)) for checkpoint in damaged],
        sound=newest_sound(request) if damaged else None,
        checkpoints=listed.checkpoints,
        next_page_token=listed.next_page_token,
        timeline=timeline(last),
        columns=[(name, f"metrics.{quote(name)}") for name in names[:COLUMNS]],
        curves=names[:CURVES],
        better=better,
        states=list(CheckpointState),
        asked={"filter": filter, "order_by": order_by, "state": state},
    )


@router.get("/ui/{root}/{run}/curves")
def curves(caller: Reader, request: RunRequestDependency) -> JSONResponse:
    """Return the metrics of listed steps and the steps of aliases, as JSON for the chart."""
    steps = sorted(_listed(request.plane, *request.names), key=lambda checkpoint: checkpoint.step)
    names = metric_names(reversed(steps))
    shown = sample_steps(steps, POINTS)
    series = {}
    for name in names[:CURVES]:
        values = [checkpoint.metrics.get(name, math.nan) for checkpoint in shown]
        series[name] = [value if math.isfinite(value) else None for value in values]
    aliases = [[checkpoint.step, name] for checkpoint in steps for name in checkpoint.aliases]
    drawn = {
        "steps": [checkpoint.step for checkpoint in shown],
        "series": series,
        "aliases": aliases,
    }
    return JSONResponse(drawn, headers=HEADERS)


def metric_names(checkpoints: Any) -> list[str]:
    """Return the names of metrics, sorted by the number of steps that have them, then by name."""
    counted: dict[str, int] = {}
    for checkpoint in checkpoints:
        for name in checkpoint.metrics:
            counted[name] = counted.get(name, 0) + 1
    return sorted(counted, key=lambda name: (-counted[name], name))


def sample_steps(steps: Sequence[Checkpoint], most: int) -> list[Checkpoint]:
    """Choose about `most` steps, evenly; always the first, the last and those with aliases."""
    if len(steps) <= most:
        return list(steps)
    apart = math.ceil(len(steps) / most)
    last = len(steps) - 1
    return [step for at, step in enumerate(steps) if at % apart == 0 or at == last or step.aliases]


def _listed(plane: ControlPlane, root: str, run: str) -> Iterator[Checkpoint]:
    token, read = None, 0
    while read < _MAX_READ:
        listed = page_of_checkpoints(plane, root, run, AVAILABLE, 1000, token)
        yield from listed.checkpoints
        read += len(listed.checkpoints)
        token = listed.next_page_token
        if token is None:
            return


@router.post("/ui/{root}/{run}/labels")
def labels_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Set a label of the run, or remove it."""
    body = body_of(AnnotateRunRequest, labels={form.text("name"): form.text("value") or None})
    changed = runs.annotate_run_labels(
        request.plane,
        caller,
        *request.names,
        body.labels,
        seen=Seen(None),  # only one label is set, so no concurrent change of others is overwritten
    )
    return request.render("run/labels.html", run=changed)


@router.post("/ui/{root}/{run}/verify")
def verify_run_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start to verify the run's records, and those listed steps that the form's `steps` names."""
    body = body_of(VerifyRunRequest, steps=form.text("steps") or "all")
    started = verify.verify_run(
        request.plane, caller, *request.names, steps=body.steps, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)
