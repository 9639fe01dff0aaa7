"""A bucket in memory that counts what each simulated process asks of it, and takes its time.

It stands below Cairn's own store code: in the place of TensorStore's key-value store, and of the
requests of gcsfs. Each request waits for `latency`; so many of a process are under way at a time as
TensorStore allows. Array bytes are left out: of values there are sizes.
"""

from __future__ import annotations

import base64
import bisect
import heapq
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import google_crc32c
import tensorstore as ts

from cairn.storage.store import files_gcs, gcs, objects
from cairn.storage.store.files import BLOCK_BYTES

__all__ = ["VALUES", "Asked", "LeftOut", "SimulatedStore"]

_REQUESTS_AT_ONCE: Final = 32
"""TensorStore's `gcs_request_concurrency`, of a process."""

_PAGE: Final = 1000

VALUES: Final = "values"
"""The operation of whatever asks for values, or sends them."""


class LeftOut:
    """Bytes of values, of which only the number is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes


class Asked(NamedTuple):
    """Requests of one kind of a process.

    Attributes:
        count: how many.
        nbytes: sent and answered, but for headers.
    """

    count: int
    nbytes: int


class _Stored(NamedTuple):
    data: bytes | LeftOut
    generation: int


class _Later:
    """What a request gives, once its time has passed. As a future of TensorStore."""

    def __init__(self, value: Any, ready: float) -> None:
        self._value, self._ready = value, ready

    def result(self, timeout: float | None = None) -> Any:
        left = self._ready - time.monotonic()
        if timeout is not None and left > timeout:
            time.sleep(timeout)
            raise TimeoutError
        if left > 0:
            time.sleep(left)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def cancel(self) -> None:
        """What was asked is done."""


class SimulatedStore:
    """All buckets.

    Attributes:
        requests: by process and operation.
        latency: of a request, in seconds.
    """

    def __init__(self, process: Callable[[], int], latency: float) -> None:
        """Empty.

        Args:
            process: the number of the process that the caller belongs to.
            latency: of a request, in seconds.
        """
        self.requests: dict[tuple[int, str], Asked] = {}
        self.latency = latency
        self._process = process
        self._objects: dict[str, _Stored] = {}
        self._names: list[str] = []
        self._generation = 0
        self._lock = threading.Lock()
        self._slots: dict[int, list[float]] = {}
        self._under_way: list[tuple[float, float]] = []
        self._ranges: dict[tuple[str, int, int, int], bytes] = {}

    @contextmanager
    def served(self) -> Iterator[None]:
        """Meanwhile every gs:// URI is of this store."""
        shim = SimpleNamespace(
            KvStore=SimpleNamespace(open=self._opened, KeyRange=ts.KvStore.KeyRange),
            Context=ts.Context,
        )
        with ExitStack() as stack:
            patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
            patch(objects, "ts", shim)
            patch(objects, "_absent_generation", lambda: b"")
            patch(gcs, "filesystem", lambda _: self)
            patch(files_gcs, "filesystem", lambda _: self)
            yield

    def names(self) -> dict[str, int]:
        """Bytes of all objects, by name."""
        return {name: len(one.data) for name, one in self._objects.items()}

    def ask(self, operation: str, nbytes: int, times: int = 1) -> float:
        """Count requests; when they are answered, on the clock of `time.monotonic`."""
        process = self._process()
        with self._lock:
            before = self.requests.get((process, operation), Asked(0, 0))
            asked = Asked(before.count + times, before.nbytes + nbytes)
            self.requests[process, operation] = asked
            slots = self._slots.setdefault(process, [0.0] * _REQUESTS_AT_ONCE)
            now = time.monotonic()
            ready = max(now, slots[0]) + self.latency * times
            heapq.heapreplace(slots, ready)
            if process == 0:
                self._under_way.append((now, ready))
        return ready

    def waited(self, since: float) -> float:
        """Seconds since a time of the clock in which a request of process 0 was under way."""
        waited, end = 0.0, since
        for began, ready in sorted(one for one in self._under_way if one[0] >= since):
            waited += max(0.0, ready - max(began, end))
            end = max(end, ready)
        return waited

    def wait(self, operation: str, nbytes: int = 0, times: int = 1) -> None:
        """Make requests, one after another, and wait for their answers."""
        _Later(None, self.ask(operation, nbytes, times)).result()

    def upload(self, name: str, nbytes: int) -> None:
        """Write an object of values in many requests, after one that begins."""
        self.wait(VALUES, nbytes, 1 + -(-nbytes // BLOCK_BYTES))
        self.put(name, LeftOut(nbytes), None)

    # What TensorStore's `KvStore` is asked.

    def _opened(self, spec: dict[str, Any], *, context: object) -> _Later:
        del context
        return _Later(_Keys(self, f"{spec['bucket']}/{spec['path']}"), 0.0)

    def put(self, name: str, data: bytes | LeftOut | None, if_equal: bytes | None) -> bytes:
        """Write or, with None, delete; the generation, which is empty if the condition fails."""
        with self._lock:
            known = self._objects.get(name)
            current = b"" if known is None else str(known.generation).encode()
            if if_equal is not None and if_equal != current:
                return b""
            self._generation += 1
            if data is None:
                if known is not None:
                    del self._objects[name]
                    del self._names[bisect.bisect_left(self._names, name)]
            else:
                if known is None:
                    bisect.insort(self._names, name)
                self._objects[name] = _Stored(data, self._generation)
            return str(self._generation).encode()

    def get(self, name: str) -> _Stored | None:
        """An object."""
        return self._objects.get(name)

    # What gcsfs is asked.

    def call(self, method: str, path: str, *names: str, **options: Any) -> Any:
        """A request of the JSON API, of those that Cairn makes."""
        if (method, path) == ("GET", "b/{}/o"):
            if not options.get("json_out"):
                self.wait("list")
                return {"Date": formatdate(usegmt=True)}, b""
            return self._page(names[0], options)
        if (method, path) == ("GET", "b/{}/o/{}"):
            self.wait("stat")
            found = self._objects.get("/".join(names))
            if found is None:
                raise FileNotFoundError("/".join(names))
            return _described(names[1], found)
        raise NotImplementedError(f"{method} {path}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """A range of an object. Processes that ask for the same one share its memory."""
        found = self._objects.get(path)
        data = b"" if found is None else found.data
        assert isinstance(data, bytes), f"{path}: values have no bytes here"
        low, high = start or 0, len(data) if end is None else min(end, len(data))
        self.wait("read", max(0, high - low))
        if found is None:
            raise FileNotFoundError(path)
        if (low, high) == (0, len(data)):
            return data
        return self._ranges.setdefault((path, found.generation, low, high), data[low:high])

    def _page(self, bucket: str, options: dict[str, Any]) -> dict[str, Any]:
        prefix, delimiter = options.get("prefix") or "", options.get("delimiter")
        root = f"{bucket}/{prefix}"
        token = options.get("pageToken")
        items: list[dict[str, Any]] = []
        folders: dict[str, None] = {}
        with self._lock:
            at = bisect.bisect_left(self._names, root if token is None else token)
            while at < len(self._names) and len(items) + len(folders) < _PAGE:
                name = self._names[at]
                if not name.startswith(root):
                    break
                rest = name[len(root) :]
                if delimiter and "/" in rest:
                    folder = f"{root}{rest.partition('/')[0]}/"
                    folders[folder[len(bucket) + 1 :]] = None
                    at = bisect.bisect_left(self._names, f"{folder[:-1]}0")  # "0" follows "/"
                    continue
                items.append(_described(name[len(bucket) + 1 :], self._objects[name]))
                at += 1
            more = at < len(self._names) and self._names[at].startswith(root)
            following = self._names[at] if more else None
        self.wait("list", 200 * len(items))
        return {"items": items, "prefixes": [*folders], "nextPageToken": following}


def _described(name: str, stored: _Stored) -> dict[str, Any]:
    described = {"name": name, "size": str(len(stored.data)), "generation": str(stored.generation)}
    if isinstance(stored.data, bytes):
        crc = google_crc32c.value(stored.data).to_bytes(4, "big")
        described["crc32c"] = base64.b64encode(crc).decode()
    return described


class _Keys:
    """The objects below a prefix, as TensorStore's `KvStore` has them."""

    def __init__(self, store: SimulatedStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def read(self, key: str, if_not_equal: bytes | None = None) -> _Later:
        name = f"{self._prefix}{key}"
        found = self._store.get(name)
        if found is None:
            ready = self._store.ask("read", 0)
            return _Later(SimpleNamespace(state="missing", stamp=_stamp(b"")), ready)
        stamp = _stamp(str(found.generation).encode())
        if if_not_equal == stamp.generation:
            ready = self._store.ask("read", 0)
            return _Later(SimpleNamespace(state="unspecified", stamp=stamp), ready)
        ready = self._store.ask("read", len(found.data))
        return _Later(SimpleNamespace(state="value", value=found.data, stamp=stamp), ready)

    def write(
        self, key: str, value: bytes | LeftOut | None, if_equal: bytes | None = None
    ) -> _Later:
        name = f"{self._prefix}{key}"
        operation, nbytes = ("delete", 0) if value is None else ("write", len(value))
        if isinstance(value, LeftOut):
            operation = VALUES
        stamp = _stamp(self._store.put(name, value, if_equal))
        return _Later(stamp, self._store.ask(operation, nbytes))


def _stamp(generation: bytes) -> SimpleNamespace:
    return SimpleNamespace(generation=generation)
