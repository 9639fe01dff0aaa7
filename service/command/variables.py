"""`CAIRN_*` variables: those that Cairn reads, misspelt ones, and a file that sets some."""

import logging
import re
import shlex
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cairn.service.errors import SettingsError
from cairn.service.settings import Settings

logger = logging.getLogger(__name__)

PREFIX: Final = "CAIRN_"
OTHERS: Final = (
    "CAIRN_ANNOUNCE_ROOT",
    "CAIRN_DIRECT_IO",
    "CAIRN_ENV_FILE",
    "CAIRN_KEY",
    "CAIRN_KEY_FILE",
    "CAIRN_READ_ONCE",
    "CAIRN_URL",
    "CAIRN_WRITER_ID",
)
"""Variables that Cairn reads outside the server's settings."""

_LIKE: Final = 0.75
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def known_variables() -> list[str]:
    """Return the names of all `CAIRN_*` variables that Cairn reads."""
    return sorted((*(f"{PREFIX}{name.upper()}" for name in Settings.model_fields), *OTHERS))


def unread_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the `CAIRN_*` variables that Cairn does not read, each with the most similar name.

    The similar name is None if no variable that Cairn reads has one.
    """
    variables = known_variables()
    return {
        name: next(iter(get_close_matches(name.upper(), variables, n=1, cutoff=_LIKE)), None)
        for name in sorted(environment)
        if name.upper().startswith(PREFIX) and name.upper() not in variables
    }


def default_text(field: FieldInfo) -> str:
    """Return the default of a setting as text; empty if it is empty or None."""
    if field.default is PydanticUndefined:
        return "{}" if field.default_factory is dict else "found at the start"
    return "" if field.default in ("", None) else str(field.default)


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
    """Warn of variables whose name is probably misspelt, since they have no effect."""
    for name, near in unread_variables(environment).items():
        if near is not None:
            logger.warning("%s: nothing reads a variable of that name; is %s meant?", name, near)


def read_env_file(path: Path, environment: MutableMapping[str, str]) -> None:
    """Set the variables of a file that are not set yet.

    A line is NAME=VALUE with shell quoting, a comment, or empty. Nothing is expanded.

    Raises:
        SettingsError: The file can't be read, or has other lines; the text names each of them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(
            f"{path}: expected a file of NAME=VALUE lines, found: {exc}. `cairn init` makes one."
        ) from exc
    variables: dict[str, str] = {}
    odd: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that does not end
            words = ["", ""]
        if not words:
            continue
        name, joint, value = words[-1].partition("=")
        if words[:-1] not in ([], ["export"]) or not joint or not _NAME.fullmatch(name):
            odd.append(f"line {number}")  # the number, not the text: it may be a password
        variables[name] = value
    if odd:
        raise SettingsError(
            f"{path}: expected NAME=VALUE on each line, a value with spaces or special characters "
            f"in quotes, found something else in {', '.join(odd)}"
        )
    for name, value in variables.items():
        environment.setdefault(name, value)
