"""Configuration and model card of a step: `/ui/{root}/{run}/steps/{step}/config`."""

import math
from collections import Counter
from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions.step_meta import read_meta
from cairn.service.dashboard.charts.json_tree import json_tree
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import StepRequestDependency

router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/steps/{step}/config")
def config_page(caller: Reader, request: StepRequestDependency) -> HTMLResponse:
    """Show the model of a step: its architecture, configuration, and where it was saved."""
    step = request.open_step()
    meta = read_meta(step)
    has_model = "model" in step.array_items
    leaves = [leaf for leaf in step.leaves if leaf.item == "model" or not has_model]
    elements = Counter[str]()
    for leaf in leaves:
        elements[leaf.dtype] += math.prod(leaf.shape)
    return request.render(
        "step/config.html",
        checkpoint=request.checkpoint(),
        manifest=step.manifest,
        model=step.manifest.model,
        has_model=has_model,
        items=step.array_items,
        values=elements.total(),
        dtypes=dict(elements.most_common()),
        nbytes=sum(leaf.nbytes for leaf in leaves),
        meta=meta,
        meta_tree=json_tree(meta.tree),
    )
