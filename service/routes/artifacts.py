"""What gather and convert made: description and files, with ranges."""

from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Response
from fastapi.responses import StreamingResponse

from cairn.service import actions
from cairn.service.access import Caller, Reader, Scope
from cairn.service.actions import StoredFile
from cairn.service.dependencies import PlaneDependency
from cairn.service.http import ByteRange, Condition, names_etag, parse_range, problem_responses
from cairn.service.jobs import ARTIFACT_PATTERN, ArtifactRef
from cairn.service.schemas import Artifact

router: Final = APIRouter(prefix="/artifacts", tags=["artifacts"])

BLOCK_BYTES: Final = 4 << 20

ArtifactId = Annotated[
    str, Path(pattern=ARTIFACT_PATTERN, description="`artifact_id` of an operation's result.")
]
FileName = Annotated[str, Path(max_length=255, description="Name of a file of the artifact.")]
RangeHeader = Annotated[
    str | None, Header(alias="Range", max_length=200, description="One range of bytes.")
]


MEDIA_TYPE: Final = "application/octet-stream"
"""Of every file: it is to be kept, not to be shown."""


@router.get("/{artifact}", responses=problem_responses(404))
def get_artifact(caller: Reader, artifact: ArtifactId, plane: PlaneDependency) -> Artifact:
    """What the artifact is, and its files."""
    return actions.get_artifact(plane, _named(caller, artifact))


@router.get(
    "/{artifact}/files/{name}",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The file.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
        206: {"description": "The range that was asked for."},
        304: {"description": "The client has it already."},
        **problem_responses(404, 416),
    },
)
def download_file(
    caller: Reader,
    artifact: ArtifactId,
    name: FileName,
    plane: PlaneDependency,
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """One file, or a range of it. Its ETag stays for as long as the artifact."""
    file = actions.find_file(plane, _named(caller, artifact), name)
    headers = _headers(file)
    if names_etag(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if if_range is not None and if_range != headers["ETag"]:
        range_header = None
    part = parse_range(range_header, file.size)
    whole = ByteRange(0, file.size, file.size)
    if part is not None:
        headers["Content-Range"] = part.content_range
    headers["Content-Length"] = str(len(part or whole))
    return StreamingResponse(
        _blocks(file, part or whole),
        status_code=200 if part is None else 206,
        headers=headers,
        media_type=MEDIA_TYPE,
    )


@router.head("/{artifact}/files/{name}", include_in_schema=False)
def describe_file(
    caller: Reader, artifact: ArtifactId, name: FileName, plane: PlaneDependency
) -> Response:
    """The headers of the whole file."""
    file = actions.find_file(plane, _named(caller, artifact), name)
    headers = {**_headers(file), "Content-Length": str(file.size)}
    return Response(headers=headers, media_type=MEDIA_TYPE)


def _named(caller: Caller, artifact: str) -> ArtifactRef:
    """What an id names, if the caller may see it."""
    ref = ArtifactRef.parse(artifact)
    caller.require(Scope.READ, ref.root)
    return ref


def _headers(file: StoredFile) -> dict[str, str]:
    """What every answer about a file has."""
    return {
        "Accept-Ranges": "bytes",
        "ETag": f'"{file.version}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }


def _blocks(file: StoredFile, part: ByteRange) -> Iterator[bytes]:
    position = part.start
    while position < part.stop:
        end = min(position + BLOCK_BYTES, part.stop)
        block = file.files.read_range(file.name, position, end)
        if not block:
            return  # shorter than it was a moment ago: the client sees a broken connection
        position += len(block)
        yield block
