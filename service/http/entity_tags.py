"""ETags, and headers that name them. Imports no web framework, since the client imports this."""

import hashlib

from pydantic import BaseModel


def etag(sequence: int) -> str:
    """Return the ETag of an alias at a sequence number."""
    return f'"{sequence}"'


def names_etag(if_none_match: str | None, tag: str) -> bool:
    """Return whether an `If-None-Match` header names an ETag."""
    tags = [part.strip().removeprefix("W/") for part in (if_none_match or "").split(",")]
    return "*" in tags or tag in tags


def body_etag(body: BaseModel) -> str:
    """Return the ETag of a resource: a digest of its whole body."""
    return content_etag(body.model_dump_json().encode())


def content_etag(content: bytes) -> str:
    """Return the ETag of a serialized body."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
