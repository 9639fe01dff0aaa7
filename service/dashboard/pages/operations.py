"""Jobs, their workers and artifacts: `/operations`, `/artifacts`."""

from typing import Annotated, Final

from fastapi import Path, Query, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator, Reader, ServerAdministrator
from cairn.service.actions import aliases, artifacts, workers
from cairn.service.actions import operations as operations_actions
from cairn.service.dashboard import snippets
from cairn.service.dashboard.form_fields import redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dashboard.requests import OperationRequestDependency
from cairn.service.dependencies import PageToken, PlaneDependency
from cairn.service.filters.search import EVERYTHING
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.routes import operations
from cairn.service.schemas import ARTIFACT_PATTERN, OPERATION_PATTERN, OperationState

ROWS: Final = 30

router: Final = page_router(PermittedRoute)

State = Annotated[OperationState | None, Query()]
OperationId = Annotated[str, Path(pattern=OPERATION_PATTERN)]
ArtifactId = Annotated[str, Path(pattern=ARTIFACT_PATTERN)]


@router.get("/operations")
def operations_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    state: Annotated[str, Query(max_length=16)] = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show all jobs, newest first, and the workers that execute them."""
    operation_state = OperationState(state) if state in list(OperationState) else None
    search = EVERYTHING
    if operation_state is not None:
        search = search.equal(state=operation_state.value)
    listed = operations.page_of_operations(plane, caller, search, ROWS, page_token)
    return page(
        request,
        "operations/operations.html",
        operations=listed.operations,
        next_page_token=listed.next_page_token,
        state=operation_state,
        states=list(OperationState),
        workers=workers.list_workers(plane, caller),
    )


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
