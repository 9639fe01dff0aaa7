"""Endpoints that GCS does not have: faults and quotas of a double in another process.

GET    /_double                what is in force, and how many bytes came in
POST   /_double/faults         {"kind": "status", "status": 503, "operation": "upload", ...}
DELETE /_double/faults         all of them, and the quotas
DELETE /_double/faults/<id>    one
POST   /_double/faults/<id>/release
PUT    /_double/quota          {"bytes": 1000000 or null, "bucket": name or null, "status": 403}
"""

from __future__ import annotations

import dataclasses

from tests.gcs.errors import InvalidRequestError, NotFoundError
from tests.gcs.faults import Fault
from tests.gcs.service import Service
from tests.gcs.wire import Request, Response

OPTIONS = {field.name for field in dataclasses.fields(Fault) if field.init} - {
    "kind",
    "predicate",
    "fired",
    "id",
    "snapshot",
    "_happened",
    "_released",
}


def show(service: Service, _request: Request) -> Response:
    """What is in force."""
    return Response.json(
        {
            "faults": [fault.to_json() for fault in service.faults.all()],
            "received_bytes": service.received_bytes,
            "used_bytes": {bucket.name: bucket.used_bytes for bucket in service.store.buckets()},
        }
    )


def add_fault(service: Service, request: Request) -> Response:
    """Orders a fault."""
    value = request.body.json()
    kind = value.pop("kind", None)
    unknown = sorted(value.keys() - OPTIONS)
    if unknown:
        raise InvalidRequestError(f"unknown options {unknown}; known: {sorted(OPTIONS)}")
    return Response.json(service.faults.add(kind, **value).to_json())


def _fault(service: Service, request: Request) -> Fault:
    for fault in service.faults.all():
        if fault.id == int(request.parameters["fault"]):
            return fault
    raise NotFoundError(f"no fault {request.parameters['fault']}")


def remove_fault(service: Service, request: Request) -> Response:
    """Takes one fault back."""
    service.faults.remove(_fault(service, request).id)
    return Response(status=204)


def clear_faults(service: Service, _request: Request) -> Response:
    """Takes all faults and quotas back."""
    service.faults.clear()
    return Response(status=204)


def release_fault(service: Service, request: Request) -> Response:
    """Lets go what a fault holds back."""
    _fault(service, request).release()
    return Response(status=204)


def set_quota(service: Service, request: Request) -> Response:
    """Limits the bytes stored."""
    value = request.body.json()
    limit = value.get("bytes")
    if limit is not None and not isinstance(limit, int):
        raise InvalidRequestError(f"bytes: a number or null was expected, found {limit!r}")
    service.faults.set_quota(
        limit, bucket=value.get("bucket"), status=int(value.get("status", 403))
    )
    return Response(status=204)
