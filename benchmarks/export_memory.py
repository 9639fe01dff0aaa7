"""Peak memory and speed of streaming a checkpoint to safetensors, at two model sizes.

Each size is saved by Cairn's checkpointer, then exported by a fresh process that loads no JAX:
every kernel is transposed, as for PyTorch. The reference is a plain copy + fsync of the exported
bytes, measured in the same run, alternating with the exports. Files are in the page cache for
both.

    python benchmarks/export_memory.py [--sizes 0.5 2] [--repeats 3] [--json results.json]

Fails (exit 1) if the peak memory of the largest and the smallest size differ by 256 MB or more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cairn.storage.store.opening import open_files

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "export_memory.json"
MEGABYTE = 10**6
LIMIT_BYTES = 256 * MEGABYTE
COPY_BLOCK_BYTES = 16 << 20
VOCABULARY = 32_000
STEP = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="in 10^9 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: temp")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--child", nargs="+", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_child(*arguments.child)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = [measure(size, Path(folder), arguments.repeats) for size in arguments.sizes]
    peaks = [result["peak_bytes"] for result in results]
    difference = max(peaks) - min(peaks)
    print_table(results, difference)
    report = {
        "device": f"CPU, {os.cpu_count()} cores, {platform.platform()}",
        "mesh": None,
        "reference": "copy + fsync of the same bytes",
        "results": results,
        "peak_difference_bytes": difference,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if difference < LIMIT_BYTES else 1


def measure(gigabytes: float, folder: Path, repeats: int) -> dict[str, Any]:
    """Saves one checkpoint, then exports and copies it, alternating."""
    run, target = folder / f"run-{gigabytes:g}", folder / f"export-{gigabytes:g}"
    saved = in_fresh_process("save", str(run), f"{gigabytes:g}")
    exports, copies = [], []
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        exports.append(in_fresh_process("export", str(run), str(target)))
        copies.append(in_fresh_process("copy", str(target)))
    shutil.rmtree(run)
    shutil.rmtree(target)
    seconds = statistics.median(export["seconds"] for export in exports)
    copy_seconds = statistics.median(copy["seconds"] for copy in copies)
    return {
        "gigabytes": gigabytes,
        "bytes": exports[0]["bytes"],
        "leaves": saved["leaves"],
        "largest_leaf_bytes": saved["largest_leaf_bytes"],
        "peak_bytes": max(export["peak_bytes"] for export in exports),
        "baseline_bytes": max(export["baseline_bytes"] for export in exports),
        "export_seconds": seconds,
        "copy_seconds": copy_seconds,
        "ratio": seconds / copy_seconds,
        "exports": exports,
        "copies": copies,
    }


def print_table(results: list[dict[str, Any]], difference: int) -> None:
    columns = (
        "size",
        "leaves",
        "largest leaf",
        "peak RSS",
        "over start",
        "export",
        "copy",
        "ratio",
    )
    print("".join(f"{column:>14}" for column in columns))
    for result in results:
        row = (
            f"{result['bytes'] / 1e9:.2f} GB",
            str(result["leaves"]),
            f"{result['largest_leaf_bytes'] / MEGABYTE:.0f} MB",
            f"{result['peak_bytes'] / MEGABYTE:.0f} MB",
            f"{(result['peak_bytes'] - result['baseline_bytes']) / MEGABYTE:.0f} MB",
            f"{result['export_seconds']:.2f} s",
            f"{result['copy_seconds']:.2f} s",
            f"{result['ratio']:.2f}",
        )
        print("".join(f"{cell:>14}" for cell in row))
    print(
        f"peak RSS differs by {difference / MEGABYTE:.0f} MB "
        f"(must be below {LIMIT_BYTES / MEGABYTE:.0f} MB)"
    )


def in_fresh_process(*child: str) -> dict[str, Any]:
    """Runs one part in a process of its own and returns what it printed."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(REPOSITORY),
        PYTHONSAFEPATH="1",  # beside this file lies another `storage`
        JAX_PLATFORMS="cpu",
    )
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *child]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_child(part: str, *paths: str) -> dict[str, Any]:
    """The part of the benchmark that `in_fresh_process` asked for."""
    match part:
        case "save":
            return save(paths[0], float(paths[1]))
        case "export":
            return export(paths[0], paths[1])
        case _:
            return copy(Path(paths[0]))


