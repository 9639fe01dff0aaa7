"""Form routes of aliases: promote, delete."""

from http import HTTPStatus
from typing import Final

from fastapi import BackgroundTasks, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import (
    aliases,
)
from cairn.service.actions import aliases as aliases_actions
from cairn.service.dashboard import addresses
from cairn.service.dashboard.forms.fields import Form, FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import RunRequestDependency, StepRequestDependency
from cairn.service.dependencies import AliasName
from cairn.service.errors import AliasMovedError, InvalidRequestError
from cairn.service.schemas import (
    Alias,
    PromoteRequest,
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
        moved = aliases_actions.promote(
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


@router.post("/ui/{root}/{run}/aliases/{alias}/delete")
def delete_alias_form(
    caller: Operator, request: RunRequestDependency, alias: AliasName, form: FormDependency
) -> Response:
    """Delete an alias if it has not moved since the page showed it."""
    sequence = form.number("sequence")
    if sequence is None:
        raise InvalidRequestError("The form lacks the sequence of the alias. Reload it.")
    aliases_actions.delete_alias(request.plane, caller, *request.names, alias, expect=sequence)
    return redirect(addresses.run(*request.names, "aliases"))
