"""Downloads of stored files, whole or in part, that are verified while they are sent.

A whole file is compared with its checksum while it is sent. Its last block is sent only if the
checksum is right: if it is wrong, the answer ends short of its `Content-Length`, so clients reject
it. A file of a single block is verified before the status is sent.

Many clients treat a short answer as a broken connection, and request the rest. So once a file was
found damaged, a range of it is sent only after the whole file was verified again.

A record may name a file in a folder outside the run. Such a file is verified once before any byte
of it is sent. Otherwise somebody who can write a run's records could read every file that the
server can read.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final
from urllib.parse import quote

import google_crc32c
from fastapi import Header, Response
from fastapi.responses import StreamingResponse

from cairn.service.http.byte_ranges import ByteRange, parse_range
from cairn.service.http.entity_tags import names_etag
from cairn.storage.errors import CorruptionError
from cairn.storage.store.file_checksums import read_crc32c
from cairn.storage.store.files import Files

BLOCK_BYTES: Final = 4 << 20

MEDIA_TYPE: Final = "application/octet-stream"
"""Type of every file: browsers save it, and do not display it."""

DOWNLOADS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The file.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {"description": "The range that was asked for."},
    304: {"description": "The client has it already."},
}
"""OpenAPI declaration of a download's answers."""

_Key = tuple[str, str, str, str | None]

NOTHING: Final = "nothing"
"""Value of `found` in errors about a missing file."""

_MAX_KEYS: Final = 1000
_damaged: Final[dict[_Key, None]] = {}
"""Files that were damaged at their last download; the latest `_MAX_KEYS` of them."""
_confirmed: Final[dict[_Key, None]] = {}
"""Files outside their run whose checksum was right at the last read; the latest of them."""

RangeHeader = Annotated[
    str | None, Header(alias="Range", max_length=200, description="One range of bytes.")
]


@dataclass(frozen=True)
class StoredFile:
    """File of a store, ready to be read.

    Attributes:
        files: Folder of the file.
        name: Name of the file in the folder; the client sees its last part.
        size: Size in bytes.
        version: Text that differs for each content.
        crc32c: Checksum, eight hexadecimal digits; None: unknown.
        next_step: Advice for the error about unexpected bytes.
        etag: ETag in the store.
        is_of_others: The file is in a folder outside the run, which only a record names, and the
            store did not confirm its checksum.
    """

    files: Files
    name: str
    size: int
    version: str
    crc32c: str | None
    next_step: str
    etag: str | None = None
    is_of_others: bool = False

    @property
    def key(self) -> _Key:
        """Key of the file with this content, unique among all files and contents."""
        return str(self.files.uri), self.name, self.version, self.etag

    def changed(self, expected: object, found: object) -> CorruptionError:
        """Return the error for unexpected bytes; for a file outside the run it hides `found`.

        Args:
            expected: Size or checksum in the record.
            found: Size or checksum of the stored file.
        """
        if self.is_of_others and found != NOTHING:
            found = "others"
        return CorruptionError(
            "the file is not what was saved",
            path=self.files.uri / self.name,
            expected=expected,
            found=found,
            next_step=self.next_step,
        )


def download(
    file: StoredFile,
    *,
    is_head: bool,
    range_header: str | None,
    if_range: str | None,
    if_none_match: str | None,
) -> Response:
    """Return the answer with a file, or a range of it.

    Args:
        file: File to send.
        is_head: The request is HEAD: the answer has the headers of the whole file alone.
        range_header: Value of the header `Range`.
        if_range: Value of `If-Range`. If it is not the file's ETag, the whole file is sent.
        if_none_match: Value of `If-None-Match`. If it names the file's ETag, the answer is 304.

    Raises:
        RangeNotSatisfiableError: No byte of the range is in the file.
        CorruptionError: The file is damaged and has a single block; or the request is for a range
            of a file that was found damaged, and still is.
        StoreUnavailableError: The store does not answer.
    """
    headers = _headers(file)
    if names_etag(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if file.is_of_others:
        _confirm(file)
    if is_head:
        headers["Content-Length"] = str(file.size)
        return Response(headers=headers, media_type=MEDIA_TYPE)
    if if_range is not None and if_range != headers["ETag"]:
        range_header = None
    part = parse_range(range_header, file.size)
    if part is None:
        blocks, status, length = _whole(file), 200, file.size
    else:
        if file.key in _damaged:
            for _ in _whole(file):  # verify again: the file may have been restored
                pass
        blocks, status, length = _blocks(file, part), 206, len(part)
        headers["Content-Range"] = part.content_range
    headers["Content-Length"] = str(length)
    # Read the first block now, so that an error gets its own status.
    begun = chain([next(blocks, b"")], blocks)
    return StreamingResponse(begun, status_code=status, headers=headers, media_type=MEDIA_TYPE)


def _headers(file: StoredFile) -> dict[str, str]:
    """Return the headers that all answers about a file have."""
    name = file.name.rpartition("/")[2]
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{file.version}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    if file.crc32c is not None:  # RFC 9530: the digest is of the whole file, for ranges too
        digest = base64.b64encode(bytes.fromhex(file.crc32c)).decode()
        headers["Repr-Digest"] = f"crc32c=:{digest}:"
    return headers


def _blocks(file: StoredFile, part: ByteRange) -> Iterator[bytes]:
    position = part.start
    while position < part.stop:
        end = min(position + BLOCK_BYTES, part.stop)
        block = file.files.read_range(file.name, position, end)
        if not block:
            # The file was cut short just now.
            raise file.changed(f"{file.size} bytes", f"{position}")
        position += len(block)
        yield block


def _confirm(file: StoredFile) -> None:
    """Verify a file's checksum, unless that was done since the file's last change.

    Raises:
        CorruptionError: The file has another size or checksum.
    """
    if file.etag is not None and file.key in _confirmed:
        return
    size, crc32c = read_crc32c(file.files, file.name, file.size)
    if (size, crc32c) != (file.size, file.crc32c):
        raise file.changed(f"{file.size} bytes with crc32c {file.crc32c}", "others")
    _keep(_confirmed, file.key)


def _keep(recent: dict[_Key, None], key: _Key) -> None:
    recent[key] = None
    for old in list(recent)[:-_MAX_KEYS]:
        recent.pop(old, None)


def _whole(file: StoredFile) -> Iterator[bytes]:
    """Yield all blocks of a file, but the last one only if the checksum is right.

    Raises:
        CorruptionError: The checksum is wrong.
    """
    checksum, last = google_crc32c.Checksum(), b""
    for block in _blocks(file, ByteRange(0, file.size, file.size)):
        checksum.update(block)
        if last:
            yield last
        last = block
    actual = checksum.digest().hex()
    if file.crc32c not in (None, actual):
        _keep(_damaged, file.key)
        raise file.changed(f"crc32c {file.crc32c}", actual)
    _damaged.pop(file.key, None)
    yield last
