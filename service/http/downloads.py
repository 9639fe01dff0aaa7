"""Files of a store that are sent as they are: whole or a range, with what tells them apart.

A whole file is compared with its checksum while it is sent, and its last block stays back until
that is right: what ends short of its `Content-Length` is no file that a client keeps. One of a
single block is compared before its status is sent. Many clients take what ends short for a
connection that broke, and ask for the rest: of a file that was found damaged none is sent, unless
it is right again. Of a file that is not the run's own nothing is sent, and nothing is said, before
all of it was read once and was what the run says: else whoever writes a run could read any file.
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
from cairn.storage.store import Files, read_crc32c

BLOCK_BYTES: Final = 4 << 20

MEDIA_TYPE: Final = "application/octet-stream"
"""Of every file: it is to be kept, not to be shown."""

DOWNLOADS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The file.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {"description": "The range that was asked for."},
    304: {"description": "The client has it already."},
}
"""What the OpenAPI document says of such an answer."""

_Key = tuple[str, str, str, str | None]

NOTHING: Final = "nothing"
"""What is found where a file is gone."""

_MOST_KEPT: Final = 1000
_damaged: Final[dict[_Key, None]] = {}
"""Files that were not what was saved when they were sent last; those that were found last."""
_confirmed: Final[dict[_Key, None]] = {}
"""Files of others that were what a run says when they were read last; those that were read last."""

RangeHeader = Annotated[
    str | None, Header(alias="Range", max_length=200, description="One range of bytes.")
]


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, ready to be read.

    Attributes:
        files: The folder.
        name: Of the file in it; one that is downloaded is called by its last part.
        size: Bytes.
        version: Another text for every other content.
        crc32c: Of the bytes, eight hexadecimal digits; None: nobody has noted it.
        next_step: What to do if they are others.
        etag: Of the stored file, as the store tells it.
        is_of_others: It lies in a folder that only a record names, and the store did not tell that
            its checksum is right.
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
        """What no other content of any file has."""
        return str(self.files.uri), self.name, self.version, self.etag

    def changed(self, expected: object, found: object) -> CorruptionError:
        """That the store has other bytes; which, only of a file that is the run's own."""
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
    range_header: str | None,
    if_range: str | None,
    if_none_match: str | None,
) -> Response:
    """The answer that has a file, or a range of it.

    Args:
        file: Which.
        range_header: Value of `Range`.
        if_range: Value of `If-Range`: with another ETag than the file's, all of it is sent.
        if_none_match: Value of `If-None-Match`.

    Raises:
        RangeNotSatisfiableError: Nothing of the range lies in the file.
        CorruptionError: It is one block, and not what it was; or a range is asked for of a file
            that was found damaged, and still is.
        StoreUnavailableError: The store does not answer.
    """
    headers = _headers(file)
    if names_etag(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    if file.is_of_others:
        _confirm(file)
    if if_range is not None and if_range != headers["ETag"]:
        range_header = None
    part = parse_range(range_header, file.size)
    if part is None:
        blocks, status, length = _whole(file), 200, file.size
    else:
        if file.key in _damaged:
            for _ in _whole(file):  # it may have been restored
                pass
        blocks, status, length = _blocks(file, part), 206, len(part)
        headers["Content-Range"] = part.content_range
    headers["Content-Length"] = str(length)
    begun = chain([next(blocks, b"")], blocks)  # what fails at once gets a status that says so
    return StreamingResponse(begun, status_code=status, headers=headers, media_type=MEDIA_TYPE)


def described(file: StoredFile) -> Response:
    """The headers of the whole file alone.

    Raises:
        CorruptionError: It is not the run's own, and not what the run says.
        StoreUnavailableError: The store does not answer.
    """
    if file.is_of_others:
        _confirm(file)
    headers = {**_headers(file), "Content-Length": str(file.size)}
    return Response(headers=headers, media_type=MEDIA_TYPE)


def _headers(file: StoredFile) -> dict[str, str]:
    """What every answer about a file has."""
    name = file.name.rpartition("/")[2]
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{file.version}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    if file.crc32c is not None:  # RFC 9530; of the whole file, also where a range of it is sent
        digest = base64.b64encode(bytes.fromhex(file.crc32c)).decode()
        headers["Repr-Digest"] = f"crc32c=:{digest}:"
    return headers


def _blocks(file: StoredFile, part: ByteRange) -> Iterator[bytes]:
    position = part.start
    while position < part.stop:
        end = min(position + BLOCK_BYTES, part.stop)
        block = file.files.read_range(file.name, position, end)
        if not block:
            raise file.changed(f"{file.size} bytes", f"{position}")  # it was cut short just now
        position += len(block)
        yield block


def _confirm(file: StoredFile) -> None:
    """See that a file has its checksum, unless it was seen since it was changed last."""
    if file.etag is not None and file.key in _confirmed:
        return
    size, crc32c = read_crc32c(file.files, file.name, file.size)
    if (size, crc32c) != (file.size, file.crc32c):
        raise file.changed(f"{file.size} bytes with crc32c {file.crc32c}", "others")
    _keep(_confirmed, file.key)


def _keep(known: dict[_Key, None], key: _Key) -> None:
    known[key] = None
    for old in list(known)[:-_MOST_KEPT]:
        known.pop(old, None)


def _whole(file: StoredFile) -> Iterator[bytes]:
    """All its bytes, the last of them once they are known to be right."""
    checksum, held = google_crc32c.Checksum(), b""
    for block in _blocks(file, ByteRange(0, file.size, file.size)):
        checksum.update(block)
        if held:
            yield held
        held = block
    found = checksum.digest().hex()
    if file.crc32c not in (None, found):
        _keep(_damaged, file.key)
        raise file.changed(f"crc32c {file.crc32c}", found)
    _damaged.pop(file.key, None)
    yield held
