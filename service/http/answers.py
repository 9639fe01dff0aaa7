"""JSON answers, and their ETags."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import Response
from pydantic import BaseModel

from cairn.service.http.entity_tags import content_etag, names_etag
from cairn.service.schemas import Operation

NOT_CHANGED: Final[dict[str, Any]] = {"description": "It is as last seen."}
"""OpenAPI declaration of a 304."""


def json_answer(body: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer with a serialized body; call this in the thread of the route.

    FastAPI would validate the body a second time in another thread, and serialize it in the event
    loop, where it blocks all other requests. The route declares `response_model` for OpenAPI only.
    """
    return Response(body.model_dump_json(), headers=headers, media_type="application/json")


def tagged_answer(body: BaseModel, if_none_match: str | None = None) -> Response:
    """Return a JSON answer with its ETag, or a 304 if `if_none_match` names that ETag."""
    answer = json_answer(body)
    tag = content_etag(bytes(answer.body))
    if names_etag(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    answer.headers["ETag"] = tag
    return answer


def created_answer(body: BaseModel, location: str) -> Response:
    """Return a 201 answer with an ETag, for a resource created at the path `location`."""
    answer = tagged_answer(body)
    answer.status_code = HTTPStatus.CREATED
    answer.headers["Location"] = location
    return answer


def accepted(operation: Operation, response: Response) -> Operation:
    """Set the header `Location` to the operation's path, and return the operation.

    It is the body of a 202 answer.
    """
    response.headers["Location"] = f"/v1/operations/{operation.id}"
    return operation
