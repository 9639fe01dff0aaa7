"""Disk usage of a run, retention and garbage: `/ui/{root}/{run}/storage`."""

from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import clean_up, runs
from cairn.service.actions import usage as usage_actions
from cairn.service.dashboard.charts.growth import growth
from cairn.service.dashboard.form_fields import Form, FormDependency, body_of
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import PLAIN_PATTERN, ApplyRetentionRequest, RetentionPolicy

ROWS: Final = 100

_DAY_SECONDS: Final = 86_400.0
_RULES: Final = ("keep_last", "keep_every", "keep_days", "best", "labelled")
"""Fields of the form of which each is a rule; an empty one is none."""

router: Final = page_router(StorePage)

Field = Annotated[str, Query(max_length=300, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/storage")
def storage_page(
    caller: Reader,
    request: RunRequestDependency,
    keep_last: Field = "",
    keep_every: Field = "",
    keep_days: Field = "",
    best: Field = "",
    mode: Field = "min",
    best_count: Field = "",
    labelled: Field = "",
) -> HTMLResponse:
    """Show the disk usage of a run, and the bytes that a retention policy would free."""
    fields = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_days": keep_days,
        "best": best,
        "mode": mode,
        "best_count": best_count,
        "labelled": labelled,
    }
    plan = None
    if any(fields[rule] for rule in _RULES):
        policy = policy_of(Form({name: [text] for name, text in fields.items()}))
        plan = clean_up.plan_retention(request.plane, *request.names, policy)
    usage = usage_actions.get_usage(request.plane, *request.names)
    return request.render(
        "run/storage.html",
        run=runs.get_run(request.plane, *request.names, refresh=False),
        usage=usage,
        steps=list(reversed(usage.steps))[:ROWS],
        growth=growth(usage.steps),
        asked=fields,
        plan=plan,
    )


def policy_of(form: Form) -> RetentionPolicy:
    """Build the policy that a form describes.

    Raises:
        InvalidRequestError: All fields are empty, or a field is invalid.
    """
    if not any(form.text(rule) for rule in _RULES):
        raise InvalidRequestError("Fill in at least one rule of what to keep.")
    days = form.decimal("keep_days")
    count = form.number("best_count")
    best = {
        "metric": form.text("best"),
        "mode": form.text("mode"),
        "count": 1 if count is None else count,
    }
    labels = [label.strip() for label in form.text("labelled").split(",")]
    return body_of(
        RetentionPolicy,
        keep_last=form.number("keep_last"),
        keep_every=form.number("keep_every"),
        keep_within_seconds=None if days is None else days * _DAY_SECONDS,
        keep_best=[best] if best["metric"] else [],
        keep_labelled=[label for label in labels if label],
    )


@router.post("/ui/{root}/{run}/retention")
def retention_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start to delete the steps that a policy does not keep."""
    body = body_of(ApplyRetentionRequest, policy=policy_of(form), dry_run=False)
    started = clean_up.apply_retention(
        request.plane, caller, *request.names, body, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/gc")
def collect_garbage_form(caller: Operator, request: RunRequestDependency) -> HTMLResponse:
    """Start to remove the garbage of the run."""
    started = clean_up.collect_garbage(
        request.plane, caller, *request.names, dry_run=False, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)
