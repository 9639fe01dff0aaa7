"""A job of many processes in one: each a thread that runs Cairn's own code, with its own number.

What they meet through (JAX's coordination service) and the bucket are simulated, and Orbax, which
makes the step's folder and commits it: of it there are as many requests as of the real one. Devices
are numbers, arrays have a shape and a sharding. Array bytes are left out: nothing is copied,
compared or exchanged, but counted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.simulated.network import Coordination, OfEach, Rounds
from benchmarks.simulated.store import VALUES, LeftOut, SimulatedStore
from cairn.state.checkpointing.processes import background, exchange, gather
from cairn.state.checkpointing.restores import local_leaves, shared_leaves, targets
from cairn.state.checkpointing.saves import engine, host_arrays
from cairn.storage.arrays import data_file_writers, data_files, paged_table
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import shard_index
from cairn.storage.arrays.orbax_tree import CUSTOM_KEY, STEP_METADATA
from cairn.storage.reading import item_arrays, leaf_reads
from cairn.storage.runs.records import step_index
from cairn.storage.runs.records.layout import COMMIT_FILE
from cairn.storage.store import objects
from cairn.storage.store.objects import ObjectStore

__all__ = ["SimulatedArray", "SimulatedJob"]

_BEGIN_REQUESTS, _COMMIT_REQUESTS = 13, 5
"""What Orbax asks a bucket for before and after the items are written, one after another, but for
the two files that are written here. Counted at a server of GCS's protocol, Orbax 0.12.8."""

_STACK_BYTES: Final = 512 << 10
_POLL_SECONDS: Final = 5
_SWITCH_SECONDS: Final = 0.1
_WRITERS: Final = 1
"""A thousand processes share an interpreter: they look less often than real ones, take longer
turns, and write one object of an item at a time."""

R = TypeVar("R")


class _Device:
    """A device, as far as shardings ask."""

    platform: Final = "tpu"
    device_kind: Final = "simulated"

    def __init__(self, number: int, process: int, client: object) -> None:
        self.id, self.process_index, self.client = number, process, client

    def __repr__(self) -> str:
        return f"device {self.id}"


class _Sharding(NamedSharding):
    """A sharding that every process shares, and each sees its own devices of."""

    job: SimulatedJob

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Mapping[Any, Any]:
        me = self.job.process()
        places = self.devices_indices_map(shape)
        return {device: places[device] for device in self.job.devices_of(me) if device in places}

    @property
    def is_fully_addressable(self) -> bool:
        return self.job.count == 1


class SimulatedArray(jax.Array):
    """An array of which there is no element."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any) -> None:
        self._shape, self._dtype, self._sharding = shape, np.dtype(dtype), sharding

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)
    sharding = property(lambda self: self._sharding)
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: int(np.prod(self._shape, dtype=object)))
    is_fully_addressable = property(lambda self: self._sharding.is_fully_addressable)

    def is_deleted(self) -> bool:
        """Never."""
        return False

    def addressable_data(self, index: int) -> np.ndarray[Any, Any]:
        """The memory of a shard: one element that stands for all."""
        del index
        shape = self._sharding.shard_shape(self._shape)
        return np.broadcast_to(np.zeros((), self._dtype), shape)


class _Nothing:
    """Memory that there is none of: what is put there is forgotten."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> _Nothing:
        parts = [one for one in (index if isinstance(index, tuple) else (index,)) if one is not ...]
        sizes = [len(range(*part.indices(n))) for part, n in zip(parts, self.shape, strict=False)]
        return _Nothing([*sizes, *self.shape[len(sizes) :]], self.dtype)

    def __setitem__(self, index: Any, values: Any) -> None:
        pass

    def view(self, dtype: Any) -> _Nothing:
        return _Nothing(self.shape, dtype)

    def reshape(self, shape: Sequence[int]) -> _Nothing:
        return _Nothing(shape, self.dtype)

    def astype(self, dtype: Any) -> _Nothing:
        return _Nothing(self.shape, dtype)


