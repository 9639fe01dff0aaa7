"""Import of checkpoints that plain Orbax saved: `/adopt`."""

from json import loads
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import adopt
from cairn.service.dashboard.form_fields import Form, FormDependency, body_of, invalid
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.schemas import AdoptRequest

router: Final = page_router()


@router.get("/adopt")
def adopt_page(request: Request, caller: Reader, plane: PlaneDependency) -> HTMLResponse:
    """Show the form that asks for a folder and for the run to import it as."""
    return page(request, "runs/adopt.html", roots=caller.visible(plane.roots))


@router.post("/adopt/{root}")
def adopt_form(
    request: Request,
    caller: Operator,
    root: RootName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Start to import the checkpoints of a folder as a run of the root."""
    body = body_of(
        AdoptRequest,
        folder=form.text("folder"),
        run=form.text("run"),
        step=form.number("step"),
        model=_model(form),
    )
    started = adopt.adopt_folder(plane, caller, root, body, idempotency_key=None)
    return page(request, "operations/card.html", operation=started)


def _model(form: Form) -> dict[str, Any] | None:
    """Read the model that the form describes, as `config` and `map`; None if both are empty.

    Raises:
        InvalidRequestError: Only one of the two is filled in, or one is not a JSON object.
    """
    names = [name for name in ("config", "map") if form.text(name)]
    if not names:
        return None
    if len(names) == 1:
        missing = "map" if names == ["config"] else "config"
        raise invalid(missing, f"fill it in too: a {names[0]} alone is not enough")
    return {name: _json(form, name) for name in names}


def _json(form: Form, name: str) -> dict[str, Any]:
    try:
        document = loads(form.text(name))
    except (ValueError, RecursionError) as exc:
        raise invalid(name, f"this is not JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise invalid(name, "this is JSON, but no object: begin with '{'")
    return document
