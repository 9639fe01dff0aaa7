"""Form route that hands a dead worker's jobs over."""

from typing import Annotated, Final

from fastapi import Path, Response

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import workers
from cairn.service.dashboard.forms.fields import redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dependencies import PlaneDependency

router: Final = page_router()


@router.post("/workers/{worker}/take-over")
def take_over_form(
    caller: ServerAdministrator,
    worker: Annotated[str, Path(max_length=128)],
    plane: PlaneDependency,
) -> Response:
    """Hand the unfinished jobs of a dead worker over to other workers."""
    workers.take_over_worker(plane, caller, worker)
    return redirect("/operations")
