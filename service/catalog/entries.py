"""SQL expressions for members of JSON columns, equivalent in SQLite and PostgreSQL."""

import math
import re
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    ColumnElement,
    Double,
    Float,
    Text,
    case,
    cast,
    column,
    func,
    literal,
    not_,
    null,
    select,
    type_coerce,
)

_NUL: Final = r"\u0000"
"""NUL as JSON writes it. PostgreSQL's text cannot have it, and SQLite takes it for the end."""

_NOT_FINITE: Final = {"inf": math.inf, "-inf": -math.inf}
"""JSON has neither infinities nor NaN, so they are stored as text."""


def text_entry(of: Any, key: str, dialect: str) -> ColumnElement[Any]:
    """Return a member as text; null if it is missing. NUL becomes U+FFFD, in its name too.

    Args:
        of: JSON column.
        key: Name of the member; it may have any characters.
        dialect: Name of the database's dialect.
    """
    if dialect == "sqlite":
        return _from_sqlite(of, key, lambda value, _: type_coerce(value, Text()))
    plain = case(
        (func.strpos(cast(of, Text()), _NUL) > 0, cast(_without_nul(of), JSON())), else_=of
    )
    return plain.op("->>", return_type=Text())(literal(key, Text()))


def number_entry(of: Any, key: str, dialect: str) -> ColumnElement[Any]:
    """Return a member as a number; null if it is missing or NaN.

    Args:
        of: JSON column.
        key: Name of the member.
        dialect: Name of the database's dialect.
    """
    if dialect == "sqlite":
        return _from_sqlite(of, key, _number)
    text = text_entry(of, key, dialect)
    return case((text == "nan", null()), else_=cast(text, Double()))


def scalar_entries(
    of: Any, key: str, dialect: str
) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """Return a member as a number and as a text; null where it is not one.

    Args:
        of: JSON column of finite numbers and texts.
        key: Name of the member.
        dialect: Name of the database's dialect.
    """
    if dialect == "sqlite":
        return (
            _from_sqlite(
                of, key, lambda value, kind: case((kind != "text", cast(value, Double())))
            ),
            _from_sqlite(
                of, key, lambda value, kind: case((kind == "text", type_coerce(value, Text())))
            ),
        )
    text = text_entry(of, key, dialect)
    kind = func.json_typeof(of.op("->", return_type=JSON())(literal(key, Text())))
    return case((kind == "number", cast(text, Double()))), case((kind == "string", text))


WRITTEN_NUMBER: Final = r"^[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,2})?$"
"""Texts that are sorted as numbers, such as labels of learning rates."""

SQLITE_NUMBER: Final = "cairn_number"
"""SQL function of our connections to SQLite: the number that a text is; null for another text."""


def written_number(text: object) -> float | None:
    """Return the number that a text is; None for another text."""
    if isinstance(text, str) and re.fullmatch(WRITTEN_NUMBER, text):
        return float(text)
    return None


def written_entries(
    of: Any, key: str, dialect: str
) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """Return a text as the number that it is, and as a text if it is none; the other is null.

    Args:
        of: JSON column of texts.
        key: Name of the member.
        dialect: Name of the database's dialect.
    """
    text = text_entry(of, key, dialect)
    if dialect == "sqlite":
        number = getattr(func, SQLITE_NUMBER)(text, type_=Double())
        return number, case((number.is_(None), text))
    is_number = text.op("~", return_type=Boolean())(WRITTEN_NUMBER)
    return case((is_number, cast(text, Double()))), case((not_(is_number), text))


def has_entries(of: Any) -> ColumnElement[bool]:
    """Return the condition that a JSON object has any member."""
    return cast(of, Text()) != "{}"


def _without_nul(of: Any) -> ColumnElement[str]:
    """Replace NUL in JSON text by U+FFFD.

    Escaped backslashes are rewritten first, since a `u0000` after one of them is plain text.
    """
    return func.replace(
        func.replace(cast(of, Text()), r"\\", r"\u005c"), _NUL, r"\ufffd", type_=Text()
    )


def _number(value: ColumnElement[Any], kind: ColumnElement[Any]) -> ColumnElement[Any]:
    infinities = [(value == text, literal(sign, Float())) for text, sign in _NOT_FINITE.items()]
    return case(
        (kind == "text", case(*infinities, else_=null())), else_=type_coerce(value, Float())
    )


def _from_sqlite(
    of: Any, key: str, read: Callable[[ColumnElement[Any], ColumnElement[Any]], ColumnElement[Any]]
) -> ColumnElement[Any]:
    """Read a member by comparing names: SQLite's JSON paths cannot express all of them."""
    plain = case((func.instr(of, _NUL) > 0, _without_nul(of)), else_=of)
    entry = func.json_each(plain).table_valued(
        column("key", Text()), column("value", Text()), column("type", Text())
    )
    query = select(read(entry.c.value, entry.c.type)).where(entry.c.key == literal(key, Text()))
    return query.scalar_subquery()
