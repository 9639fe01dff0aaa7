"""Configuration and model card of a step: `/ui/{root}/{run}/steps/{step}/config`."""

import math
from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.storage.runs.records.manifest import LeafRecord

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)


@router.get("/ui/{root}/{run}/steps/{step}/config")
def config_page(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show the model of a step: its architecture, configuration, and where it was saved."""
    found = request.opened()
    model = [leaf for leaf in found.leaves if leaf.item == "model"]
    return request.render(
        "step/config.html",
        checkpoint=request.checkpoint(),
        manifest=found.manifest,
        model=found.manifest.model,
        parameters=sum(math.prod(leaf.shape) for leaf in model),
        dtypes=_dtypes(model),
        model_bytes=sum(leaf.nbytes for leaf in model),
    )


def _dtypes(leaves: list[LeafRecord]) -> dict[str, int]:
    """Count the elements per dtype, the most frequent dtype first."""
    found: dict[str, int] = {}
    for leaf in leaves:
        found[leaf.dtype] = found.get(leaf.dtype, 0) + math.prod(leaf.shape)
    return dict(sorted(found.items(), key=lambda one: -one[1]))
