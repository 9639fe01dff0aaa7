"""Where a run comes from, and what came of it: `/ui/{root}/{run}/lineage`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.actions import RunLineage
from cairn.service.dashboard import addresses
from cairn.service.dashboard.drawing.family import Family, Node, family
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName
from cairn.service.routes import page_of_checkpoints
from cairn.service.schemas import CheckpointState, Run

_FORKS_DRAWN: Final = 12
_STEPS: Final = 100

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.get("/ui/{root}/{run}/lineage")
def lineage_page(
    request: Request, caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """Forks, rollbacks and adopted steps of one run."""
    known = actions.get_run(plane, root, run, refresh=False)
    found = actions.run_lineage(plane, caller.visible(plane.roots), known)
    aside = page_of_checkpoints(plane, root, run, CheckpointState.SET_ASIDE, _STEPS, None)
    listed = page_of_checkpoints(plane, root, run, CheckpointState.LISTED, _STEPS, None)
    adopted = [one for one in listed.checkpoints if not one.uri.startswith(f"{known.uri}/")]
    return page(
        request,
        "run/lineage.html",
        run=known,
        lineage=found,
        drawing=_drawing(known, found),
        aside=aside.checkpoints,
        adopted=adopted,
    )


def _drawing(run: Run, found: RunLineage) -> Family | None:
    if not found.parents and not found.forks and found.unknown is None:
        return None
    children = [run, *found.parents]
    before = [
        Node(parent.name, _from(child), addresses.run(parent.root, parent.name))
        for parent, child in zip(found.parents, children, strict=False)
    ]
    if found.unknown is not None:
        before.append(Node(found.unknown.rsplit("/", 1)[-1], "not in these roots", None))
    after = [Node(one.name, _from(one), addresses.run(one.root, one.name)) for one in found.forks]
    if len(after) > _FORKS_DRAWN:
        rest = len(after) - _FORKS_DRAWN + 1
        after = [*after[: _FORKS_DRAWN - 1], Node(f"{rest} more", "listed below", None)]
    here = Node(run.name, "this run", None, here=True)
    return family(before, here, after)


def _from(child: Run) -> str:
    return "" if child.lineage is None else f"fork at step {child.lineage.step}"
