"""The OpenAPI document: complete enough that a client can be generated from it.

`python -m cairn.service.command.openapi` prints it.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cairn.service.schemas import Problem

_REFERENCE = "#/components/schemas/{model}"


def describe_api(app: FastAPI) -> None:
    """Give `app` its document: the framework's, and the schema of the problems it declares."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title,
        summary=app.summary,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    _, problems = models_json_schema([(Problem, "serialization")], ref_template=_REFERENCE)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in problems["$defs"].items():
        schemas.setdefault(name, schema)
    return found
