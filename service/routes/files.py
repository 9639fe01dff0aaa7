"""The files of a checkpoint as they lie in the store: which there are, and their bytes."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Response
from fastapi.responses import StreamingResponse

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
    DOWNLOADS,
    Condition,
    CountedList,
    RangeHeader,
    StoreReadRoute,
    described,
    download,
    json_answer,
    named,
    problem_responses,
)
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
    """The files of a listed step, by name, with their checksums. None of them is read.

    `cairn.index`, in which this list lies, is not in it: it is Cairn's own.
    """
    found = actions.open_step(plane, root, run, step)
    listed = CountedList.at("files", (found.uri, found.manifest_digest), page_token)
    page, more = actions.list_files(found, after=listed.after, limit=page_size)
    token = listed.token(len(page), more=more)
    return json_answer(StepFileList(files=page, next_page_token=token))


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
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """One file of a listed step, or a range of it; of an adopted step its owner's file.

    Its ETag stays for as long as the step. `Repr-Digest` (RFC 9530) has the CRC-32C of the whole
    file. A whole file that is damaged in the store ends short of its `Content-Length`.
    """
    file = actions.find_step_file(actions.open_step(plane, root, run, step), name)
    return download(file, range_header=range_header, if_range=if_range, if_none_match=if_none_match)


@router.head(_FILE, include_in_schema=False)
def describe_checkpoint_file(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    name: FilePath,
    plane: PlaneDependency,
) -> Response:
    """The headers of the whole file."""
    return described(actions.find_step_file(actions.open_step(plane, root, run, step), name))
