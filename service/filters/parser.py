r"""Parser of filters in a subset of AIP-160.

    filter     = [ expression ]
    expression = factor { "AND" factor } | factor { "OR" factor }
    factor     = "NOT" factor | "(" expression ")" | condition
    condition  = path ( "=" | "!=" | "<" | "<=" | ">" | ">=" ) value | path ":" ( "*" | name )
    path       = field [ "." name ]
    name       = letters without spaces, dots and signs, or a text
    value      = a text, or letters without spaces, commas and parentheses
    text       = "…" or '…', in which \" \' and \\ stand for the second of the two

AND and OR need parentheses between them, since languages differ in which of them binds first.
Source: AIP-160, https://google.aip.dev/160.
"""

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final, cast

from cairn.service.filters.expressions import (
    All,
    AnyOf,
    Comparison,
    Expression,
    Has,
    Not,
    Operator,
    Path,
    Value,
)
from cairn.service.filters.fields import Field, Kind
from cairn.service.filters.text_reader import TextReader

LONGEST_FILTER: Final = 2000
"""Largest number of characters of a filter."""

MOST_CONDITIONS: Final = 50
DEEPEST: Final = 16
"""Largest nesting depth of parentheses and NOTs."""

_ORDERED: Final = ("<=", ">=", "!=", "<", ">", "=")
_EQUAL: Final = ("!=", "=")
_OPERATORS: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.TEXT: _EQUAL,
    Kind.CHOICE: _EQUAL,
    Kind.INTEGER: _ORDERED,
    Kind.NUMBER: _ORDERED,
    Kind.MOMENT: _ORDERED,
    Kind.NAMES: (),
    Kind.SCALAR: _ORDERED,
}
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITIES: Final = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf}
_MOMENT: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
    r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_LARGEST: Final = 2**63 - 1  # largest integer of the databases


def parse_filter(text: str, fields: Mapping[str, Field]) -> Expression | None:
    """Parse a filter; None: the text is empty.

    Args:
        text: Text from the client.
        fields: Fields of the list's entries.

    Raises:
        InvalidRequestError: The text is no valid filter; the error has the position, and what was
            expected there.
    """
    reader = TextReader(text, "filter", kept=fields)
    if len(text) > LONGEST_FILTER:
        reader.refuse_all(f"expected {LONGEST_FILTER} characters at most, found {len(text)}")
    return None if reader.at_end() else _Parser(reader).whole()


