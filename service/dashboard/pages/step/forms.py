"""Forms of a step's page: promote, note, delete, export, go back, verify."""

from http import HTTPStatus
from typing import Final

from fastapi import BackgroundTasks, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import aliases, checkpoints, convert, restore, runs, verify
from cairn.service.dashboard import addresses
from cairn.service.dashboard.form_fields import Form, FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.errors import AliasMovedError, InvalidRequestError
from cairn.service.http.entity_tags import body_etag
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    GRACE_SECONDS,
    Alias,
    AnnotateRequest,
    ConvertRequest,
    PromoteRequest,
    RestoreMode,
    RestoreRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/steps/{step}/promote")
def promote_form(
    caller: Operator,
    request: StepRequestDependency,
    form: FormDependency,
    background: BackgroundTasks,
) -> HTMLResponse:
    """Point an alias at the step, if neither has changed since the page showed them."""
    body = body_of(PromoteRequest, alias=form.text("alias"), reason=form.text("reason"))
    try:
        moved = aliases.promote(
            request.plane,
            caller,
            *request.names,
            alias=body.alias,
            reason=body.reason,
            expect=seen_sequence(form, body.alias),
            attempt=form.number("attempt"),
            later=background.add_task,
        )
    except AliasMovedError as exc:
        current = (exc.extra or {}).get("current")
        return request.render(
            "step/conflict.html",
            status=HTTPStatus.PRECONDITION_FAILED,
            here=addresses.step(*request.names),
            root=request.root,
            name=request.run,
            step=request.step,
            asked=body,
            attempt=form.number("attempt"),
            current=None if current is None else Alias.model_validate(current),
        )
    answer = request.render(
        "step/promoted.html",
        moved=moved,
        root=request.root,
        name=request.run,
        checkpoint=request.checkpoint(),
        aliases=aliases.list_aliases(request.plane, request.root, request.run, refresh=False),
    )
    answer.background = background
    return answer


def seen_sequence(form: Form, alias: str) -> int | None:
    """Return the sequence number at which the page showed an alias; None if it did not show it."""
    for entry in form.texts("seen"):
        name, _, number = entry.partition("=")
        if name == alias and number.isascii() and number.isdigit():
            return int(number)
    return None


@router.post("/ui/{root}/{run}/steps/{step}/notes")
def notes_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Set a label or a metric of the step, or remove it."""
    name, text = form.text("name"), form.text("value")
    if form.text("kind") == "metric":
        body = body_of(AnnotateRequest, metrics={name: form.decimal("value")})
    else:
        body = body_of(AnnotateRequest, labels={name: text or None})
    changed = checkpoints.annotate_checkpoint(
        request.plane,
        caller,
        *request.names,
        labels=body.labels,
        metrics=body.metrics,
        better={},
        seen=Seen(None),  # only one entry is set, so no concurrent change of others is overwritten
        attempt=form.number("attempt"),
    )
    return request.render("step/notes.html", checkpoint=changed)


@router.post("/ui/{root}/{run}/steps/{step}/delete")
def delete_form(caller: Operator, request: StepRequestDependency, form: FormDependency) -> Response:
    """Move the step to the trash, and show it there."""
    checkpoints.delete_checkpoint(
        request.plane,
        caller,
        *request.names,
        attempt=form.number("attempt"),
        reason=form.text("reason"),
        grace=GRACE_SECONDS,
    )
    return redirect(addresses.step(*request.names))


@router.post("/ui/{root}/{run}/steps/{step}/undelete")
def undelete_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> Response:
    """Undelete the step, and show its page again."""
    checkpoints.undelete_checkpoint(request.plane, caller, *request.names, form.number("attempt"))
    return redirect(addresses.step(*request.names))


@router.post("/ui/{root}/{run}/steps/{step}/convert")
def convert_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start an export of the step."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        ConvertRequest,
        format=form.text("format") or "huggingface",
        dtype=form.text("dtype") or None,
        max_shard_size=form.text("max_shard_size") or "5GB",
        lora=form.text("lora") or "merge",
        allow_nonfinite=form.checked("allow_nonfinite"),
        check_logits=form.checked("check_logits"),
        despite_damage=form.text("despite_damage") or None,
    )
    started = convert.convert_checkpoint(
        request.plane, caller, *request.names, body, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/steps/{step}/fork")
def fork_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start a new run from the step."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        RestoreRequest,
        mode=RestoreMode.FORK,
        run=form.text("run"),
        despite_damage=form.text("despite_damage") or None,
    )
    started = restore.restore_checkpoint(
        request.plane, caller, *request.names, body, seen=None, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/steps/{step}/rollback")
def rollback_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Supersede later steps of the run, unless a step was saved since the page showed the run."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        RestoreRequest,
        mode=RestoreMode.ROLLBACK,
        strand=form.texts("strand"),
        despite_damage=form.text("despite_damage") or None,
    )
    current = runs.get_run(request.plane, request.root, request.run, refresh=True)
    if current.latest_step != form.number("latest"):
        raise InvalidRequestError(
            f"The latest step is {current.latest_step} now, no longer {form.text('latest')}. "
            "Reload the page to see what would be superseded."
        )
    seen = Seen(frozenset({body_etag(current)}))
    started = restore.restore_checkpoint(
        request.plane, caller, *request.names, body, seen=seen, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/steps/{step}/verify")
def verify_step_form(caller: Operator, request: StepRequestDependency) -> HTMLResponse:
    """Start to verify the step."""
    started = verify.verify_checkpoint(request.plane, caller, *request.names, idempotency_key=None)
    return request.render("operations/card.html", operation=started)
