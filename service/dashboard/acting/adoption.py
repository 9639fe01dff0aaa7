"""What the form that adopts a folder asks for."""

from json import loads
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dashboard.forms import Form, FormDependency, body_of, invalid
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
        model=_model(form),
    )
    started = actions.adopt_folder(plane, caller, root, wanted, idempotency_key=None)
    return page(request, "operations/card.html", operation=started)


def _model(form: Form) -> dict[str, Any] | None:
    """The model that the form describes; None: none.

    Raises:
        InvalidRequestError: There is one text without the other, or one is no JSON object.
    """
    given = [name for name in ("config", "map") if form.text(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = "map" if given == ["config"] else "config"
        raise invalid(missing, f"expected one, as there is a {given[0]}: they go together")
    return {name: _json(form, name) for name in given}


def _json(form: Form, name: str) -> dict[str, Any]:
    try:
        found = loads(form.text(name))
    except (ValueError, RecursionError) as exc:
        raise invalid(name, f"expected a JSON object, found none: {exc}") from exc
    if not isinstance(found, dict):
        raise invalid(name, f"expected a JSON object, found {type(found).__name__}")
    return found