class SimulatedJob:
    """The processes, their devices, and what they share.

    Attributes:
        count: of processes.
        store: the bucket.
        network: bytes of values that processes have given each other.
        times: when process 0 was where, by name.
    """

    def __init__(self, count: int, devices: int, *, latency: float) -> None:
        """Of so many processes with so many devices each; none runs yet."""
        self.count = count
        self._here = threading.local()
        self.store = SimulatedStore(self.process, latency)
        self.coordination = Coordination(self.process)
        self._rounds, self._answered = Rounds(self.process), list[str]()
        self._devices = [
            [_Device(process * devices + number, process, self) for number in range(devices)]
            for process in range(count)
        ]
        self.network = 0
        self.times: dict[str, float] = {}
        self._lock = threading.Lock()

    def process(self) -> int:
        """The number of the process that the calling thread belongs to."""
        return getattr(self._here, "process", 0)

    def process_index(self) -> int:
        """As `process`: shardings ask their devices' client."""
        return self.process()

    def devices_of(self, process: int) -> list[_Device]:
        """The devices of a process."""
        return self._devices[process]

    def sharding(self, axes: Mapping[str, int], *spec: str | tuple[str, ...] | None) -> _Sharding:
        """A sharding over all devices, on a mesh of these axes."""
        sharding = _Sharding(self._mesh(tuple(axes.items())), PartitionSpec(*spec))
        sharding.job = self
        return sharding

    @functools.cache  # noqa: B019 (a job lasts as long as the program)
    def _mesh(self, axes: tuple[tuple[str, int], ...]) -> Mesh:
        flat = np.array([device for group in self._devices for device in group])
        return Mesh(
            flat.reshape([size for _, size in axes]),
            tuple(name for name, _ in axes),
            axis_types=(AxisType.Auto,) * len(axes),
        )

    def publishing(self) -> float:
        """Seconds since all have written: what process 0 took, if it had the machine for itself.

        That is the time on the clock or, if it is less, that of the processor, and of those
        requests of process 0 that were under way, and of its messages.
        """
        clock = time.monotonic() - self.times["written"]
        processor = time.process_time() - self.times["written, processor"]
        waits = self.store.waited(self.times["written"])
        return min(clock, processor + waits)

    def run(self, work: Callable[[], R]) -> list[R]:
        """What `work` gives in each process, all at a time."""
        outcomes: list[Future[R]] = [Future() for _ in range(self.count)]

        def run(number: int) -> None:
            self._here.process = number
            try:
                outcomes[number].set_result(work())
            except BaseException as exc:
                outcomes[number].set_exception(exc)

        with self._simulated():
            threads = [threading.Thread(target=run, args=(i,)) for i in range(self.count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [outcome.result() for outcome in outcomes]

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        """Meanwhile Cairn's code finds this job in the place of JAX's."""
        begun = threading.Thread.start
        job = self

        def start(thread: threading.Thread) -> None:
            process, run = job.process(), thread.run

            def of_process() -> None:
                job._here.process = process
                run()

            thread.run = of_process  # type: ignore[method-assign]
            begun(thread)

        def cached(function: Any) -> Any:
            plain = function.__wrapped__
            known: dict[Any, Any] = {}

            def call(*args: Any) -> Any:
                key = (job.process(), *args)
                if key not in known:
                    known[key] = plain(*args)
                return known[key]

            call.__wrapped__ = plain  # type: ignore[attr-defined]
            return call

        stack_size = threading.stack_size(_STACK_BYTES)
        with ExitStack() as stack, self.store.served():

            def patch(owner: object, name: str, new: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, new))

            stack.callback(threading.stack_size, stack_size)
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_SECONDS)
            log = logging.getLogger("cairn")
            patch(log, "propagate", False)  # a thousand processes say the same
            patch(log, "handlers", [logging.NullHandler()])
            patch(threading.Thread, "start", start)
            patch(jax, "process_index", self.process)
            patch(jax, "process_count", lambda: self.count)
            patch(jax, "device_count", lambda: sum(map(len, self._devices)))
            patch(exchange, "coordination", lambda: self.coordination)
            patch(background, "coordination", lambda: self.coordination)
            patch(exchange, "POLL_SECONDS", _POLL_SECONDS)
            patch(background, "POLL_SECONDS", _POLL_SECONDS)
            patch(exchange, "_rounds", self._rounds)
            patch(exchange, "_answered", self._answered)
            patch(objects, "_open_stores", OfEach(self.process))
            patch(host_arrays, "_layout", cached(host_arrays._layout))
            patch(targets, "local_boxes", cached(targets.local_boxes))
            patch(paged_table, "_sha256", _once_of_memory(paged_table._sha256))
            patch(step_index, "hashlib", SimpleNamespace(sha256=_once_of_memory(hashlib.sha256)))
            patch(shared_leaves, "shared_boxes", self._once(shared_leaves.shared_boxes))
            patch(shared_leaves, "batch_bytes", self._once(shared_leaves.batch_bytes))
            patch(shared_leaves, "batches", self._once(shared_leaves.batches))
            # Array bytes are left out from here on.
            patch(data_files, "_encoded", _left_out)
            patch(data_files, "ContentSum", _NoSum)
            patch(data_file_writers, "_assemble", _put_together)
            patch(data_file_writers._ObjectWriter, "_hand_over", _handed_over)
            patch(data_file_writers, "_REMOTE_WRITERS", _WRITERS)
            patch(data_file_writers, "_ASSEMBLERS", _WRITERS)
            patch(
                data_file_writers._UploadWriter, "write", functools.partialmethod(_streamed, self)
            )
            patch(engine.StepWrite, "_open", functools.partialmethod(_orbax, self))
            for module in (shared_leaves, targets):
                patch(module, "aligned_empty", _no_memory)
            for module in (local_leaves, shared_leaves):
                patch(module, "HostMemory", _NoHostMemory)
            patch(targets.PlacedLeaf, "value", lambda leaf, **_: _Nothing((), leaf._dtype))
            patch(targets.TargetLeaf, "finish", lambda leaf, value: value)
            patch(leaf_reads.LeafReads, "pieces", lambda *_: None)  # their requests are not counted
            patch(item_arrays.ItemArrays, "array", functools.partialmethod(_reads, self))
            patch(item_arrays.ItemArrays, "wait", lambda _, pending, path: pending)
            patch(gather, "gather_bytes", self._gather)
            patch(background, "meet", self._timed(background.meet))
            yield

    def _once(self, pure: Callable[..., R]) -> Callable[..., R]:
        """A pure function that gives each process of a load the same: one of them works it out."""
        known: dict[str, R] = {}
        lock = threading.Lock()

        def call(*args: Any) -> R:
            first, *rest = args
            given = list(first) if not isinstance(first, list) else first
            ends = [(one.path, len(getattr(one, "slices", ()))) for one in given[:1] + given[-1:]]
            key = f"{len(given)} {ends} {rest}"
            with lock:
                if key not in known:
                    known[key] = pure(given, *rest)
            return known[key]

        return call

    def _gather(self, members: Sequence[int], streams: Sequence[_Nothing]) -> None:
        mine = len(streams[list(members).index(self.process())])
        with self._lock:
            self.network += mine * (len(members) - 1)

    def _timed(self, meet: Callable[..., None]) -> Callable[..., None]:
        def timed(key: str, place: str, **options: Any) -> None:
            meet(key, place, **options)
            if self.process() == 0:
                self.times[place] = time.monotonic()
                self.times[f"{place}, processor"] = time.process_time()

        return timed


