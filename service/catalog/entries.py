"""SQL expressions for members of JSON columns, equivalent in SQLite and PostgreSQL."""

import math
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import (
    JSON,
    ColumnElement,
    Double,
    Float,
    Text,
    case,
    cast,
    column,
    func,
    literal,
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
