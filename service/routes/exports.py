"""Exports at stable addresses: a run, a checkpoint and options name one, and no id."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import exports as exports_actions
from cairn.service.dependencies import PlaneDependency, RootName, RunName
from cairn.service.http.downloads import DOWNLOADS, RangeHeader, download
from cairn.service.http.limited_routes import StoreReadRoute
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import Condition
from cairn.service.http.problems import problem_responses
from cairn.service.routes.artifacts import FileName
from cairn.service.schemas import (
    CHECKPOINT_PATTERN,
    SIZE_PATTERN,
    Artifact,
    ConvertRequest,
    ExportDtype,
)

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/exports", tags=["artifacts"], route_class=StoreReadRoute
)

CheckpointName = Annotated[
    str,
    Path(
        pattern=CHECKPOINT_PATTERN,
        description="A step, an alias, or `latest`.",
        examples=["production"],
    ),
]


def _options(
    format: Annotated[
        Literal["huggingface", "pytorch", "gguf"], Query(description="As of the conversion.")
    ] = "huggingface",
    dtype: Annotated[
        ExportDtype | None, Query(description="As of the conversion; left out: as stored.")
    ] = None,
    max_shard_size: Annotated[
        str,
        Query(
            max_length=32,
            json_schema_extra={"pattern": SIZE_PATTERN},
            description="As of the conversion.",
        ),
    ] = "5GB",
    lora: Annotated[Literal["merge", "keep"], Query(description="As of the conversion.")] = "merge",
    allow_nonfinite: Annotated[bool, Query(description="As of the conversion.")] = False,
    check_logits: Annotated[bool, Query(description="As of the conversion.")] = False,
) -> ConvertRequest:
    """Return the options of the export that a request names."""
    return ConvertRequest(
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        lora=lora,
        allow_nonfinite=allow_nonfinite,
        check_logits=check_logits,
    )


Options = Annotated[ConvertRequest, Depends(_options)]


@router.get("/" + named("checkpoint"), responses=problem_responses(404, 409))
def get_export(
    caller: Reader,
    root: RootName,
    run: RunName,
    checkpoint: CheckpointName,
    options: Options,
    plane: PlaneDependency,
) -> Artifact:
    """Get the export of a checkpoint with these options, and the list of its files.

    The address stays the same, whatever made the export. An alias that moves leads to the export of
    its new step; the `id` in the answer names this one for good. 404 if there is no such export
    yet: the answer says how to make it. 409 if the checkpoint is damaged.
    """
    return exports_actions.find_export(plane, root, run, checkpoint, options)


@router.head("/" + named("checkpoint") + "/files/{name}", include_in_schema=False)
@router.get(
    "/" + named("checkpoint") + "/files/{name}",
    response_class=StreamingResponse,
    responses={**DOWNLOADS, **problem_responses(404, 409, 416)},
)
def download_export_file(
    caller: Reader,
    root: RootName,
    run: RunName,
    checkpoint: CheckpointName,
    name: FileName,
    options: Options,
    plane: PlaneDependency,
    request: Request,
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """Download a file of the export of a checkpoint, or a range of it.

    As `/v1/artifacts/{artifact}/files/{name}`, whose address is in `Content-Location`: take further
    files from there if the alias may move meanwhile. The ETag changes with the content.
    """
    artifact, file = exports_actions.find_export_file(plane, root, run, checkpoint, options, name)
    answer = download(
        file,
        is_head=request.method == "HEAD",
        range_header=range_header,
        if_range=if_range,
        if_none_match=if_none_match,
    )
    answer.headers["Content-Location"] = f"/v1/artifacts/{artifact}/files/{file.name}"
    return answer
