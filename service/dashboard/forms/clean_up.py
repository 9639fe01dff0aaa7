"""Form routes that clean a run up: retention, garbage. Conversion of the form to a policy."""

from dataclasses import asdict, dataclass
from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import clean_up
from cairn.service.dashboard.forms.fields import Form, FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import (
    ApplyRetentionRequest,
    RetentionPolicy,
)

router: Final = page_router()


_DAY = 86_400.0


@dataclass(frozen=True)
class PolicyFields:
    """Fields of the policy form as typed. An empty field means no rule."""

    keep_last: str = ""
    keep_every: str = ""
    keep_days: str = ""
    best: str = ""
    mode: str = "min"
    best_count: str = ""
    labelled: str = ""

    @classmethod
    def of(cls, form: Form) -> "PolicyFields":
        """Read the fields from a form."""
        return cls(**{name: form.text(name) for name in cls.__dataclass_fields__})

    def __bool__(self) -> bool:
        """Return True if at least one field is filled in."""
        return any((self.keep_last, self.keep_every, self.keep_days, self.best, self.labelled))


def policy_of(fields: PolicyFields) -> RetentionPolicy:
    """Build the policy of the form's fields.

    Raises:
        InvalidRequestError: All fields are empty, or a field is invalid.
    """
    if not fields:
        raise InvalidRequestError("Fill in at least one rule of what to keep.")
    form = Form({name: [value] for name, value in asdict(fields).items()})
    days = form.decimal("keep_days")
    count = form.number("best_count")
    best = {"metric": fields.best, "mode": fields.mode, "count": 1 if count is None else count}
    return body_of(
        RetentionPolicy,
        keep_last=form.number("keep_last"),
        keep_every=form.number("keep_every"),
        keep_within_seconds=None if days is None else days * _DAY,
        keep_best=[best] if fields.best else [],
        keep_labelled=[label.strip() for label in fields.labelled.split(",") if label.strip()],
    )


@router.post("/ui/{root}/{run}/retention")
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


@router.post("/ui/{root}/{run}/gc")
def collect_garbage_form(caller: Operator, request: RunRequestDependency) -> HTMLResponse:
    """Start to remove the garbage of the run."""
    started = clean_up.collect_garbage(
        request.plane, caller, *request.names, dry_run=False, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)
