"""Saves, restores, imports and exports of a job on an accelerator, each beside its own limit.

This file needs nothing but `pip install cairn-checkpoints[train]`: copied alone to a machine with a
GPU or a TPU it says how far Cairn is from what that machine can do. Limits, and Orbax, safetensors
and transformers where they are installed, are measured in the same run. Whatever a row needs is
measured in a fresh process that has all devices; calls are those that users make, timed from
outside. A row that can't be measured says why; nothing is estimated.

    python accelerator.py [--size 16.4GB] [--rows TEXT ...] [--folder FOLDER]
        [--output results.json] [--plot plot.svg] [--without-peers]
    python -m benchmarks.accelerator --small   # seconds, on any device; figures say little

By default the state has 16.4 GB, the folder's disk must have room for 55, and all of it is meant to
take some 8 minutes on an H100, on which it has not run yet. The results are written anew after each
row. Fails (exit 1) if a measurement failed, not if this machine has not what it takes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

PACKAGES: Final = (
    *("cairn-checkpoints", "jax", "jaxlib", "orbax-checkpoint"),
    *("flax", "optax", "numpy", "safetensors", "transformers", "torch"),
)
SIZE_BYTES: Final = 16_400_000_000
SMALL_BYTES: Final = 1_500_000
RESTORED, BASE = 0.54, 0.2
"""Of the size: the state that is restored (8.9 GB), and a model in bfloat16 (3.3 GB)."""

LAYERS, RESTORED_LAYERS, SMALL_LAYERS = 24, 13, 1
STEP_SECONDS, QUICK_STEP_SECONDS = 0.18, 0.007
IDLE_STEPS: Final = 5
SAVES, QUICK_SAVES, SMALL_SAVES = 3, 6, 2
LORA_RANK: Final = 16

DIRECT_THREADS: Final = 8
READERS: Final = (16, 8)
SLOT_BYTES, PIECE_BYTES, BLOCK_BYTES = 32 << 20, 8 << 20, 4096
TILE: Final = 128
PROBES, PROBE_BYTES = 64, 1 << 20

MEASUREMENT_SECONDS: Final = 300
"""A measurement that takes longer is given up."""

SETTLED_BYTES, SETTLE_SECONDS = 16 << 20, 12.0
TABLE_WIDTH: Final = 170

Measured = dict[str, Any]


class UnmeasurableError(Exception):
    """This machine has not what a measurement takes; the message says what."""


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One number: a measurement's field."""

    measurement: str
    field: str


@dataclass(frozen=True)
class Budget:
    """The most that a row should be on an accelerator: a number, by size, or of the row's limit.

    Attributes:
        most: in the row's unit.
        a_byte: in the row's unit, for each byte of the state.
        of_limit: as a ratio.
    """

    most: float | None = None
    a_byte: float | None = None
    of_limit: float | None = None

    def value(self, limit: float | None, nbytes: int) -> float | None:
        """The number, if there is what it depends on."""
        if self.most is not None:
            return self.most
        if self.a_byte is not None:
            return self.a_byte * nbytes
        return None if limit is None or self.of_limit is None else limit * self.of_limit


@dataclass(frozen=True)
class Row:
    """One line of the results: what is measured, its limit, its budget, who is beside it.

    Attributes:
        beside: others, by name, and their figures.
        unit: "seconds" or "bytes".
    """

    name: str
    value: Figure
    limit: Figure
    limit_name: str
    budget: Budget
    beside: tuple[tuple[str, Figure], ...] = ()
    unit: str = "seconds"

    @property
    def measurements(self) -> list[str]:
        """All that it takes."""
        figures = [self.value, self.limit, *(figure for _, figure in self.beside)]
        return list(dict.fromkeys(figure.measurement for figure in figures))


ORBAX: Final = "Orbax, AsyncCheckpointer"
TUNED: Final = "Orbax, tuned"
DISPATCH: Final = "device_put of what changed to pinned_host, nothing waited for"


def _save_rows(
    name: str, field: str, limit: tuple[str, str], budget: Sequence[Budget]
) -> list[Row]:
    return [
        Row(
            f"{name}, {which}", Figure("save", f"{field}_{which}"), Figure("save", limit[0]),
            limit[1], most, ((ORBAX, Figure("save_orbax", f"{field}_{which}")),),
        )
        for which, most in zip(("first", "later"), budget, strict=True)
    ]  # fmt: skip


def _adapter_rows(name: str, measurement: str) -> list[Row]:
    return [
        Row(
            f"{name}, later save: the call", Figure(measurement, "call_later"),
            Figure(measurement, "dispatch"), DISPATCH, Budget(most=0.05),
        ),
        Row(
            f"{name}, later save: bytes written", Figure(measurement, "written"),
            Figure(measurement, "changed"), "bytes of adapters and their optimizer",
            Budget(of_limit=1.1), unit="bytes",
        ),
    ]  # fmt: skip


ROWS: Final[tuple[Row, ...]] = (
    *_save_rows(
        "call of EasyDeLState.save_state", "call", ("dispatch", DISPATCH),
        (Budget(most=0.1), Budget(most=0.05)),
    ),
    *_save_rows(
        "cost of a save to the loop", "cost", ("arrival", "the same, until all are there"),
        (Budget(of_limit=1.2),) * 2,
    ),
    *_save_rows(
        "until durable", "durable", ("disk", "parallel direct writes of as many bytes"),
        (Budget(of_limit=1.2),) * 2,
    ),
    Row(
        "peak of host memory", Figure("save", "peak"), Figure("save", "bytes"),
        "bytes of the state", Budget(of_limit=1.0), ((ORBAX, Figure("save_orbax", "peak")),),
        unit="bytes",
    ),
    Row(
        "peak of host memory, host_memory a quarter of the state", Figure("save_limited", "peak"),
        Figure("save_limited", "allowed"), "host_memory and the largest leaf of a device",
        Budget(of_limit=1.0), unit="bytes",
    ),
    Row(
        "restore, warm", Figure("restore_warm", "seconds"), Figure("restore_limit", "warm"),
        "preadv into a slot, device_put, block_until_ready", Budget(a_byte=0.9 / 8.9e9),
        (
            (TUNED, Figure("restore_orbax_warm", "seconds")),
            ("safetensors and device_put", Figure("restore_safetensors", "seconds")),
        ),
    ),
    Row(
        "restore, cold", Figure("restore_cold", "seconds"), Figure("restore_limit", "cold"),
        "the fastest raw read of the files", Budget(of_limit=1.0),
        ((TUNED, Figure("restore_orbax_cold", "seconds")),),
    ),
    *_adapter_rows("LoRA on a frozen base, whole state donated", "lora"),
    *_adapter_rows("QLoRA on a base in nf4, adapters donated", "qlora"),
    Row(
        "small model, quick steps: the call, first", Figure("quick", "call_first"),
        Figure("quick", "dispatch"), DISPATCH, Budget(most=0.05),
    ),
    Row(
        "small model, quick steps: the call, later", Figure("quick", "call_later"),
        Figure("quick", "dispatch"), DISPATCH, Budget(most=0.015),
    ),
    *(
        Row(
            f"from_pretrained in {dtype}", Figure(f"import_{dtype}", "seconds"),
            Figure("import_limit", dtype), "a read from the page cache, turned by tiles",
            Budget(of_limit=1.5), (("transformers, to the CPU", Figure("transformers", dtype)),),
        )
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Row(
            f"save_pretrained, {name}", Figure("export", field), Figure("export", f"{field}_cp"),
            "cp of the same files in the page cache, and fsync", Budget(of_limit=1.15),
        )
        for name, field in (("one file", "one"), ("several files", "several"))
    ),
)  # fmt: skip