def _once_of_memory(digest: Callable[[Any], R]) -> Callable[[Any], R]:
    """A digest that is not taken again of the same memory, which all processes share here."""
    known: dict[tuple[int, int], tuple[Any, R]] = {}

    def call(data: Any) -> R:
        octets = np.frombuffer(data, np.uint8)
        key = octets.ctypes.data, len(octets)
        if key not in known:
            known[key] = data, digest(data)  # it stays where it is
        return known[key][1]

    return call


class _NoSum:
    """No content, no sum of it."""

    def update(self, data: object) -> None:
        """Nothing is looked at."""

    def text(self) -> str:
        return f"words-64:{0:016x}"


def _no_memory(shapes: Iterable[Sequence[int]], dtype: Any) -> list[_Nothing]:
    return [_Nothing(shape, dtype) for shape in shapes]


class _NoHostMemory:
    """In the place of `HostMemory`: there is room for everything."""

    def fits(self, shape: Sequence[int], count: int, dtype: Any) -> bool:
        return True

    def lasting(self, shape: Sequence[int], count: int, dtype: Any) -> list[_Nothing]:
        return [_Nothing(shape, dtype) for _ in range(count)]

    def passing(self, shape: Sequence[int], count: int, dtype: Any) -> tuple[list[_Nothing], None]:
        return self.lasting(shape, count, dtype), None

    def wait(self) -> bool:
        return False

    def drain(self) -> None:
        """Nothing is on its way."""


