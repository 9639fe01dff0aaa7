"""Does a long job's memory grow, and does a later step ask more of its store than an early one?

One process saves again and again: a donating step changes what it trains, a frozen table stays, and
each save is waited for. After it garbage is collected and the resident memory read. A parent has
the store, if that is a bucket's double, counts what each step asks, and says when to go on.

    python -m benchmarks.soak [--local 1000] [--memory 2000] [--steps 2000] [--json FILE]

The C library's allocator keeps freed memory for each thread, and divides it among arenas, so that
resident memory of a process with many threads creeps up for a while though nothing is held. So a
job to each store runs without these caches: there `allocated` is every byte that native code holds,
and Python for what is large. What is small it has in blocks of its own, which are counted. The
others are as jobs are.

The first saves (`--warm-up`) don't count. What is left is cut into batches, since the memory
after one save hangs on that after the one before; a line is laid through the batches' means, and
its slope has a confidence interval of 95 % (Student's t). Leases are renewed by the clock and not
by steps: the job's is so long that none is. Objects are those that Python's collector knows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "soak.json"
BUCKET = "soak"
SETTLED = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.malloc.mxfast=0"
}
"""No caches of threads, one arena, no bins of freed pieces that count as used: what is allocated is
what somebody holds."""
LEASE_SECONDS = 7 * 24 * 3600.0
BATCHES = 18
WIDTH = 64
FROZEN = 1 << 16


Start = Callable[[list[str], dict[str, str]], "subprocess.Popen[str]"]


class Slope(NamedTuple):
    """By how much a number grows with each save.

    Attributes:
        mean: as the line has it.
        low: where its confidence interval of 95 % begins.
        high: where that ends.
    """

    mean: float
    low: float
    high: float


def slope(values: Sequence[float], batches: int = BATCHES) -> Slope:
    """The slope of a line through the means of equal batches, a save being one.

    Args:
        values: one of each save; what does not fill a batch is left out at the front.
        batches: at least three.
    """
    from scipy.special import stdtrit  # comes with JAX

    y = np.asarray(means(values, batches))
    x = np.arange(batches) * float(len(values) // batches)
    away = x - x.mean()
    mean = float(away @ y / (away @ away))
    left = y - y.mean() - mean * away
    error = math.sqrt(float(left @ left) / (batches - 2) / float(away @ away))
    half = float(stdtrit(batches - 2, 0.975)) * error
    return Slope(mean, mean - half, mean + half)


def means(values: Sequence[float], batches: int = BATCHES) -> list[float]:
    """The means of equal batches; what does not fill one is left out at the front."""
    size = len(values) // batches
    cut = np.asarray(values[len(values) - size * batches :], np.float64).reshape(batches, size)
    return [float(mean) for mean in cut.mean(1)]


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Runs the jobs, each of which `start` starts with arguments of Python's and an environment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--local", type=int, default=1000, help="saves to a local disk")
    parser.add_argument("--memory", type=int, default=2000, help="saves to the bucket's double")
    parser.add_argument("--steps", type=int, default=2000, help="the same, as jobs are")
    parser.add_argument("--warm-up", type=int, default=100, help="saves that don't count")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary one")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the run's URI: this is the child
    options = parser.parse_args(arguments)
    if options.job:
        return _job(options.job)
    start = start or _started
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.local:
            for name, allocator in (
                ("a local disk", {}),
                ("a local disk, without the allocator's caches", SETTLED),
            ):
                told = _told(start, str(folder / f"disk-{len(rows)}"), options.local, allocator)
                rows.append(_printed(_row(name, list(told), options.warm_up)))
        if options.memory:
            name = "a bucket, without the allocator's caches"
            given = (options.memory, options.warm_up)
            rows.append(_printed(_bucket(start, folder / "bucket", name, *given, SETTLED)))
        if options.steps:
            given = (options.steps, options.warm_up)
            rows.append(_printed(_bucket(start, folder / "steps", "a bucket", *given, {})))
    options.json.write_text(json.dumps(_with_others(rows, options.json), indent=2) + "\n")
    return 0


def _with_others(rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The rows, and those in the file of what was not run now."""
    known = json.loads(file.read_text()) if file.exists() else []
    measured = {row["row"] for row in rows}
    return sorted(
        [*rows, *(row for row in known if row["row"] not in measured)],
        key=lambda row: (row["saves"], row["row"]),
    )


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def _bucket(
    start: Start, folder: Path, name: str, saves: int, warm_up: int, allocator: dict[str, str]
) -> dict[str, Any]:
    from tests.gcs.server import GcsServer, client_environment

    told: list[dict[str, int]] = []
    requests: list[int] = []
    with GcsServer(folder) as server:
        server.store.create_bucket(BUCKET)
        environment = client_environment(server.url) | allocator
        for one in _told(start, f"gs://{BUCKET}/run", saves, environment):
            told.append(one)
            requests.append(len(server.requests))
            server.requests.clear()
    row = _row(name, told, warm_up)
    return row | {"requests": {"2": requests[1], str(saves): requests[-1]},
                  "most requests": max(requests[1:])}  # fmt: skip


