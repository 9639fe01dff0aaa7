"""Tensor tree of a step: `/ui/{root}/{run}/steps/{step}/tensors`."""

import math
from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.charts.tensor_tree import branches, place, trail
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.schemas import PLAIN_PATTERN

MAX_ROWS: Final = 150

router: Final = page_router(StorePage)

Text = Annotated[str, Query(max_length=2000, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/steps/{step}/tensors")
def tensors_page(
    caller: Reader, request: StepRequestDependency, item: Text = "", prefix: Text = "", q: Text = ""
) -> HTMLResponse:
    """Show a level of a step's tensor tree, or the results of a search in it."""
    step = request.open_step()
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for leaf in step.leaves:
        sizes[leaf.item] = sizes.get(leaf.item, 0) + leaf.nbytes
        counts[leaf.item] = counts.get(leaf.item, 0) + 1
    shown = item or ("model" if "model" in sizes else next(iter(sizes), ""))
    own = [leaf for leaf in step.leaves if leaf.item == shown]
    prefix = place(own, prefix)
    words = q.lower().split()
    matches = [leaf for leaf in own if all(word in leaf.path.lower() for word in words)]
    rows = branches(own, prefix) if not words else []
    if not prefix and len(rows) == 1 and rows[0].leaf is None:  # skip a level without a choice
        prefix = rows[0].prefix
        rows = branches(own, prefix)
    elements = sum(math.prod(leaf.shape) for leaf in own)
    return request.render(
        "step/tensors.html",
        checkpoint=request.checkpoint(),
        items=[(name, counts[name], sizes[name]) for name in sorted(sizes)],
        item=shown,
        prefix=prefix,
        trail=trail(prefix),
        q=q,
        branches=rows[:MAX_ROWS],
        matches=matches[:MAX_ROWS] if words else [],
        found_count=len(matches) if words else len(rows),
        most=MAX_ROWS,
        total=max(1, sizes.get(shown, 0)),
        elements=elements,
    )
