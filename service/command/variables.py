"""The `CAIRN_*` variables that mean something, and those that are set and mean nothing."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from cairn.service.settings import Settings

logger = logging.getLogger(__name__)

PREFIX: Final = "CAIRN_"
OTHERS: Final = (
    "CAIRN_ANNOUNCE_ROOT",
    "CAIRN_DIRECT_IO",
    "CAIRN_KEY",
    "CAIRN_KEY_FILE",
    "CAIRN_URL",
    "CAIRN_WRITER_ID",
)
"""Variables that are read, and are no settings of the server."""

_LIKE: Final = 0.75


def known_variables() -> list[str]:
    """Every `CAIRN_*` variable that means something."""
    return sorted((*(f"{PREFIX}{name.upper()}" for name in Settings.model_fields), *OTHERS))


def unread_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that nothing reads, and the one that each is most like, if it is like any."""
    known = known_variables()
    return {
        name: next(iter(get_close_matches(name.upper(), known, n=1, cutoff=_LIKE)), None)
        for name in sorted(environment)
        if name.upper().startswith(PREFIX) and name.upper() not in known
    }


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
    """Say which variables are likely to be meant for a setting, which has its default instead."""
    for name, near in unread_variables(environment).items():
        if near is not None:
            logger.warning("%s: nothing reads a variable of that name; is %s meant?", name, near)
