"""Small objects with conditional writes, over TensorStore: file, gcs, s3 and memory.

A generation is an opaque stamp of one stored value. `write_if` and `delete_if` act only if the
object still has the given generation. This compare-and-swap is the base of everything that
processes share in a run. A bucket needs conditional writes alone: there `delete_if` writes a grave,
which every method here takes for nothing (see `graves`).
"""

import builtins
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import tensorstore as ts

from cairn.storage.errors import (
    ConfinementError,
    CorruptionError,
    InvalidURIError,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
    translate_error,
    unconfirmed_change,
)
from cairn.storage.store import bounds, s3
from cairn.storage.store.bounds import Oversized, bound_of, check_writable
from cairn.storage.store.buckets import bucket_driver
from cairn.storage.store.deadlines import Progress, no_answer_error, set_outcome, wait_for
from cairn.storage.store.disk.confinement import (
    HAS_PATH_HANDLES,
    PathHandle,
    check_below,
    open_folder_handle,
)
from cairn.storage.store.disk.directory_entries import durable_entries, fsync_path
from cairn.storage.store.disk.locked_files import locked_file
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX, remove_stale_lock
from cairn.storage.store.files import translated_errors
from cairn.storage.store.files_local import LocalFiles
from cairn.storage.store.graves import GRAVE, is_grave, may_be_grave
from cairn.storage.store.listings import ListedObject, ListedPage
from cairn.storage.store.requests import Operation, timed_request
from cairn.storage.store.uri import Confinement, StoreURI, check_path, parse_uri, s3_endpoint

__all__ = [
    "ObjectStore",
    "Versioned",
    "long_retry_context",
    "read_context",
    "store_context",
]

_RETRIES = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "4s"}
_LONG_RETRIES = {"max_retries": 9, "initial_delay": "500ms", "max_delay": "16s"}
_CURL_TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "20",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "60",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}
_READS_AT_ONCE = 64
_READS_OF_VALUES = 128
_MAX_PARSED = 100_000
_MIN_PARSED = 1024
_MAX_STORES = 4096
_WINDOW_BYTES = 64 << 20
_NOTHING: Final = slice(0, 0)
_AS_GRAVE: Final = slice(0, len(GRAVE))
_MAX_GRAVES: Final = 16
"""Number of attempts to write over a grave: each that fails means that somebody was faster."""
_LARGE_BYTES = 64 << 10
_MAX_SIZES = 100_000
_WITHOUT_A_NETWORK: Final = ("file", "memory")


T = TypeVar("T")


class Versioned(NamedTuple):
    """Value and the generation that it had when it was read."""

    value: bytes
    generation: bytes


@functools.cache
def store_context() -> ts.Context:
    """Return this process's TensorStore context: shared connections, bounded retries."""
    # TensorStore reads these before its first request. They make it drop a silent connection and
    # retry the request; without them it waits forever.
    for name, value in _CURL_TIMEOUTS.items():
        os.environ.setdefault(name, value)
    return ts.Context(
        {
            "gcs_request_retries": _RETRIES,
            "s3_request_retries": _RETRIES,
            "file_io_sync": True,
        }
    )


@functools.cache
def long_retry_context() -> ts.Context:
    """Return the context for a save's arrays: it retries for more than a minute."""
    retries = {"gcs_request_retries": _LONG_RETRIES, "s3_request_retries": _LONG_RETRIES}
    return ts.Context(retries, parent=store_context())


@functools.cache
def _absent_generation() -> bytes:
    """Return the generation that stands for a missing object, in every store."""
    memory = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    return bytes(memory.read("absent").result().stamp.generation)


@functools.cache
def read_context() -> ts.Context:
    """Return the context for reads of values, with a high limit on concurrent requests."""
    limits = {
        "gcs_request_concurrency": {"limit": _READS_OF_VALUES},
        "s3_request_concurrency": {"limit": _READS_OF_VALUES},
    }
    return ts.Context(limits, parent=store_context())


