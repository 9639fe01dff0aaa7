"""Artifacts of gather and convert: their descriptions, and their files with range requests."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import artifacts as artifacts_actions
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.http.downloads import DOWNLOADS, RangeHeader, download
from cairn.service.http.limited_routes import StoreReadRoute
from cairn.service.http.path_names import named
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.preconditions import Condition
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import ARTIFACT_PATTERN, Artifact, ArtifactList

step_router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["artifacts"], route_class=StoreReadRoute
)
router: Final = APIRouter(prefix="/artifacts", tags=["artifacts"], route_class=PermittedRoute)

ArtifactId = Annotated[
    str, Path(pattern=ARTIFACT_PATTERN, description="`artifact_id` of an operation's result.")
]
FileName = Annotated[str, Path(max_length=255, description="Name of a file of the artifact.")]


@step_router.get("/" + named("step") + "/artifacts", responses=problem_responses(404))
def list_artifacts(
    caller: Reader, root: RootName, run: RunName, step: StepNumber, plane: PlaneDependency
) -> ArtifactList:
    """List the artifacts of a listed step, newest first; read from the store."""
    return ArtifactList(artifacts=artifacts_actions.list_artifacts(plane, root, run, step))


@router.get("/{artifact}", responses=problem_responses(404))
def get_artifact(caller: Reader, artifact: ArtifactId, plane: PlaneDependency) -> Artifact:
    """Get the description of an artifact and the list of its files."""
    return artifacts_actions.get_artifact(plane, caller, artifact)


@router.head("/{artifact}/files/{name}", include_in_schema=False)
@router.get(
    "/{artifact}/files/{name}",
    response_class=StreamingResponse,
    responses={**DOWNLOADS, **problem_responses(404, 416)},
)
def download_file(
    caller: Reader,
    artifact: ArtifactId,
    name: FileName,
    plane: PlaneDependency,
    request: Request,
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """Download a file of an artifact, or a range of it.

    The ETag stays the same for as long as the artifact exists. `Repr-Digest` (RFC 9530) is the
    CRC-32C of the whole file. If a file is damaged in the store, a download of the whole file ends
    short of its `Content-Length`.
    """
    file = artifacts_actions.find_file(plane, caller, artifact, name)
    return download(
        file,
        is_head=request.method == "HEAD",
        range_header=range_header,
        if_range=if_range,
        if_none_match=if_none_match,
    )
