"""Text of a filter between quotes."""

import re
from typing import Final

_SPECIAL: Final = re.compile(r'["\\]')
_ESCAPED: Final = re.compile(r"""\\(["'\\])""")


def quote(text: str) -> str:
    """Any text as a filter has it: a label's name with dots, say, or its value."""
    return '"' + _SPECIAL.sub(r"\\\g<0>", text) + '"'


def unquote(quoted: str) -> str:
    """What stands between quotes."""
    return _ESCAPED.sub(r"\1", quoted[1:-1])
