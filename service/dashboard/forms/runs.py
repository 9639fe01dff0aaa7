"""Form route of a run's labels."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import runs
from cairn.service.dashboard.forms.fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    AnnotateRunRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/labels")
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
