"""Starting a job."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from cairn.service.access import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import AuditEntry
from cairn.service.jobs import (
    IdempotencyKeyReusedError,
    OperationNotFoundError,
    operation_id,
    operation_key,
    start_export,
)
from cairn.service.schemas import MAX_ERRORS, Operation
from cairn.storage.runs import Run

_PLACE: Final = ("root", "run", "by")
_NONE: Final = object()
_LONGEST: Final = 80  # letters of a field that is named


@dataclass(frozen=True)
class Start:
    """A request to start a job.

    Attributes:
        plane: Where.
        caller: Who asks.
        root: Name of the root that it is about.
        kind: Of the job.
        action: What the audit trail calls it.
        idempotency_key: The same key of this caller, in this root, is the same operation, for good.
        briefly: What the audit trail has of fields that are too large for it.
    """

    plane: ControlPlane
    caller: Caller
    root: str
    kind: str
    action: str
    idempotency_key: str | None
    briefly: Mapping[str, Any] = field(default_factory=dict)

    def repeated(self, asked: Mapping[str, Any]) -> Operation | None:
        """The operation that the key names, if that was asked for; None: it is to be made.

        To be called before anything is looked up in the store: what was asked for then may be gone
        by the time that a client that got no answer asks again.

        Args:
            asked: What the path and the body say, as the job's request has it.

        Raises:
            UnknownRootError: No such root is configured.
            NotReadyError: Jobs were not launched.
        """
        if self.idempotency_key is None:
            return None
        self.plane.root(self.root)
        found = self._used()
        if found is None:
            return None
        told = {name: found.request.get(name) for name in asked}
        if (found.kind, told) != (self.kind, dict(asked)):
            return None  # `make` tells what is wrong
        with self._audited(found.request) as entry:
            entry.complete(operation=found.id)
        return found

    def is_key_used(self) -> bool:
        """Whether the key names an operation: then `make` finds it, or tells what is wrong.

        Raises:
            NotReadyError: Jobs were not launched.
        """
        return self._used() is not None

    def make(self, request: Mapping[str, Any], *, exported: Run | None = None) -> Operation:
        """Start the job, or find the one that is meant.

        Args:
            request: JSON object handed to it, with the root and the run that it is about.
            exported: The run where an export lies, if it has been made already.

        Raises:
            NotReadyError: Jobs were not launched.
            IdempotencyKeyReusedError: The key was used for another request; says for which.
        """
        jobs, key = self.plane.jobs, self._key
        with self._audited(request) as entry:
            try:
                if exported is None:
                    operation = jobs.start(self.kind, request, idempotency_key=key)
                else:
                    operation = start_export(jobs, exported, request, idempotency_key=key)
            except IdempotencyKeyReusedError as exc:
                found = reuse(exc.used, self.kind, request)
                raise IdempotencyKeyReusedError(self.idempotency_key, exc.used, found) from exc
            entry.complete(operation=operation.id)
        return operation

    @property
    def _key(self) -> str | None:
        """The engine's."""
        if self.idempotency_key is None:
            return None
        return operation_key(self.caller.name, self.root, self.idempotency_key)

    def _used(self) -> Operation | None:
        """The operation that the key names."""
        if self._key is None:
            return None
        with suppress(OperationNotFoundError):
            return self.plane.jobs.get(operation_id(self._key))
        return None

    def _audited(self, request: Mapping[str, Any]) -> AbstractContextManager[AuditEntry]:
        told = {**request, **self.briefly}
        detail = {name: value for name, value in told.items() if name not in _PLACE}
        place = {"root": request["root"], "run": request["run"]}
        return audited(self.plane, self.caller, self.action, **place, **detail)


def reuse(used: Operation, kind: str, request: Mapping[str, Any]) -> str:
    """How a request is another one than that of an operation."""
    before = {"kind": str(used.kind), **_flat(used.request)}
    now = {"kind": kind, **_flat(request)}
    different = [
        name
        for name in dict.fromkeys([*before, *now])
        if before.get(name, _NONE) != now.get(name, _NONE)
    ]
    changes = [
        f"{name[:_LONGEST]} {_shown(now, name)} where it was {_shown(before, name)}"
        for name in different[:MAX_ERRORS]
    ]
    if len(different) > MAX_ERRORS:
        changes.append(f"and {len(different) - MAX_ERRORS} more")
    place = "/".join(str(used.request[name]) for name in ("root", "run"))
    step = f"/steps/{used.request['step']}" if "step" in used.request else ""
    return f"another one than its {used.kind} of {place}{step}: {', '.join(changes)}"


def _flat(request: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Its fields, also those in others, by their whole names."""
    found: dict[str, Any] = {}
    for name, value in request.items():
        inner = _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{within}{name}": value}
    return found


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name])[:_LONGEST] if name in fields else "not given"
