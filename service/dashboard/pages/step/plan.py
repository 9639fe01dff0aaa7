"""Plan of a step for another mesh: `/ui/{root}/{run}/steps/{step}/plan`."""

from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import plans
from cairn.service.dashboard.charts.mesh import mesh_of, mesh_text, parse_mesh
from cairn.service.dashboard.form_fields import body_of
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.schemas import PLAIN_PATTERN, PlanRequest, StepName

ROWS: Final = 100
DTYPES: Final = ("float32", "bfloat16", "float16", "float64")

router: Final = page_router(StorePage)

Text = Annotated[str, Query(max_length=1000, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/steps/{step}/plan")
def plan_page(
    caller: Reader,
    request: StepRequestDependency,
    mesh: Text = "",
    processes: Annotated[int, Query(ge=1, le=1_048_576)] = 1,
    dtype: Text = "",
) -> HTMLResponse:
    """Show bytes per device, leaves that do not divide evenly, and how to load on a mesh."""
    step = request.open_step()
    model = step.manifest.model
    axes = parse_mesh(mesh) if mesh else mesh_of(model.config if model else {}) or {"fsdp": 8}
    body = body_of(PlanRequest, mesh={"axes": axes, "processes": processes}, dtype=dtype or None)
    name = StepName(root=request.root, run=request.run, step=request.step)
    plan, more = plans.plan_step(step, name, request.uri, body, after=0, limit=ROWS)
    return request.render(
        "step/plan.html",
        checkpoint=request.checkpoint(),
        plan=plan,
        more=more,
        mesh=mesh_text(axes),
        processes=processes,
        dtype=dtype,
        dtypes=DTYPES,
        rows=ROWS,
    )
