"""Rejection of unknown query parameters: the typo `?atempt=1` must not delete all attempts.

Text in a path or query that no database can store is also rejected.
"""

from collections.abc import Callable
from copy import copy
from difflib import get_close_matches
from typing import Any, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from cairn.service.schemas import MAX_ERRORS, MORE_ERRORS, is_plain

__all__ = ["refuse_unknown_parameters"]

_known: Final[dict[tuple[Callable[..., Any], str], list[str]]] = {}
"""Names of the query parameters, by an operation's function and path."""


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise unless the OpenAPI document declares all query parameters of the request.

    Raises:
        RequestValidationError: The query has unknown parameters, the first of which are named; or
            the path or query has text that no database can store.
    """
    odd = [
        {
            "type": "odd_text",
            "loc": (place, name),
            "msg": "expected text without NUL and without half of a surrogate pair",
            "input": value,
        }
        for place, parameters in (("path", request.path_params), ("query", request.query_params))
        for name, value in parameters.items()
        if not is_plain(value)
    ]
    if odd:
        raise RequestValidationError(odd)
    if not request.query_params:
        return
    names = _parameters(request.scope["route"])
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in names]
    if unknown:
        errors: list[dict[str, Any]] = [
            {
                "type": "unknown_parameter",
                "loc": ("query", name),
                "msg": _expected(name, names),
                "input": request.query_params[name],
            }
            for name in unknown[:MAX_ERRORS]  # bounded: a search for close matches is slow
        ]
        rest = {"count": len(unknown) - len(errors)}
        raise RequestValidationError(
            [*errors, {"type": MORE_ERRORS, "loc": ("query",), "ctx": rest}]
        )


def _parameters(route: APIRoute) -> list[str]:
    """Return the names of an operation's query parameters.

    They come from the OpenAPI document of this route alone; that of all routes takes half a second.
    """
    key = (route.endpoint, route.path_format)
    if key not in _known:
        described = copy(route)
        described.include_in_schema = True  # a HEAD is in no document
        (item,) = get_openapi(title="", version="", routes=[described])["paths"].values()
        (operation,) = item.values()
        names = (
            parameter["name"]
            for parameter in operation.get("parameters", [])
            if parameter["in"] == "query"
        )
        _known[key] = sorted(names)
    return _known[key]


def _expected(name: str, names: list[str]) -> str:
    if not names:
        return "unknown parameter; this operation has none in the query"
    meant = get_close_matches(name, names, n=1)
    hint = f" (did you mean {meant[0]}?)" if meant else ""
    return f"unknown parameter{hint}; expected {', '.join(names)}"
