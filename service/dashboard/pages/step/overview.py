"""Overview of a step, with its actions: `/ui/{root}/{run}/steps/{step}`."""

from datetime import timedelta
from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.callers import Caller
from cairn.service.access.permission import Reader
from cairn.service.actions import aliases as aliases_actions
from cairn.service.actions import convert, gates, operations, runs
from cairn.service.actions.plane import ControlPlane
from cairn.service.dashboard import snippets
from cairn.service.dashboard.damage import damage_job, newest_sound
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.errors import NotReadyError
from cairn.service.filters.expressions import Comparison, Path
from cairn.service.filters.search import EVERYTHING
from cairn.service.glossary import trainer_label
from cairn.service.schemas import Checkpoint, Operation
from cairn.storage.errors import SourceRefusedError
from cairn.storage.store.disk.confinement import source_folder

SHOWN: Final = 8
CLOCKS_APART: Final = timedelta(days=1)
"""Largest difference between the clocks of a training job and of the server."""

router: Final = page_router()
store_router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/steps/{step}")
def step_page(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show a step: its metrics, how to load it, its exports and its actions."""
    checkpoint = request.checkpoint()
    aliases = aliases_actions.list_aliases(request.plane, request.root, request.run, refresh=False)
    later = [alias for alias in aliases if alias.step > request.step]
    # The files of an imported step are in another folder, which the settings must permit.
    refused = None
    try:
        source_folder(request.plane.place(request.root, request.run), checkpoint.uri)
    except SourceRefusedError as exc:
        refused = exc.next_step
    return request.render(
        "step/overview.html",
        checkpoint=checkpoint,
        sound=newest_sound(request) if checkpoint.damaged else None,
        damage_job=damage_job(request, caller, checkpoint),
        aliases=aliases,
        stranded=later,
        run=runs.get_run(request.plane, request.root, request.run, refresh=False),
        operations=operations_of(request.plane, caller, checkpoint),
        refused=refused,
        snippets=snippets,
        is_gated=bool(gates.gates_of(request.plane, *request.names[:2], None, max_age=None)),
    )


@store_router.get("/ui/{root}/{run}/steps/{step}/gates")
def gates_part(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show which gates would refuse the step, and why, before somebody promotes it."""
    return request.render(
        "step/gates.html", blocked=gates.blocked_aliases(request.plane, *request.names)
    )


@store_router.get("/ui/{root}/{run}/steps/{step}/export")
def export_part(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show how a step without a model config is exported, which only its manifest tells."""
    checkpoint = request.checkpoint()
    stored_by = convert.stored_by(request.plane, *request.names)
    return request.render(
        "step/export.html",
        checkpoint=checkpoint,
        stored_by=stored_by,
        trainer=stored_by and trainer_label(stored_by.trainer),
        command=snippets.convert_command(
            checkpoint, needs_config=stored_by is not None and not stored_by.has_settings
        ),
        gather=snippets.gather_command(checkpoint),
    )


def operations_of(plane: ControlPlane, caller: Caller, checkpoint: Checkpoint) -> list[Operation]:
    """Return the newest operations of a step; none if the server runs without jobs."""
    search = EVERYTHING
    if checkpoint.created is not None:  # no request of an earlier operation need be read
        search = search.among(Comparison(Path("created"), ">=", checkpoint.created - CLOCKS_APART))
    place = {"root": checkpoint.root, "run": checkpoint.run}
    search = search.equal(step=checkpoint.step, **place)
    try:
        newest, _ = operations.list_operations(plane, caller, search, after=(), limit=SHOWN)
    except NotReadyError:
        return []
    return newest
