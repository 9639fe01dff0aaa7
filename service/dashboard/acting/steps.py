"""What forms on a step's page ask for: promote, note, export, fork, roll back, verify, delete."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, BackgroundTasks, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dashboard import addresses
from cairn.service.dashboard.forms import Form, FormDependency, body_of
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.errors import AliasMovedError, InvalidRequestError
from cairn.service.http import Seen, body_etag
from cairn.service.schemas import (
    GRACE_SECONDS,
    Alias,
    AnnotateRequest,
    ConvertRequest,
    Operation,
    PromoteRequest,
    RestoreMode,
    RestoreRequest,
)

router: Final = APIRouter(
    prefix="/ui/{root}/{run}/steps/{step}",
    include_in_schema=False,
    default_response_class=HTMLResponse,
    route_class=CatalogPage,
)


@router.post("/promote")
def promote_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
    background: BackgroundTasks,
) -> HTMLResponse:
    """Point an alias at the step, if it is where the page showed it."""
    body = body_of(PromoteRequest, alias=form.text("alias"), reason=form.text("reason"))
    try:
        moved = actions.promote(
            plane,
            caller,
            root,
            run,
            step,
            alias=body.alias,
            reason=body.reason,
            expect=seen_sequence(form, body.alias),
            later=background.add_task,
        )
    except AliasMovedError as exc:
        current = (exc.extra or {}).get("current")
        return page(
            request,
            "step/conflict.html",
            status=HTTPStatus.PRECONDITION_FAILED,
            here=addresses.step(root, run, step),
            root=root,
            name=run,
            step=step,
            asked=body,
            current=None if current is None else Alias.model_validate(current),
        )
    answer = page(
        request,
        "step/promoted.html",
        moved=moved,
        root=root,
        name=run,
        checkpoint=actions.get_checkpoint(plane, root, run, step, refresh=False),
        aliases=actions.list_aliases(plane, root, run, refresh=False),
    )
    answer.background = background
    return answer


def seen_sequence(form: Form, alias: str) -> int | None:
    """At which sequence number the page showed an alias; None: it showed none of that name."""
    for one in form.texts("seen"):
        name, _, number = one.partition("=")
        if name == alias and number.isascii() and number.isdigit():
            return int(number)
    return None


@router.post("/notes")
def notes_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Set a label or a metric of the step, or remove it."""
    name, text = form.text("name"), form.text("value")
    if form.text("kind") == "metric":
        wanted = body_of(AnnotateRequest, metrics={name: form.decimal("value")})
    else:
        wanted = body_of(AnnotateRequest, labels={name: text or None})
    changed = actions.annotate_checkpoint(
        plane,
        caller,
        root,
        run,
        step,
        labels=wanted.labels,
        metrics=wanted.metrics,
        better={},
        seen=Seen(None),  # one entry is set: whatever the others are, nobody's is overwritten
    )
    return page(request, "step/notes.html", checkpoint=changed)


@router.post("/convert")
def convert_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Start an export of the step."""
    wanted = body_of(
        ConvertRequest,
        format=form.text("format") or "huggingface",
        dtype=form.text("dtype") or None,
        max_shard_size=form.text("max_shard_size") or "5GB",
        lora=form.text("lora") or "merge",
        allow_nonfinite=form.checked("allow_nonfinite"),
        check_logits=form.checked("check_logits"),
    )
    started = actions.convert_checkpoint(
        plane, caller, root, run, step, wanted, idempotency_key=None
    )
    return _card(request, started)


@router.post("/fork")
def fork_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Start a new run from the step."""
    wanted = body_of(RestoreRequest, mode=RestoreMode.FORK, run=form.text("run"))
    started = actions.restore_checkpoint(
        plane, caller, root, run, step, wanted, seen=None, idempotency_key=None
    )
    return _card(request, started)


@router.post("/rollback")
def rollback_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Set later steps of the run aside, unless more were saved than the page showed."""
    wanted = body_of(RestoreRequest, mode=RestoreMode.ROLLBACK, strand=form.texts("strand"))
    known = actions.get_run(plane, root, run, refresh=True)
    if known.latest_step != form.number("latest"):
        raise InvalidRequestError(
            f"{run}: expected step {form.text('latest')} as the latest, as the page showed, found "
            f"{known.latest_step}. Reload the page to see what would be set aside."
        )
    seen = Seen(frozenset({body_etag(known)}))
    started = actions.restore_checkpoint(
        plane, caller, root, run, step, wanted, seen=seen, idempotency_key=None
    )
    return _card(request, started)


@router.post("/verify")
def verify_step_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
) -> HTMLResponse:
    """Start to read every byte of the step."""
    started = actions.verify_checkpoint(plane, caller, root, run, step, idempotency_key=None)
    return _card(request, started)


@router.post("/delete")
def delete_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> Response:
    """Move the step to the trash, and show it there."""
    actions.delete_checkpoint(
        plane,
        caller,
        root,
        run,
        step,
        attempt=form.number("attempt"),
        reason=form.text("reason"),
        grace=GRACE_SECONDS,
    )
    return _anew(root, run, step)


@router.post("/undelete")
def undelete_form(
    request: Request,
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    form: FormDependency,
) -> Response:
    """Take the deletion of the step back, and show it listed."""
    actions.undelete_checkpoint(plane, caller, root, run, step, form.number("attempt"))
    return _anew(root, run, step)


def _card(request: Request, operation: Operation) -> HTMLResponse:
    return page(request, "operations/card.html", operation=operation)


def _anew(root: str, run: str, step: int) -> Response:
    headers = {"HX-Redirect": addresses.step(root, run, step)}
    return Response(status_code=HTTPStatus.OK, headers=headers)
