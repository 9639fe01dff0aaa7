"""Aliases of a run and their histories: `/ui/{root}/{run}/aliases`."""

from typing import Final

from fastapi import Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import aliases as aliases_actions
from cairn.service.actions import runs
from cairn.service.dashboard import addresses
from cairn.service.dashboard.form_fields import FormDependency, redirect
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.dependencies import AliasName
from cairn.service.errors import InvalidRequestError

AT_ONCE: Final = 10
"""Number of histories that are read with the page; each other one loads when it is opened."""

router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/aliases")
def aliases_page(caller: Reader, request: RunRequestDependency) -> HTMLResponse:
    """Show the aliases of a run, and who moved them and why."""
    aliases = aliases_actions.list_aliases(request.plane, *request.names, refresh=True)
    histories = {
        alias.alias: aliases_actions.alias_history(request.plane, *request.names, alias.alias)
        for alias in aliases[:AT_ONCE]
    }
    return request.render(
        "run/aliases.html",
        run=runs.get_run(request.plane, *request.names, refresh=False),
        aliases=aliases,
        histories=histories,
    )


@router.get("/ui/{root}/{run}/aliases/{alias}")
def alias_part(caller: Reader, request: RunRequestDependency, alias: AliasName) -> HTMLResponse:
    """Show the history of an alias."""
    history = aliases_actions.alias_history(request.plane, *request.names, alias)
    return request.render("run/history.html", history=history, root=request.root, name=request.run)


@router.post("/ui/{root}/{run}/aliases/{alias}/delete")
def delete_alias_form(
    caller: Operator, request: RunRequestDependency, alias: AliasName, form: FormDependency
) -> Response:
    """Delete an alias if it has not moved since the page showed it."""
    sequence = form.number("sequence")
    if sequence is None:
        raise InvalidRequestError("The form lacks the sequence of the alias. Reload it.")
    aliases_actions.delete_alias(request.plane, caller, *request.names, alias, expect=sequence)
    return redirect(addresses.run(*request.names, "aliases"))
