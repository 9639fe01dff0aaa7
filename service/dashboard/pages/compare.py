"""Comparison of two steps: `/compare` (form) and `/ui/{root}/{run}/steps/{step}/compare`."""

from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from cairn.service.access.callers import Caller, Scope
from cairn.service.access.permission import Reader
from cairn.service.actions import aliases, checkpoints, diffs
from cairn.service.actions.diffs import DiffSelection, DiffSide
from cairn.service.actions.plane import ControlPlane
from cairn.service.dashboard import addresses
from cairn.service.dashboard.charts.changes import bars_of, layers_of
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dashboard.requests import StepRequest, StepRequestDependency
from cairn.service.dependencies import MAX_STEP, PlaneDependency
from cairn.service.http.value_streams import ValueRead
from cairn.service.routes.runs import page_of_runs
from cairn.service.schemas import ALIAS_PATTERN, PLAIN_PATTERN, RUN_PATTERN
from cairn.storage.errors import StepChangedError

ROWS: Final = 150
AT_ONCE_BYTES: Final = 256 << 20
"""Largest total of differing leaves whose values the page compares without a click."""
_RUNS: Final = 200

router: Final = page_router()
store_router: Final = page_router(StorePage)

Name = Annotated[str, Query(pattern=rf"^$|{RUN_PATTERN}", max_length=128)]
Chosen = Annotated[str, Query(pattern=rf"^([0-9]{{1,15}})?$|{ALIAS_PATTERN}", max_length=128)]
Step = Annotated[int, Query(ge=0, le=MAX_STEP)]
Text = Annotated[str, Query(max_length=2000, pattern=PLAIN_PATTERN)]


@router.get("/compare")
def compare_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    root: Name = "",
    run: Name = "",
    step: Chosen = "",
    other_root: Name = "",
    other_run: Name = "",
    other: Chosen = "",
    pick: Annotated[list[int] | None, Query()] = None,
) -> Response:
    """Ask for two steps, each by number or alias, and redirect to their comparison.

    Three and more that were picked in the list of a run have a page of their own.
    """
    picked = sorted(set(pick or ()))
    if len(picked) > 2 and root and run:
        steps = [("step", f"{root}/{run}/{number}") for number in picked]
        return RedirectResponse(f"/compare/steps?{urlencode(steps)}", HTTPStatus.SEE_OTHER)
    if len(picked) == 2:
        step, other = str(picked[0]), str(picked[1])
    if root and run and step and other:
        number = _number(plane, caller, root, run, step)
        that_root, that_run = other_root or root, other_run or run
        that = _number(plane, caller, that_root, that_run, other)
        target = addresses.comparison((root, run, number), (that_root, that_run, that))
        return RedirectResponse(target, HTTPStatus.SEE_OTHER)
    roots = caller.visible(plane.roots)
    visible = page_of_runs(plane, roots, _RUNS, None).runs
    first = next(iter(roots), "")
    return page(
        request,
        "compare/choose.html",
        runs=sorted({other.name for other in visible}),
        roots=list(roots),
        picked=pick is not None,
        asked={
            "root": root or first,
            "run": run,
            "step": step or (str(picked[0]) if picked else ""),
            "other_root": other_root or root or first,
            "other_run": other_run or run,
            "other": other,
        },
    )


