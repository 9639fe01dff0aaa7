"""Files of a step, and its exports: `/ui/{root}/{run}/steps/{step}/files`."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import artifacts
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.storage.runs.step_files import is_kept

MAX_ROWS: Final = 200

router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/steps/{step}/files")
def files_page(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show the files of a step with their checksums, and its exports to download."""
    step = request.open_step()
    objects = step.contents.objects
    checkpoint = request.checkpoint()
    # The owner's folder of an imported step lacks what the run keeps of it.
    is_imported = step.manifest.source is not None
    kept = [record for record in objects[:MAX_ROWS] if is_imported and is_kept(record.name)]
    stored = [record for record in objects[:MAX_ROWS] if record not in kept]
    return request.render(
        "step/files.html",
        checkpoint=checkpoint,
        artifacts=artifacts.list_artifacts(request.plane, *request.names),
        places=[(checkpoint.uri, stored), *([(str(step.uri), kept)] if kept else [])],
        file_count=len(objects),
        nbytes=sum(record.size for record in objects),
        most=MAX_ROWS,
    )
