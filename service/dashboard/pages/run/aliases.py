"""Aliases of a run and their histories: `/ui/{root}/{run}/aliases`."""

from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import listing, promotion
from cairn.service.dashboard.asked import OfRun
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dependencies import AliasName

AT_ONCE: Final = 10
"""Number of histories that are read with the page; the others load when they are opened."""

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)


@router.get("/ui/{root}/{run}/aliases")
def aliases_page(caller: Reader, asked: OfRun) -> HTMLResponse:
    """Show the aliases of a run, and who moved them and why."""
    found = listing.list_aliases(asked.plane, *asked.names, refresh=True)
    histories = {
        one.alias: promotion.alias_history(asked.plane, *asked.names, one.alias)
        for one in found[:AT_ONCE]
    }
    return asked.page(
        "run/aliases.html",
        run=listing.get_run(asked.plane, *asked.names, refresh=False),
        aliases=found,
        histories=histories,
    )


@router.get("/ui/{root}/{run}/aliases/{alias}")
def alias_part(caller: Reader, asked: OfRun, alias: AliasName) -> HTMLResponse:
    """Show the history of an alias."""
    history = promotion.alias_history(asked.plane, *asked.names, alias)
    return asked.page("run/history.html", history=history, root=asked.root, name=asked.run)
