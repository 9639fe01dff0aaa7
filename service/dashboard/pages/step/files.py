"""A step's files, and what was made of it: `/ui/{root}/{run}/steps/{step}/files`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber

MOST_ROWS: Final = 200

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)


@router.get("/ui/{root}/{run}/steps/{step}/files")
def files_page(
    request: Request,
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
) -> HTMLResponse:
    """Files of one step with their checksums, and exports of it to download."""
    found = actions.open_step(plane, root, run, step)
    objects = found.contents.objects
    return page(
        request,
        "step/files.html",
        checkpoint=actions.get_checkpoint(plane, root, run, step, refresh=False),
        artifacts=actions.list_artifacts(plane, root, run, step),
        files=objects[:MOST_ROWS],
        file_count=len(objects),
        nbytes=sum(one.size for one in objects),
        most=MOST_ROWS,
    )
