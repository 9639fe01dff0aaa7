"""Starting a job."""

from collections.abc import Mapping
from typing import Any, Final

from cairn.service.access import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs import (
    IdempotencyKeyReusedError,
    OperationNotFoundError,
    operation_id,
    start_export,
)
from cairn.service.schemas import Operation
from cairn.storage.runs import Run

_PLACE: Final = ("root", "run", "by")
_NONE: Final = object()
_LONGEST: Final = 80  # letters of a field that is named


def start(
    plane: ControlPlane,
    caller: Caller,
    kind: str,
    request: Mapping[str, Any],
    *,
    action: str,
    idempotency_key: str | None,
    exported: Run | None = None,
) -> Operation:
    """Start a job, or find the one that is meant.

    Args:
        plane: Where.
        caller: Who asks.
        kind: Of the job.
        request: JSON object handed to it, with the root and the run that it is about.
        action: What the audit trail calls it.
        idempotency_key: The same key is the same operation, for good.
        exported: The run where an export lies, if it has been made already.

    Raises:
        NotReadyError: Jobs were not launched.
        IdempotencyKeyReusedError: The key was used for another request; says for which, if the
            caller may know.
    """
    jobs = plane.jobs
    detail = {name: value for name, value in request.items() if name not in _PLACE}
    with audited(
        plane, caller, action, root=request["root"], run=request["run"], **detail
    ) as entry:
        try:
            if exported is None:
                operation = jobs.start(kind, request, idempotency_key=idempotency_key)
            else:
                operation = start_export(jobs, exported, request, idempotency_key=idempotency_key)
        except IdempotencyKeyReusedError as exc:
            if not caller.sees(exc.used.request["root"]):
                raise
            found = reuse(exc.used, kind, request)
            raise IdempotencyKeyReusedError(exc.key, exc.used, found) from exc
        entry.complete(operation=operation.id)
    return operation


def repeated(
    plane: ControlPlane,
    caller: Caller,
    kind: str,
    asked: Mapping[str, Any],
    *,
    action: str,
    idempotency_key: str | None,
) -> Operation | None:
    """The operation that a key names, if that was asked for; None: `start` tells what is wrong.

    To be called before anything is looked up in the store: what was asked for then may be gone by
    the time that a client that got no answer asks again.

    Args:
        plane: Where.
        caller: Who asks.
        kind: Of the job.
        asked: What the path and the body say, as the job's request has it.
        action: What the audit trail calls it.
        idempotency_key: Of the request.

    Raises:
        UnknownRootError: No such root is configured.
        NotReadyError: Jobs were not launched.
    """
    if idempotency_key is None:
        return None
    plane.root(asked["root"])
    try:
        found = plane.jobs.get(operation_id(idempotency_key))
    except OperationNotFoundError:
        return None
    told = {name: found.request.get(name, _NONE) for name in asked}
    if (found.kind, told) != (kind, dict(asked)):
        return None
    detail = {name: value for name, value in found.request.items() if name not in _PLACE}
    place = {"root": asked["root"], "run": asked["run"]}
    with audited(plane, caller, action, **place, **detail) as entry:
        entry.complete(operation=found.id)
    return found


def reuse(used: Operation, kind: str, request: Mapping[str, Any]) -> str:
    """How a request is another one than that of an operation."""
    before = {"kind": used.kind.value, **_flat(used.request)}
    now = {"kind": kind, **_flat(request)}
    different = [
        f"{name} {_shown(now, name)} where it was {_shown(before, name)}"
        for name in sorted({*before, *now}, key=[*before, *now].index)
        if before.get(name, _NONE) != now.get(name, _NONE)
    ]
    place = "/".join(str(used.request[name]) for name in ("root", "run"))
    step = f"/steps/{used.request['step']}" if "step" in used.request else ""
    return f"another one than its {used.kind.value} of {place}{step}: {', '.join(different)}"


def _flat(request: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Its fields, also those in others, by their whole names."""
    found: dict[str, Any] = {}
    for name, value in request.items():
        inner = _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{within}{name}": value}
    return found


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name])[:_LONGEST] if name in fields else "not given"
