"""Rows of `control_plane.py` of looks into checkpoints: a slice, statistics, a diff, a plan.

A step with one leaf of 2 GiB in float32 and one of 512 MiB in bfloat16, and three with 100,000
leaves of 32 bytes: two equal ones and one that differs in a leaf. All of them are saved as a
trainer saves them, the files of the large leaves are not in the page cache, and each server is a
fresh one. The plan is of the records of `large_step.py`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np

from benchmarks import large_step
from benchmarks import storage_places as places
from benchmarks.control_plane_load import load, request
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.tensor_parts import TensorPart
from cairn.storage.runs.run import Run
from examples.demo import servers

SLICE_BYTES: Final = 1 << 20
SLICE: Final = "slice of 1 MiB out of a leaf of 2 GiB"
STATISTICS_BUDGET: Final = 0.8
DIFF_SECONDS: Final = 1.0
PLAN_SECONDS: Final = 2.0
PLANNED: Final = {
    "mesh": {"axes": {"dp": 8, "fsdp": 64, "tp": 8}, "processes": 512},
    "dtype": "bfloat16",
}
CHECKPOINTS: Final = "/v1/roots/default/runs/{}/checkpoints"

Row = dict[str, Any]


def rows(folder: Path, chosen: argparse.Namespace) -> list[Row]:
    """The rows; `chosen.looked` is the bytes of the large leaf, `chosen.leaves` how many small."""
    root = folder / "looks"
    root.mkdir()
    _save(root, chosen)
    found = []
    with _server(root, folder / "slices") as (url, process):
        found += _slices(root, url, process, chosen)
    found += _statistics(root)
    with _server(root, folder / "statistics") as (url, _):
        path = f"{CHECKPOINTS.format('large')}/1/tensors/half?stats=1"
        found.append(_seconds("statistics of 512 MiB over HTTP, first call", url + path, None))
    for name, other in (("equal", 2), ("that differ in one", 3)):
        with _server(root, folder / f"diff-{other}") as (url, _):
            path = f"{CHECKPOINTS.format('small')}/1:diff?other={other}"
            title = f"diff of {chosen.leaves:,} leaves, {name}"
            budget = DIFF_SECONDS if other == 2 else None
            found.append(_seconds(f"{title}, first call", url + path, budget))
            found.append(_seconds(f"{title}, later call", url + path, budget))
    return found + plans(folder)


def plans(folder: Path) -> list[Row]:
    """The rows of plans alone."""
    root = folder / "plans"
    root.mkdir()
    large_step.save(root / "405b")
    path = f"{CHECKPOINTS.format('405b')}/1:plan"
    title = "plan of a 405B tree (126 layers, with Adam's moments) on a mesh of 4,096"
    with _server(root, folder / "planning") as (url, _):
        return [
            _seconds(f"{title}, {call} call", url + path, PLAN_SECONDS, PLANNED)
            for call in ("first", "later")
        ]


def _save(root: Path, chosen: argparse.Namespace) -> None:
    draw = np.random.default_rng(0)
    full = draw.standard_normal((chosen.looked // 65536, 16384), np.float32)
    half = full.reshape(-1)[: full.size // 2].astype(ml_dtypes.bfloat16)
    with Checkpointer(str(root / "large")) as checkpointer:
        tree = {"full": full, "half": half.reshape(-1, 16384)}
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    small = {f"leaf{n:06}": np.full(8, n, np.float32) for n in range(chosen.leaves)}
    with Checkpointer(str(root / "small")) as checkpointer:
        for step in (1, 2, 3):
            if step == 3:
                small["leaf000007"] = np.zeros(8, np.float32)
            checkpointer.save(step, {"model": small}, meta={}).wait()


@contextmanager
def _server(root: Path, folder: Path) -> Iterator[tuple[str, int]]:
    folder.mkdir()
    with servers.control_plane(str(root), folder, {}, 0) as (url, _, process):
        yield url, process.pid


def _slices(root: Path, url: str, process: int, chosen: argparse.Namespace) -> list[Row]:
    part = TensorPart.of(*_large(root), "full")
    count = max(1, SLICE_BYTES // (part.shape[1] * 4))
    draw = random.Random(0)

    def at() -> str:
        start = draw.randrange(part.shape[0] - count)
        return f"{start}:{start + count}"

    def ask(client: int, turn: int) -> bytes:
        path = f"{CHECKPOINTS.format('large')}/1/tensors/full?slice={at()}"
        return request(url, "GET", path)

    found = []
    load(url, ask, clients=1, turns=2)
    for clients in (1, chosen.clients[0]):
        _evict(root)
        before = _read_bytes(process)
        answers = load(url, ask, clients=clients, turns=chosen.turns)
        read = (_read_bytes(process) - before) / len(answers.seconds)
        draw.seed(1)
        needed = [TensorPart.of(*_large(root), "full", at()).stored_bytes for _ in range(100)]
        found.append(
            {
                "row": SLICE,
                "clients": clients,
                "p50_ms": round(answers.p50 * 1e3, 2),
                "p99_ms": round(answers.p99 * 1e3, 2),
                "per_second": round(answers.per_second, 1),
                "reference": {"name": "chunks that hold it", "bytes": round(np.mean(needed))},
                "read_bytes": round(read),
                "ratio": round(read / float(np.mean(needed)), 3),
                "budget": 1.0,
            }
        )
    return found


def _large(root: Path) -> tuple[CheckpointReader, str]:
    run = Run.open(str(root / "large"))
    info = run.step(1)
    return CheckpointReader.open(run.step_uri(info), run.manifest(info)), "model"


def _read_bytes(process: int) -> int:
    """What a process has read of files and sockets."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _statistics(root: Path) -> list[Row]:
    found = []
    for leaf, title in (("full", "2 GiB of float32"), ("half", "512 MiB of bfloat16")):
        reads, statistics = [], []
        for _ in range(3):  # in turns
            reads.append(_timed(lambda part: sum(1 for _ in part.blocks()), root, leaf))
            statistics.append(_timed(lambda part: part.statistics(), root, leaf))
        read, took = float(np.median(reads)), float(np.median(statistics))
        found.append(
            {
                "row": f"statistics, {title}",
                "clients": 1,
                "p50_ms": round(took * 1e3, 2),
                "p99_ms": None,
                "per_second": None,
                "reference": {"name": "one checked read of it", "p50_ms": round(read * 1e3, 2)},
                "ratio": round(read / took, 3),
                "budget": STATISTICS_BUDGET,
            }
        )
    return found


def _evict(root: Path) -> None:
    """Have the system forget the files of the large leaves: a user meets them cold."""
    places.evict(str(root / "large"))


def _timed(do: Callable[[TensorPart], object], root: Path, leaf: str) -> float:
    part = TensorPart.of(*_large(root), leaf)
    _evict(root)
    began = time.perf_counter()
    do(part)
    return time.perf_counter() - began


def _seconds(name: str, url: str, budget: float | None, body: Row | None = None) -> Row:
    method = "GET" if body is None else "POST"
    began = time.perf_counter()
    httpx.request(method, url, json=body, timeout=600).raise_for_status()
    seconds = round(time.perf_counter() - began, 3)
    empty = dict.fromkeys(("clients", "p50_ms", "p99_ms", "per_second", "ratio", "reference"))
    return {"row": name, **empty, "seconds": seconds, "budget": budget}
