"""Leaves of a checkpoint: list, compare, plan for a mesh, and read values."""

from typing import Annotated, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response

from cairn.service.access.permission import Reader
from cairn.service.actions import diffs, plans, tensors
from cairn.service.dependencies import (
    MAX_STEP,
    PageSize,
    PageToken,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.errors import InvalidRequestError
from cairn.service.http.answers import NOT_CHANGED, json_answer
from cairn.service.http.entity_tags import names_etag
from cairn.service.http.limited_routes import StoreReadRoute
from cairn.service.http.paging import CountedList
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import Condition
from cairn.service.http.problems import problem_responses
from cairn.service.http.value_streams import ValueRead, ValueStream
from cairn.service.schemas import (
    ITEM_PATTERN,
    NAME_PATTERN,
    PLAIN_PATTERN,
    RUN_PATTERN,
    PlanRequest,
    Scope,
    StepDiff,
    StepName,
    StepPlan,
    TensorList,
    TensorStatistics,
    TensorValues,
)
from cairn.storage.reading.tensor_parts import MOST_READ_BYTES

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["tensors"], route_class=StoreReadRoute
)

_TENSORS: Final = "/" + named("step") + "/tensors"

ItemFilter = Annotated[
    str | None, Query(pattern=ITEM_PATTERN, description="Leaves of this item only.")
]
Prefix = Annotated[
    str,
    Query(
        max_length=2000,
        pattern=PLAIN_PATTERN,
        description="Leaves only whose path begins with this text.",
    ),
]
LeafPath = Annotated[
    str,
    Path(
        max_length=4000,
        pattern=PLAIN_PATTERN,
        description="Path of a leaf, as the list of them has it.",
    ),
]
LeafItem = Annotated[
    str | None,
    Query(
        pattern=ITEM_PATTERN,
        description="Item of the leaf. Default: `model`, or the only item that holds arrays.",
    ),
]
PartText = Annotated[
    str,
    Query(
        alias="slice",
        max_length=1000,
        pattern=PLAIN_PATTERN,
        description="Part of the leaf as NumPy writes it, such as `0:10,:,3` or `...,-1`; steps "
        "are positive. Default: all.",
        examples=["0:2"],
    ),
]
Format = Annotated[
    Literal["npy", "safetensors", "json"] | None,
    Query(
        description="Default: npy. `npy` has no bfloat16, no float8 and no four-bit dtypes, "
        "`safetensors` no four-bit ones; `json` has all but complex ones, and at most 65,536 "
        "elements."
    ),
]

OtherStep = Annotated[
    int, Query(ge=0, le=MAX_STEP, description="The step that this one is compared with.")
]
OtherRun = Annotated[
    str | None, Query(pattern=RUN_PATTERN, description="Run of the other; default: the same.")
]
OtherRoot = Annotated[
    str | None, Query(pattern=NAME_PATTERN, description="Root of the other; default: the same.")
]
CompareValues = Annotated[
    bool, Query(description="Read the values of leaves that differ, and tell how far apart.")
]
Stats = Annotated[
    bool,
    Query(
        description="Answer with what the elements are like, as JSON, and not with them: their "
        "range, mean, deviation, norm, how many are not finite, and a histogram. At most 4 GiB of "
        "chunks are read for it; what has the same digest is read once."
    ),
]

PlanPageSize = Annotated[int, Query(ge=1, le=10_000, description="Leaves at most on this page.")]

WHOLE_BYTES: Final = 8 << 20
"""Largest answer that is read and checked in full before its status is sent.

Damage in a larger answer shows only after the status, so the answer ends short.
"""


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
    """List the leaves of a listed step, by item and path. No values are read."""
    opened = tensors.open_step(plane, root, run, step)
    parameters = opened.uri, opened.manifest_digest, item, prefix
    listed = CountedList.at("tensors", parameters, page_token)
    page, more = tensors.list_tensors(
        opened, item=item, prefix=prefix, after=listed.after, limit=page_size
    )
    return json_answer(TensorList(tensors=page, next_page_token=listed.token(len(page), more=more)))


