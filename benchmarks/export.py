"""Speed and peak memory of exporting a checkpoint, by the size of its model.

Three do it: the job's own code in a process of its own, which loads no JAX; the job as it is asked
of a control plane over HTTP; and, for comparison, `save_pretrained` of transformers, of a model
that lies in memory. The reference is the limit: `cp` of the same bytes and an fsync of each file,
measured in the same round. Nothing that is read is in the page cache. An export reads back what it
wrote, which `cp` does not: a row of its own has three passes over the disk as its reference.

    python -m benchmarks.export [--sizes 0.1 0.5 2 6] [--rounds 3] [--folder DIR] [--output FILE]

A row is {row, seconds, bytes,
peak_rss_bytes, reference, ratio, budget, runs}; ratios are taken within a round, and a row gives
medians. The plot is drawn beside the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import storage_limits as limits
from benchmarks import storage_places as places
from benchmarks.storage_plot import plot

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = REPOSITORY / "benchmarks" / "results" / "export.json"
SIZES: Final = (0.1, 0.5, 2.0, 6.0)
PEERS: Final = (0.1, 0.5, 2.0)
"""Sizes at which transformers is measured too; it holds the whole model."""
VOCABULARY: Final = 32_000
RUN, STEP = "bench", 1
BUDGET: Final = 1.15
FLAT_BYTES: Final = 64_000_000
FILLS_MEMORY_BYTES: Final = 400_000_000
"""A smaller model ends before the export's buffers are full: its peak says nothing of flatness."""
SMALL, SMALL_ROUNDS = 1.0, 3
"""Below so many 10^9 bytes there are so many times more rounds: the reference takes a moment, and
how long that is depends on what the disk does besides."""
REFERENCE: Final = "cp + fsync"
PASSES: Final = "read, write and read back, past the page cache"
PEER: Final = ", save_pretrained of transformers"

Measure = dict[str, Any]


def main(given: Sequence[str] | None = None) -> int:
    """Measures, writes the rows and the plot, and prints what is over its budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES), help="in 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: temp")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs="+", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.child:
        part, *paths = arguments.child
        print(json.dumps(PARTS[part](*paths)))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in arguments.sizes:
            rounds = arguments.rounds * (SMALL_ROUNDS if size < SMALL else 1)
            rows += measure(size, Path(folder), rounds)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    plot(arguments.output, arguments.output.with_suffix(".svg"), is_peer=lambda n: n.endswith(PEER))
    for row in rows:
        print(
            f"{row['row']:<52} {row['seconds']:7.2f} s  {row['peak_rss_bytes'] / 1e6:7.0f} MB  "
            f"{row['ratio']:5.2f} of {row['reference']['name']}"
        )
    over = [row["row"] for row in rows if row["budget"] and row["ratio"] > row["budget"]]
    print(f"over their budget: {', '.join(over) or 'none'}")
    peaks = [
        row["peak_rss_bytes"]
        for row in rows
        if row["row"].startswith("export, ") and row["bytes"] > FILLS_MEMORY_BYTES
    ]
    if peaks:
        print(
            f"peaks of the exports differ by {(max(peaks) - min(peaks)) / 1e6:.0f} MB "
            f"(limit {FLAT_BYTES / 1e6:.0f}), the highest is {max(peaks) / 1e6:.0f} MB"
        )
    return 0


def measure(gigabytes: float, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The rows of one size; who measures first shifts from round to round."""
    store = folder / "store"
    in_fresh_process("save", str(store), f"{gigabytes:g}")
    label = f"{gigabytes:g} GB"
    alone = f"export, {label}"
    contenders: dict[str, Callable[[], Measure]] = {
        alone: lambda: in_fresh_process("export", str(store), str(folder / "made")),
        f"convert job, {label}": lambda: in_fresh_process("convert", str(store), str(folder)),
    }
    if gigabytes in PEERS or gigabytes < min(PEERS):
        contenders[f"{label}{PEER}"] = lambda: in_fresh_process(
            "peer", f"{gigabytes:g}", str(folder / "theirs")
        )
    runs: dict[str, list[Measure]] = {name: [] for name in contenders}
    of_passes: list[Measure] = []
    for number in range(rounds):
        names = [*contenders]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            places.evict(str(store))
            made = contenders[name]()
            source = Path(made.pop("folder"))
            runs[name].append({**made, "reference_seconds": copy(source, folder / "copy")})
            if name == alone:
                passes = three_passes(source, folder / "copy")
                of_passes.append({**made, "reference_seconds": passes})
            shutil.rmtree(source)
    shutil.rmtree(store)
    rows = [row(name, found) for name, found in runs.items()]
    return [*rows, {**row(f"{label}, export of three passes", of_passes, PASSES), "budget": None}]


