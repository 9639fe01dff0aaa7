"""Log lines and Prometheus metrics for the outcome of every save.

Each outcome is one line of the logger "cairn.save", as key=value. The metrics are in
prometheus_client's default registry; to serve them is up to the job.
"""

import json
import logging
import threading
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakSet

from cairn.state.checkpointing.save_handle import SaveHandle, SaveState, refused_save
from cairn.storage.errors import StorageError
from cairn.storage.store.uri import StoreURI

__all__ = [
    "prepare_metrics",
    "record_damage",
    "record_dedup",
    "record_outcome",
    "record_refusal",
    "record_retention",
    "record_started",
    "record_withheld",
]

logger = logging.getLogger("cairn.save")

_LEVELS: Final = {
    SaveState.DURABLE: logging.INFO,
    SaveState.SUPERSEDED: logging.INFO,
    SaveState.SKIPPED: logging.INFO,
    SaveState.REFUSED: logging.WARNING,
    SaveState.FAILED: logging.ERROR,
}
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
_lock = threading.Lock()
_started: WeakSet[SaveHandle] = WeakSet()
_ended: WeakSet[SaveHandle] = WeakSet()


_KEPT_AS: Final = "_cairn_save_metrics"


def _metrics() -> SimpleNamespace:
    """Return the metrics; the first call creates and registers them.

    Prometheus refuses to register a name twice, but this module may be imported again, or called by
    several threads at once. That is why the metrics are kept as an attribute of the registry.
    """
    from prometheus_client import REGISTRY

    kept: SimpleNamespace | None = vars(REGISTRY).get(_KEPT_AS)
    if kept is not None:
        return kept
    new = _new_metrics()
    kept = vars(REGISTRY).setdefault(_KEPT_AS, new)  # atomic: one thread wins
    if kept is new:
        for metric in vars(new).values():
            REGISTRY.register(metric)
    return kept


def _new_metrics() -> SimpleNamespace:
    """Return new metrics, which are not registered yet."""
    from prometheus_client import Counter, Gauge, Histogram

    return SimpleNamespace(
        saves=Counter("cairn_saves", "Saves by what became of them.", ["outcome"], registry=None),
        seconds=Histogram(
            "cairn_save_seconds",
            "From the start of a save until it was durable.",
            buckets=_SECONDS,
            registry=None,
        ),
        blocked=Histogram(
            "cairn_save_blocked_seconds",
            "How long a save kept training.",
            buckets=_SECONDS,
            registry=None,
        ),
        nbytes=Counter("cairn_save_bytes", "Bytes of the arrays of durable saves.", registry=None),
        last=Gauge(
            "cairn_save_last_durable_step", "The step that became durable last.", registry=None
        ),
        deleted=Counter(
            "cairn_retention_deleted_steps", "Steps that retention deleted.", registry=None
        ),
        retention_failures=Counter(
            "cairn_retention_failures", "Retention passes that failed.", registry=None
        ),
        shared=Counter(
            "cairn_save_shared_bytes",
            "Bytes of files that steps share with the one before.",
            registry=None,
        ),
        verified=Counter(
            "cairn_save_verified_bytes",
            "Bytes of files that were read before they were shared.",
            registry=None,
        ),
        damaged=Counter(
            "cairn_save_damaged_files",
            "Files of earlier steps that were found damaged.",
            registry=None,
        ),
    )


def prepare_metrics() -> None:
    """Create the metrics if they do not exist, so that the first save takes no time for it."""
    _metrics()


def record_started(handle: SaveHandle) -> None:
    """Record how long a started save blocked its caller; once per save."""
    if _is_new(handle, _started):
        _metrics().blocked.observe(handle.blocked_seconds)


def record_outcome(handle: SaveHandle) -> None:
    """Record the outcome of a save that has ended; further calls for the save do nothing.

    Made for `SaveHandle.when_done`.
    """
    if not handle.done or not _is_new(handle, _ended):
        return
    metrics = _metrics()
    metrics.saves.labels(outcome=handle.state.value).inc()
    fields: dict[str, Any] = {
        "outcome": handle.state.value,
        "step": handle.step,
        "attempt": handle.attempt or None,
        "reason": handle.reason,
        "superseded_by": handle.superseded_by,
        "uri": str(handle.uri),
    }
    if handle.state in (SaveState.DURABLE, SaveState.FAILED):
        fields |= {
            "seconds": round(handle.seconds or 0.0, 3),
            "blocked_seconds": round(handle.blocked_seconds, 3),
            "bytes": handle.nbytes or None,
        }
    if handle.state is SaveState.DURABLE:
        metrics.seconds.observe(handle.seconds or 0.0)
        metrics.nbytes.inc(handle.nbytes)
        metrics.last.set(handle.step)
    if handle.error is not None:
        fields |= {"error": type(handle.error).__name__, "found": _one_line(handle.error)}
    logger.log(_LEVELS[handle.state], _line(fields))


def record_refusal(error: BaseException, *, step: int, uri: StoreURI) -> SaveHandle:
    """Record that a save did not begin because of `error`; once per error and step.

    Returns:
        The handle of the refused save, which is also set as the error's attribute `save`.
    """
    refused = vars(error).get("save")
    if isinstance(refused, SaveHandle) and (refused.step, refused.uri) == (step, uri):
        return refused
    handle = refused_save(step=step, uri=uri, error=error)
    vars(error)["save"] = handle
    record_outcome(handle)
    return handle


def record_dedup(*, shared: int, verified: int) -> None:
    """Count the bytes of files that a save linked, and of those that it read to verify them."""
    metrics = _metrics()
    metrics.shared.inc(shared)
    metrics.verified.inc(verified)


def record_damage(file: StoreURI, *, expected: str, found: str) -> None:
    """Count and log a damaged file of an earlier step, which a save refused to link."""
    _metrics().damaged.inc()
    fields = {"file": str(file), "expected": expected, "found": found}
    advice = "Verify the steps that have this file; the values are written anew."
    logger.warning(_line({"shared_file": "damaged", **fields, "next_step": advice}))


def record_retention(
    uri: StoreURI, *, deleted: int = 0, errors: tuple[StorageError, ...] = ()
) -> None:
    """Record the outcome of a retention pass."""
    metrics = _metrics()
    metrics.deleted.inc(deleted)
    if deleted:
        logger.info(_line({"retention": "deleted", "steps": deleted, "uri": str(uri)}))
    for error in errors:
        metrics.retention_failures.inc()
        fields = {"error": type(error).__name__, "found": _one_line(error)}
        logger.warning(_line({"retention": "failed", "uri": str(uri), **fields}))


def record_withheld(uri: StoreURI, error: StorageError) -> None:
    """Record that retention deletes nothing for now, as it can't apply its policy."""
    logger.warning(_line({"retention": "withheld", "uri": str(uri), "found": _one_line(error)}))


def _is_new(handle: SaveHandle, recorded: WeakSet[SaveHandle]) -> bool:
    with _lock:
        if handle in recorded:
            return False
        recorded.add(handle)
        return True


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _line(fields: dict[str, Any]) -> str:
    """Return fields as "key=value ..."; values with blanks, quotes or "=" are quoted as in JSON."""
    pairs = []
    for key, value in fields.items():
        if value is None:
            continue
        text = str(value)
        if not text or any(sign.isspace() or sign in '"=' for sign in text):
            text = json.dumps(text, ensure_ascii=False)
        pairs.append(f"{key}={text}")
    return " ".join(pairs)
