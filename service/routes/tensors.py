"""The leaves of a checkpoint: which there are."""

import hashlib
from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dependencies import (
    PageSize,
    PageToken,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http import (
    StoreReadRoute,
    decode_token,
    encode_token,
    json_answer,
    named,
    problem_responses,
)
from cairn.service.schemas import ITEM_PATTERN, TensorList

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["tensors"], route_class=StoreReadRoute
)

_TENSORS: Final = "/" + named("step") + "/tensors"

ItemFilter = Annotated[
    str | None, Query(pattern=ITEM_PATTERN, description="Leaves of this item only.")
]
Prefix = Annotated[
    str, Query(max_length=2000, description="Leaves only whose path begins with this text.")
]


@router.get(_TENSORS, response_model=TensorList, responses=problem_responses(404))
def list_tensors(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    item: ItemFilter = None,
    prefix: Prefix = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """The leaves of a listed step, by item and path. None of their values is read."""
    found = actions.open_step(plane, root, run, step)
    asked = f"{found.uri}\n{found.manifest_digest}\n{item}\n{prefix}"
    listing = f"tensors {hashlib.sha256(asked.encode()).hexdigest()}"
    (known,) = decode_token(listing, page_token, kinds=(int,)) or (0,)
    after = max(0, int(known))
    page, more = actions.list_tensors(found, item=item, prefix=prefix, after=after, limit=page_size)
    token = encode_token(listing, (after + len(page),)) if more else None
    return json_answer(TensorList(tensors=page, next_page_token=token))
