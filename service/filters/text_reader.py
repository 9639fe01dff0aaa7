"""Reader of a text from left to right, which reports the position of errors."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NoReturn

from cairn.service.errors import InvalidRequestError
from cairn.service.filters.expressions import Path, unquote
from cairn.service.filters.fields import Field

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"""[^\s()"'=!<>:.,\\]+""")
_WORD: Final = re.compile(r"""[^\s()"'=!<>,\\]+""")
_STRING: Final = re.compile(r""""(?:[^"\\]|\\["'\\])*"|'(?:[^'\\]|\\["'\\])*\'""")
_SHOWN: Final = 40  # characters of the found text in an error

_KEPT_ELSEWHERE: Final[Mapping[str, str]] = {
    "size": "a checkpoint's size is `bytes`",
}


class TextReader:
    """Text of a query parameter, and the position up to which it was read."""

    def __init__(self, text: str, parameter: str, *, kept: Mapping[str, Field]) -> None:
        """Begin to read a query parameter.

        Args:
            text: Text of the parameter.
            parameter: Name of the parameter, for errors.
            kept: Fields of the list's entries, by name.
        """
        self._text, self._parameter, self._kept = text, parameter, kept
        self._at = 0

    def place(self) -> int:
        """Skip spaces, and return the position of the next word."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        return self._at

    def at_end(self) -> bool:
        """Return whether only spaces are left."""
        return self.place() == len(self._text)

    def take(self, *signs: str) -> str | None:
        """Read one of several signs if it comes next, and return it; else return None.

        Args:
            signs: The signs; a sign that begins with another one must come before it.
        """
        at = self.place()
        for sign in signs:
            if self._text.startswith(sign, at):
                self._at += len(sign)
                return sign
        return None

    def take_word(self, *words: str) -> str | None:
        """Read one of several words if it comes next, and return it; else return None."""
        word = _WORD.match(self._text, self.place())
        if word is None or word[0] not in words:
            return None
        self._at = word.end()
        return word[0]

    def string(self, expected: str) -> str | None:
        """Read a quoted text if it comes next, and return it without quotes; else return None.

        Args:
            expected: Description of what was expected, for the error.

        Raises:
            InvalidRequestError: The quotes are not closed, or an escape is invalid.
        """
        at = self.place()
        if self._text[at : at + 1] not in ("'", '"'):
            return None
        string = _STRING.match(self._text, at)
        if string is None:
            self.refuse(
                f"{expected}, between quotes that are closed; in them, a quote or a backslash "
                "after a backslash stands for itself, and nothing else may follow one",
                at=at,
            )
        self._at = string.end()
        return unquote(string[0])

    def word(self) -> str | None:
        """Read a text without quotes and return it; None: no such text comes next.

        It ends before a space, comma, parenthesis, quote, backslash or operator.
        """
        word = _WORD.match(self._text, self.place())
        if word is None:
            return None
        self._at = word.end()
        return word[0]

    def path(self) -> tuple[Path, Field]:
        """Read a field, or a member of a keyed field, and return it with the field's definition.

        Raises:
            InvalidRequestError: The next text is neither.
        """
        at = self.place()
        name = _NAME.match(self._text, at)
        if name is None:
            self.refuse(f"a field: {self._fields()}")
        field = self._kept.get(name[0])
        if field is None:
            near = get_close_matches(name[0], self._kept, n=1)
            other = _KEPT_ELSEWHERE.get(name[0])
            hint = f"; {other}" if other else f" (did you mean {near[0]}?)" if near else ""
            self.refuse(f"a field: {self._fields()}{hint}", at=at)
        self._at = name.end()
        if not self._text.startswith(".", self._at):
            return Path(name[0]), field
        if not field.keyed:
            self.refuse(f"an operator: {name[0]} has no parts")
        self._at += 1
        return Path(name[0], self._key(name[0])), field

    def key(self, field: str) -> str:
        """Read the name of a member of a keyed field.

        Args:
            field: Name of the field, for the error.

        Raises:
            InvalidRequestError: The next text is no name.
        """
        self.place()
        return self._key(field)

    def _key(self, field: str) -> str:
        expected = f"a name of one of {field}"
        start = self._at
        if self._text[start : start + 1] in ("'", '"'):
            return self.string(expected) or ""
        name = _NAME.match(self._text, start)
        if name is None:
            self.refuse(f"{expected}; between quotes if it has other letters", at=start)
        self._at = name.end()
        if self._text.startswith(".", self._at):
            self.refuse(f'quotes around a name that has dots, such as {field}."eval.loss"')
        return name[0]

    def refuse(self, expected: str, *, at: int | None = None) -> NoReturn:
        """Raise an error that names a position, what was expected there, and what was found.

        Args:
            expected: Description of what was expected.
            at: Position; None: that of the next word.

        Raises:
            InvalidRequestError: Always.
        """
        place = self.place() if at is None else at
        rest = self._text[place:]
        shown = repr(rest[:_SHOWN] + "…" * (len(rest) > _SHOWN)) if rest else "its end"
        detail = f"at character {place + 1}: expected {expected}; found {shown}"
        self.refuse_all(detail)

    def refuse_all(self, detail: str) -> NoReturn:
        """Raise an error about the whole text.

        Args:
            detail: Message of the error.

        Raises:
            InvalidRequestError: Always.
        """
        field = f"query.{self._parameter}"
        raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])

    def _fields(self) -> str:
        return ", ".join(
            f"{name}.NAME" if field.keyed else name for name, field in self._kept.items()
        )