_DESCRIPTORS_AT_ONCE: Final = 64
_descriptors: Final = threading.BoundedSemaphore(_DESCRIPTORS_AT_ONCE)
"""Bounds open descriptors: TensorStore queues reads, while each handle is open from the start."""


@functools.cache
def _disk() -> ts.KvStore:
    """Return a key-value store of the whole disk, for the paths of a `PathHandle`."""
    return ts.KvStore.open({"driver": "file", "path": "/"}, context=store_context()).result()


_StoreKey: TypeAlias = tuple[str, Confinement | None, str | None, str | None]

_open_stores: WeakValueDictionary[_StoreKey, "ObjectStore"] = WeakValueDictionary()
_last_opened: dict[_StoreKey, "ObjectStore"] = {}
"""LRU cache of stores that may have no other reference: keeps what they have parsed."""
_open_lock = threading.Lock()


class ObjectStore:
    """Small objects below one folder. Safe for use by many threads.

    Every method raises `StoreUnavailableError` if the store gives no answer, `InvalidURIError` for
    a key that is not a plain relative path, and `ConfinementError` if a link leads out of the
    folder's confinement. An object that exceeds its bound in `bounds` has an `Oversized` as its
    value.
    """

    def __init__(self, uri: StoreURI, *, patient: bool = False) -> None:
        """Open the store of the folder `uri`.

        Args:
            uri: the folder, which need not exist.
            patient: retry a failing store for a minute instead of seconds. Concurrent writes then
                share one deadline: an answer to one is progress of all.
        """
        self.uri = uri
        self._progress = Progress() if patient else None
        self._parsed: dict[tuple[str, Any], tuple[bytes, Any]] = {}
        self._parsed_limit = _MIN_PARSED
        self._sizes: dict[str, int] = {}
        self._folder = f"{uri.local_path}/" if uri.scheme == "file" else None
        self._is_confined = (
            HAS_PATH_HANDLES and uri.scheme == "file" and uri.confinement is not None
        )
        if uri.scheme == "s3":
            s3.check_installed()
        spec = uri.kvstore_spec()
        context = long_retry_context() if patient else store_context()
        try:
            self._kv = wait_for(ts.KvStore.open(spec, context=context))
        except (ValueError, OSError) as exc:
            raise translate_error(exc, path=uri) from exc

    def __repr__(self) -> str:
        return f"ObjectStore({str(self.uri)!r})"

    @classmethod
    def open(cls, uri: StoreURI | str | os.PathLike[str]) -> "ObjectStore":
        """Return the store of the folder `uri`, one per folder and process; it need not exist.

        Raises:
            InvalidURIError: `uri` is malformed.
            StoreUnavailableError: the store can't be opened.
        """
        parsed = parse_uri(uri)
        key = (
            str(parsed),
            parsed.confinement,
            os.environ.get("TENSORSTORE_GCS_HTTP_URL"),
            s3_endpoint(),
        )
        with _open_lock:
            store = _open_stores.get(key)
            if store is None:
                store = _open_stores[key] = cls(parsed)
            _last_opened.pop(key, None)
            _last_opened[key] = store
            if len(_last_opened) > _MAX_STORES:
                del _last_opened[next(iter(_last_opened))]
            return store

    @property
    def is_remote(self) -> bool:
        """True if requests go over a network."""
        return self.uri.scheme not in _WITHOUT_A_NETWORK

    def gather(self, *calls: Callable[[], Any]) -> list[Any]:
        """Make independent calls concurrently, in one round trip; return their results.

        Without a network it makes them in turn: starting a thread would take longer. All calls have
        ended when this returns, or raises the error of the first failed call.
        """
        if not self.is_remote:
            return [call() for call in calls]
        futures: list[Future[Any]] = []
        for call in calls[1:]:  # no pool: a pool refuses work at exit
            future: Future[Any] = Future()
            arguments = (set_outcome, future, call)
            threading.Thread(
                target=copy_context().run, args=arguments, name="cairn-at-once", daemon=True
            ).start()
            futures.append(future)
        first: Future[Any] = Future()
        try:
            set_outcome(first, calls[0])
        finally:
            wait(futures)
        return [future.result() for future in (first, *futures)]

    def read(self, key: str) -> Versioned | None:
        """Return the value at `key`, or None if there is none."""
        stored = self._stored(key)
        return None if stored is None or self._is_grave(key, stored.value) else stored

    def _stored(self, key: str) -> Versioned | None:
        """Return what is stored at `key`, a grave too."""
        name = check_path(key, within=self.uri)
        return self._versioned(name, *self._start(name, self._size(name)))

    def read_many(self, keys: Iterable[str]) -> dict[str, Versioned | None]:
        """Return the values at `keys`, reading many at a time."""
        return dict(self.read_each(keys))

    def read_each(self, keys: Iterable[str]) -> Iterator[tuple[str, Versioned | None]]:
        """Yield the values at `keys` in order, reading ahead within bounded memory."""
        for window in self._windows([check_path(key, within=self.uri) for key in keys]):
            reads = [(name, self._start(name, size)) for name, size in window]
            while reads:
                name, reading = reads.pop(0)
                stored = self._versioned(name, *reading)
                is_gone = stored is None or self._is_grave(name, stored.value)
                yield name, None if is_gone else stored

    def existing(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that have an object, or a link out of confinement; reads no value."""
        names, present = [check_path(key, within=self.uri) for key in keys], set()
        for start in range(0, len(names), _READS_AT_ONCE):
            reads = []
            for name in names[start : start + _READS_AT_ONCE]:
                try:
                    part = _AS_GRAVE if self._has_graves(name) else _NOTHING
                    reads.append((name, self._read(name, byte_range=part)))
                except ConfinementError:
                    present.add(name)
            for name, future in reads:
                if self._is_there(name, future):
                    present.add(name)
        return present

    def _is_there(self, name: str, future: Any) -> bool:
        """Return True if a read of an object's first bytes finds one that is no grave."""
        try:
            result = self._wait("stat", future, name)
        except StoreUnavailableError:
            raise
        except StorageError:
            if not self._has_graves(name):
                raise
            return self.read(name) is not None  # it may be shorter than a grave
        return bool(result.state == "value" and not self._is_grave(name, bytes(result.value)))

    def _has_graves(self, name: str) -> bool:
        """Return True if `delete_if` leaves a grave at `name`; disks delete under a lock."""
        return self.is_remote and may_be_grave(name)

    def _is_grave(self, name: str, value: bytes) -> bool:
        return value == GRAVE and self._has_graves(name)

    def _windows(self, names: Iterable[str]) -> Iterator[builtins.list[tuple[str, int]]]:
        """Yield groups of names and sizes to read at once, bounded in number and bytes."""
        window: builtins.list[tuple[str, int]] = []
        together = 0
        for name in names:
            size = self._size(name)
            kept = size
            if size > bounds.MIN_BOUND_BYTES and size > bound_of(name).max_bytes:
                kept = 0  # too large: it is not read
            if len(window) == _READS_AT_ONCE or (window and together + kept > _WINDOW_BYTES):
                yield window
                window, together = [], 0
            window.append((name, size))
            together += kept
        if window:
            yield window

    def _size(self, name: str) -> int:
        """Return an object's size in bytes; 0 if unknown.

        It is known on a disk, and in a bucket for large objects of the last listing.
        """
        if self._folder is None:
            return self._sizes.get(name, 0)
        try:
            return os.stat(self._folder + name).st_size
        except OSError:  # absent, or refused: TensorStore reports it
            return 0

    def _start(
        self, name: str, size: int, cached_generation: bytes | None = None
    ) -> tuple[Any, Oversized | None]:
        """Begin to read an object; of one that exceeds its bound, only the generation.

        A range longer than the object is an error in TensorStore, so a limit can't be part of the
        read; the size decides before.

        Args:
            name: name of the object.
            size: its size in bytes; 0 if unknown.
            cached_generation: generation whose value the caller already has; None: none.
        """
        if size > bounds.MIN_BOUND_BYTES:
            bound = bound_of(name)
            if size > bound.max_bytes and self._is_larger(name, bound.max_bytes):
                return self._read(name, byte_range=_NOTHING), Oversized(size, bound)
        return self._read(name, if_not_equal=cached_generation), None

    def _read(self, name: str, **options: Any) -> Any:
        """Begin to read an object; in a confined folder through a handle, safe from renames."""
        if not self._is_confined:
            return self._kv.read(name, **options)
        assert self._folder is not None
        with translated_errors(f"{self.uri}/{name}"):
            if not _descriptors.acquire(timeout=Progress().seconds_left()):
                raise TimeoutError("others wait for the disk")
            try:
                handle = PathHandle(self.uri, self._folder + name)
            except BaseException as exc:
                _descriptors.release()
                if isinstance(exc, FileNotFoundError | NotADirectoryError):
                    return _disk().read("proc/self/fd/none")  # of a missing object
                raise

        def release(_: Any) -> None:
            handle.close()
            _descriptors.release()

        future = _disk().read(handle.path[1:], **options)
        future.add_done_callback(release)
        return future

    def _replace(self, name: str, value: bytes | None, condition: bytes | None) -> bytes:
        """Write or delete an object in a confined disk folder, under TensorStore's lock.

        TensorStore itself would follow a link in place of its lock file.

        Args:
            name: name of the object.
            value: its new bytes; None deletes it.
            condition: the generation that it must have; None: any.

        Returns:
            The new generation; empty if the object had another one, or there was nothing to delete.
        """
        assert self._folder is not None
        folder, last = os.path.split(self._folder + name)
        operation: Operation = "delete" if value is None else "write"
        with translated_errors(f"{self.uri}/{name}", operation):
            try:
                handle = open_folder_handle(self.uri, folder, create=value is not None)
            except (FileNotFoundError, NotADirectoryError):
                if value is not None:
                    raise
                return b""
            with handle, locked_file(os.path.join(handle.path, last)) as file:
                current = wait_for(self._read(name, byte_range=_NOTHING)).stamp.generation
                if condition is not None and condition != bytes(current):
                    return b""
                if value is None:
                    file.remove()
                    return _absent_generation()
                file.write(value)
                stored = f"proc/self/fd/{file.descriptor}"
                written = wait_for(_disk().read(stored, byte_range=_NOTHING))
                file.replace()
                return bytes(written.stamp.generation)

    def _delete(self, name: str, condition: bytes | None = None) -> Callable[[], bytes]:
        """Begin to delete; return a function that waits and returns what `_replace` does."""
        if self._is_confined:
            generation = self._confirmed(name, None, lambda: self._replace(name, None, condition))
            return lambda: generation
        future = self._kv.write(name, None, if_equal=condition)
        return lambda: self._confirmed(
            name, None, lambda: bytes(self._wait("delete", future, name).generation)
        )

    def _is_larger(self, name: str, size: int) -> bool:
        """Return True if an object is larger than `size`.

        On a disk this is always so, since the opened file can't shrink. In a bucket the object may
        have been replaced since its size was read.
        """
        if self._folder is not None:
            return True
        beyond = self._read(name, byte_range=slice(size, size + 1))
        try:
            return bool(self._wait("read", beyond, name).state == "value")
        except StoreUnavailableError:
            raise
        except StorageError:  # the range is beyond its end
            self._sizes.pop(name, None)
            return False

    def _versioned(self, name: str, future: Any, oversized: Oversized | None) -> Versioned | None:
        result = self._wait("read", future, name)
        if result.state != "value":
            return None
        return Versioned(self._value(name, result, oversized), bytes(result.stamp.generation))

    def _value(self, name: str, result: Any, oversized: Oversized | None) -> bytes:
        """Return the value of a read, or the placeholder of one that exceeds its bound."""
        if oversized is not None:
            return oversized
        value = bytes(result.value)
        if (
            len(value) <= bounds.MIN_BOUND_BYTES
            or len(value) <= (bound := bound_of(name)).max_bytes
        ):
            return value
        self._note_size(name, len(value))
        return Oversized(len(value), bound)

    def _note_size(self, name: str, size: int) -> None:
        """Remember a large object's size: later reads check it against its bound first."""
        if size <= _LARGE_BYTES:
            self._sizes.pop(name, None)
        elif len(self._sizes) < _MAX_SIZES:
            self._sizes[name] = size

    def _pages(
        self, prefix: str, delimiter: str = "", *, graves: bool = False
    ) -> Iterator[ListedPage]:
        """Yield the pages of a bucket's listing, with names below this folder.

        Remembers the sizes of large objects.

        Args:
            prefix: prefix of the names below this folder.
            delimiter: "/" lists one folder alone.
            graves: whether to list graves, too.
        """
        root = f"{self.uri.path}/" if self.uri.path else ""
        for page in bucket_driver(self.uri).list_pages(self.uri, f"{root}{prefix}", delimiter):
            below = [item._replace(name=item.name[len(root) :]) for item in page.objects]
            for item in below:
                self._note_size(item.name, item.size)
            kept = below if graves else [item for item in below if not self._is_listed_grave(item)]
            yield ListedPage(kept, [folder[len(root) :] for folder in page.folders])

    def _is_listed_grave(self, item: ListedObject) -> bool:
        answer = is_grave(item)
        return self.read(item.name) is None if answer is None else answer

    def parse_many(
        self, keys: Iterable[str], parse: Callable[[bytes, StoreURI], T]
    ) -> dict[str, T | CorruptionError]:
        """Return `parse(value, path)` for the objects at `keys`, without the absent ones.

        An LRU cache keeps results by generation: an unchanged object is neither transferred nor
        parsed again. Pass the same function each time, and let it return something small. Errors
        that `parse` returns are not cached: the read may have been truncated. An object that may
        not be opened has its error as the result; other objects are still read.
        """
        results: dict[str, T | CorruptionError] = {}
        names = [check_path(key, within=self.uri) for key in keys]
        # Room for several kinds of records of every step; entries of removed steps age out.
        self._parsed_limit = min(max(self._parsed_limit, 8 * len(names)), _MAX_PARSED)
        for window in self._windows(names):
            reads = []
            for name, size in window:
                have = self._parsed.get((name, parse))
                try:
                    begun = self._start(name, size, have[0] if have else None)
                except ConfinementError as exc:
                    results[name] = exc.with_traceback(None)
                else:
                    reads.append((name, have, *begun))
            while reads:
                name, have, future, oversized = reads.pop(0)
                result = self._wait("read", future, name)
                if result.state == "value":
                    data = self._value(name, result, oversized)
                    if self._is_grave(name, data):
                        continue
                    value = parse(data, self.uri / name)
                    if not isinstance(value, Exception):
                        self._remember((name, parse), (bytes(result.stamp.generation), value))
                    results[name] = value
                elif result.state == "unspecified" and have is not None:
                    self._remember((name, parse), have)
                    results[name] = have[1]
        return results

    def _remember(self, key: tuple[str, Any], value: tuple[bytes, Any]) -> None:
        self._parsed.pop(key, None)
        while len(self._parsed) >= self._parsed_limit:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # other threads
                del self._parsed[next(iter(self._parsed))]
        self._parsed[key] = value

    def write(self, key: str, value: bytes) -> bytes:
        """Store `value` at `key` unconditionally; return the new generation.

        Raises:
            StoreFullError: no space or quota left.
            UnsupportedFormatError: the value exceeds the bound of its kind.
        """
        return self._put(key, value, None)

    def start_write(self, key: str, value: bytes | bytearray) -> Callable[[], bytes]:
        """Begin to `write`; return a function that waits for it and returns the new generation.

        `value` is copied at once. Stale locks of killed writers are not removed, so do not use this
        for disk files whose earlier writer may have been killed.

        Raises:
            StoreFullError: from the returned function: no space or quota left.
        """
        if self._is_confined:
            written = self._put(key, bytes(value), None)
            return lambda: written
        check_writable(self._checked(key), len(value))
        future = self._kv.write(key, value)
        return lambda: bytes(self._wait("write", future, key).generation)

    def etag_of(self, generation: bytes) -> str | None:
        """Return the etag of the stored value with this generation; None if the store has none."""
        if self.uri.scheme != "s3":
            return None
        return generation.decode().strip("\0")  # TensorStore's mark of a generation that is a text

    def write_if(
        self,
        key: str,
        value: bytes,
        *,
        generation: bytes | None,
        same_is_success: bool = False,
    ) -> bytes:
        """Store `value` at `key` if its generation is unchanged; return the new generation.

        Args:
            key: the object's name.
            value: its new bytes.
            generation: the generation that the caller last read; None: the object must not exist.
            same_is_success: treat finding exactly `value` there as success. Over a network, a
                retried write whose first answer was lost fails against its own result. Set this
                where the bytes are unique to this call, or equal bytes are as good.

        Raises:
            PreconditionFailedError: the object changed; `current` is a `Versioned`, or None if
                absent.
            StoreFullError: no space or quota left.
            UnsupportedFormatError: the value exceeds the bound of its kind.
        """
        condition = _absent_generation() if generation is None else generation
        current: Versioned | None = None
        for _ in range(_MAX_GRAVES):
            if written := self._put(key, value, condition):
                return written
            stored = self._stored(key)
            if stored is None or not self._is_grave(key, stored.value):
                current = stored
                break
            if generation is not None:
                break
            condition = stored.generation  # over the grave, unless another writer is faster
        if same_is_success and current is not None and current.value == value:
            self.sync(key)
            return current.generation
        raise PreconditionFailedError(
            "changed by someone else",
            path=self.uri / key,
            expected="no object" if generation is None else "the generation last read",
            found="no object" if current is None else "another one",
            next_step="Read it again and decide anew.",
            current=current,
        )

    def refuses_write(self, key: str, value: bytes, *, generation: bytes | None) -> bool:
        """Write as `write_if` does; return True if the store refuses, without reading why.

        Args:
            key: the object's name.
            value: its new bytes, which are stored unless refused.
            generation: as in `write_if`.
        """
        condition = _absent_generation() if generation is None else generation
        return not self._put(key, value, condition)

    def refuses_deletion(self, key: str, *, generation: bytes) -> bool:
        """Delete under a condition, on a disk; return True if it refuses or nothing is there."""
        return not self._delete(self._checked(key), generation)()

    def _put(self, key: str, value: bytes, condition: bytes | None) -> bytes:
        """Write if the generation is `condition`; return the new generation, empty if it differs.

        On a disk, the lock file of a killed writer is removed first. If another writer is killed
        between that and our write, our value ends with bytes of the other one: the value is
        therefore read back, and written again if it is wrong.
        """
        check_writable(self._checked(key), len(value))
        if self.uri.scheme != "file":
            stamp = self._wait("write", self._kv.write(key, value, if_equal=condition), key)
            return bytes(stamp.generation)
        path = os.path.join(self.uri.local_path, key)

        def put() -> bytes:
            with translated_errors(f"{self.uri}/{key}"), durable_entries(os.path.dirname(path)):
                if self._is_confined:
                    return self._replace(key, value, condition)
                return self._put_file(path, key, value, condition)

        return self._confirmed(key, value, put)

    def _put_file(self, path: str, key: str, value: bytes, condition: bytes | None) -> bytes:
        while True:
            remove_stale_lock(path)
            stamp = self._wait("write", self._kv.write(key, value, if_equal=condition), key)
            written = bytes(stamp.generation)
            if not written:
                return written
            # Read back: a writer that was killed since may have left its tail in our lock file.
            stored = self.read(key)
            if stored is None or stored.generation != written or stored.value == value:
                return written
            condition = written

    def _confirmed(self, key: str, value: bytes | None, change: Callable[[], bytes]) -> bytes:
        """Change an object; if the disk fails meanwhile, find out whether it changed.

        A rename or unlink takes effect before the folder is synced and the file is read back. If
        the disk fails in between, the change is made and only needs a sync.

        Args:
            key: the object's name.
            value: its new bytes; None: it is deleted.
            change: makes the change and returns the new generation.

        Raises:
            StorageError: the error of `change`. The object is unchanged, unless the error says that
                it changed or that this is unknown.
        """
        try:
            return change()
        except CorruptionError:  # refused before anything changed
            raise
        except StorageError as exc:
            # After a timeout the abandoned thread may still change the object.
            if self._folder is None or isinstance(exc.__cause__, TimeoutError):
                raise
            error = exc
        path = self.uri / key
        try:
            stored = self.read(key)
        except StorageError:
            raise unconfirmed_change(error, path, "no answer to whether it is made") from error
        if (None if stored is None else stored.value) != value:
            raise error
        try:
            self.sync(key)
        except StorageError:
            raise unconfirmed_change(error, path, "one that a power failure may undo") from error
        return _absent_generation() if stored is None else stored.generation

    def sync(self, name: str) -> None:
        """Sync what another process may just have written or deleted on a disk.

        Call this before you report another process's change as durable: that process may have died
        before its own fsync. Does nothing on other stores, where a visible change is durable.

        Args:
            name: name of an object, whose folder is synced; or of a folder, with "/" at its end.

        Raises:
            StorageError: the disk failed.
        """
        if self._folder is None:
            return
        check_path(name.removesuffix("/"), within=self.uri)
        folder = os.path.dirname(self._folder + name)
        with (
            translated_errors(f"{self.uri}/{name}"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            durable_entries(folder),
            open_folder_handle(self.uri, folder) as handle,
        ):
            fsync_path(handle.path)

    def delete(self, key: str) -> None:
        """Remove `key`, if it exists."""
        self._delete(self._checked(key))()

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove the `keys` that exist, many at a time."""
        names = [self._checked(key) for key in keys]
        for start in range(0, len(names), _READS_AT_ONCE):
            window = names[start : start + _READS_AT_ONCE]
            for deleted in [self._delete(name) for name in window]:
                deleted()

    def delete_if(self, key: str, *, generation: bytes) -> None:
        """Remove `key` if its generation is unchanged, or if it is already absent.

        In a bucket a grave stays until `delete` removes it: call that once nobody writes the name
        again.

        Raises:
            PreconditionFailedError: the object changed; `current` is a `Versioned`.
        """
        if self._has_graves(key):
            is_done = self._put(key, GRAVE, generation)
        else:
            is_done = self._delete(self._checked(key), generation)()
        if not is_done:
            current = self.read(key)
            if current is not None:
                raise PreconditionFailedError(
                    "changed by someone else",
                    path=self.uri / key,
                    expected="the generation last read",
                    found="another one",
                    next_step="Read it again and decide anew.",
                    current=current,
                )

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Return all keys that start with `prefix`, sorted. Walks all folders below it."""
        if self.is_remote:
            return self._listed(prefix)
        if folder := prefix.rpartition("/")[0]:
            self._checked(folder)
        keys = self._wait("list", self._kv.list(_range(prefix)), prefix)
        names = (key.decode("utf-8", "surrogateescape") for key in keys)
        return sorted(name for name in names if not name.endswith(LOCK_SUFFIX))

    def _listed(self, prefix: str, *, graves: bool = False) -> builtins.list[str]:
        """Return a bucket's keys without TensorStore, which treats refused listings as complete."""
        _range(prefix)  # raises if it is no relative prefix
        pages = self._pages(prefix, graves=graves)
        return sorted(item.name for page in pages for item in page.objects)

    def children(self, prefix: str) -> builtins.list[str]:
        """Return the keys of the objects directly in the folder `prefix`, sorted.

        Does not walk below it. The keys are full ones, which start with `prefix`.
        """
        return self.entries(prefix)[0]

    def etags(self, prefix: str) -> dict[str, str | None]:
        """Return stamps of the objects directly in a folder, which change whenever they do.

        Reads no object.

        Args:
            prefix: the folder; the names are full keys, which start with it.

        Returns:
            Key -> stamp; None if the store has none, or if the object changed too recently for a
            reliable timestamp.
        """
        folder = f"{prefix.removesuffix('/')}/"
        if self.uri.scheme == "file":
            etags = LocalFiles(self.uri).etags(folder)
            return {f"{folder}{name}": stamp for name, stamp in etags.items()}
        if self.uri.scheme == "memory":
            return dict.fromkeys(self.children(folder))
        pages = self._pages(folder, "/")
        return dict(sorted((item.name, item.stamp) for page in pages for item in page.objects))

    def entries(self, prefix: str) -> tuple[builtins.list[str], builtins.list[str]]:
        """Return (`children`, `folders`), from a single listing."""
        folder = f"{prefix.removesuffix('/')}/"
        if self.uri.scheme == "file":
            entries = LocalFiles(self.uri).list(folder)
            files, folders = (
                [f"{folder}{entry.name}" for entry in entries if entry.is_dir is kind]
                for kind in (False, True)
            )
            return files, folders
        if self.is_remote:
            pages = [*self._pages(folder, "/")]
            names = (item.name for page in pages for item in page.objects)
            return sorted(names), sorted({name for page in pages for name in page.folders})
        keys = self.list(folder)  # no checkpoints there: a full listing is small
        start = len(folder)
        below = {key[: key.index("/", start)] for key in keys if "/" in key[start:]}
        return [key for key in keys if "/" not in key[start:]], sorted(below)

    def folders(self, prefix: str) -> builtins.list[str]:
        """Return the folders directly in the folder `prefix`, sorted, without "/" at the end.

        The names are full paths, which start with `prefix`.
        """
        return self.entries(prefix)[1]

    def delete_prefix(self, prefix: str) -> None:
        """Remove all keys that start with `prefix`, which must not be empty.

        Raises:
            InvalidURIError: `prefix` is empty or no path.
        """
        self._checked(prefix.removesuffix("/"))
        if self.is_remote:
            self.delete_many(self._listed(prefix, graves=True))
        elif self._is_confined:
            self.delete_many(self.list(prefix))
        else:
            self._wait("delete", self._kv.delete_range(_range(prefix)), prefix)

    def _checked(self, key: str) -> str:
        check_path(key, within=self.uri)
        if self.uri.confinement is not None and self.uri.scheme == "file":
            check_below(self.uri, os.path.join(self.uri.local_path, key))
        return key

    def _wait(self, operation: Operation, future: Any, key: str) -> Any:
        began = time.monotonic()
        with timed_request(operation, f"{self.uri}/{key}"):
            try:
                return wait_for(future, self._progress)
            except TimeoutError as exc:
                found = "none; a write may or may not have been done"
                raise no_answer_error(f"{self.uri}/{key}", time.monotonic() - began, found) from exc
            except (ValueError, OSError) as exc:
                raise translate_error(exc, path=f"{self.uri}/{key}") from exc


def _range(prefix: str) -> ts.KvStore.KeyRange:
    if not prefix:
        return ts.KvStore.KeyRange()
    if any(segment in (".", "..") for segment in prefix.split("/")) or prefix.startswith("/"):
        raise InvalidURIError("invalid prefix", expected="a relative prefix", found=repr(prefix))
    low = prefix.encode()
    return ts.KvStore.KeyRange(low, low[:-1] + bytes([low[-1] + 1]))