def _row(name: str, told: Sequence[dict[str, int]], warm_up: int) -> dict[str, Any]:
    counted = told[warm_up:]
    return {
        "row": name,
        "saves": len(told),
        "warm-up": warm_up,
        "resident": [round(mean) for mean in means([one["resident"] for one in counted])],
        "resident a save": _rounded(slope([one["resident"] for one in counted])),
        "allocated a save": _rounded(slope([one["allocated"] for one in counted]))
        if counted[0].get("allocated")
        else None,
        "blocks a save": _rounded(slope([one["blocks"] for one in counted]))
        if counted[0].get("blocks")
        else None,
        "objects a save": _rounded(slope([one["objects"] for one in counted])),
        "requests": None,
    }


def _rounded(one: Slope) -> dict[str, float]:
    return {name: round(value, 4) + 0.0 for name, value in one._asdict().items()}


def _told(
    start: Start, uri: str, saves: int, environment: dict[str, str]
) -> Iterator[dict[str, int]]:
    """What the job says after each save, which goes on when asked for more.

    Raises:
        RuntimeError: it ended before.
    """
    arguments = ["-m", "benchmarks.soak", "--job", uri]
    flags = "--xla_force_host_platform_device_count=4"
    variables = {**os.environ, **environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with start(arguments, variables) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        for step in range(1, saves + 1):
            with contextlib.suppress(BrokenPipeError):
                job.stdin.write(f"{step}\n")
                job.stdin.flush()
            line = job.stdout.readline()
            if not line:
                raise RuntimeError(f"the job ended at step {step} of {saves}: {job.wait()}")
            yield json.loads(line)
        job.stdin.close()
        if job.wait():
            raise RuntimeError(f"the job ended with status {job.returncode}")


def _started(arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _job(uri: str) -> int:
    """Save a step for each line of the standard input, and say what memory there is then."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from cairn import Checkpointer

    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())

    def drawn() -> dict[str, jax.Array]:
        layers = {f"layers.{n}.kernel": jnp.full((WIDTH, WIDTH), 0.5) for n in range(8)}
        return {name: jax.device_put(values, cut) for name, values in layers.items()}

    @jax.jit
    def trained(state: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lambda leaf: leaf * 0.999 + 0.001, state)

    step_of = jax.jit(trained, donate_argnums=0)
    state = {"params": drawn(), "mu": drawn(), "nu": drawn()}
    frozen = jax.device_put(jnp.arange(FROZEN, dtype=jnp.float32), whole)
    libc = ctypes.CDLL(None)
    with Checkpointer(uri, lease_ttl=LEASE_SECONDS) as checkpointer:
        for line in sys.stdin:
            step = int(line)
            state = step_of(state)
            items = {"model": {**state["params"], "table": frozen},
                     "optimizer": {"mu": state["mu"], "nu": state["nu"]}}  # fmt: skip
            handle = checkpointer.save(step, items, metrics={"loss": 1 / step})
            state = step_of(state)
            handle.wait()
            for thread in threading.enumerate():
                if thread.name.startswith("cairn-save"):
                    thread.join()
            gc.collect()
            libc.malloc_trim(0)
            told = {"step": step, "resident": _resident(), "objects": len(gc.get_objects())}
            told["blocks"] = sys.getallocatedblocks()
            told["allocated"] = _allocated(libc) if "GLIBC_TUNABLES" in os.environ else 0
            print(json.dumps(told), flush=True)
    return 0


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated(libc: ctypes.CDLL) -> int:
    """Bytes that the C library's allocator has handed out, in its heap and by pages."""
    libc.mallinfo2.restype = _MallocInfo
    found = libc.mallinfo2()
    return int(found.uordblks) + int(found.hblkhd)


if __name__ == "__main__":
    raise SystemExit(main())
