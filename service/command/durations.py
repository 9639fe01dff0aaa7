"""Durations on the command line: `90s`, `30m`, `12h`, `7d`, `2w`, or a number of seconds."""

import re
from typing import Final

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhdw]?)")


def parse_duration(text: str) -> float:
    """Parse a duration; return seconds.

    Raises:
        ValueError: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(
            "expected a number with s, m, h, d or w (seconds, minutes, hours, days, weeks), "
            f"such as 12h or 7d, found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]
