"""Faults that tests order: errors, delays, silence, cut connections, stale lists, a quota.

A fault applies to requests that match it, `count` times, after letting `skip` of them pass.
Without any, the double does what it is asked.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.gcs.errors import ApiError, InvalidRequestError
from tests.gcs.listing import Snapshot
from tests.gcs.wire import Request

Kind = Literal[
    "status",
    "slow",
    "hold",
    "hang",
    "cut_upload",
    "cut_download",
    "stall_download",
    "truncate",
    "lost_response",
    "mute",
    "stale_list",
    "unconditional",
]
KINDS: tuple[Kind, ...] = (
    "status",  # answers with `status` before anything happens
    "slow",  # waits `seconds` before anything happens
    "hold",  # waits until `release()`, then goes on as if nothing had happened
    "hang",  # does nothing, and neither answers nor closes before it is released
    "cut_upload",  # closes the connection after `nbytes` of the request's body
    "cut_download",  # promises the whole object, closes the connection after `nbytes` of it
    "stall_download",  # as `cut_download`, but does not close before it is released
    "truncate",  # answers with the first `nbytes` only, as if the object ended there
    "lost_response",  # does the work, then closes the connection without an answer
    "mute",  # as `lost_response`, but does not close before it is released
    "stale_list",  # lists the bucket as it was when the fault was ordered
    "unconditional",  # does the work whatever the request's preconditions say
)
REASONS = {
    401: "required",
    403: "forbidden",
    404: "notFound",
    408: "requestTimeout",
    412: "conditionNotMet",
    429: "rateLimitExceeded",
    500: "backendError",
    502: "badGateway",
    503: "backendError",
    504: "gatewayTimeout",
    507: "quotaExceeded",
}


@dataclass(eq=False)
class Fault:
    """One ordered fault.

    Attributes:
        kind: what happens, see `KINDS`.
        operation: regex that the operation must match whole, such as `media\\.get`; None: any.
        name: regex searched in "bucket/object"; None: any.
        predicate: any further condition on the request (Python only).
        count: how often it happens; None: until removed.
        skip: how many matching requests pass first.
        status: for `status`.
        seconds: for `slow`.
        nbytes: for `cut_upload`, `cut_download`, `stall_download`, `truncate`.
        fired: how often it has happened.
        snapshot: for `stale_list`.
    """

    kind: Kind
    operation: str | None = None
    name: str | None = None
    predicate: Callable[[Request], bool] | None = None
    count: int | None = 1
    skip: int = 0
    status: int = 503
    seconds: float = 0.0
    nbytes: int = 0
    fired: int = 0
    id: int = 0
    snapshot: Snapshot | None = field(default=None, repr=False)
    _happened: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _released: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(f"unknown fault {self.kind!r}; known: {', '.join(KINDS)}")

    def wait(self, timeout: float = 30.0, times: int = 1) -> None:
        """Returns once it has happened `times` times.

        Raises:
            TimeoutError: if it has not within `timeout` seconds.
        """
        with self._happened:
            if not self._happened.wait_for(lambda: self.fired >= times, timeout):
                raise TimeoutError(f"{self} fired {self.fired} of {times} times in {timeout} s")

    def release(self) -> None:
        """Lets go what this holds back, now and from now on."""
        self._released.set()

    def pause(self) -> None:
        """Waits, on behalf of a request, until released or (`slow`) its seconds are over."""
        self._released.wait(self.seconds if self.kind == "slow" else None)

    def error(self) -> ApiError:
        """What a `status` fault answers."""
        reason = REASONS.get(self.status, "injected")
        return ApiError(self.status, reason, f"injected fault: {self.status} {reason}")

    def matches(self, request: Request) -> bool:
        if self.kind == "stale_list" and request.operation != "objects.list":
            return False
        if self.operation is not None and not re.fullmatch(self.operation, request.operation):
            return False
        if self.name is not None and not re.search(self.name, f"{request.bucket}/{request.name}"):
            return False
        return self.predicate is None or self.predicate(request)

    def take(self, request: Request) -> bool:
        """Whether it happens to this request; counts."""
        if self.count == 0 or not self.matches(request):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.count is not None:
            self.count -= 1
        with self._happened:
            self.fired += 1
            self._happened.notify_all()
        return True

    def to_json(self) -> dict[str, Any]:
        names = ("id", "kind", "operation", "name", "count", "skip")
        values = ("status", "seconds", "nbytes", "fired")
        return {name: getattr(self, name) for name in names + values}


class Faults:
    """The faults and quotas in force.

    Args:
        snapshot: gives the buckets as they are now; `stale_list` needs it.
    """

    def __init__(self, snapshot: Callable[[], Snapshot] = Snapshot) -> None:
        self.snapshot = snapshot
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._faults: list[Fault] = []
        self._quotas: dict[str | None, tuple[int, int]] = {}

    def add(self, kind: Kind, **options: Any) -> Fault:
        """Orders a fault; `options` are the attributes of `Fault`."""
        fault = Fault(kind, **options)
        if kind == "stale_list":
            fault.snapshot = self.snapshot()
        with self._lock:
            fault.id = next(self._ids)
            self._faults.append(fault)
        return fault

    def remove(self, fault_id: int) -> None:
        """Takes a fault back, and lets go what it holds."""
        for fault in self.all():
            if fault.id == fault_id:
                with self._lock:
                    self._faults.remove(fault)
                fault.release()

    def all(self) -> list[Fault]:
        with self._lock:
            return list(self._faults)

    def clear(self) -> None:
        """Takes back every fault and every quota."""
        for fault in self.all():
            self.remove(fault.id)
        with self._lock:
            self._quotas.clear()

    def take(self, request: Request) -> list[Fault]:
        """The faults that happen to this request, in the order they were ordered."""
        with self._lock:
            return [fault for fault in self._faults if fault.take(request)]

    def set_quota(
        self, nbytes: int | None, *, bucket: str | None = None, status: int = 403
    ) -> None:
        """Limits the bytes stored in a bucket, or in each of them; None lifts the limit.

        GCS itself answers 403 `quotaExceeded`; 507 is what other stores say.
        """
        with self._lock:
            if nbytes is None:
                self._quotas.pop(bucket, None)
            else:
                self._quotas[bucket] = (nbytes, status)

    def admit(self, bucket: str, used: int, growth: int) -> None:
        """Lets bytes in, or refuses them.

        Raises:
            ApiError: with the quota's status.
        """
        with self._lock:
            quota = self._quotas.get(bucket, self._quotas.get(None))
        if quota is not None and growth > 0 and used + growth > quota[0]:
            limit, status = quota
            raise ApiError(
                status,
                "quotaExceeded",
                f"The storage quota of bucket {bucket} is exceeded: "
                f"{used} + {growth} bytes > {limit} bytes.",
            )
