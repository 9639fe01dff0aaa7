"""Entries of the catalog's JSON columns, in SQL: alike in SQLite and PostgreSQL."""

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
"""As JSON has it. PostgreSQL's text can't have it, and SQLite takes it for the end."""

_NOT_FINITE: Final = {"inf": math.inf, "-inf": -math.inf}
"""JSON has neither them nor NaN: they are text there."""


def text_entry(of: Any, key: str, dialect: str) -> ColumnElement[Any]:
    """An entry as text; null where there is none. NUL is U+FFFD, in its name as well.

    Args:
        of: The column.
        key: The entry's name, whatever letters it has.
        dialect: Name of the database's.
    """
    if dialect == "sqlite":
        return _from_sqlite(of, key, lambda value, _: type_coerce(value, Text()))
    plain = case(
        (func.strpos(cast(of, Text()), _NUL) > 0, cast(_without_nul(of), JSON())), else_=of
    )
    return plain.op("->>", return_type=Text())(literal(key, Text()))


def number_entry(of: Any, key: str, dialect: str) -> ColumnElement[Any]:
    """An entry as a number; null where there is none, or NaN.

    Args:
        of: The column.
        key: The entry's name.
        dialect: Name of the database's.
    """
    if dialect == "sqlite":
        return _from_sqlite(of, key, _number)
    text = text_entry(of, key, dialect)
    return case((text == "nan", null()), else_=cast(text, Double()))


def has_entries(of: Any) -> ColumnElement[bool]:
    """Whether there is any entry."""
    return cast(of, Text()) != "{}"


def _without_nul(of: Any) -> ColumnElement[str]:
    """JSON with U+FFFD in place of NUL; an escaped backslash is not the begin of one."""
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
    """By comparing names: paths of SQLite's JSON functions have no form for some."""
    plain = case((func.instr(of, _NUL) > 0, _without_nul(of)), else_=of)
    entry = func.json_each(plain).table_valued(
        column("key", Text()), column("value", Text()), column("type", Text())
    )
    found = select(read(entry.c.value, entry.c.type)).where(entry.c.key == literal(key, Text()))
    return found.scalar_subquery()
