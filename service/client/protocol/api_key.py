"""API key of a client: from the environment, never from a command line."""

import os
from collections.abc import Generator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httpx

from cairn.service.errors import SettingsError


class KeyAuth(httpx.Auth):
    """API key that each request carries.

    The file `CAIRN_KEY_FILE` is read again when the server refuses the key: somebody may have put
    a new one there since a long-running client started.
    """

    def __init__(self, header: str, file: str | None = None) -> None:
        self._header = header
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send a request with the key; once more if it is refused and the file has another."""
        request.headers["Authorization"] = sent = self._header
        response = yield request
        if response.status_code != HTTPStatus.UNAUTHORIZED or self._file is None:
            return
        with suppress(SettingsError):  # it is being replaced: the refusal is the answer
            self._header = _header(_read(self._file), self._file)
        if self._header != sent:
            request.headers["Authorization"] = self._header
            yield request


def key_auth(key: str | None) -> KeyAuth | None:
    """Return what adds the API key to each request; None: there is no key.

    Args:
        key: API key; default: `CAIRN_KEY`, else the content of the file `CAIRN_KEY_FILE`.

    Raises:
        SettingsError: The file can't be read, or the text is not a valid key.
    """
    if key is not None:
        return KeyAuth(_header(key, "key"))
    if key := os.environ.get("CAIRN_KEY"):
        return KeyAuth(_header(key, "CAIRN_KEY"))
    if file := os.environ.get("CAIRN_KEY_FILE"):
        return KeyAuth(_header(_read(file), f"CAIRN_KEY_FILE: {file}"), file)
    return None


def _header(key: str, source: str) -> str:
    key = key.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise SettingsError(
            f"{source}: expected a key such as ck_<id>_<secret>, found another text. "
            "`cairn keys create` makes one."
        )
    return f"Bearer {key}"


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "no text"
        raise SettingsError(
            f"CAIRN_KEY_FILE: {file}: expected a file with a key, found: {why}"
        ) from exc
