"""ETags, and the conditions that name them. The client reads this too, and has no framework."""

import hashlib

from pydantic import BaseModel


def etag(sequence: int) -> str:
    """The ETag of an alias at a sequence number."""
    return f'"{sequence}"'


def names_etag(if_none_match: str | None, tag: str) -> bool:
    """Whether an `If-None-Match` header, if there is one, names an ETag."""
    given = [part.strip().removeprefix("W/") for part in (if_none_match or "").split(",")]
    return "*" in given or tag in given


def body_etag(body: BaseModel) -> str:
    """The ETag of a resource whose whole body it stands for."""
    return content_etag(body.model_dump_json().encode())


def content_etag(content: bytes) -> str:
    """The same, of the body as it is sent."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
