"""API key of a client: from the environment, never from a command line."""

import os
from pathlib import Path

from cairn.service.errors import SettingsError


def authorization(key: str | None) -> dict[str, str]:
    """Return the header with the API key; without a key, no header.

    Args:
        key: API key; default: `CAIRN_KEY`, else the content of the file `CAIRN_KEY_FILE`.

    Raises:
        SettingsError: The file can't be read, or the text is not a valid key.
    """
    if key is not None:
        return _header(key, "key")
    if key := os.environ.get("CAIRN_KEY"):
        return _header(key, "CAIRN_KEY")
    if file := os.environ.get("CAIRN_KEY_FILE"):
        return _header(_read(file), f"CAIRN_KEY_FILE: {file}")
    return {}


def _header(key: str, source: str) -> dict[str, str]:
    key = key.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise SettingsError(
            f"{source}: expected a key such as ck_<id>_<secret>, found another text. "
            "`cairn keys create` makes one."
        )
    return {"Authorization": f"Bearer {key}"}


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "no text"
        raise SettingsError(
            f"CAIRN_KEY_FILE: {file}: expected a file with a key, found: {why}"
        ) from exc
