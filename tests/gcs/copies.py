"""Copies that the server makes: copyTo, rewriteTo, moveTo and compose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gcs.conditions import Conditions
from tests.gcs.errors import InvalidRequestError
from tests.gcs.objects import Bucket
from tests.gcs.resources import StoredObject
from tests.gcs.service import Service, checked_name, generation, settable
from tests.gcs.wire import BLOCK_BYTES, Request, Response

MAX_COMPONENTS = 32


def _copy(service: Service, request: Request, target: Bucket, name: str) -> StoredObject:
    """Copies the source, if it is what the client thinks, to `name`, under its conditions."""
    source_bucket = service.store.bucket(request.bucket)
    with source_bucket.lock:
        source = source_bucket.get(request.name, generation(request.query, "sourceGeneration"))
        Conditions.parse(request.query, "ifSource").check_write(source)
    resource = settable(request.body.json())
    fields: Mapping[str, Any] = resource or source.fields
    if resource and "contentType" not in resource and "contentType" in source.fields:
        fields = {**resource, "contentType": source.fields["contentType"]}
    conditions = Conditions.parse(request.query)
    return target.link(source, source_bucket, name, fields=fields, conditions=conditions)


def copy(service: Service, request: Request) -> Response:
    """`POST .../o/<source>/copyTo/b/<bucket>/o/<name>`."""
    target = service.store.bucket(request.parameters["target_bucket"])
    stored = _copy(service, request, target, checked_name(request.parameters["target_name"]))
    return Response.json(stored.resource(request.base_url))


def rewrite(service: Service, request: Request) -> Response:
    """`POST .../o/<source>/rewriteTo/...`: done in one call, as GCS does within a location."""
    target = service.store.bucket(request.parameters["target_bucket"])
    stored = _copy(service, request, target, checked_name(request.parameters["target_name"]))
    return Response.json(
        {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": str(stored.size),
            "objectSize": str(stored.size),
            "done": True,
            "resource": stored.resource(request.base_url),
        }
    )


def move(service: Service, request: Request) -> Response:
    """`POST .../o/<source>/moveTo/o/<name>`: within one bucket, all at once."""
    bucket = service.store.bucket(request.bucket)
    name = checked_name(request.parameters["target_name"])
    if name == request.name:
        raise InvalidRequestError("The source and destination objects are the same.")
    with bucket.lock:
        stored = _copy(service, request, bucket, name)
        bucket.delete(request.name)
    return Response.json(stored.resource(request.base_url))


def compose(service: Service, request: Request) -> Response:
    """`POST .../o/<name>/compose`: concatenates up to 32 objects of one bucket."""
    bucket = service.store.bucket(request.bucket)
    name = checked_name(request.name)
    value = request.body.json()
    sources = value.get("sourceObjects")
    if not isinstance(sources, list) or not 1 <= len(sources) <= MAX_COMPONENTS:
        raise InvalidRequestError(
            f"The number of source components provided must be between 1 and {MAX_COMPONENTS}."
        )
    destination = value.get("destination") or {}
    fields = settable(destination)
    components = 0
    staged = bucket.stage()
    try:
        for source in sources:
            match = (source.get("objectPreconditions") or {}).get("ifGenerationMatch")
            conditions = Conditions(generation_match=None if match is None else int(match))
            wanted = source.get("generation")
            number = None if wanted is None else int(wanted)
            stored, file = bucket.open(source["name"], number, conditions)
            with file:
                while block := file.read(BLOCK_BYTES):
                    staged.write(block)
            components += stored.component_count or 1
            fields.setdefault("contentType", stored.content_type)
        done = bucket.commit(
            name,
            staged,
            fields=fields,
            conditions=Conditions.parse(request.query),
            component_count=components,
        )
    finally:
        staged.discard()
    return Response.json(done.resource(request.base_url))
