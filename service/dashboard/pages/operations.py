"""Jobs, their workers and artifacts: `/operations`, `/artifacts`."""

from typing import Annotated, ClassVar, Final

from fastapi import Path, Query, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator, Reader, ServerAdministrator
from cairn.service.actions import aliases, artifacts, workers
from cairn.service.actions import operations as operations_actions
from cairn.service.actions.operations import UNFINISHED
from cairn.service.dashboard import snippets
from cairn.service.dashboard.form_fields import redirect
from cairn.service.dashboard.page_routes import CatalogPage, page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dashboard.requests import OperationRequestDependency
from cairn.service.dependencies import PageToken, PlaneDependency
from cairn.service.filters.expressions import quote
from cairn.service.filters.fields import OPERATION_FIELDS
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.routes import operations
from cairn.service.schemas import (
    ARTIFACT_PATTERN,
    OPERATION_PATTERN,
    PLAIN_PATTERN,
    Operation,
    OperationKind,
    OperationState,
)

ROWS: Final = 30
CARDS: Final = 20
"""Largest number of operations that are shown as cards."""

ENDED: Final = frozenset(state.value for state in OperationState if state.final)
KINDS: Final[tuple[tuple[str, str, tuple[OperationKind, ...]], ...]] = (
    ("", "All", ()),
    ("exports", "Exports", (OperationKind.CONVERT, OperationKind.GATHER)),
    ("forks", "Forks and rollbacks", (OperationKind.RESTORE,)),
    ("verifications", "Verifications", (OperationKind.VERIFY,)),
    ("clean-up", "Clean-up", (OperationKind.RETENTION, OperationKind.GC)),
    ("imports", "Imports", (OperationKind.ADOPT,)),
)
"""Kinds of operations that the page tells apart: in its address, on the page, and in the API."""


class OperationsPage(CatalogPage):
    """Route of the list of operations, whose filters are searches."""

    searches: ClassVar[frozenset[str]] = frozenset({"kind", "state", "run", "caller", "since"})


router: Final = page_router(PermittedRoute)

Typed = Annotated[str, Query(max_length=128, pattern=PLAIN_PATTERN)]
StartedBy = Annotated[str, Query(alias="caller", max_length=128, pattern=PLAIN_PATTERN)]
OperationId = Annotated[str, Path(pattern=OPERATION_PATTERN)]
ArtifactId = Annotated[str, Path(pattern=ARTIFACT_PATTERN)]


def operations_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    kind: Typed = "",
    state: Typed = "",
    run: Typed = "",
    started_by: StartedBy = "",
    since: Typed = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show all jobs, newest first, those that run now as cards, and the workers."""
    filter = operation_filter(kind, state, run, started_by, since)
    search = Search.parse(filter, "", OPERATION_FIELDS)
    listed = operations.page_of_operations(plane, caller, search, ROWS, page_token)
    current: list[Operation] = []
    if page_token is None and state not in ENDED:
        running = EVERYTHING.among(UNFINISHED)
        if search.filter is not None:
            running = running.among(search.filter)
        current, _ = operations_actions.list_operations(
            plane, caller, running, after=(), limit=CARDS
        )
    return page(
        request,
        "operations/operations.html",
        operations=listed.operations,
        current=current,
        next_page_token=listed.next_page_token,
        several_roots=len(caller.visible(plane.roots)) > 1,
        asked={"kind": kind, "state": state, "run": run, "caller": started_by, "since": since},
        kinds=[(name, title) for name, title, _ in KINDS],
        states=[state.value for state in OperationState],
        is_searched=bool(filter) or page_token is not None,
        workers=workers.list_workers(plane, caller),
    )


router.add_api_route("/operations", operations_page, route_class_override=OperationsPage)


def operation_filter(kind: str, state: str, run: str, started_by: str, since: str) -> str:
    """Translate the search form's fields into a filter of the API."""
    kinds = next((kinds for name, _, kinds in KINDS if name == kind), ())
    parts = [
        f"({' OR '.join(f'kind = {each.value}' for each in kinds)})" if kinds else "",
        f"state = {state}" if state in list(OperationState) else "",
        f"run:{quote(run.strip())}" if run.strip() else "",
        f"caller:{quote(started_by.strip())}" if started_by.strip() else "",
        f"created >= {quote(f'{since}T00:00:00Z')}" if since else "",
    ]
    return " AND ".join(part for part in parts if part)


@router.get("/operations/{operation}")
def operation_page(caller: Reader, request: OperationRequestDependency) -> HTMLResponse:
    """Show a job: its progress, request and result."""
    operation = operations_actions.get_operation(request.plane, caller, request.operation)
    return request.render("operations/operation.html", operation=operation)


@router.get("/operations/{operation}/card")
def operation_card(caller: Reader, request: OperationRequestDependency) -> HTMLResponse:
    """Show a job as a card of the list."""
    operation = operations_actions.get_operation(request.plane, caller, request.operation)
    return request.render("operations/card.html", operation=operation)


@router.post("/operations/{operation}/cancel")
def cancel_form(caller: Operator, request: OperationRequestDependency) -> HTMLResponse:
    """Cancel a job."""
    operation = operations_actions.cancel_operation(request.plane, caller, request.operation)
    return request.render("operations/card.html", operation=operation)


@router.post("/operations/{operation}/resume")
def resume_form(caller: Operator, request: OperationRequestDependency) -> HTMLResponse:
    """Run a failed or cancelled job again."""
    operation = operations_actions.resume_operation(request.plane, caller, request.operation)
    return request.render("operations/card.html", operation=operation)


@router.get("/artifacts/{artifact}")
def artifact_page(
    request: Request, caller: Reader, artifact: ArtifactId, plane: PlaneDependency
) -> HTMLResponse:
    """Show an artifact: its files with checksums and downloads, and how to load them."""
    description = artifacts.get_artifact(plane, caller, artifact)
    step = (description.step, description.attempt)
    listed = aliases.list_aliases(plane, description.root, description.run, refresh=False)
    alias = next((entry.alias for entry in listed if (entry.step, entry.attempt) == step), None)
    origin = str(request.base_url).rstrip("/")
    return page(
        request,
        "operations/artifact.html",
        artifact=description,
        snippets=snippets,
        alias=alias,
        needs_key=plane.settings.auth == "keys",
        permanent=snippets.permanent_address(description, origin, alias),
        origin=origin,
    )


@router.post("/workers/{worker}/take-over")
def take_over_form(
    caller: ServerAdministrator,
    worker: Annotated[str, Path(max_length=128)],
    plane: PlaneDependency,
) -> Response:
    """Hand the unfinished jobs of a dead worker over to other workers."""
    workers.take_over_worker(plane, caller, worker)
    return redirect("/operations")
