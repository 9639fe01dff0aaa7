"""Plan of a step for another mesh: `/ui/{root}/{run}/steps/{step}/plan`."""

from typing import Annotated, Final

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions.looking import plans
from cairn.service.dashboard.asked import OfStep
from cairn.service.dashboard.drawing.mesh import mesh_of, mesh_text
from cairn.service.dashboard.forms import body_of
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.pages.step.meshes import parse_mesh
from cairn.service.schemas import PLAIN_PATTERN, PlanRequest, StepName

ROWS: Final = 100
DTYPES: Final = ("float32", "bfloat16", "float16", "float64")

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)

Text = Annotated[str, Query(max_length=1000, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/steps/{step}/plan")
def plan_page(
    caller: Reader,
    asked: OfStep,
    mesh: Text = "",
    processes: Annotated[int, Query(ge=1, le=1_048_576)] = 1,
    dtype: Text = "",
) -> HTMLResponse:
    """Show bytes per device, leaves that do not divide evenly, and how to load on a mesh."""
    found = asked.opened()
    model = found.manifest.model
    axes = parse_mesh(mesh) if mesh else mesh_of(model.config if model else {}) or {"fsdp": 8}
    wanted = body_of(PlanRequest, mesh={"axes": axes, "processes": processes}, dtype=dtype or None)
    name = StepName(root=asked.root, run=asked.run, step=asked.step)
    plan, more = plans.plan_step(found, name, asked.uri, wanted, after=0, limit=ROWS)
    return asked.page(
        "step/plan.html",
        checkpoint=asked.checkpoint(),
        plan=plan,
        more=more,
        mesh=mesh_text(axes),
        processes=processes,
        dtype=dtype,
        dtypes=DTYPES,
        rows=ROWS,
    )
