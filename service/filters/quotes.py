"""Quoted text in the filter language."""

import re
from typing import Final

_SPECIAL: Final = re.compile(r'["\\]')
_ESCAPED: Final = re.compile(r"""\\(["'\\])""")


def quote(text: str) -> str:
    """Quote any text for a filter: a label's name with dots, for example, or its value."""
    return '"' + _SPECIAL.sub(r"\\\g<0>", text) + '"'


def unquote(quoted: str) -> str:
    """Return the text between the quotes, without its escapes."""
    return _ESCAPED.sub(r"\1", quoted[1:-1])
