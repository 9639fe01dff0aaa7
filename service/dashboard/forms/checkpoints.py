"""Form routes of a step: set labels and metrics, delete, undelete."""

from typing import Final

from fastapi import Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import checkpoints
from cairn.service.actions import checkpoints as checkpoints_actions
from cairn.service.dashboard import addresses
from cairn.service.dashboard.forms.fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    GRACE_SECONDS,
    AnnotateRequest,
)

router: Final = page_router()


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
    checkpoints_actions.delete_checkpoint(
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
    checkpoints_actions.undelete_checkpoint(
        request.plane, caller, *request.names, form.number("attempt")
    )
    return redirect(addresses.step(*request.names))
