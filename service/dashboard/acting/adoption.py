"""What the form that adopts a folder asks for."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dashboard.forms import FormDependency, body_of
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.schemas import AdoptRequest

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.post("/adopt/{root}")
def adopt_form(
    request: Request,
    caller: Operator,
    root: RootName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Start to list the checkpoints of a folder in a run of the root."""
    wanted = body_of(
        AdoptRequest,
        folder=form.text("folder"),
        run=form.text("run"),
        step=form.number("step"),
    )
    started = actions.adopt_folder(plane, caller, root, wanted, idempotency_key=None)
    return page(request, "operations/card.html", operation=started)
