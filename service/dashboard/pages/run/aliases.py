"""Where a run's aliases point, and pointed: `/ui/{root}/{run}/aliases`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import AliasName, PlaneDependency, RootName, RunName

AT_ONCE: Final = 10
"""Histories that are read with the page; others when they are opened."""

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)


@router.get("/ui/{root}/{run}/aliases")
def aliases_page(
    request: Request, caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """Aliases of one run, and who moved them why."""
    found = actions.list_aliases(plane, root, run, refresh=True)
    histories = {
        one.alias: actions.alias_history(plane, root, run, one.alias) for one in found[:AT_ONCE]
    }
    return page(
        request,
        "run/aliases.html",
        run=actions.get_run(plane, root, run, refresh=False),
        aliases=found,
        histories=histories,
    )


@router.get("/ui/{root}/{run}/aliases/{alias}")
def alias_part(
    request: Request,
    caller: Reader,
    root: RootName,
    run: RunName,
    alias: AliasName,
    plane: PlaneDependency,
) -> HTMLResponse:
    """The history of one alias."""
    history = actions.alias_history(plane, root, run, alias)
    return page(request, "run/history.html", history=history, root=root, name=run)