class _Parser:
    """Recursive-descent parser with a bounded depth."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._conditions = 0

    def whole(self) -> Expression:
        expression = self._expression(0)
        if not self._reader.at_end():
            self._refuse_next("AND, OR or the end")
        return expression

    def _expression(self, depth: int) -> Expression:
        parts = [self._factor(depth)]
        joined = self._reader.take_word("AND", "OR")
        if joined is None:
            return parts[0]
        word: str | None = joined
        while word is not None:
            parts.append(self._factor(depth))
            at = self._reader.place()
            word = self._reader.take_word("AND", "OR")
            if word not in (None, joined):
                self._reader.refuse(
                    f"{joined}, or parentheses that say which of AND and OR binds first", at=at
                )
        return All(tuple(parts)) if joined == "AND" else AnyOf(tuple(parts))

    def _factor(self, depth: int) -> Expression:
        if depth > DEEPEST:
            self._reader.refuse(f"at most {DEEPEST} parentheses and NOTs in each other")
        if self._reader.take_word("NOT"):
            return Not(self._factor(depth + 1))
        if self._reader.take("("):
            expression = self._expression(depth + 1)
            if not self._reader.take(")"):
                self._refuse_next("AND, OR or )")
            return expression
        return self._condition()

    def _refuse_next(self, expected: str) -> None:
        at = self._reader.place()
        word = self._reader.word() or ""
        hint = f" (did you mean {word.upper()}?)" if word.upper() in ("AND", "OR") else ""
        self._reader.refuse(f"{expected}{hint}", at=at)

    def _condition(self) -> Expression:
        self._conditions += 1
        if self._conditions > MOST_CONDITIONS:
            self._reader.refuse(f"at most {MOST_CONDITIONS} conditions")
        path, field = self._reader.path()
        if field.keyed and path.key is None:
            if not self._reader.take(":"):
                self._reader.refuse(f"{path.field}.NAME, {path.field}:NAME or {path.field}:*")
            if self._reader.take("*"):
                return Has(path)
            return Has(Path(path.field, self._reader.key(path.field)))
        if self._reader.take(":"):
            if self._reader.take("*"):
                return Has(path)
            if field.kind is not Kind.NAMES and (field.kind is not Kind.TEXT or field.keyed):
                self._reader.refuse(f"* after {path}:, which asks whether there is a value")
            return Has(path, self._reader.key(path.field))
        operators = _OPERATORS[field.kind]
        operator = self._reader.take(*operators)
        if operator is None:
            others = " ".join(operators) + ", " if operators else ""
            more = f" or {path.field}:NAME" if field.kind is Kind.NAMES else ""
            self._reader.refuse(f"{others}{path}:*{more}")
        at = self._reader.place()
        value = _read_value(self._reader, path, field)
        if field.kind is Kind.SCALAR and isinstance(value, str) and operator not in _EQUAL:
            self._reader.refuse(f"a number for {path}: texts are only equal or not", at=at)
        return Comparison(path, cast(Operator, operator), value)


def _read_value(reader: TextReader, path: Path, field: Field) -> Value:
    at = reader.place()
    expected = f"{field.kind.value} for {path}"
    quoted = reader.string(expected)
    text = reader.word() if quoted is None else quoted
    if text is None:
        reader.refuse(expected, at=at)
    if field.kind is Kind.SCALAR and quoted is None and _NUMBER.fullmatch(text):
        return float(text)
    if field.kind in (Kind.TEXT, Kind.SCALAR):
        if text == "*" and quoted is None:
            reader.refuse(f"{expected}, or {path}:* for any; a text * stands in quotes", at=at)
        return text
    if field.kind is Kind.CHOICE:
        if text not in field.choices:
            near = get_close_matches(text, field.choices, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            reader.refuse(f"one of {', '.join(field.choices)}{hint}", at=at)
        return text
    if field.kind is Kind.MOMENT:
        moment = _moment(text)
        if moment is None:
            example = "2026-01-31T12:00:00Z or 2026-01-31T12:00:00.123456+02:00"
            reader.refuse(f"{expected}, with its zone, such as {example}", at=at)
        return moment
    if quoted is not None:
        reader.refuse(f"{expected}, without quotes", at=at)
    value, more = _READERS[field.kind](text)
    if value is None:
        reader.refuse(f"{expected}{more}", at=at)
    return value


def _integer(text: str) -> tuple[int | None, str]:
    if not _INTEGER.fullmatch(text):
        return None, ", in digits"
    if len(text) > 20 or abs(int(text)) > _LARGEST:
        return None, f" of at most {_LARGEST}"
    return int(text), ""


def _number(text: str) -> tuple[float | None, str]:
    if text in _INFINITIES:
        return _INFINITIES[text], ""
    if text.lower() in ("nan", "+nan", "-nan"):
        return None, ": nothing is equal to NaN, nor less or greater"
    if not _NUMBER.fullmatch(text):
        return None, ", such as 12, -0.5, 1e-3 or inf"
    value = float(text)
    return (None, " within float64") if math.isinf(value) else (value, "")


_READERS: Final[Mapping[Kind, Callable[[str], tuple[int | float | None, str]]]] = {
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
}


def _moment(text: str) -> datetime | None:
    if not _MOMENT.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):  # February 31, or a moment before the year 1 in UTC
        return None