FILES_OF: Final = {
    **dict.fromkeys(
        (
            *("restore_warm", "restore_cold", "restore_orbax_warm", "restore_orbax_cold"),
            *("restore_safetensors", "restore_limit"),
        ),
        "stored",
    ),
    **dict.fromkeys(
        ("import_float32", "import_bfloat16", "import_limit", "transformers"), "export"
    ),
}
"""Whose files a measurement reads: that one comes first, and leaves them in its folder."""

PEERS: Final = frozenset(
    (
        "save_orbax",
        "restore_orbax_warm",
        "restore_orbax_cold",
        "restore_safetensors",
        "transformers",
    )
)


# -- the run ---------------------------------------------------------------------------------------

Start = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs this file with these arguments."""


def start_fresh(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own."""
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        timeout=MEASUREMENT_SECONDS,
    )


def main(argv: Sequence[str] | None = None, start: Start | None = None) -> int:
    """Measures the rows that are asked for; 1 if a measurement failed.

    Args:
        argv: the command line.
        start: how a measurement's process is started; in the small form, if it is to have one.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=size_of, help="of the state: bytes, or such as 16.4GB")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--folder", type=Path, help="where to work, on the disk to measure")
    parser.add_argument("--output", type=Path, help="where the results go, as JSON")
    parser.add_argument("--plot", type=Path, help="where a plot of them goes, as SVG")
    parser.add_argument(
        "--without-peers", action="store_true", help="leave Orbax, safetensors, transformers out"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny states, all in one process: it runs, no more"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        job = json.loads(arguments.child)
        print(json.dumps(outcome(job["measurement"], Job(**job["job"]))))
        return 0
    rows = [row for row in ROWS if any(part in row.name for part in arguments.rows)]
    if not rows:
        parser.error(f"--rows {' '.join(arguments.rows)}: no row has this in its name")
    size = arguments.size or (SMALL_BYTES if arguments.small else SIZE_BYTES)
    if not arguments.small:
        start = start or start_fresh
    began = time.time()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        peers = not arguments.without_peers
        bench = Bench(Path(folder), size, start, small=arguments.small, peers=peers)
        results: Measured = {"environment": {}, "rows": [], "measurements": bench.measured}
        for number, row in enumerate(rows):
            results["rows"].append(bench.row(row))
            results["environment"] = bench.environment() | {
                "seconds": round(time.time() - began, 1)
            }
            bench.drop_files(rows[number + 1 :])
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.plot:
        arguments.plot.write_text("\n".join(drawing(results["rows"])) + "\n")
    print_table(results)
    for name, measured in bench.measured.items():
        if "error" in measured:
            print(f"failed: {name}: {measured['error']}", file=sys.stderr)
    return 1 if any("error" in measured for measured in bench.measured.values()) else 0


def size_of(text: str) -> int:
    """Bytes of "16.4GB", "800MB" or "1000000"."""
    for suffix, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("", 1.0)):
        if text.upper().endswith(suffix):
            return int(float(text[: len(text) - len(suffix)]) * factor)
    raise ValueError(text)


@dataclass(frozen=True)
class Job:
    """What a measurement gets.

    Attributes:
        folder: its own, or that of the measurement whose files it reads.
        size: bytes of the state that is saved.
        small: few layers, quick steps.
        peers: Orbax, safetensors and transformers are measured too.
    """

    folder: str
    size: int
    small: bool
    peers: bool

    def __post_init__(self) -> None:
        os.makedirs(self.folder, exist_ok=True)

    @property
    def pause(self) -> float:
        """Seconds between the steps of a loop."""
        return 0.01 if self.small else 0.0

    @property
    def lora_pattern(self) -> str:
        """The layers that get adapters, and codes in place of weights."""
        return "q_proj" if self.small else ".*"

    def saves(self, count: int = SAVES) -> int:
        """How many saves a loop has, the first included."""
        return SMALL_SAVES if self.small else count

    def step_seconds(self, seconds: float = STEP_SECONDS) -> float:
        """How long a step of a loop takes at least."""
        return 0.0 if self.small else seconds

    def path(self, *names: str) -> str:
        """A place in the folder."""
        return os.path.join(self.folder, *names)

    def shape(self, share: float = 1.0, layers: int = LAYERS, parameter_bytes: int = 12) -> Shape:
        """Of a model with so many bytes for each parameter (12: in float32, with two moments)."""
        return Shape.of(self.size * share / parameter_bytes, SMALL_LAYERS if self.small else layers)


class Bench:
    """Rows of one run, and what was measured for them.

    Attributes:
        measured: by measurement: its fields, or why there are none ("unmeasured", "error").
    """

    def __init__(
        self, folder: Path, size: int, start: Start | None, *, small: bool, peers: bool
    ) -> None:
        without = {} if peers else {name: {"unmeasured": "--without-peers"} for name in PEERS}
        self.measured: dict[str, Measured] = without
        self._folder, self._size, self._start = folder, size, start
        self._small, self._peers = small, peers

    def row(self, row: Row) -> Measured:
        """The row's JSON."""
        for name in row.measurements:
            self._measure(name)
        own = self.measured[row.value.measurement]
        value, trouble = self._number(row.value)
        limit, no_limit = self._number(row.limit)
        beside = [(name, *self._number(figure)) for name, figure in row.beside]
        budget = row.budget.value(limit, own.get("bytes", 0)) if "bytes" in own else None
        accelerator = own.get("device", {}).get("platform", "cpu") != "cpu"
        comparable = accelerator and not self._small
        return {
            "row": row.name,
            "unit": row.unit,
            "measured": value,
            "unmeasured": trouble,
            "limit": {"name": row.limit_name, "value": limit, "unmeasured": no_limit},
            "ratio": value / limit if value is not None and limit else None,
            "beside": [
                {"name": name, "value": number, "unmeasured": reason}
                for name, number, reason in beside
            ],
            "budget": budget,
            "met": None if value is None or budget is None or not comparable else value <= budget,
            "accelerator": accelerator,
            "device": own.get("device"),
            "way": own.get("way"),
            "bytes": own.get("bytes"),
            "leaves": own.get("leaves"),
            "versions": versions(),
            "notes": [
                note for name in row.measurements for note in self.measured[name].get("notes", [])
            ],
        }

    def environment(self) -> Measured:
        """Where the rows were measured."""
        devices = [each["device"] for each in self.measured.values() if "device" in each]
        return {
            "device": devices[0] if devices else None,
            "small": self._small,
            "size": self._size,
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": versions(),
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def drop_files(self, left: Sequence[Row]) -> None:
        """Removes the files that no row reads that is left."""
        read = {FILES_OF.get(name) for row in left for name in row.measurements}
        for path in self._folder.iterdir():
            if path.name not in read:
                shutil.rmtree(path)

    def _measure(self, name: str) -> None:
        if name in self.measured:
            return
        source = FILES_OF.get(name, name)
        if source != name:
            self._measure(source)
            files = self.measured[source]
            if trouble := files.get("unmeasured") or files.get("error"):
                self.measured[name] = {"unmeasured": f"no files to read: {trouble}"}
                return
        began = time.perf_counter()
        job = Job(str(self._folder / source), self._size, self._small, self._peers)
        measured = self._in_fresh_process(name, job) if self._start else outcome(name, job)
        measured["took"] = round(time.perf_counter() - began, 2)
        self.measured[name] = measured
        print(f"{name} ({measured['took']:.1f} s)", file=sys.stderr, flush=True)

    def _in_fresh_process(self, name: str, job: Job) -> Measured:
        assert self._start is not None
        try:
            child = {"measurement": name, "job": asdict(job)}
            done = self._start(["--child", json.dumps(child)])
            lines = done.stdout.splitlines()
            if done.returncode or not lines:
                last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
                return {"error": f"exit status {done.returncode}: {last}"}
            measured: Measured = json.loads(lines[-1])
            if "error" in measured:
                sys.stderr.write(done.stderr)
        except (subprocess.TimeoutExpired, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return measured

    def _number(self, figure: Figure) -> tuple[float | None, str | None]:
        """A figure's number, or why there is none."""
        measured = self.measured[figure.measurement]
        if trouble := measured.get("unmeasured") or measured.get("error"):
            return None, trouble
        value = measured[figure.field]
        return (None, value) if isinstance(value, str) else (value, None)


def outcome(measurement: str, job: Job) -> Measured:
    """What was measured, or why it was not: one that fails stops no other."""
    try:
        if job.small:  # programs then run once or twice: what counts is how long they compile
            import jax

            jax.config.update("jax_disable_most_optimizations", True)
        return MEASUREMENTS[measurement](job)
    except UnmeasurableError as reason:
        return {"unmeasured": str(reason)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, str | None]:
    """Of the packages that matter; None for one that is not installed."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def require_package(package: str) -> None:
    """Raises if a package is not installed."""
    if versions()[package] is None:
        raise UnmeasurableError(f"{package} is not installed")


# -- what is saved ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A Llama whose layers have 12.25 times the square of its width in parameters."""

    hidden: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, parameters: float, layers: int) -> Shape:
        """About so many parameters; of 24 layers and 1.37e9 the width is 2048."""
        width = math.sqrt(parameters / (12.25 * layers + 32))
        hidden = max(64, round(width / 64) * 64)
        return cls(hidden, layers, 16 * hidden)

    @property
    def intermediate(self) -> int:
        """Width of the layers between."""
        return int(self.hidden * 2.75)

    def model(self, dtype: str = "float32") -> Any:
        """A new model, over all devices."""
        import jax
        from flax import nnx

        from cairn import DecoderConfig, DecoderForCausalLM

        config = DecoderConfig(
            model_type="llama",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        model = DecoderForCausalLM(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        if jax.device_count() > 1:
            model.shard_model()
        return model


def state_of(model: Any) -> Any:
    """A state with AdamW's moments."""
    import jax
    import optax

    from cairn import EasyDeLState

    state = EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)
    return jax.block_until_ready(state)


def new_state(shape: Shape) -> Any:
    """A new state, if the devices and the host have memory for it and for a save."""
    import jax

    nbytes = 12 * (12.25 * shape.layers * shape.hidden**2 + 2 * shape.vocabulary * shape.hidden)
    stats = jax.local_devices()[0].memory_stats() or {}
    room = stats.get("bytes_limit", math.inf) * jax.device_count()
    if 1.4 * nbytes > room:
        raise UnmeasurableError(
            f"the devices have {room / 1e9:.1f} GB, a state of {nbytes / 1e9:.1f} GB and its steps "
            "need 1.4 times its size: give a smaller --size"
        )
    require_memory(1.3 * nbytes)
    return state_of(shape.model())


def leaves_of(tree: Any) -> list[Any]:
    """The arrays of a tree."""
    import jax

    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def nbytes_of(tree: Any) -> int:
    """Bytes of the arrays of a tree."""
    return sum(leaf.nbytes for leaf in leaves_of(tree))


def device_of() -> Measured:
    """The devices."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
    }


def way_of(handle: Any) -> str:
    """The way that a save took, as far as its handle says it."""
    attributes = {name: getattr(handle, name, None) for name in ("staging", "waves")}
    return ", ".join(f"{name}: {value}" for name, value in attributes.items() if value is not None)


class Training:
    """A state in training: each step donates it, or its trained part, and takes about so long.

    Attributes:
        state: as the last step left it.
    """

    def __init__(self, state: Any, seconds: float, *, donates_all: bool = True) -> None:
        import jax
        import jax.numpy as jnp

        names = ("step", "graphstate", "opt_state")
        template = jax.eval_shape(lambda: state)
        width = 64 if jax.default_backend() == "cpu" else 4096

        def advance(trained: Any, frozen: Any, matrix: Any, rounds: Any) -> Any:
            before = template.replace(graphother=frozen, **trained)
            grads = jax.tree.map(lambda leaf: leaf * 1e-3 + 1e-4, before.graphstate)
            after = before.apply_gradients(grads=grads)
            worked = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ matrix), matrix)
            passed = frozen if donates_all else None
            return {name: getattr(after, name) for name in names}, passed, worked[0, 0]

        self.state = state
        self._names, self._donates_all = names, donates_all
        self._advance = jax.jit(advance, donate_argnums=(0, 1) if donates_all else 0)
        self._matrix = jnp.full((width, width), 1 / width, jnp.bfloat16)
        self._rounds = 0
        for _ in range(2):
            self.step()
        light = taken = min(self.step() for _ in range(3))
        while taken < seconds:
            self._rounds = 2 * self._rounds or 16
            taken = min(self.step() for _ in range(2))
        if self._rounds:
            self._rounds = int(self._rounds * (seconds - light) / (taken - light))

    def step(self) -> float:
        """Seconds of one step."""
        import jax
        import numpy as np

        began = time.perf_counter()
        trained = {name: getattr(self.state, name) for name in self._names}
        done = self._advance(
            trained, self.state.graphother, self._matrix, np.asarray(self._rounds, np.int32)
        )
        trained, frozen, _ = jax.block_until_ready(done)
        changed = {**trained, "graphother": frozen} if self._donates_all else trained
        self.state = self.state.replace(**changed)
        return time.perf_counter() - began

    def idle(self) -> list[float]:
        """Seconds of some steps."""
        return [self.step() for _ in range(IDLE_STEPS)]


# -- host memory, disk -----------------------------------------------------------------------------


class HostMemory:
    """Peak of this process's resident memory from when this is made, above what it was then.

    The kernel keeps the peak itself (VmHWM) if it lets it be reset; a thread looks at what is
    resident besides, and by how much the machine's available memory falls, for memory that a driver
    pins may be counted as nobody's.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the peak hides in what was freed and not returned
        self._level, self._available = _status("VmRSS"), _available_bytes()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._kept = _status("VmHWM") <= 1.05 * self._level
        except (OSError, UnmeasurableError):
            self._kept = False
        self._peak, self.fallen = self._level, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, _status("VmHWM" if self._kept else "VmRSS"))
        self.fallen = max(self.fallen, self._available - _available_bytes())

    def stop(self) -> int:
        """The peak, in bytes above the level before."""
        self._over.set()
        self._thread.join()
        self._look()
        return max(0, self._peak - self._level)

    def tell(self) -> Measured:
        """How it was measured."""
        return {
            "peak by": "VmHWM" if self._kept else "VmRSS, every 50 ms",
            "fall of MemAvailable": self.fallen,
        }


def _status(name: str) -> int:
    return _kilobytes("/proc/self/status", name)


def _kilobytes(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise UnmeasurableError(f"{path}: expected a line {name}, found none")


def _available_bytes() -> int:
    """The least of what the machine and this process's control group have left."""
    left = [_kilobytes("/proc/meminfo", "MemAvailable")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path("/sys/fs/cgroup", limit).read_text().strip()
            if most.isdigit():
                left.append(int(most) - int(Path("/sys/fs/cgroup", used).read_text()))
        except OSError:
            continue
    return min(left)


def require_memory(nbytes: float) -> None:
    """Raises if the host has less memory left."""
    if (left := _available_bytes()) < nbytes:
        raise UnmeasurableError(
            f"needs {nbytes / 1e9:.1f} GB of host memory, found {left / 1e9:.1f}: "
            "give a smaller --size"
        )


def require_space(folder: str, nbytes: float) -> None:
    """Raises if the disk has less room."""
    if (left := shutil.disk_usage(folder).free) < nbytes:
        raise UnmeasurableError(
            f"{folder}: needs {nbytes / 1e9:.1f} GB, found {left / 1e9:.1f}: give another --folder "
            "or a smaller --size"
        )


def sync_disk(folder: str) -> None:
    """Has the folder's file system write what it holds, so that nobody pays for it later."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: str) -> None:
    """Makes what a peer wrote durable: every file and folder."""
    for path in [Path(folder), *Path(folder).rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def files_below(folder: str) -> list[Path]:
    """Every file that has content."""
    paths = (path for path in Path(folder).rglob("*") if path.is_file())
    return sorted(path for path in paths if path.stat().st_size)


def bytes_below(folder: str) -> int:
    """Bytes of the files below a folder; a file of several names counts once."""
    stats = [path.stat() for path in files_below(folder)]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def local_path(uri: Any) -> str:
    """The path of a file:// URI, or of a plain path."""
    text = str(uri)
    return urlsplit(text).path if text.startswith("file:") else text


def has_direct_io(folder: str) -> bool:
    """True if the file system writes past the page cache."""
    path = os.path.join(folder, "direct")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        Path(path).unlink(missing_ok=True)
    return True


def write_direct(folder: str, nbytes: int) -> Measured:
    """Seconds in which threads write and sync so many bytes, each into a file of its own."""
    os.makedirs(folder)
    direct = has_direct_io(folder)
    flags = os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0)
    share = -(-nbytes // DIRECT_THREADS // BLOCK_BYTES) * BLOCK_BYTES
    piece = min(PIECE_BYTES, max(BLOCK_BYTES, share))
    buffers = [mmap.mmap(-1, piece) for _ in range(DIRECT_THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(piece))

    def write(number: int) -> None:
        descriptor = os.open(os.path.join(folder, str(number)), flags)
        try:
            with memoryview(buffers[number]) as view:
                for at in range(0, share, piece):
                    with view[: min(piece, share - at)] as part:
                        if os.write(descriptor, part) != part.nbytes:
                            raise OSError(f"{folder}: not all was written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    sync_disk(folder)
    began = time.perf_counter()
    with ThreadPoolExecutor(DIRECT_THREADS) as pool:
        list(pool.map(write, range(DIRECT_THREADS)))
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    how = "past the page cache" if direct else "through the page cache: no direct I/O here"
    return {"seconds": seconds, "how": f"direct writes: {DIRECT_THREADS} threads, {how}"}


def pieces_of(paths: Sequence[Path], size: int) -> list[tuple[int, int, int]]:
    """Number of the file, start and length of each piece."""
    sizes = [path.stat().st_size for path in paths]
    return [
        (number, at, min(size, whole - at))
        for number, whole in enumerate(sizes)
        for at in range(0, whole, size)
    ]


@contextmanager
def descriptors_of(paths: Sequence[Path], flags: int = 0) -> Iterator[list[int]]:
    """Descriptors of the files."""
    descriptors = [os.open(path, os.O_RDONLY | flags) for path in paths]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_raw(paths: Sequence[Path], threads: int, *, direct: bool = False) -> float:
    """Seconds in which threads read all files, each into a buffer that it uses again."""
    own = threading.local()

    def read(piece: tuple[int, int, int]) -> int:
        number, at, length = piece
        if not hasattr(own, "buffer"):
            own.buffer = mmap.mmap(-1, PIECE_BYTES)
        return read_into(descriptors[number], own.buffer, at, length)

    with descriptors_of(paths, os.O_DIRECT if direct else 0) as descriptors:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            count = sum(pool.map(read, pieces_of(paths, PIECE_BYTES)))
        seconds = time.perf_counter() - began
    expected = sum(path.stat().st_size for path in paths)
    if count != expected:
        raise OSError(f"{paths[0].parent}: expected to read {expected} bytes, read {count}")
    return seconds


def read_into(descriptor: int, buffer: Any, at: int, length: int) -> int:
    """Reads so many bytes into a buffer; whole blocks, for direct reads begin and end at these."""
    whole = -(-length // BLOCK_BYTES) * BLOCK_BYTES
    done = 0
    while done < length:
        with memoryview(buffer) as view, view[done:whole] as part:
            count = os.preadv(descriptor, [part], at + done)
        if not count:
            break
        done += count
    return min(done, length)


def evict(paths: Sequence[Path]) -> str:
    """Takes files out of the page cache; says whether they are."""
    cached = places = 0
    buffer = bytearray(1)
    with descriptors_of(paths) as descriptors:
        for path, descriptor in zip(paths, descriptors, strict=True):
            size = path.stat().st_size
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            # A look at a page that is not there has the kernel read it, and what follows unless
            # reads are said to be random.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for at in range(0, size, max(PROBE_BYTES, -(-size // PROBES))):
                places += 1
                try:
                    cached += os.preadv(descriptor, [buffer], at, os.RWF_NOWAIT)
                except BlockingIOError:
                    continue
                except OSError as error:
                    return f"asked for; the file system does not tell whether ({error.strerror})"
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return "yes" if not cached else f"no: {cached} of {places} places are still cached"


# -- saves -----------------------------------------------------------------------------------------


class Waiting(threading.Thread):
    """A wait in a thread.

    Attributes:
        ended: when it was over, on the clock of `time.perf_counter`.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._wait = wait
        self._error: BaseException | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        """Waits."""
        try:
            self._wait()
        except BaseException as error:
            self._error = error
        self.ended = time.perf_counter()

    def result(self) -> float:
        """When it was over; raises what the wait raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self.ended


Save = Callable[[Any, int], Callable[[], Any]]
"""Saves a state as a step; returns what waits until it is durable."""


def save_while_training(
    training: Training, save: Save, count: int, folder: str, pause: float
) -> list[Measured]:
    """Saves, each while the loop runs on until it is durable; all leaves change in between.

    Between steps that take no time it pauses, or CPU devices would have the cores to themselves.
    """
    saves = []
    idle = training.idle()
    for number in range(1, count + 1):
        sync_disk(folder)
        stored = bytes_below(folder)
        began = time.perf_counter()
        wait = save(training.state, number)
        call = time.perf_counter() - began
        waiting = Waiting(wait)
        steps: list[float] = []
        while waiting.is_alive() or len(steps) < IDLE_STEPS:
            steps.append(training.step())
            time.sleep(pause)
        durable = waiting.result() - began
        after = training.idle()
        usual = statistics.median(idle + after)
        idle = after
        saves.append(
            {
                "call": call,
                "cost": call + sum(steps) - len(steps) * usual,
                "durable": durable,
                "next_step": steps[0],
                "idle_step": usual,
                "steps": len(steps),
                "written": bytes_below(folder) - stored,
            }
        )
    return saves


def first_and_later(saves: Sequence[Measured], settled: int = 1) -> Measured:
    """Figures of the first save, and the medians of those after so many."""
    names = ("call", "cost", "durable")
    later = saves[settled:]
    return {
        **{f"{name}_first": saves[0][name] for name in names},
        **{
            f"{name}_later": statistics.median(save[name] for save in later)
            if later
            else f"the disk has room for {len(saves)} saves alone"
            for name in names
        },
    }


def settle(small: bool) -> None:
    """Waits until host memory grows no more: what a job's first compilation has time for."""
    pause = 0.02 if small else 1.0
    before, until = _available_bytes(), time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        time.sleep(pause)
        left = _available_bytes()
        if before - left < SETTLED_BYTES:
            return
        before = left


def room_for_saves(job: Job, nbytes: int, count: int) -> int:
    """How many saves the disk has room for, at most `count`."""
    require_space(job.folder, 1.1 * nbytes)
    return min(count, int(shutil.disk_usage(job.folder).free // (1.1 * nbytes)))


def saved_by_cairn(
    job: Job, state: Any, seconds: float, most: int, *, donates_all: bool = True, settled: int = 1
) -> tuple[Training, list[Measured], Measured]:
    """Calls of `EasyDeLState.save_state` in a loop; the training, each save, and their fields.

    Later ones are those after `settled`. The run is taken first (`begin`), as a `RunSaver` does
    when a job starts, and memory is pinned.
    """
    from cairn import Checkpointer

    run = job.path("run")
    handles: list[Any] = []

    def save(state: Any, step: int) -> Callable[[], Any]:
        handles.append(state.save_state(run, step=step, verbose=False))
        wait: Callable[[], Any] = handles[-1].wait
        return wait

    nbytes, leaves = nbytes_of(state), len(leaves_of(state))
    count = room_for_saves(job, nbytes, most)
    training = Training(state, seconds, donates_all=donates_all)
    memory = HostMemory()
    Checkpointer.for_run(run).begin(like=training.state)
    settle(job.small)
    saves = save_while_training(training, save, count, job.folder, job.pause)
    peak = memory.stop()
    Checkpointer.for_run(run).close()
    shutil.rmtree(run)
    measured = {
        **first_and_later(saves, settled),
        "peak": peak,
        "bytes": nbytes,
        "leaves": leaves,
        "way": way_of(handles[-1]),
        "device": device_of(),
        "details": {
            **memory.tell(),
            "saves": saves,
            "blocked_seconds": [handle.blocked_seconds for handle in handles],
        },
    }
    return training, saves, measured


def pinned_limits(leaves: Sequence[Any]) -> Measured:
    """Seconds of `device_put` to pinned memory: until dispatched, and until all is there."""
    import jax

    names = ("dispatch", "arrival")
    try:
        places = [leaf.sharding.with_memory_kind("pinned_host") for leaf in leaves]
    except ValueError as error:
        return dict.fromkeys(names, f"no memory kind pinned_host: {error}") | {"puts": []}
    puts = []
    for _ in range(4):
        gc.collect()
        began = time.perf_counter()
        copies = [jax.device_put(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
        dispatch = time.perf_counter() - began
        jax.block_until_ready(copies)
        puts.append({"dispatch": dispatch, "arrival": time.perf_counter() - began})
        del copies
    # The first has XLA's pool grow.
    return {name: statistics.median(put[name] for put in puts[1:]) for name in names} | {
        "puts": puts
    }


def save(job: Job) -> Measured:
    """`EasyDeLState.save_state` in a loop, and the limits, by the same process, after that."""
    state = new_state(job.shape())
    training, _, measured = saved_by_cairn(job, state, job.step_seconds(), job.saves())
    limits = pinned_limits(leaves_of(training.state))
    disk = write_direct(job.path("direct-writes"), measured["bytes"])
    measured["details"] |= {"puts": limits.pop("puts")}
    return measured | limits | {"disk": disk["seconds"], "notes": [disk["how"]]}


def save_orbax(job: Job) -> Measured:
    """Orbax's AsyncCheckpointer in the same loop, with the same leaves."""
    require_package("orbax-checkpoint")
    import orbax.checkpoint as ocp

    state = new_state(job.shape())
    nbytes, leaves = nbytes_of(state), len(leaves_of(state))
    require_memory(2.3 * nbytes)
    count = room_for_saves(job, nbytes, job.saves())
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(state: Any, step: int) -> Callable[[], Any]:
        folder = job.path(str(step))
        checkpointer.save(folder, args=ocp.args.PyTreeSave(named_leaves(state)))

        def wait() -> None:
            checkpointer.wait_until_finished()
            sync_files(folder)

        return wait

    training = Training(state, job.step_seconds())
    memory = HostMemory()
    saves = save_while_training(training, save, count, job.folder, job.pause)
    peak = memory.stop()
    checkpointer.close()
    return {
        **first_and_later(saves),
        "peak": peak,
        "bytes": nbytes,
        "leaves": leaves,
        "device": device_of(),
        "details": {**memory.tell(), "saves": saves},
    }


def named_leaves(state: Any) -> dict[str, Any]:
    """The leaves of a state, by name, as peers take them."""
    return {f"leaf_{number:05d}": leaf for number, leaf in enumerate(leaves_of(state))}


def save_limited(job: Job) -> Measured:
    """A save whose host memory is a quarter of the state."""
    from cairn import Checkpointer

    state = new_state(job.shape())
    nbytes = nbytes_of(state)
    require_space(job.folder, 1.1 * nbytes)
    parts = (shard.data.nbytes for leaf in leaves_of(state) for shard in leaf.addressable_shards)
    largest = max(parts)
    limit = max(nbytes // 4, largest)
    run = job.path("run")
    memory = HostMemory()
    with Checkpointer.for_run(run, host_memory=limit) as checkpointer:
        checkpointer.begin(like=state)
        settle(job.small)
        began = time.perf_counter()
        handle = state.save_state(run, step=1, verbose=False)
        call = time.perf_counter() - began
        handle.wait()
    durable = time.perf_counter() - began
    return {
        "peak": memory.stop(),
        "allowed": limit + largest,
        "bytes": nbytes,
        "leaves": len(leaves_of(state)),
        "way": way_of(handle),
        "device": device_of(),
        "details": {**memory.tell(), "host_memory": limit, "call": call, "durable": durable},
    }


def save_adapters(job: Job, *, quantized: bool) -> Measured:
    """Saves of adapters beside a base in bfloat16, which each step donates, or in nf4, which none.

    The later ones have only the adapters to write, and their optimizer: those from the fourth on,
    if each step gives back another array of the base, which devices compare by then.
    """
    shape = job.shape(BASE, parameter_bytes=2)
    model = shape.model("bfloat16")
    if quantized:
        size = math.gcd(64, shape.hidden, shape.intermediate)
        model.quantize(method="nf4", group_size=size, quantization_pattern=job.lora_pattern)
    model.apply_lora_to_layers(lora_rank=LORA_RANK, lora_pattern=job.lora_pattern)
    state = state_of(model)
    del model
    base = nbytes_of(state.graphother)
    settled = 1 if quantized else 3
    training, saves, measured = saved_by_cairn(
        job, state, job.step_seconds(), settled + job.saves() - 1, donates_all=not quantized,
        settled=settled,
    )  # fmt: skip
    trained = leaves_of((training.state.graphstate, training.state.opt_state))
    limits = pinned_limits(trained)
    measured["details"] |= {"puts": limits.pop("puts"), "base": base}
    later = [save["written"] for save in saves[settled:]]
    return {
        **measured,
        **limits,
        "written": statistics.median(later) if later else measured["call_later"],
        "changed": sum(leaf.nbytes for leaf in trained),
    }


def save_quick_model(job: Job) -> Measured:
    """A small model whose steps are quick: 29 MB, 119 leaves."""
    state = new_state(job.shape() if job.small else Shape(192, 4, 1600))
    training, _, measured = saved_by_cairn(
        job, state, job.step_seconds(QUICK_STEP_SECONDS), job.saves(QUICK_SAVES)
    )
    limits = pinned_limits(leaves_of(training.state))
    limits |= {"dispatch_a_leaf": limits["dispatch"]}
    if isinstance(limits["dispatch"], float):
        limits["dispatch_a_leaf"] = limits["dispatch"] / measured["leaves"]
    measured["details"] |= {name: limits.pop(name) for name in ("puts", "dispatch_a_leaf")}
    return measured | limits


# -- restores --------------------------------------------------------------------------------------


def store(job: Job) -> Measured:
    """The step that is restored, as Cairn, Orbax and safetensors store it."""
    from cairn import Checkpointer

    state = new_state(job.shape(RESTORED, RESTORED_LAYERS))
    leaves, nbytes = named_leaves(state), nbytes_of(state)
    require_space(job.folder, 3.3 * nbytes)
    handle = state.save_state(job.path("run"), step=1, verbose=False)
    handle.wait()
    Checkpointer.for_run(job.path("run")).close()
    described = {
        "step": local_path(handle.uri),
        "fingerprint": fingerprint(state),
        "leaves": {
            name: {"shape": leaf.shape, "dtype": leaf.dtype.name, "spec": spec_of(leaf)}
            for name, leaf in leaves.items()
        },
    }
    Path(job.path("step.json")).write_text(json.dumps(described))
    if job.peers and versions()["orbax-checkpoint"]:
        from orbax.checkpoint import v1 as ocp

        with tuned_context():
            ocp.save_checkpointables(job.path("orbax"), {"state": leaves})
    if job.peers and versions()["safetensors"]:
        import numpy as np
        from safetensors import numpy as safetensors

        on_host = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        os.makedirs(job.path("safetensors"))
        safetensors.save_file(on_host, job.path("safetensors", "data"))
    return {"bytes": nbytes, "leaves": len(leaves), "device": device_of()}


def spec_of(leaf: Any) -> list[Any]:
    """The axes of the mesh that cut each dimension of a leaf."""
    return [
        list(axes) if isinstance(axes, tuple) else axes
        for axes in getattr(leaf.sharding, "spec", ())
    ]


def tuned_context() -> Any:
    """Orbax without compression and with files of 64 MiB."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = 64 << 20
    return context


def fingerprint(state: Any) -> int:
    """CRC-32 of the first rows of the first matrix: is what came back what was saved."""
    import numpy as np

    matrix = next(leaf for leaf in leaves_of(state.graphstate) if leaf.ndim == 2)
    return zlib.crc32(np.asarray(matrix[:8]).tobytes())


def targets_of(job: Job) -> dict[str, Any]:
    """Shape, dtype and place of each leaf that peers restore."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    from cairn import make_mesh

    several = jax.device_count() > 1
    mesh = make_mesh((1, -1, 1, 1)) if several else None

    def place(spec: list[Any]) -> Any:
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        axes = [tuple(axis) if isinstance(axis, list) else axis for axis in spec]
        return NamedSharding(mesh, PartitionSpec(*axes))

    described = json.loads(Path(job.path("step.json")).read_text())["leaves"]
    return {
        name: jax.ShapeDtypeStruct(
            tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]), sharding=place(leaf["spec"])
        )
        for name, leaf in described.items()
    }


def time_restore(job: Job, folder: str, restore: Callable[[], Any], *, cold: bool) -> Measured:
    """The first restore of a process, of files that are in the page cache, or not."""
    import jax

    jax.block_until_ready(jax.device_put(0))
    paths = files_below(folder)
    dropped = evict(paths) if cold else None
    if not cold:
        read_raw(paths, DIRECT_THREADS)
    memory = HostMemory()
    worked, began = time.process_time(), time.perf_counter()
    restored = jax.block_until_ready(restore())
    seconds = time.perf_counter() - began
    worked = time.process_time() - worked
    return {
        "seconds": seconds,
        "restored": restored,
        "bytes": nbytes_of(restored),
        "leaves": len(leaves_of(restored)),
        "device": device_of(),
        "details": {"host memory": memory.stop(), "processor seconds": worked},
        "notes": [f"taken out of the page cache: {dropped}"] if cold else [],
    }


def restore_by_cairn(job: Job, *, cold: bool) -> Measured:
    """`EasyDeLState.load_state`."""
    import jax
    import optax

    from cairn import EasyDeLState

    described = json.loads(Path(job.path("step.json")).read_text())
    place: Measured = {"device": jax.devices()[0]}
    if jax.device_count() > 1:
        place = {"auto_shard_model": True}

    def restore() -> Any:
        run = job.path("run")
        return EasyDeLState.load_state(run, tx=optax.adamw(1e-3), verbose=False, **place)

    measured = time_restore(job, described["step"], restore, cold=cold)
    if fingerprint(measured.pop("restored")) != described["fingerprint"]:
        raise RuntimeError(
            f"{described['step']}: expected the values that were saved, found others"
        )
    return measured


def restore_by_orbax(job: Job, *, cold: bool) -> Measured:
    """The same leaves, from files that Orbax wrote."""
    require_package("orbax-checkpoint")
    from orbax.checkpoint import v1 as ocp

    target = {"state": targets_of(job)}

    def restore() -> Any:
        with tuned_context():
            return ocp.load_checkpointables(job.path("orbax"), target)

    measured = time_restore(job, job.path("orbax"), restore, cold=cold)
    del measured["restored"]
    return measured


def restore_by_safetensors(job: Job) -> Measured:
    """`load_file`, and `device_put` of each leaf."""
    require_package("safetensors")
    import jax
    from safetensors import numpy as safetensors

    targets = targets_of(job)

    def restore() -> Any:
        loaded = safetensors.load_file(job.path("safetensors", "data"))
        return {name: jax.device_put(loaded[name], leaf.sharding) for name, leaf in targets.items()}

    measured = time_restore(job, job.path("safetensors"), restore, cold=False)
    del measured["restored"]
    return measured


def restore_limit(job: Job) -> Measured:
    """The files of Cairn's step: threads that put what they read on a device; and raw reads."""
    import jax

    jax.block_until_ready(jax.device_put(0))
    described = json.loads(Path(job.path("step.json")).read_text())
    paths = files_below(described["step"])
    read_raw(paths, DIRECT_THREADS)
    puts = {f"{threads} threads": put_on_devices(paths, threads) for threads in READERS}
    reads: dict[str, float] = {}
    dropped = set()
    modes = [("cached", False)]
    if has_direct_io(job.folder):
        modes.append(("direct", True))
    for threads in READERS:
        for mode, direct in modes:
            dropped.add(evict(paths))
            reads[f"{threads} threads, {mode}"] = read_raw(paths, threads, direct=direct)
    return {
        # The first of a process, as the restore is; later ones have memory that is pinned.
        "warm": next(iter(puts.values())),
        "cold": min(reads.values()),
        "bytes": sum(path.stat().st_size for path in paths),
        "device": device_of(),
        "details": {"puts": puts, "reads": reads},
        "notes": [f"before raw reads, taken out of the page cache: {answer}" for answer in dropped],
    }


def put_on_devices(paths: Sequence[Path], threads: int) -> float:
    """Seconds: each thread reads into its slot, puts that on a device, waits, and goes on."""
    import jax
    import numpy as np

    own = threading.local()
    devices = jax.local_devices()
    shares_memory = devices[0].platform == "cpu"  # an array there may be the slot itself

    def put(numbered: tuple[int, tuple[int, int, int]]) -> Any:
        index, (number, at, length) = numbered
        if shares_memory or not hasattr(own, "slot"):
            own.slot = mmap.mmap(-1, SLOT_BYTES)
        if read_into(descriptors[number], own.slot, at, length) != length:
            raise OSError(f"{paths[number]}: not all was read")
        values = np.frombuffer(own.slot, np.uint8, length)
        return jax.block_until_ready(jax.device_put(values, devices[index % len(devices)]))

    with descriptors_of(paths) as descriptors:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            arrays = list(pool.map(put, enumerate(pieces_of(paths, SLOT_BYTES))))
        seconds = time.perf_counter() - began
    del arrays
    return seconds


# -- imports, exports ------------------------------------------------------------------------------


def export(job: Job) -> Measured:
    """`save_pretrained` of a model in bfloat16, and `cp` of what it wrote; one file stays."""
    model = job.shape(BASE, parameter_bytes=2).model("bfloat16")
    from flax import nnx

    weights = nnx.state(model, nnx.Param)
    nbytes, leaves = nbytes_of(weights), len(leaves_of(weights))
    require_space(job.folder, 3.3 * nbytes)
    measured: Measured = {"bytes": nbytes, "leaves": leaves, "device": device_of()}
    details: Measured = {}
    shards = {"several": min(1_000_000_000, nbytes // 3), "one": 2 * nbytes}
    for name, most in shards.items():
        target = job.path(name)
        sync_disk(job.folder)
        worked, began = time.process_time(), time.perf_counter()
        files = model.save_pretrained(target, max_shard_size=most)
        measured[name] = time.perf_counter() - began
        details[name] = {
            "files": sum(file.endswith(".safetensors") for file in files),
            "cores busy": (time.process_time() - worked) / measured[name],
        }
        measured[f"{name}_cp"] = seconds_of_copy(target, job.path("copy"))
        if name != "one":
            shutil.rmtree(target)
    return measured | {"details": details}


def seconds_of_copy(source: str, target: str) -> float:
    """Seconds of `cp` of a folder in the page cache, and an fsync of each file."""
    read_raw(files_below(source), DIRECT_THREADS)
    sync_disk(source)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    sync_files(target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def import_by_cairn(job: Job, *, dtype: str) -> Measured:
    """`from_pretrained` of a folder in the page cache."""
    import jax
    from flax import nnx

    from cairn import DecoderForCausalLM

    folder = job.path("one")
    jax.block_until_ready(jax.device_put(0))
    read_raw(files_below(folder), DIRECT_THREADS)
    memory = HostMemory()
    worked, began = time.process_time(), time.perf_counter()
    model = DecoderForCausalLM.from_pretrained(folder, dtype=dtype, param_dtype=dtype)
    weights = jax.block_until_ready(nnx.state(model, nnx.Param))
    seconds = time.perf_counter() - began
    worked = time.process_time() - worked
    return {
        "seconds": seconds,
        "bytes": nbytes_of(weights),
        "leaves": len(leaves_of(weights)),
        "device": device_of(),
        "details": {"host memory": memory.stop(), "cores busy": worked / seconds},
    }


def import_limit(job: Job) -> Measured:
    """Threads read the tensors of a folder from the page cache, and turn them by tiles."""
    paths = [path for path in files_below(job.path("one")) if path.suffix == ".safetensors"]
    read_raw(paths, DIRECT_THREADS)
    threads = min(16, os.cpu_count() or 1)
    return {
        **{
            dtype: seconds_of_turns(paths, threads, dtype == "float32")
            for dtype in ("float32", "bfloat16")
        },
        "bytes": sum(path.stat().st_size for path in paths),
        "details": {"threads": threads},
    }


def seconds_of_turns(paths: Sequence[Path], threads: int, widened: bool) -> float:
    """Seconds in which all matrices of 16 bits are read, and turned into fresh memory."""
    import numpy as np

    def transpose(matrix: tuple[int, int, tuple[int, int]]) -> Any:
        descriptor, at, (rows, columns) = matrix
        read = mmap.mmap(-1, -(-2 * rows * columns // BLOCK_BYTES) * BLOCK_BYTES)
        if read_into(descriptor, read, at, 2 * rows * columns) != 2 * rows * columns:
            raise OSError(f"{paths[0]}: not all was read")
        source = np.frombuffer(read, np.uint16, rows * columns).reshape(rows, columns)
        target = np.empty((columns, rows), np.uint32 if widened else np.uint16)
        for row in range(0, rows, TILE):
            for column in range(0, columns, TILE):
                tile = source[row : row + TILE, column : column + TILE].T
                into = target[column : column + TILE, row : row + TILE]
                if widened:  # float32 is bfloat16 and 16 zeros
                    np.left_shift(tile, 16, out=into, dtype=np.uint32)
                else:
                    into[...] = tile
        return target

    with descriptors_of(paths) as descriptors:
        began = time.perf_counter()
        matrices = [
            (descriptor, start, shape)
            for descriptor in descriptors
            for start, shape in matrices_in(descriptor)
        ]
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(transpose, matrices))
        seconds = time.perf_counter() - began
    del results
    return seconds


def matrices_in(descriptor: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Where each matrix of a safetensors file begins, and its shape."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    header.pop("__metadata__", None)
    for tensor in header.values():
        if len(tensor["shape"]) == 2:
            rows, columns = tensor["shape"]
            yield 8 + length + tensor["data_offsets"][0], (rows, columns)


def import_by_transformers(job: Job) -> Measured:
    """`from_pretrained` of transformers, onto the CPU; the first of each dtype, and one more."""
    require_package("transformers")
    require_package("torch")
    import torch
    from transformers import LlamaForCausalLM

    folder = job.path("one")
    read_raw(files_below(folder), DIRECT_THREADS)
    seconds: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        for _ in range(2):
            began = time.perf_counter()
            LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
            seconds.setdefault(dtype, []).append(time.perf_counter() - began)
    return {**{dtype: times[0] for dtype, times in seconds.items()}, "details": seconds}


MEASUREMENTS: Final[Mapping[str, Callable[[Job], Measured]]] = {
    "save": save,
    "save_orbax": save_orbax,
    "save_limited": save_limited,
    "lora": partial(save_adapters, quantized=False),
    "qlora": partial(save_adapters, quantized=True),
    "quick": save_quick_model,
    "stored": store,
    "restore_warm": partial(restore_by_cairn, cold=False),
    "restore_cold": partial(restore_by_cairn, cold=True),
    "restore_orbax_warm": partial(restore_by_orbax, cold=False),
    "restore_orbax_cold": partial(restore_by_orbax, cold=True),
    "restore_safetensors": restore_by_safetensors,
    "restore_limit": restore_limit,
    "export": export,
    "import_float32": partial(import_by_cairn, dtype="float32"),
    "import_bfloat16": partial(import_by_cairn, dtype="bfloat16"),
    "import_limit": import_limit,
    "transformers": import_by_transformers,
}


# -- what is shown ---------------------------------------------------------------------------------


def print_table(results: Mapping[str, Any]) -> None:
    """The rows, and what they were measured on."""
    from rich.console import Console
    from rich.table import Table

    environment = results["environment"]
    device, installed = environment["device"] or {}, environment["versions"]
    title = f"{device.get('count')} {device.get('kind')} ({device.get('platform')})"
    if device.get("platform") == "cpu":
        title += ": CPU devices, these are no accelerator's figures"
    if environment["small"]:
        title += "; small: figures say little"
    table = Table("row", "measured", "limit", "beside", "budget", "", "bytes, leaves", "way")
    for row in results["rows"]:
        unit = row["unit"]
        table.add_row(
            row["row"],
            amount(row["measured"], unit, row["unmeasured"]),
            f"{amount(row['limit']['value'], unit, row['limit']['unmeasured'])}  "
            f"{row['limit']['name']}",
            "\n".join(
                f"{amount(peer['value'], unit, peer['unmeasured'])}  {peer['name']}"
                for peer in row["beside"]
            ),
            amount(row["budget"], unit, None),
            {None: "", True: "met", False: "missed"}[row["met"]],
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.4g} MB, {row['leaves']}",
            row["way"] or "",
        )
    console = Console(width=max(Console().width, TABLE_WIDTH))
    console.print(title)
    console.print(table)
    for note in dict.fromkeys(note for row in results["rows"] for note in row["notes"]):
        console.print(note)
    names = ", ".join(f"{name} {number}" for name, number in installed.items() if number)
    console.print(f"{names}; {environment['cores']} cores, {environment['seconds']} s in all")


def amount(value: float | None, unit: str, trouble: str | None) -> str:
    """A number with its unit, short, or why there is none."""
    if value is None:
        return trouble or ""
    if unit == "bytes":
        return f"{value / 1e6:,.4g} MB"
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.3g} ms"


WIDTH, LEFT, RIGHT, LINE, TOP = 1200, 440, 320, 22, 60
DECADES: Final = (-1, 3)
"""Powers of ten of the plot's axis."""


def drawing(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of an SVG: each row as a ratio to its limit, on a logarithmic axis."""
    height = TOP + LINE * len(rows) + 16
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield _text(12, 20, "Ratio to the limit of the same run, logarithmic; lower is better")
    yield _text(12, 38, "bar: Cairn · ring: who is beside it · tick: the budget")
    if not all(row["accelerator"] for row in rows):
        yield _text(LEFT, 38, "CPU devices: these are no accelerator's figures")
    for decade in range(DECADES[0], DECADES[1] + 1):
        x = _across(10.0**decade)
        yield f'<path d="M{x:.1f} {TOP - 4}V{height - 12}" stroke="#b9bec6"/>'
        yield _text(x, TOP - 8, f"{10.0**decade:g}", anchor="middle")
    for number, row in enumerate(rows):
        yield from _bar(row, TOP + LINE * number)
    yield "</svg>"


def _bar(row: Mapping[str, Any], y: int) -> Iterator[str]:
    limit = row["limit"]["value"]
    yield _text(LEFT - 8, y + 15, row["row"], anchor="end")
    if row["measured"] is None or not limit:
        yield _text(LEFT + 6, y + 15, str(row["unmeasured"] or row["limit"]["unmeasured"])[:120])
        return
    end = _across(row["ratio"])
    color = {None: "#4a6fa5", True: "#2f7d4f", False: "#b3452c"}[row["met"]]
    yield (
        f'<rect x="{LEFT}" y="{y + 4}" width="{max(1.0, end - LEFT):.1f}" height="14" '
        f'fill="{color}"/>'
    )
    if row["budget"]:
        x = _across(row["budget"] / limit)
        yield f'<path d="M{x:.1f} {y + 1}v20" stroke="#22262b" stroke-width="2"/>'
    for x in (_across(peer["value"] / limit) for peer in row["beside"] if peer["value"]):
        yield f'<circle cx="{x:.1f}" cy="{y + 11}" r="5" fill="none" stroke="#22262b"/>'
    figures = f"{amount(row['measured'], row['unit'], None)} of {amount(limit, row['unit'], None)}"
    yield _text(WIDTH - RIGHT + 12, y + 15, f"{figures} ({row['ratio']:.3g})")


def _across(ratio: float) -> float:
    low, high = DECADES
    power = min(high, max(low, math.log10(max(ratio, 1e-9))))
    return LEFT + (power - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="#22262b" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