@router.get(
    "/" + named("step") + ":diff", response_model=StepDiff, responses=problem_responses(404)
)
def diff_checkpoints(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    other: OtherStep,
    plane: PlaneDependency,
    request: Request,
    other_run: OtherRun = None,
    other_root: OtherRoot = None,
    values: CompareValues = False,
    item: ItemFilter = None,
    prefix: Prefix = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """Compare a listed step with another step, of the same run or of another run.

    Leaves are compared by their digests, independent of sharding. Equal leaves are never read. With
    `values`, the differing leaves on the page are read; a page that would read more than 4 GiB ends
    early.
    """
    root_of_other = other_root or root
    caller.require(Scope.READ, root_of_other)
    this = diffs.DiffSide.open(plane, root, run, step)
    that = diffs.DiffSide.open(plane, root_of_other, other_run or run, other)
    listed = CountedList.at("diff", (this.name, that.name, item, prefix), page_token)
    most = diffs.MAX_COMPARED_BYTES
    selection = diffs.DiffSelection(item, prefix, values, listed.after, page_size, most)

    def answer() -> Response:
        diff, more = diffs.diff_steps(this, that, selection)
        token = listed.token(len(diff.differences), more=more)
        return json_answer(diff.model_copy(update={"next_page_token": token}))

    if not values:
        return answer()
    return ValueRead(answer, request, root, diffs.MAX_COMPARED_MEMORY_BYTES)


@router.post(
    "/" + named("step") + ":plan", response_model=StepPlan, responses=problem_responses(404, 409)
)
def plan_checkpoint(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: PlanRequest,
    plane: PlaneDependency,
    page_size: PlanPageSize = 1000,
    page_token: PageToken = None,
) -> Response:
    """Plan a load of a listed step on a mesh: sharding of leaves, bytes per device and process.

    The request changes nothing and reads only the step's index. Leaves that do not fit the mesh
    come first.
    """
    opened = tensors.open_step(plane, root, run, step)
    parameters = opened.uri, opened.manifest_digest, body.model_dump_json()
    listed = CountedList.at("plan", parameters, page_token)
    name = StepName(root=root, run=run, step=step)
    uri = f"{plane.place(root, run)}/steps/{step}"
    plan, more = plans.plan_step(opened, name, uri, body, after=listed.after, limit=page_size)
    token = listed.token(len(plan.leaves), more=more)
    return json_answer(plan.model_copy(update={"next_page_token": token}))


@router.get(
    _TENSORS + "/{leaf:rest}",
    response_model=TensorValues | TensorStatistics,
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
    item: LeafItem = None,
    part: PartText = "",
    format: Format = None,
    stats: Stats = False,
    if_none_match: Condition = None,
) -> Response:
    """Read the values of a leaf, or of a slice of it. Only the chunks that hold them are read.

    Each chunk is checked against its digest before any of its bytes are sent. If a later chunk of a
    long answer is damaged, the answer ends short of its `Content-Length`. Typed PRNG keys are
    returned as their uint32 words, along one more axis.
    """
    opened = tensors.open_step(plane, root, run, step)
    item = tensors.item_of(opened, item)
    tensor_part = tensors.open_part(opened.reader(), item, leaf, part)
    if stats and format not in {None, "json"}:
        raise InvalidRequestError(f"format={format}: statistics are JSON; leave it away")
    kind = "stats" if stats else format or "npy"
    headers = {
        "ETag": f'"{tensors.version_of(opened, item, leaf, part, kind)}"',
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    if names_etag(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if kind == "stats":
        return ValueRead(
            lambda: json_answer(tensors.tensor_statistics(plane, opened, tensor_part), headers),
            request,
            root,
            tensor_part.held_bytes,
        )
    if kind == "json":
        return ValueRead(
            lambda: json_answer(tensors.tensor_values(tensor_part), headers),
            request,
            root,
            tensor_part.held_bytes,
            is_long=False,
        )
    file = tensor_part.file(kind)
    name = quote(f"{leaf.rpartition('/')[2] or item}.{kind}", safe="")
    headers |= {
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Content-Length": str(file.nbytes),
    }
    media_type = "application/octet-stream"
    if request.method == "HEAD":
        return Response(headers=headers, media_type=media_type)
    if file.nbytes <= WHOLE_BYTES and tensor_part.stored_bytes <= MOST_READ_BYTES:
        return ValueRead(
            lambda: Response(b"".join(file.blocks()), headers=headers, media_type=media_type),
            request,
            root,
            tensor_part.held_bytes,
            is_long=False,
        )
    return ValueStream(file.blocks, request, root, tensor_part.held_bytes, headers)


# HEAD has the name of GET, since it is the same operation without a body.
router.add_api_route(
    _TENSORS + "/{leaf:rest}",
    read_tensor,
    methods=["HEAD"],
    include_in_schema=False,
    name="read_tensor",
)