def row(name: str, runs: list[Measure], reference: str = REFERENCE) -> dict[str, Any]:
    """One row of what was measured in each round."""
    return {
        "row": name,
        "seconds": statistics.median(run["seconds"] for run in runs),
        "bytes": runs[0]["bytes"],
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "reference": {
            "name": reference,
            "seconds": statistics.median(run["reference_seconds"] for run in runs),
        },
        "ratio": statistics.median(run["seconds"] / run["reference_seconds"] for run in runs),
        "budget": None if name.endswith(PEER) else BUDGET,
        "runs": runs,
    }


def in_fresh_process(*child: str) -> Measure:
    """Runs one part in a process of its own; what it printed."""
    command = [sys.executable, "-m", "benchmarks.export", "--child", *child]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    found: Measure = json.loads(done.stdout.splitlines()[-1])
    return found


def copy(source: Path, target: Path) -> float:
    """Seconds that `cp` of a folder takes, and an fsync of each file and of the folder."""
    places.evict(str(source))
    target.mkdir()
    began = time.perf_counter()
    for path in source.iterdir():
        subprocess.run(["cp", str(path), str(target / path.name)], check=True)
    sync(target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def three_passes(source: Path, target: Path) -> float:
    """Seconds that the disk takes for the weights of a folder, and for reading what it wrote."""
    places.evict(str(source))
    target.mkdir()
    began = time.perf_counter()
    for path in source.glob("*.safetensors"):
        limits.copy_and_read_back(path, target / path.name)
    sync(target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def sync(folder: Path) -> None:
    """Has a folder's files on the disk."""
    for path in [*folder.iterdir(), folder]:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


# -- in processes of their own ---------------------------------------------------------------------


def config_of(gigabytes: float) -> Any:
    """A Llama of about this size in f32.

    All whose peaks are compared have matrices of the same width: the peak depends on these.
    """
    from cairn.interop.config.decoder import DecoderConfig

    hidden = 512 if gigabytes < 0.3 else 2048
    vocabulary = min(VOCABULARY, max(64, int(gigabytes * 1e9 / 16 / hidden)))
    vocabulary -= vocabulary % (64 if vocabulary < 4096 else 128)  # as real ones are padded
    layer_bytes = 4 * hidden * hidden * (4 + 3 * 2.75)
    layers = max(1, round((gigabytes * 1e9 - 8 * vocabulary * hidden) / layer_bytes))
    return DecoderConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(hidden * 2.75),
        num_hidden_layers=layers,
        num_attention_heads=16,
    )


def save(store: str, gigabytes: str) -> Measure:
    """Saves a step as a training job does, of random numbers, which nothing compresses."""
    import numpy as np

    from cairn.interop.config.decoder_layers import leaf_shapes
    from cairn.state.checkpointing.checkpointer import Checkpointer
    from cairn.state.checkpointing.trees import nest
    from cairn.storage.runs.records.manifest import ModelInfo

    config = config_of(float(gigabytes))
    numbers = np.random.default_rng(0)
    leaves = {
        path: numbers.standard_normal(shape, dtype=np.float32)
        for path, shape in leaf_shapes(config).items()
    }
    info = ModelInfo(model_type="llama", model_class="DecoderForCausalLM", config=config.to_dict())
    with Checkpointer(f"{store}/{RUN}") as checkpointer:
        checkpointer.save(STEP, {"model": nest(leaves)}, meta={}, model=info).wait()
    return {"leaves": len(leaves)}


def export(store: str, target: str) -> Measure:
    """The job's own steps, one after the other, with nothing around them."""
    from cairn.service.jobs.context import JobContext, Result
    from cairn.service.jobs.kinds.convert import CONVERT, KIND, RULE_VERSION, requested_options
    from cairn.service.jobs.kinds.export_job import export_request
    from cairn.service.jobs.process_memory import keep_one_arena
    from cairn.service.jobs.progress import ProgressMeter
    from cairn.service.schemas import ConvertRequest
    from cairn.storage.runs.run import Run
    from cairn.storage.store.uri import parse_uri

    class Alone(JobContext):
        operation_id = "op-0"
        roots: Mapping[str, Any] = {"default": parse_uri(store)}
        progress = ProgressMeter(lambda report: None, clock=time.monotonic)

        def step(self, name: str, function: Callable[[], Result]) -> Result:
            return function()

        def parts(
            self, token: str, parts: Sequence[Result], *, at_once: int | None = None
        ) -> list[Result]:
            assert CONVERT.part is not None
            return [CONVERT.part(self, request, part) for part in parts]

        def check(self) -> None:
            pass

    keep_one_arena()  # as a worker does
    began = time.perf_counter()
    run = Run.open(f"{store}/{RUN}")
    request = export_request(
        KIND,
        root="default",
        run=run,
        step=run.step(STEP),
        options=requested_options(ConvertRequest()),
        rule_version=RULE_VERSION,
    )
    made = CONVERT.run(Alone(), request)
    seconds = time.perf_counter() - began
    loaded = sorted({"jax", "flax", "orbax", "torch"} & set(sys.modules))
    if loaded:
        raise SystemExit(f"the export must not load {loaded}")
    peak = peak_bytes(os.getpid())
    (folder,) = {path.parent for path in Path(store, RUN, "exports").rglob("config.json")}
    shutil.move(folder, target)
    shutil.rmtree(Path(store, RUN, "exports"))
    return {"seconds": seconds, "bytes": made["bytes"], "peak_rss_bytes": peak, "folder": target}


def convert(store: str, folder: str) -> Measure:
    """The job, asked of a fresh control plane; its peak is that of the server's whole process."""
    from cairn.service.client.client import Client
    from examples.demo.servers import control_plane

    shutil.rmtree(Path(folder, "control-plane"), ignore_errors=True)
    with (
        control_plane(store, Path(folder), {}, port=0) as (url, _, process),
        Client(url) as client,
    ):
        client.checkpoint(RUN, STEP)
        began = time.perf_counter()
        done = client.wait(client.convert(RUN, STEP).id)
        seconds = time.perf_counter() - began
        artifact = client.artifact((done.result or {})["artifact_id"])
        peak = peak_bytes(process.pid)
    target = Path(folder, "made")
    shutil.move(artifact.uri.removeprefix("file://"), target)
    shutil.rmtree(Path(store, RUN, "exports"))
    return {
        "seconds": seconds,
        "bytes": artifact.bytes,
        "peak_rss_bytes": peak,
        "folder": str(target),
    }


def peer(gigabytes: str, target: str) -> Measure:
    """`save_pretrained` of the same model in memory; its files are synced, as ours are."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**config_of(float(gigabytes)).to_hf())
    with torch.device("cpu"):
        model = transformers.LlamaForCausalLM(config)
    began = time.perf_counter()
    model.save_pretrained(target, max_shard_size="5GB")
    sync(Path(target))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "bytes": sum(path.stat().st_size for path in Path(target).iterdir()),
        "peak_rss_bytes": peak_bytes(os.getpid()),
        "folder": target,
    }


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process; unlike `ru_maxrss`, without its parent's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc: this benchmark needs Linux")


PARTS: Final[dict[str, Callable[..., Measure]]] = {
    "save": save,
    "export": export,
    "convert": convert,
    "peer": peer,
}


if __name__ == "__main__":
    sys.exit(main())
