"""Files of a checkpoint as the store has them: list and download."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import files, tensors
from cairn.service.dependencies import (
    PageSize,
    PageToken,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http.answers import json_answer
from cairn.service.http.downloads import DOWNLOADS, RangeHeader, download
from cairn.service.http.limited_routes import StoreReadRoute
from cairn.service.http.paging import CountedList
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import Condition
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import PLAIN_PATTERN, StepFileList

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["checkpoints"], route_class=StoreReadRoute
)

_FILES: Final = "/" + named("step") + "/files"
_FILE: Final = _FILES + "/{name:rest}"

FilePath = Annotated[
    str,
    Path(
        max_length=2000,
        pattern=PLAIN_PATTERN,
        description="Path of a file in the step's folder, as the list of them has it.",
    ),
]


@router.get(_FILES, response_model=StepFileList, responses=problem_responses(404))
def list_checkpoint_files(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """List the files of a listed step, by name, with their checksums. No file is read.

    The list leaves out `cairn.index`, Cairn's own file that holds this list.
    """
    opened = tensors.open_step(plane, root, run, step)
    listed = CountedList.at("files", (opened.uri, opened.manifest_digest), page_token)
    page, more = files.list_files(opened, after=listed.after, limit=page_size)
    token = listed.token(len(page), more=more)
    return json_answer(StepFileList(files=page, next_page_token=token))


@router.head(_FILE, include_in_schema=False)
@router.get(
    _FILE,
    response_class=StreamingResponse,
    responses={**DOWNLOADS, **problem_responses(404, 416)},
)
def download_checkpoint_file(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    name: FilePath,
    plane: PlaneDependency,
    request: Request,
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """Download a file of a listed step, or a range of it.

    The files of an imported step come from the folder that it was imported from. The ETag stays
    the same for as long as the step exists. `Repr-Digest` (RFC 9530) is the CRC-32C of the whole
    file. If a file is damaged in the store, a download of the whole file ends short of its
    `Content-Length`.
    """
    file = files.find_step_file(tensors.open_step(plane, root, run, step), name)
    return download(
        file,
        is_head=request.method == "HEAD",
        range_header=range_header,
        if_range=if_range,
        if_none_match=if_none_match,
    )
