"""Download of one large file, resumed after broken connections."""

import base64
import binascii
from collections.abc import AsyncGenerator
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx
from anyio import AsyncFile

from cairn.service.client.asynchronous.connection import check
from cairn.service.client.asynchronous.whole_file import whole_file
from cairn.service.client.protocol.responses import unreachable
from cairn.service.errors import DownloadError

ATTEMPTS_WITHOUT_PROGRESS: Final = 5


async def download(http: httpx.AsyncClient, path: str, target: Path) -> int:
    """Download `path` to `target`; return its size in bytes.

    Raises:
        DownloadError: The checksum differs from the server's.
        ProblemResponseError: The server refused.
        ServerUnreachableError: The connection broke five times without a byte in between.
    """
    async with whole_file(target) as file:
        await _fetch(http, path, file)
    return target.stat().st_size


async def blocks(http: httpx.AsyncClient, path: str, start: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of `path` from an offset on; the content at `path` must never change.

    Raises:
        ProblemResponseError: The server refused.
        ServerUnreachableError: The connection broke five times without a byte in between.
    """
    failures = 0
    while True:
        before = start
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        try:
            async with http.stream("GET", path, headers=headers) as response:
                if start and response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return  # `start` is the end of the file
                await check(response)
                skip = start if response.status_code != HTTPStatus.PARTIAL_CONTENT else 0
                async for chunk in response.aiter_bytes():
                    block, skip = chunk[skip:], max(0, skip - len(chunk))
                    start += len(block)
                    if block:
                        yield block
            return
        except httpx.TransportError as exc:
            failures = 0 if start > before else failures + 1
            if failures == ATTEMPTS_WITHOUT_PROGRESS:
                raise unreachable(f"{http.base_url}{path}", exc) from exc


async def _fetch(http: httpx.AsyncClient, path: str, file: AsyncFile[bytes]) -> None:
    """Download into `file`, resume after a break, and compare the checksum of the whole file.

    The server can't verify a file that it sends in ranges, so the client has to.
    """
    import google_crc32c  # here: most requests need none

    etag: str | None = None
    expected: str | None = None
    checksum = google_crc32c.Checksum()
    failures = 0
    while True:
        before = await file.tell()
        headers = {"Accept-Encoding": "identity"}
        if before and etag is not None:
            headers |= {"Range": f"bytes={before}-", "If-Range": etag}
        try:
            async with http.stream("GET", path, headers=headers) as response:
                await check(response)
                if response.status_code != HTTPStatus.PARTIAL_CONTENT:  # from the start
                    await file.seek(0)
                    await file.truncate()
                    expected = _expected_crc32c(response.headers.get("repr-digest", ""))
                    checksum = google_crc32c.Checksum()
                    etag = _strong(response.headers.get("etag"))
                async for chunk in response.aiter_bytes():
                    await file.write(chunk)
                    checksum.update(chunk)
            break
        except httpx.TransportError as exc:
            failures = 0 if await file.tell() > before else failures + 1
            if failures == ATTEMPTS_WITHOUT_PROGRESS:
                raise unreachable(f"{http.base_url}{path}", exc) from exc
    computed = checksum.digest().hex()
    if expected not in (None, computed):
        raise DownloadError(
            f"{http.base_url}{path}: expected crc32c {expected}, found {computed}. `cairn verify` "
            "says whether the store is damaged."
        )


def _expected_crc32c(digests: str) -> str | None:
    """Read the CRC-32C of a `Repr-Digest` header as eight hexadecimal digits, or None."""
    for field in digests.split(","):
        name, _, value = field.strip().partition("=")
        if name == "crc32c":
            try:
                return base64.b64decode(value.strip(":"), validate=True).hex()
            except binascii.Error:
                return None
    return None


def _strong(etag: str | None) -> str | None:
    """Return the ETag if it is strong, else None: a weak one may be equal for different bytes."""
    return None if etag is None or etag.startswith("W/") else etag
