"""Form routes of a run's pages: labels, aliases, retention, garbage, verification, writer."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Administrator, Operator
from cairn.service.actions import aliases as aliases_actions
from cairn.service.actions import clean_up, runs, verify, writers
from cairn.service.dashboard import addresses
from cairn.service.dashboard.forms.fields import FormDependency, body_of, invalid
from cairn.service.dashboard.forms.policies import PolicyFields, policy_of
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.dependencies import AliasName
from cairn.service.errors import InvalidRequestError
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    AnnotateRunRequest,
    ApplyRetentionRequest,
    TakeOverRequest,
    VerifyRunRequest,
)

router: Final = APIRouter(
    prefix="/ui/{root}/{run}",
    include_in_schema=False,
    default_response_class=HTMLResponse,
    route_class=CatalogPage,
)


@router.post("/labels")
def labels_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Set a label of the run, or remove it."""
    body = body_of(AnnotateRunRequest, labels={form.text("name"): form.text("value") or None})
    changed = runs.annotate_run_labels(
        request.plane,
        caller,
        *request.names,
        body.labels,
        seen=Seen(None),  # only one label is set, so no concurrent change of others is overwritten
    )
    return request.render("run/labels.html", run=changed)


@router.post("/aliases/{alias}/delete")
def delete_alias_form(
    caller: Operator, request: RunRequestDependency, alias: AliasName, form: FormDependency
) -> Response:
    """Delete an alias if it has not moved since the page showed it."""
    sequence = form.number("sequence")
    if sequence is None:
        raise InvalidRequestError("sequence: expected that of the alias as last seen, found none")
    aliases_actions.delete_alias(request.plane, caller, *request.names, alias, expect=sequence)
    headers = {"HX-Redirect": addresses.run(*request.names, "aliases")}
    return Response(status_code=HTTPStatus.OK, headers=headers)


@router.post("/retention")
def retention_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start to delete the steps that a policy does not keep."""
    policy = policy_of(PolicyFields.of(form))
    body = body_of(ApplyRetentionRequest, policy=policy, dry_run=False)
    started = clean_up.apply_retention(
        request.plane, caller, *request.names, body, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/gc")
def collect_garbage_form(caller: Operator, request: RunRequestDependency) -> HTMLResponse:
    """Start to remove the garbage of the run."""
    started = clean_up.collect_garbage(
        request.plane, caller, *request.names, dry_run=False, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/verify")
def verify_run_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start to verify the run: all of its steps, or those that the form names."""
    body = body_of(VerifyRunRequest, steps=form.text("steps") or "all")
    started = verify.verify_run(
        request.plane, caller, *request.names, steps=body.steps, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/take-over")
def take_over_form(
    caller: Administrator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Take the run over from the writer that the page showed, if the box is ticked."""
    if not form.checked("sure"):
        raise invalid("sure", "expected it to be ticked, found that it is not")
    body = body_of(TakeOverRequest, attempt=form.number("attempt"), reason=form.text("reason"))
    taken = writers.take_run_over(request.plane, caller, *request.names, body)
    return request.render("run/taken_over.html", root=request.root, name=request.run, taken=taken)
