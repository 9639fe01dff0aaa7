"""What gather and convert made: description and files, with ranges."""

import mimetypes
from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Response
from fastapi.responses import StreamingResponse

from cairn.service.dependencies import SettingsDependency
from cairn.service.http import ByteRange, parse_range, problem_responses
from cairn.service.jobs import ARTIFACT_PATTERN, ArtifactRef
from cairn.service.schemas import Artifact, ArtifactFile, OperationKind
from cairn.service.settings import Settings
from cairn.storage.errors import ArtifactNotFoundError, CorruptionError
from cairn.storage.runs import ExportFile, ExportManifest
from cairn.storage.store import Files, StoreURI, from_rfc3339, open_files

router: Final = APIRouter(prefix="/artifacts", tags=["artifacts"])

BLOCK_BYTES: Final = 4 << 20

ArtifactId = Annotated[
    str, Path(pattern=ARTIFACT_PATTERN, description="`artifact_id` of an operation's result.")
]
FileName = Annotated[str, Path(max_length=255, description="Name of a file of the artifact.")]
RangeHeader = Annotated[
    str | None, Header(alias="Range", max_length=200, description="One range of bytes.")
]
Condition = Annotated[str | None, Header(max_length=2000)]


@router.get("/{artifact}", responses=problem_responses(404))
def get_artifact(artifact: ArtifactId, settings: SettingsDependency) -> Artifact:
    """What the artifact is, and its files."""
    ref = ArtifactRef.parse(artifact)
    manifest, folder = ref.open(settings.root_uris)
    return Artifact(
        id=ref.id,
        kind=OperationKind(manifest.kind),
        root=ref.root,
        run=ref.run,
        step=manifest.step,
        attempt=manifest.attempt,
        manifest_digest=manifest.source,
        options=manifest.options,
        uri=str(folder),
        bytes=manifest.nbytes,
        files=[
            ArtifactFile(name=file.name, bytes=file.size, crc32c=file.crc32c)
            for file in manifest.files
        ],
        created=from_rfc3339(manifest.created),
    )


@router.get(
    "/{artifact}/files/{name}",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The file.",
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        },
        206: {"description": "The range that was asked for."},
        304: {"description": "The client has it already."},
        **problem_responses(404, 416),
    },
)
def download_file(
    artifact: ArtifactId,
    name: FileName,
    settings: SettingsDependency,
    range_header: RangeHeader = None,
    if_range: Condition = None,
    if_none_match: Condition = None,
) -> Response:
    """One file, or a range of it. Its ETag stays for as long as the artifact."""
    files, file, headers = _find(artifact, name, settings)
    if if_none_match is not None and _names(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if if_range is not None and if_range != headers["ETag"]:
        range_header = None
    part = parse_range(range_header, file.size)
    whole = ByteRange(0, file.size, file.size)
    if part is not None:
        headers["Content-Range"] = part.content_range
    headers["Content-Length"] = str(len(part or whole))
    return StreamingResponse(
        _blocks(files, name, part or whole),
        status_code=200 if part is None else 206,
        headers=headers,
        media_type=_media_type(name),
    )


@router.head("/{artifact}/files/{name}", include_in_schema=False)
def describe_file(artifact: ArtifactId, name: FileName, settings: SettingsDependency) -> Response:
    """The headers of the whole file."""
    _, file, headers = _find(artifact, name, settings)
    headers["Content-Length"] = str(file.size)
    return Response(headers=headers, media_type=_media_type(name))


def _find(artifact: str, name: str, settings: Settings) -> tuple[Files, ExportFile, dict[str, str]]:
    """The artifact's folder, the file in it, and the headers that every answer about it has.

    Raises:
        ArtifactNotFoundError: There is no such artifact, or it has no such file.
        CorruptionError: The stored file has another size.
    """
    manifest, folder = ArtifactRef.parse(artifact).open(settings.root_uris)
    file = _file(manifest, name, folder)
    files = open_files(folder)
    size = files.stat(name).size
    if size != file.size:
        raise CorruptionError(
            "the file changed since it was published",
            path=folder / name,
            expected=f"{file.size} bytes",
            found=f"{size}",
            next_step="Delete the export, then convert or gather the checkpoint again.",
        )
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{file.crc32c}-{file.size:x}-{manifest.folder[-8:]}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    return files, file, headers


def _file(manifest: ExportManifest, name: str, folder: StoreURI) -> ExportFile:
    for file in manifest.files:
        if file.name == name:
            return file
    raise ArtifactNotFoundError(
        "no such file",
        path=folder,
        expected=", ".join(file.name for file in manifest.files[:20]),
        found=repr(name[:200]),
    )


def _names(header: str, etag: str) -> bool:
    """Whether an `If-None-Match` names the ETag."""
    given = [part.strip().removeprefix("W/") for part in header.split(",")]
    return "*" in given or etag in given


def _blocks(files: Files, name: str, part: ByteRange) -> Iterator[bytes]:
    position = part.start
    while position < part.stop:
        block = files.read_range(name, position, min(position + BLOCK_BYTES, part.stop))
        if not block:
            return  # shorter than it was a moment ago: the client sees a broken connection
        position += len(block)
        yield block


def _media_type(name: str) -> str:
    return mimetypes.guess_type(name)[0] or "application/octet-stream"
