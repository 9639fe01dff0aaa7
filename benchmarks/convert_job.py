"""Peak memory and speed of the control plane's convert job, at two model sizes.

Each size is saved by `EasyDeLState` on eight virtual devices, then converted over HTTP by a fresh
control plane whose peak RSS the kernel reports (VmHWM). The reference is a copy + fsync of the
exported bytes, measured in the same run, alternating with the conversions. Files are in the page
cache for both.

    python -m benchmarks.convert_job [--sizes 0.5 2] [--repeats 3] [--json results.json]

Fails (exit 1) if the peaks of the largest and the smallest size differ by 256 MB or more.
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

from rich.console import Console
from rich.table import Table

from cairn.service.client.client import Client
from examples.demo.servers import control_plane

RESULTS = Path(__file__).resolve().parent / "results" / "convert_job.json"
MEGABYTE = 10**6
LIMIT_BYTES = 256 * MEGABYTE
COPY_BLOCK_BYTES = 16 << 20
RUN, STEP = "bench", 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="in 10^9 bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--save", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save:
        save(arguments.save[0], float(arguments.save[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(size, Path(folder), arguments.repeats) for size in arguments.sizes]
    peaks = [row["peak_bytes"] for row in rows]
    difference = max(peaks) - min(peaks)
    print_table(rows, difference)
    report = {
        "device": f"CPU, {os.cpu_count()} cores, {platform.platform()}",
        "mesh": {"fsdp": 8},
        "reference": "copy + fsync of the exported bytes",
        "rows": rows,
        "peak_difference_bytes": difference,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if difference < LIMIT_BYTES else 1


def measure(gigabytes: float, folder: Path, repeats: int) -> dict[str, Any]:
    """Saves one checkpoint, then converts it and copies the result, alternating."""
    store = folder / f"store-{gigabytes:g}"
    store.mkdir()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.convert_job", "--save", str(store), f"{gigabytes:g}"],
        check=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    conversions, copies = [], []
    for _ in range(repeats):
        shutil.rmtree(store / RUN / "exports", ignore_errors=True)
        shutil.rmtree(folder / "control-plane", ignore_errors=True)
        conversions.append(convert(store, folder))
        copies.append(copy(Path(conversions[-1].pop("folder")), folder / "copy"))
    shutil.rmtree(store)
    seconds = statistics.median(conversion["seconds"] for conversion in conversions)
    copy_seconds = statistics.median(copies)
    return {
        "row": f"convert job, {gigabytes:g} GB",
        "bytes": conversions[0]["bytes"],
        "peak_bytes": max(conversion["peak_bytes"] for conversion in conversions),
        "idle_bytes": max(conversion["idle_bytes"] for conversion in conversions),
        "seconds": seconds,
        "reference": "copy + fsync",
        "reference_seconds": copy_seconds,
        "ratio": seconds / copy_seconds,
        "runs": [*conversions],
        "reference_runs": copies,
    }


def convert(store: Path, folder: Path) -> dict[str, Any]:
    """Converts the step in a fresh control plane."""
    with (
        control_plane(str(store), folder, {}, port=0) as (url, _, process),
        Client(url) as client,
    ):
        client.checkpoint(RUN, STEP)
        idle = peak_bytes(process.pid)
        began = time.perf_counter()
        done = client.wait(client.convert(RUN, STEP).id)
        seconds = time.perf_counter() - began
        artifact = client.artifact((done.result or {})["artifact_id"])
        return {
            "seconds": seconds,
            "bytes": artifact.bytes,
            "idle_bytes": idle,
            "peak_bytes": peak_bytes(process.pid),
            "folder": artifact.uri.removeprefix("file://"),
        }


def copy(source: Path, target: Path) -> float:
    """Copies a folder's files with fsync; returns seconds."""
    target.mkdir()
    began = time.perf_counter()
    for path in source.iterdir():
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            shutil.copyfileobj(reader, writer, COPY_BLOCK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def peak_bytes(pid: int) -> int:
    """The peak resident set of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status: expected a line VmHWM, found none")


def save(store: str, gigabytes: float) -> None:
    """Saves a Llama of about this size in f32; a larger one is wider, as real ones are."""
    from flax import nnx

    from cairn.state import DecoderConfig, DecoderForCausalLM, EasyDeLState

    hidden, vocabulary = (1024, 32_000) if gigabytes < 1 else (2048, 32_000)
    layer_bytes = 4 * hidden * hidden * (4 + 3 * 2.75)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(hidden * 2.75),
        num_hidden_layers=max(1, round((gigabytes * 1e9 - 8 * vocabulary * hidden) / layer_bytes)),
        num_attention_heads=16,
        sharding_axis_dims=(1, 8, 1, 1),
    )
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    model.shard_model()
    state = EasyDeLState.create(model=model, step=STEP)
    state.save_state(f"{store}/{RUN}", save_optimizer=False, verbose=False).wait()


def print_table(rows: list[dict[str, Any]], difference: int) -> None:
    table = Table("row", "bytes", "peak RSS", "idle RSS", "convert", "copy + fsync", "ratio")
    for row in rows:
        table.add_row(
            row["row"],
            f"{row['bytes'] / 1e9:.2f} GB",
            f"{row['peak_bytes'] / MEGABYTE:.0f} MB",
            f"{row['idle_bytes'] / MEGABYTE:.0f} MB",
            f"{row['seconds']:.2f} s",
            f"{row['reference_seconds']:.2f} s",
            f"{row['ratio']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"peak RSS differs by {difference / MEGABYTE:.0f} MB "
        f"(must be below {LIMIT_BYTES / MEGABYTE:.0f} MB)"
    )


if __name__ == "__main__":
    sys.exit(main())
