"""Bodies of answers, and their ETags."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import Response
from pydantic import BaseModel

from cairn.service.http.entity_tags import content_etag, names_etag

NOT_CHANGED: Final[dict[str, Any]] = {"description": "It is as last seen."}
"""OpenAPI declaration of a 304."""


def json_answer(body: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with this body, made here: in the thread of its route, and checked once.

    The framework would check it anew in another thread, and write it while nothing else can be
    answered. Its route says `response_model`.
    """
    return Response(body.model_dump_json(), headers=headers, media_type="application/json")


def tagged_answer(body: BaseModel, if_none_match: str | None = None) -> Response:
    """As `json_answer`, with its ETag; 304 if the client has seen this one."""
    answer = json_answer(body)
    tag = content_etag(bytes(answer.body))
    if names_etag(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    answer.headers["ETag"] = tag
    return answer


def created_answer(body: BaseModel, location: str) -> Response:
    """As `tagged_answer`, of what was made just now and is found at the path `location`."""
    answer = tagged_answer(body)
    answer.status_code = HTTPStatus.CREATED
    answer.headers["Location"] = location
    return answer
