"""Start of a job, with idempotency key and audit entry."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.audit import AuditEntry
from cairn.service.jobs.errors import IdempotencyKeyReusedError, OperationNotFoundError
from cairn.service.jobs.kinds.export_job import made_by
from cairn.service.jobs.records import operation_id, operation_key
from cairn.service.schemas import MAX_ERRORS, Operation, OperationState
from cairn.storage.runs.run import Run

_PLACE: Final = ("root", "run", "by")
_NONE: Final = object()
_MAX_LENGTH: Final = 80  # characters of a field's name or value in an error


@dataclass(frozen=True)
class JobStart:
    """Request to start a job.

    Attributes:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the root that the job is about.
        kind: Kind of the job.
        action: Action in the audit trail.
        idempotency_key: Idempotency key of the request, or None. If this caller repeats the key in
            this root, however late, the first request's operation is returned.
        briefly: Short values for the audit trail, in place of fields that are too large for it.
    """

    plane: ControlPlane
    caller: Caller
    root: str
    kind: str
    action: str
    idempotency_key: str | None
    briefly: Mapping[str, Any] = field(default_factory=dict)

    def earlier_operation(self, fields: Mapping[str, Any]) -> Operation | None:
        """Return the operation of an equal earlier request with the key; None: there is none.

        Call this before the store is read. A client that got no answer repeats its request, and
        what it asked for may be gone from the store by then.

        Args:
            fields: Values of the path and the body, as the job's request has them. Of `options`
                only those are compared that are given: the step decides on others.

        Raises:
            UnknownRootError: No such root is configured.
            NotReadyError: Jobs were not launched.
        """
        if self.idempotency_key is None:
            return None
        self.plane.root(self.root)
        operation = self._used()
        if operation is None:
            return None
        earlier = {name: operation.request.get(name) for name in fields}
        if "options" in fields:
            earlier["options"] = {
                name: (earlier["options"] or {}).get(name) for name in fields["options"]
            }
        if (operation.kind, earlier) != (self.kind, dict(fields)):
            return None  # `submit` raises the error
        with self._audited(operation.request) as entry:
            entry.complete(operation=operation.id)
        return operation

    def is_key_used(self) -> bool:
        """Return whether an operation has the key; then `submit` returns that operation, or raises.

        Raises:
            NotReadyError: Jobs were not launched.
        """
        return self._used() is not None

    def submit(self, request: Mapping[str, Any], *, exported: Run | None = None) -> Operation:
        """Start the job, or return the existing operation for an equal request.

        Args:
            request: JSON object for the job, with the root and the run that it is about.
            exported: Run that may have the export already.

        Raises:
            NotReadyError: Jobs were not launched.
            IdempotencyKeyReusedError: The key was used for another request, which the error
                describes.
        """
        jobs, key = self.plane.jobs, self._key
        with self._audited(request) as entry:
            try:
                operation = None if key else self._maker(request, exported)
                if operation is None:
                    operation = jobs.start(
                        self.kind, request, caller=self.caller.name, idempotency_key=key
                    )
            except IdempotencyKeyReusedError as exc:
                difference = describe_key_reuse(exc.used, self.kind, request)
                raise IdempotencyKeyReusedError(self.idempotency_key, exc.used, difference) from exc
            entry.complete(operation=operation.id)
        return operation

    def _maker(self, request: Mapping[str, Any], exported: Run | None) -> Operation | None:
        """Return the succeeded operation that made the requested export; None: there is none.

        An export that another control plane made has no operation here. Then a job is started,
        which finds the finished artifact.

        Args:
            request: JSON object for the job.
            exported: Run that may have the export already; None: there is no such run.
        """
        maker = None if exported is None else made_by(exported, request)
        if maker is None:
            return None
        with suppress(OperationNotFoundError):
            operation = self.plane.jobs.get(maker)
            is_same = (operation.kind, operation.request) == (self.kind, dict(request))
            if is_same and operation.state is OperationState.SUCCEEDED:
                return operation
        return None

    @property
    def _key(self) -> str | None:
        """Idempotency key for the engine; None: the request has no key."""
        if self.idempotency_key is None:
            return None
        return operation_key(self.caller.name, self.root, self.idempotency_key)

    def _used(self) -> Operation | None:
        """Return the operation that has the key; None: there is none."""
        if self._key is None:
            return None
        with suppress(OperationNotFoundError):
            return self.plane.jobs.get(operation_id(self._key))
        return None

    def _audited(self, request: Mapping[str, Any]) -> AbstractContextManager[AuditEntry]:
        values = {**request, **self.briefly}
        detail = {name: value for name, value in values.items() if name not in _PLACE}
        place = {"root": request["root"], "run": request["run"]}
        return audited(self.plane, self.caller, self.action, **place, **detail)


def describe_key_reuse(used: Operation, kind: str, request: Mapping[str, Any]) -> str:
    """Return a text that names the fields in which a request differs from an earlier one.

    Args:
        used: Operation of the earlier request with the same idempotency key.
        kind: Kind of the new request's job.
        request: JSON object of the new request.
    """
    before = {"kind": str(used.kind), **_flat(used.request)}
    now = {"kind": kind, **_flat(request)}
    different = [
        name
        for name in dict.fromkeys([*before, *now])
        if before.get(name, _NONE) != now.get(name, _NONE)
    ]
    changes = [
        f"{name[:_MAX_LENGTH]} {_field_text(now, name)} where it was {_field_text(before, name)}"
        for name in different[:MAX_ERRORS]
    ]
    if len(different) > MAX_ERRORS:
        changes.append(f"and {len(different) - MAX_ERRORS} more")
    place = "/".join(str(used.request[name]) for name in ("root", "run"))
    step = f"/steps/{used.request['step']}" if "step" in used.request else ""
    return f"another one than its {used.kind} of {place}{step}: {', '.join(changes)}"


def _flat(request: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Flatten nested fields to one level, with dotted names."""
    fields: dict[str, Any] = {}
    for name, value in request.items():
        inner = _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {}
        fields |= inner or {f"{within}{name}": value}
    return fields


def _field_text(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name])[:_MAX_LENGTH] if name in fields else "not given"