Pieces = Generator[int, None, None]


def _left_out(shard: Any, file: Any, digests: list[int], prints: list[int]) -> Pieces:
    """In the place of `data_files._encoded`: as many bytes and digests, and none of them."""
    del prints
    sizes = zip(shard.values.shape, shard.chunk, strict=True)
    digests += [0] * int(np.prod([size // step for size, step in sizes], dtype=object))
    yield shard.stored_bytes
    file.add(shard.stored_bytes)


def _put_together(pieces: Pieces, content: _NoSum, expected: int) -> LeftOut:
    del content, expected
    return LeftOut(sum(pieces))


def _handed_over(sink: Any, name: str, value: list[LeftOut]) -> Callable[[], bytes]:
    return sink._objects.start_write(name, value.pop())


class _Response:
    def __init__(self, outcome: Future[None]) -> None:
        self.result = outcome.result


def _streamed(
    sink: Any,
    job: SimulatedJob,
    name: str,
    pieces: Pieces,
    content: _NoSum,
    expected: int,
) -> Future[None]:
    del content, expected
    uri = sink._files.uri
    job.store.upload(f"{uri.bucket}/{uri.path}/{name}", sum(pieces))
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _orbax(step: Any, job: SimulatedJob) -> _Response:
    """In the place of `StepWrite._open`: what Orbax does around the items."""
    outcome: Future[None] = Future()
    folder, primary = step._folder, job.process() == 0
    if primary:
        for _ in range(_BEGIN_REQUESTS):
            job.store.wait("orbax")

    def run() -> None:
        try:
            step._write_watched(folder)
            if primary:
                for _ in range(_COMMIT_REQUESTS):
                    job.store.wait("orbax")
                kept = ObjectStore(folder)
                described = {"custom_metadata": {CUSTOM_KEY: step._custom}}
                kept.write(STEP_METADATA, json.dumps(described).encode())
                kept.write(COMMIT_FILE, engine.commit_text(folder))
                job.times["committed"] = time.monotonic()
            outcome.set_result(None)
        except BaseException as exc:
            outcome.set_exception(exc)

    threading.Thread(target=run).start()
    return _Response(outcome)


def _reads(arrays: Any, job: SimulatedJob, path: str) -> _Reads:
    return _Reads(arrays, path, job)


class _Reads:
    """In the place of an array that TensorStore has opened: counts what it would ask for."""

    def __init__(self, arrays: Any, path: str, job: SimulatedJob) -> None:
        info = arrays.info(path) if arrays._records is None else arrays._told(path)
        self._record = arrays._records[path]
        self._info, self._job, self._uri = info, job, arrays.uri
        self._part: tuple[slice, ...] = ()

    def __getitem__(self, part: tuple[slice, ...]) -> _Reads:
        self._part = part
        return self

    def read(self, order: str) -> _Nothing:
        del order
        cut = ChunkShapes(self._record.shards, self._record.chunks)
        itemsize = self._info.dtype.itemsize
        ranges = [
            (-(-part.stop // step) - part.start // step)
            for part, step in zip(self._part, cut.chunk, strict=True)
        ]
        chunks = int(np.prod(ranges, dtype=object))
        chunk = int(np.prod(cut.chunk, dtype=object)) * itemsize + data_files.CRC_BYTES
        index = len(shard_index(*cut, itemsize))
        self._job.store.ask(VALUES, index + chunks * chunk, times=2)
        return _Nothing([part.stop - part.start for part in self._part], self._info.dtype)
