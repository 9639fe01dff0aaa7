"""What a step of 5 TB costs a job of many processes, simulated; see `job`.

The state is that of Llama 3.1 405B in float32 with Adam's moments, its layers stacked as a scan has
them: 36 arrays, 4.87 TB. Each process has four devices, on a mesh of `data`, `fsdp` and eight-fold
`tensor`. A request to the bucket takes 20 ms. Loads onto several replicas are of the weights alone:
moments are sharded over replicas too, where there are any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from benchmarks.large_step import CONFIG
from benchmarks.simulated.job import SimulatedArray, SimulatedJob
from benchmarks.simulated.store import VALUES, Asked
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.state.checkpointing.load import load
from cairn.state.checkpointing.processes import agreement
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file, step_dir

__all__ = ["measure"]

RUN: Final = "gs://bucket/run"
LATENCY: Final = 0.020
DEVICES: Final = 4
TENSOR: Final = 8

MOST_OBJECTS: Final = 15_000
PUBLISH_SECONDS: Final = 5.0
MANIFEST_BYTES: Final = 2_000_000
NAMED_SECONDS: Final = 60.0

Make = Callable[[tuple[int, ...], str, Any], Any]


def measure(
    count: int, replicas: Sequence[int], *, layers: int | None = None, latency: float = LATENCY
) -> Iterator[dict[str, Any]]:
    """The rows of so many processes.

    Args:
        count: of processes; twice as many as there are replicas, or more.
        replicas: how many copies of the state there are, load by load.
        layers: fewer than the model has make a smaller state.
        latency: of a request to the bucket, in seconds.
    """
    job = SimulatedJob(count, DEVICES, latency=latency)
    saved = _state(job, 1, layers, SimulatedArray)
    ended: dict[str, float] = {}

    def save() -> None:
        with Checkpointer(RUN, writer_id="simulated") as checkpointer:
            checkpointer.save(1, saved).wait()
            if job.process() == 0:
                ended["publish"] = job.publishing()

    job.run(save)
    names, step = job.store.names(), f"bucket/run/{step_dir(1, 1)}/"
    values = {name: size for name, size in names.items() if name.startswith(step) and "/d/" in name}
    stored = sum(values.values())
    weights = sum(size for name, size in values.items() if name.startswith(f"{step}model/"))
    everything, others = _asked(job), _asked(job, values=False)
    yield _row("save", count, asked=everything)
    yield _row("save, but for values", count, asked=others)
    objects = [name for name in names if name.startswith(step)]
    yield _row("save: objects", count, of=len(objects), budget=MOST_OBJECTS, bytes=stored)
    yield _row("save: publish", count, of=ended["publish"], budget=PUBLISH_SECONDS, unit="seconds")
    manifest = names[f"bucket/run/{manifest_file(1, 1)}"]
    yield _row("save: manifest", count, of=manifest, budget=MANIFEST_BYTES, unit="bytes")
    yield _row("save: index", count, bytes=names[f"{step}{INDEX_FILE}"])
    for copies in replicas:
        yield from _loads(job, copies, layers, stored if copies == 1 else weights)
    yield _row(
        "a late process is named", count, of=_named_after(job), budget=NAMED_SECONDS, unit="seconds"
    )


def _loads(
    job: SimulatedJob, copies: int, layers: int | None, stored: int
) -> Iterator[dict[str, Any]]:
    target = _state(job, copies, layers, _target)
    if copies > 1:
        del target["optimizer"]
    job.store.requests.clear()
    job.run(lambda: load(RUN, target) is None)
    name = f"load, {copies} replicas" if copies > 1 else "load, sharded"
    read = _asked(job, others=False)
    ratio = round(read.nbytes / stored, 4)
    yield _row(f"{name}: values", job.count, asked=read) | {
        "reference": stored,
        "ratio": ratio,
        "budget": 1.02,
    }
    of_each = [_asked(job, values=False, process=number) for number in range(job.count)]
    yield _row(f"{name}: metadata, process 0", job.count, asked=of_each[0])
    most = max(of_each[1:], key=lambda one: one.count)
    yield _row(
        f"{name}: metadata, any other process",
        job.count,
        of=most.count,
        budget=4,
        bytes=most.nbytes,
    )


def _named_after(job: SimulatedJob) -> float:
    """Seconds until the log of process 0 names one that does not come."""
    late, named = job.count - 1, threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if job.process() == 0 and f"process {late}" in record.getMessage():
                named.set()

    logger, watch = logging.getLogger("cairn.processes"), Watch()
    took: list[float] = []

    def meet() -> None:
        if job.process() == late:
            began = time.monotonic()
            named.wait(2 * NAMED_SECONDS)
            took.append(time.monotonic() - began)
        agreement.collect(None)

    logger.addHandler(watch)
    try:
        job.run(meet)
    finally:
        logger.removeHandler(watch)
    return took[0]


def _asked(
    job: SimulatedJob, *, values: bool = True, others: bool = True, process: int | None = None
) -> Asked:
    """The requests of all processes, or of one."""
    wanted = [
        asked
        for (number, operation), asked in job.store.requests.items()
        if process in (None, number) and (values if operation == VALUES else others)
    ]
    return Asked(sum(one.count for one in wanted), sum(one.nbytes for one in wanted))


def _state(job: SimulatedJob, copies: int, layers: int | None, make: Make) -> dict[str, Any]:
    axes = {"data": copies, "fsdp": job.count * DEVICES // TENSOR // copies, "tensor": TENSOR}
    trees = [_parameters(job, axes, layers or CONFIG.num_hidden_layers, make) for _ in range(3)]
    return {"model": trees[0], "optimizer": {"mu": trees[1], "nu": trees[2]}}


def _parameters(
    job: SimulatedJob, axes: Mapping[str, int], layers: int, make: Make
) -> dict[str, Any]:
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    shared, words = CONFIG.kv_heads * CONFIG.head_size, CONFIG.vocab_size
    whole = job.sharding(axes)
    cut, turned = job.sharding(axes, "fsdp", "tensor"), job.sharding(axes, "tensor", "fsdp")
    stacked = job.sharding(axes, None, "fsdp", "tensor")
    layer = {
        "down": (inner, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "query": (hidden, hidden),
        "key": (hidden, shared),
        "value": (hidden, shared),
        "out": (hidden, hidden),
    }
    return {
        "embedding": make((words, hidden), "float32", turned),
        "head": make((hidden, words), "float32", cut),
        "norm": make((hidden,), "float32", whole),
        "layers": {
            name: make((layers, *shape), "float32", stacked) for name, shape in layer.items()
        }
        | {name: make((layers, hidden), "float32", whole) for name in ("norm1", "norm2")},
    }


def _target(shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _row(
    name: str,
    count: int,
    *,
    asked: Asked | None = None,
    of: float | None = None,
    budget: float | None = None,
    unit: str = "requests",
    bytes: int | None = None,
) -> dict[str, Any]:
    """A row: requests and bytes that were asked for, or `of` so many of a unit within a budget."""
    row: dict[str, Any] = {
        "row": f"simulated {name}",
        "processes": count,
        "requests": None if asked is None else asked.count,
        "bytes": bytes if asked is None else asked.nbytes,
        "seconds": None,
        "reference": None,
        "ratio": None,
        "budget": budget,
    }
    if of is not None and budget is not None:
        row |= {unit: round(of, 3) if unit == "seconds" else of, "ratio": round(of / budget, 4)}
    return row
