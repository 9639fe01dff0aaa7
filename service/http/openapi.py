"""OpenAPI document, complete enough to generate a client from it.

`python -m cairn.service.command.openapi` prints it.
"""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cairn.service import policies
from cairn.service import schemas as schema_models
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import Problem, example_of

_REFERENCE = "#/components/schemas/{model}"

PROTECTED: Final = "/v1/"
"""Prefix of the paths that need a key, on a server with keys."""

_SECURITY: Final[Mapping[str, Mapping[str, str]]] = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key, `ck_<id>_<secret>`, or a token of the OIDC issuer that the server "
        "trusts. `x-cairn-permission` of an operation says which scope it takes, and whether in "
        "all roots. A server without keys (`CAIRN_AUTH=loopback`) needs none, and answers its own "
        "machine only.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "__Host-cairn_session",
        "description": "A browser that has signed in at `/sign-in`. What changes something also "
        "takes the header `X-CSRF-Token` of one of its pages.",
    },
}

_SERVERS: Final = ({"url": "/", "description": "The server that this document is from."},)

_TAGS: Final[Mapping[str, str]] = {
    "roots": "Folders and buckets with runs, as the settings name them or as added since.",
    "runs": "Training runs: their labels, size in the store, and the writer that saves to them.",
    "checkpoints": "Saved steps of a run, and their files.",
    "tensors": "Arrays of a step: values, statistics, differences, and how they fit on a mesh.",
    "artifacts": "Exports of a step, and downloads of their files.",
    "aliases": "Names such as `production` that point to a step. Each has an `ETag`.",
    "jobs": "Work that goes on in the background: it answers 202 with an operation to follow.",
    "policies": "Schedules, retention, automations and gates, of the environment and of roots.",
    "operations": "State, progress and result of jobs.",
    "keys": "Keys of the callers of a server with `CAIRN_AUTH=keys`.",
    "events": "What happened to steps, aliases and jobs, and the webhooks that are sent it.",
    "audit": "Who changed what, and when.",
    "health": "Probes and metrics. They need no key.",
}
"""Text of each group of operations, in the order in which pages show them."""


def _without_null(schema: dict[str, Any]) -> None:
    """Remove null from a parameter's schema: a query cannot express null."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])
    elif kinds:
        schema["anyOf"] = kinds


def describe_api(app: FastAPI, *, needs_keys: bool = False) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document, with problems and security added.

    Args:
        app: Application with all of its routes.
        needs_keys: The server refuses callers without a key.
    """
    document = get_openapi(
        title=app.title,
        summary=app.summary,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=list(_SERVERS),
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )
    _, problems = models_json_schema([(Problem, "serialization")], ref_template=_REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in problems["$defs"].items():
        schemas.setdefault(name, schema)
    for name, schema in schemas.items():
        if "examples" in schema:  # FastAPI drops their nulls
            model = getattr(schema_models, name, None) or getattr(policies, name)
            schema["examples"] = [example_of(model)]
    document["components"]["securitySchemes"] = _SECURITY
    security: list[dict[str, list[str]]] = [{name: []} for name in _SECURITY]
    if not needs_keys:
        security.append({})
    for path, item in document["paths"].items():
        for method, operation in item.items():
            needed = path.startswith(PROTECTED)
            operation["security"] = security if needed else []
            for parameter in operation.get("parameters", []):
                _without_null(parameter["schema"])
            statuses = {400, 413} if "requestBody" in operation else set()
            if method != "get" or "{root}" in path:  # what a store holds may be damaged
                statuses |= {409}
            declared = problem_responses(*statuses)
            operation["responses"] |= {
                str(status): response for status, response in declared.items()
            }
    return document
