"""Metadata of objects and buckets: get, list, patch, delete, create."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gcs.conditions import Conditions
from tests.gcs.listing import Query, list_page
from tests.gcs.resources import StoredObject, merge_patch
from tests.gcs.service import Service, generation, settable
from tests.gcs.wire import Request, Response


def get_object(service: Service, request: Request) -> Response:
    """`GET .../o/<name>`: the resource."""
    bucket = service.store.bucket(request.bucket)
    stored = bucket.get(request.name, generation(request.query))
    Conditions.parse(request.query).check_read(stored)
    return Response.json(stored.resource(request.base_url), ETag=stored.etag)


def list_objects(service: Service, request: Request) -> Response:
    """`GET .../o`: one page."""
    page = list_page(service.store.bucket(request.bucket), Query.parse(request.query))
    value: dict[str, Any] = {"kind": "storage#objects"}
    if page.items:
        value["items"] = [stored.resource(request.base_url) for stored in page.items]
    if page.prefixes:
        value["prefixes"] = page.prefixes
    if page.next_token is not None:
        value["nextPageToken"] = page.next_token
    return Response.json(value)


def patch_object(service: Service, request: Request) -> Response:
    """`PATCH .../o/<name>` changes the fields that are named."""
    patch = request.body.json()
    allowed = {key: value for key, value in patch.items() if key in settable(patch)}

    def change(stored: StoredObject) -> Mapping[str, Any]:
        return merge_patch(stored.fields, allowed)

    return _update(service, request, change)


def update_object(service: Service, request: Request) -> Response:
    """`PUT .../o/<name>` replaces all fields."""
    fields = settable(request.body.json())
    return _update(service, request, lambda _: fields)


def _update(service: Service, request: Request, change: Any) -> Response:
    stored = service.store.bucket(request.bucket).update(
        request.name,
        change,
        generation=generation(request.query),
        conditions=Conditions.parse(request.query),
    )
    return Response.json(stored.resource(request.base_url), ETag=stored.etag)


def delete_object(service: Service, request: Request) -> Response:
    """`DELETE .../o/<name>`."""
    service.store.bucket(request.bucket).delete(
        request.name,
        generation=generation(request.query),
        conditions=Conditions.parse(request.query),
    )
    return Response(status=204)


def get_bucket(service: Service, request: Request) -> Response:
    """`GET /b/<bucket>`."""
    info = service.store.bucket(request.bucket).info
    Conditions.parse(request.query).check_read(info)
    return Response.json(info.resource(request.base_url))


def get_layout(service: Service, request: Request) -> Response:
    """`GET /b/<bucket>/storageLayout`: an ordinary, flat bucket."""
    service.store.bucket(request.bucket)
    return Response.json(
        {
            "kind": "storage#storageLayout",
            "bucket": request.bucket,
            "location": "US",
            "locationType": "multi-region",
            "hierarchicalNamespace": {"enabled": False},
        }
    )


def list_buckets(service: Service, request: Request) -> Response:
    """`GET /b`: all of them, on one page."""
    prefix = request.query.get("prefix", "")
    items = [
        bucket.info.resource(request.base_url)
        for bucket in service.store.buckets()
        if bucket.name.startswith(prefix)
    ]
    return Response.json({"kind": "storage#buckets", "items": items})


def create_bucket(service: Service, request: Request) -> Response:
    """`POST /b`."""
    value = request.body.json()
    name = str(value.pop("name", ""))
    bucket = service.store.create_bucket(name, value)
    return Response.json(bucket.info.resource(request.base_url))


def patch_bucket(service: Service, request: Request) -> Response:
    """`PATCH /b/<bucket>`."""
    conditions = Conditions.parse(request.query)
    info = service.store.patch_bucket(request.bucket, request.body.json(), conditions)
    return Response.json(info.resource(request.base_url))


def delete_bucket(service: Service, request: Request) -> Response:
    """`DELETE /b/<bucket>`: only an empty one."""
    service.store.delete_bucket(request.bucket, Conditions.parse(request.query))
    return Response(status=204)
