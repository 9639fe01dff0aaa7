"""The leaves of a checkpoint: which there are, and any part of their values."""

import hashlib
from typing import Annotated, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response

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
    NOT_CHANGED,
    Condition,
    StoreReadRoute,
    ValueStream,
    decode_token,
    encode_token,
    json_answer,
    named,
    names_etag,
    problem_responses,
)
from cairn.service.schemas import ITEM_PATTERN, TensorList, TensorValues
from cairn.storage.reading import MOST_READ_BYTES, TensorPart

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
LeafPath = Annotated[
    str, Path(max_length=4000, description="Path of a leaf, as the list of them has it.")
]
LeafItem = Annotated[str, Query(pattern=ITEM_PATTERN, description="Item of the leaf.")]
PartText = Annotated[
    str,
    Query(
        alias="slice",
        max_length=1000,
        description="Part of the leaf as NumPy writes it, such as `0:10,:,3` or `...,-1`; steps "
        "are positive. Default: all.",
        examples=["0:2"],
    ),
]
Format = Annotated[
    Literal["npy", "safetensors", "json"],
    Query(
        description="`npy` has no bfloat16, no float8 and no four-bit dtypes, `safetensors` no "
        "four-bit ones; `json` has all but complex ones, and at most 65,536 elements."
    ),
]

WHOLE_BYTES: Final = 8 << 20
"""Answers up to this size are read, and checked, before their status is sent."""


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


@router.get(
    _TENSORS + "/{leaf:path}",
    response_model=TensorValues,
    responses={
        200: {
            "description": "The part, as a file or as JSON.",
            "content": {
                "application/octet-stream": {
                    "schema": {"description": "An npy or safetensors file."}
                }
            },
        },
        304: NOT_CHANGED,
        **problem_responses(404),
    },
)
def read_tensor(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    leaf: LeafPath,
    plane: PlaneDependency,
    request: Request,
    item: LeafItem = "model",
    part: PartText = "",
    format: Format = "npy",
    if_none_match: Condition = None,
) -> Response:
    """Values of a leaf, or of a part of it. Only the chunks that hold them are read.

    Each is compared with its digest before anything of it is sent. If a later one of a long answer
    is damaged, the answer ends short of its `Content-Length`. Typed PRNG keys are the uint32 words
    that they hold, along one more axis.
    """
    found = actions.open_step(plane, root, run, step)
    asked = TensorPart.of(found.reader(), item, leaf, part)
    headers = {
        "ETag": f'"{actions.version_of(found, item, leaf, part, format)}"',
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    if names_etag(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if format == "json":
        answer = json_answer(actions.tensor_values(asked))
        answer.headers.update(headers)
        return answer
    file = asked.file(format)
    name = quote(f"{leaf.rpartition('/')[2] or item}.{format}", safe="")
    headers |= {
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Content-Length": str(file.nbytes),
    }
    media_type = "application/octet-stream"
    if request.method == "HEAD":
        return Response(headers=headers, media_type=media_type)
    if file.nbytes <= WHOLE_BYTES and asked.stored_bytes <= MOST_READ_BYTES:
        return Response(b"".join(file.blocks()), headers=headers, media_type=media_type)
    return ValueStream(file.blocks, request, root, headers)


# Named as the other: it is the same operation, without its body.
router.add_api_route(
    _TENSORS + "/{leaf:path}",
    read_tensor,
    methods=["HEAD"],
    include_in_schema=False,
    name="read_tensor",
)
