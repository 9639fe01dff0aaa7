"""What forms on a run's pages ask for: labels, aliases, retention, garbage, its writer."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Administrator, Operator
from cairn.service.dashboard import addresses
from cairn.service.dashboard.acting.policies import PolicyFields, policy_of
from cairn.service.dashboard.forms import FormDependency, body_of, invalid
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import AliasName, PlaneDependency, RootName, RunName
from cairn.service.errors import InvalidRequestError
from cairn.service.http import Seen
from cairn.service.schemas import AnnotateRunRequest, ApplyRetentionRequest, TakeOverRequest

router: Final = APIRouter(
    prefix="/ui/{root}/{run}",
    include_in_schema=False,
    default_response_class=HTMLResponse,
    route_class=CatalogPage,
)


@router.post("/labels")
def labels_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Set a label of the run, or remove it."""
    wanted = body_of(AnnotateRunRequest, labels={form.text("name"): form.text("value") or None})
    changed = actions.annotate_run_labels(
        plane,
        caller,
        root,
        run,
        wanted.labels,
        seen=Seen(None),  # one label is set: whatever the others are, nobody's is overwritten
    )
    return page(request, "run/labels.html", run=changed)


@router.post("/aliases/{alias}/delete")
def delete_alias_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    alias: AliasName,
    plane: PlaneDependency,
    form: FormDependency,
) -> Response:
    """Delete an alias that is where the page showed it."""
    sequence = form.number("sequence")
    if sequence is None:
        raise InvalidRequestError("sequence: expected that of the alias as last seen, found none")
    actions.delete_alias(plane, caller, root, run, alias, expect=sequence)
    headers = {"HX-Redirect": addresses.run(root, run, "aliases")}
    return Response(status_code=HTTPStatus.OK, headers=headers)


@router.post("/retention")
def retention_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Start to delete what a policy does not keep."""
    policy = policy_of(PolicyFields.of(form))
    wanted = body_of(ApplyRetentionRequest, policy=policy, dry_run=False)
    started = actions.apply_retention(plane, caller, root, run, wanted, idempotency_key=None)
    return page(request, "operations/card.html", operation=started)


@router.post("/gc")
def collect_garbage_form(
    request: Request, caller: Operator, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """Start to remove what the run needs no more."""
    started = actions.collect_garbage(plane, caller, root, run, dry_run=False, idempotency_key=None)
    return page(request, "operations/card.html", operation=started)


@router.post("/verify")
def verify_run_form(
    request: Request, caller: Operator, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """Start to read every byte of the run."""
    started = actions.verify_run(plane, caller, root, run, steps="all", idempotency_key=None)
    return page(request, "operations/card.html", operation=started)


@router.post("/take-over")
def take_over_form(
    request: Request,
    caller: Administrator,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Take the run from the writer that the page showed, if that was confirmed."""
    if not form.checked("sure"):
        raise invalid("sure", "expected it to be ticked, found that it is not")
    wanted = body_of(TakeOverRequest, attempt=form.number("attempt"), reason=form.text("reason"))
    taken = actions.take_run_over(plane, caller, root, run, wanted)
    return page(request, "run/taken_over.html", root=root, name=run, taken=taken)