@store_router.get("/ui/{root}/{run}/steps/{step}/compare")
def comparison_page(
    caller: Reader,
    request: StepRequestDependency,
    other: Step,
    other_root: Name = "",
    other_run: Name = "",
    prefix: Text = "",
) -> HTMLResponse:
    """Show the differences of two steps by their digests, without reading values.

    Without `other_root` or `other_run`, the other step is of the same root or run.
    """
    this, that = _sides(request, caller, (other_root, other_run, other))
    selection = DiffSelection(item=None, prefix=prefix, values=False, after=0, limit=ROWS)
    diff, more = diffs.diff_steps(this, that, selection)
    item = _measured_item(this)
    changed = [
        leaf for leaf in diff.differences if leaf.change == "values" and item in (None, leaf.item)
    ]
    nbytes = sum(leaf.this.bytes for leaf in changed if leaf.this is not None)
    kept = {"other_root": that.name.root, "other_run": that.name.run, "other": str(that.name.step)}
    named = [
        ("step", f"{side.name.root}/{side.name.run}/{side.name.step}") for side in (this, that)
    ]
    return request.render(
        "compare/comparison.html",
        diff=diff,
        more=more,
        rows=ROWS,
        prefix=prefix,
        metrics=_metrics(this, that),
        comparable=len(changed),
        at_once=nbytes <= AT_ONCE_BYTES,
        nbytes=nbytes,
        values_url=addresses.with_query(
            addresses.step(*request.names, "compare/values"), kept, prefix=prefix
        ),
        kept=kept,
        meta_url=f"/compare/steps/meta?{urlencode(named)}",
    )


@store_router.get("/ui/{root}/{run}/steps/{step}/compare/values")
def values_part(
    caller: Reader,
    request: StepRequestDependency,
    other: Step,
    other_root: Name = "",
    other_run: Name = "",
    prefix: Text = "",
) -> Response:
    """Show how much the differing leaves changed. This reads their values."""
    this, that = _sides(request, caller, (other_root, other_run, other))
    most = diffs.MAX_COMPARED_BYTES
    selection = DiffSelection(
        _measured_item(this), prefix, values=True, after=0, limit=ROWS, most_bytes=most
    )

    def answer() -> Response:
        diff, more = diffs.diff_steps(this, that, selection)
        return request.render(
            "compare/bars.html",
            layers=layers_of(diff.differences),
            bars=bars_of(diff.differences),
            more=more,
        )

    return ValueRead(answer, request.http, request.root, diffs.MAX_COMPARED_MEMORY_BYTES)


def _number(plane: ControlPlane, caller: Caller, root: str, run: str, chosen: str) -> int:
    if chosen.isdecimal():
        return int(chosen)
    caller.require(Scope.READ, root)
    alias = aliases.get_alias(plane, root, run, chosen, refresh=True)
    listed = checkpoints.get_checkpoint(plane, root, run, alias.step, refresh=False)
    if listed.attempt != alias.attempt:
        raise StepChangedError(
            "the step was saved anew after the alias was moved to it",
            path=f"{plane.place(root, run)}@{chosen}",
            expected=f"step {alias.step} of attempt {alias.attempt}, to which the alias was moved",
            found=f"that of attempt {listed.attempt}",
            next_step=f"Promote the new one, or compare it by its number, {alias.step}.",
        )
    return alias.step


def _measured_item(side: DiffSide) -> str | None:
    """Return the item whose changes are measured: the model; None for all, if the step has none.

    The size of a change means little for an optimizer's state.
    """
    return "model" if "model" in side.manifest.items else None


def _sides(
    request: StepRequest, caller: Caller, other: tuple[str, str, int]
) -> tuple[DiffSide, DiffSide]:
    other_root, other_run, number = other
    caller.require(Scope.READ, other_root or request.root)
    return (
        DiffSide.open(request.plane, *request.names),
        DiffSide.open(request.plane, other_root or request.root, other_run or request.run, number),
    )


def _metrics(this: DiffSide, that: DiffSide) -> list[dict[str, Any]]:
    """Return a row for each metric of either step, by name.

    A row's `good` is True if the other step's value is better, False if it is worse. It is None if
    the values are equal, one is missing, or the better direction is unknown.
    """
    metrics, other_metrics = this.annotation.metrics, that.annotation.metrics
    better = {**that.annotation.better, **this.annotation.better}
    rows = []
    for name in sorted({*metrics, *other_metrics}):
        left, right = metrics.get(name), other_metrics.get(name)
        change = None if left is None or right is None else right - left
        good = None
        if change and name in better:
            good = (change < 0) == (better[name] == "min")
        rows.append({"name": name, "this": left, "other": right, "change": change, "good": good})
    return rows