def shapes_of(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Leaves of a decoder of about this size in f32; a larger one is wider, as real ones are."""
    hidden = 1024 if gigabytes < 1 else 2048
    layer = {
        **{f"self_attn/{name}_proj/kernel": (hidden, hidden) for name in "qkvo"},
        "mlp/gate_proj/kernel": (hidden, hidden * 11 // 4),
        "mlp/up_proj/kernel": (hidden, hidden * 11 // 4),
        "mlp/down_proj/kernel": (hidden * 11 // 4, hidden),
        "input_layernorm/scale": (hidden,),
    }
    layer_bytes = 4 * hidden * hidden * (4 + 33 // 4) + 4 * hidden
    layers = max(1, round((gigabytes * 1e9 - 8 * VOCABULARY * hidden) / layer_bytes))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens/embedding": (VOCABULARY, hidden),
        "lm_head/kernel": (hidden, VOCABULARY),
    }
    for number in range(layers):
        shapes |= {f"layers/{number}/{name}": shape for name, shape in layer.items()}
    return shapes


def save(run: str, gigabytes: float) -> dict[str, Any]:
    import numpy as np

    from cairn.storage.training.checkpointer import Checkpointer
    from cairn.storage.training.trees import nest

    numbers = np.random.default_rng(0)
    leaves = {
        path: numbers.standard_normal(shape, dtype=np.float32)
        for path, shape in shapes_of(gigabytes).items()
    }
    with Checkpointer(run) as checkpointer:
        checkpointer.save(STEP, {"model": nest(leaves)}, meta={}).wait()
    largest = max(leaf.nbytes for leaf in leaves.values())
    return {"leaves": len(leaves), "largest_leaf_bytes": largest}


def export(run_uri: str, target: str) -> dict[str, Any]:
    from cairn.storage.reading.reader import CheckpointReader
    from cairn.storage.runs.run import Run
    from cairn.storage.safetensors.stream import TensorSource, plan_shards, write_shard

    baseline = peak_bytes()
    started = time.perf_counter()
    run = Run.open(run_uri)
    step = run.step(STEP)
    reader = CheckpointReader.open(run.step_uri(step), run.manifest(step))

    def source(path: str, shape: tuple[int, ...], dtype: Any) -> TensorSource:
        transpose = path.endswith("kernel")
        return TensorSource(
            path.replace("/", "."),
            shape[::-1] if transpose else shape,
            dtype,
            lambda max_bytes: reader.iter_blocks(
                "model", path, max_bytes=max_bytes, transpose=transpose
            ),
        )

    sources = [
        source(path, info.shape, info.dtype) for path, info in reader.leaves("model").items()
    ]
    files = open_files(target)
    written = sum(
        write_shard(files, shard.file_name, shard) for shard in plan_shards(sources, "5GB")
    )
    seconds = time.perf_counter() - started
    loaded = sorted({"jax", "flax", "orbax", "torch"} & set(sys.modules))
    if loaded:
        raise SystemExit(f"the export must not load {loaded}")
    return {
        "bytes": written,
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "baseline_bytes": baseline,
    }


def copy(folder: Path) -> dict[str, Any]:
    started = time.perf_counter()
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        target = path.with_suffix(".copy")
        with path.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, COPY_BLOCK_BYTES)
            sink.flush()
            os.fsync(sink.fileno())
        size += path.stat().st_size
    seconds = time.perf_counter() - started
    for path in folder.glob("*.copy"):
        path.unlink()
    return {"bytes": size, "seconds": seconds}


def peak_bytes() -> int:
    """Peak resident memory of this process; unlike `ru_maxrss`, without its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status: this benchmark needs Linux")


if __name__ == "__main__":
    sys.exit(main())
