"""Cairn's saves, restores and checks beside plain Orbax, torch DCP, safetensors and raw bytes.

Every measurement is made in a fresh process, and the processes of all contenders take turns: a
round runs each once, in an order that shifts from round to round. A ratio is taken within a round;
rows give the medians over the rounds. Before they are restored or checked, the files of a step have
been read once, so that they are in the page cache, or were taken out of it, or are as the save left
them, as the row says; before every save `os.sync()` has returned. All
contenders get the same state (`storage_workload.py`), and each save is deleted once it is measured.

    python -m benchmarks.storage [--megabytes 2020] [--layers 6] [--runs 5] [--rows TEXT ...]
        [--without-peers] [--store file|gcs] [--server double|nginx] [--latency SECONDS]
        [--folder FOLDER] [--output results.json]

Writes the rows as JSON, the environment beside them, and a plot made from the JSON. With
`--store gcs` a server of the GCS protocol runs beside the benchmark, as a process of its own;
contenders that write to no bucket are left out, and there are no budgets, which are for a disk.
With `--server nginx` that is in front of it and sends what is downloaded; only rows of reads are
measured. Fails (exit 1) if a measurement failed; the rows that need it are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import storage_limits as limits
from benchmarks import storage_places as places
from benchmarks import storage_plot
from benchmarks import storage_workload as workload
from benchmarks.storage_contenders import CONTENDERS
from benchmarks.storage_rows import Measurement, Row, all_rows, is_peers
from examples.demo.servers import store as serving

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
MEGABYTES = {"file": 2020.0, "gcs": 256.0}
OUTPUT = {
    "file": RESULTS / "storage.json",
    "gcs": RESULTS / "storage_gcs.json",
    "late": RESULTS / "storage_gcs_late.json",
    "nginx": RESULTS / "storage_gcs_nginx.json",
}
SERVERS = {
    "double": "a server of the GCS protocol, same machine",
    "nginx": "nginx, which sends the bytes, before a server of the GCS protocol, same machine",
}
READS = {"restore", "verify"}
STATE_MEASURES = (
    *("save_state", "save_train_state", "save_items"),
    *("save_state_of_many_layers", "save_items_of_many_layers"),
)
SAVES = 4
TABLE_WIDTH = 150
REPEATED = {"blocked_later", "extra"}
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore", "torch", "safetensors", "numpy")

Results = dict[Measurement, dict[str, Any]]
Start = Callable[[list[str], Mapping[str, str]], subprocess.CompletedProcess[str]]
"""Runs Python with these arguments and this environment, in the repository."""


def start_fresh(
    arguments: list[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own: nothing is imported, nothing is compiled."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )


def main(given: Sequence[str] | None = None, start: Start = start_fresh) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, help="size of the state, in 10^6 bytes")
    parser.add_argument("--layers", type=int, default=workload.LAYERS, help="of the state")
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument(
        "--without-peers", action="store_true", help="leave the rows out that are about others"
    )
    parser.add_argument("--store", choices=sorted(MEGABYTES), default="file")
    parser.add_argument(
        "--jobs", type=int, default=1, help="contenders at once: to try it out, figures suffer"
    )
    parser.add_argument("--folder", type=Path, help="where to work, on a disk; default: temp")
    parser.add_argument("--output", type=Path, help="where the results go")
    parser.add_argument(
        "--latency",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="added to each request to a bucket; at 0.05 a state of 64 MB tells most",
    )
    parser.add_argument(
        "--server", choices=sorted(SERVERS), default="double", help="who sends a bucket's bytes"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.child:
        return run_child(json.loads(arguments.child))
    in_front = arguments.server != "double"
    if in_front and arguments.store == "file":
        parser.error(f"--server {arguments.server}: a disk has none; give --store gcs")
    rows = [row for row in all_rows(arguments.store) if any(p in row.name for p in arguments.rows)]
    if in_front:
        rows = [row for row in rows if row.value.measurement.measure in READS]
    rows = [row for row in rows if not (arguments.without_peers and is_peers(row.name))]
    if not rows:
        parser.error(f"--rows {' '.join(arguments.rows)}: no row has this in its name")
    if arguments.latency and arguments.store == "file":
        parser.error("--latency: a disk has none to add; give --store gcs")
    kind = arguments.server if in_front else "late" if arguments.latency else arguments.store
    output = arguments.output or OUTPUT[kind]
    megabytes = arguments.megabytes or MEGABYTES[arguments.store]
    began = time.time()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        serving(arguments.store, Path(folder), *(["--nginx"] if in_front else [])) as (
            root,
            variables,
        ),
    ):
        if arguments.latency:
            places.slow_down(variables["STORAGE_EMULATOR_HOST"], arguments.latency)
        if arguments.store == "file" and not limits.can_read_and_write(Path(folder)):
            print(f"{folder}: no direct I/O here: rows of the disk's limits are left out")
            rows = [row for row in rows if not row.needs_direct_io]
        bench = Bench(
            root.removeprefix("file://"),
            variables,
            {"megabytes": megabytes, "layers": arguments.layers},
            rows,
            arguments.jobs,
            start,
        )
        for number in range(arguments.runs):
            bench.round(number)
    results = [result for row in rows if (result := row.result(bench.rounds))]
    shapes = workload.state_shapes(megabytes, arguments.layers)
    store = "local disk" if arguments.store == "file" else SERVERS[arguments.server]
    environment = environment_of(store, shapes, arguments.runs, time.time() - began)
    environment["seconds_added_to_each_request"] = arguments.latency
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    output.with_suffix(".environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    storage_plot.plot(output, output.with_suffix(".svg"))
    print_table(results)
    for measurement, trouble in bench.failures.items():
        print(f"failed: {measurement}: {trouble}", file=sys.stderr)
    return 1 if bench.failures else 0


class Bench:
    """The rounds of one benchmark.

    Attributes:
        rounds: what each round measured.
        failures: measurements that failed; they are not tried again.
    """

    def __init__(
        self,
        root: str,
        variables: Mapping[str, str],
        size: Mapping[str, float],
        rows: Sequence[Row],
        jobs: int = 1,
        start: Start = start_fresh,
    ) -> None:
        self._jobs, self._start = jobs, start
        self.rounds: list[Results] = []
        self.failures: dict[Measurement, str] = {}
        self._root, self._size = root, size
        self._environment = child_environment(variables, measured=jobs == 1)
        self._wanted = {each for row in rows for each in row.measurements()}
        figures = [one for row in rows for one in (row.value, row.reference, row.seconds)]
        self._repeated = {each.measurement for each in figures if each.field in REPEATED}

    def round(self, number: int) -> None:
        """Runs every measurement that is wanted once."""
        self.rounds.append({})
        keys = list(CONTENDERS)
        shift = number % len(keys)
        with ThreadPoolExecutor(self._jobs) as pool:
            list(pool.map(self._turn, keys[shift:] + keys[:shift]))

    def _turn(self, key: str) -> None:
        """What one contender does in a round; it leaves nothing in the store."""
        place = f"{self._root}/{key}"
        for measure in ("save_while_training", "save_adapters", "many_leaves", *STATE_MEASURES):
            wanted = Measurement(measure, key)
            if wanted in self._wanted:
                self._measure(wanted, place)
                self._delete(place)
        self._save_and_read(key, place)

    def _save_and_read(self, key: str, place: str) -> None:
        """A save, then everything that reads it, once it is in the page cache."""
        save = Measurement("save", key)
        readers = [each for each in _readers(key) if each in self._wanted]
        if save not in self._wanted and not readers:
            return
        saves = SAVES if save in self._repeated and CONTENDERS[key].asynchronous else 1
        saved = self._measure(save, place, saves=saves)
        warmed = places.in_bucket(place)
        for reader in readers if saved else ():
            restores = reader.measure == "restore"
            given = {"devices": reader.devices} if restores else {}
            cold = reader.cache == "cold"
            if cold or (reader.cache == "warm" and not warmed):
                state = {"measure": reader.cache, "name": key, "place": place}
                self._child({**state, "step": saved["step"]})
                warmed = not cold
            found = self._measure(reader, place, step=saved["step"], **given)
            if found and restores and found["fingerprint"] != saved["fingerprint"]:
                self.failures[reader] = "expected the values that were saved, found others"
        self._delete(place)

    def _measure(self, wanted: Measurement, place: str, **given: Any) -> dict[str, Any]:
        """What a fresh process measured; nothing if it failed, now or in an earlier round."""
        if wanted in self.failures:
            return {}
        if wanted.measure not in ("read", "read_direct", "verify"):
            given |= self._size
        if wanted.measure in ("save", "save_while_training", "restore"):
            given["name"] = wanted.contender
        began = time.perf_counter()
        try:
            found = self._child({"measure": wanted.measure, "place": place, **given})
        except RuntimeError as error:
            print(error, file=sys.stderr)
            self.failures[wanted] = str(error).splitlines()[-1]
            return {}
        self.rounds[-1][wanted] = found
        print(
            f"round {len(self.rounds)}: {wanted} ({time.perf_counter() - began:.0f} s)", flush=True
        )
        return found

    def _delete(self, place: str) -> None:
        if places.in_bucket(place):  # its client reads the environment, which only children have
            self._child({"measure": "delete", "place": place})
        else:
            places.delete(place)

    def _child(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arguments = ["-m", "benchmarks.storage", "--child", json.dumps(given)]
        done = self._start(arguments, self._environment)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def _readers(key: str) -> Iterator[Measurement]:
    """What can be measured on the step that a contender saved; the page cache fills meanwhile."""
    yield Measurement("restore", key, cache="saved")
    yield Measurement("restore", key, cache="cold")
    yield Measurement("read_direct", key)
    yield Measurement("restore", key)
    yield Measurement("restore", key, workload.DEVICES // 2)
    yield Measurement("read", key)
    yield Measurement("verify", key)


def run_child(given: dict[str, Any]) -> int:
    """The measurement that `Bench` asked for; its figures go to the standard output as JSON."""
    from benchmarks.storage_measures import MEASURES

    print(json.dumps(MEASURES[given.pop("measure")](**given)))
    return 0


def child_environment(variables: Mapping[str, str], *, measured: bool = True) -> dict[str, str]:
    """Eight devices, the way to the store; if it is measured, nothing that was compiled before."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (measured and name.startswith("JAX_"))
    }
    return {
        **kept,
        **variables,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={workload.DEVICES}",
        "PJRT_NPROC": str(4 * workload.DEVICES),  # threads: with too few, collectives can deadlock
        "CAIRN_WRITER_ID": "benchmark",
    }


def environment_of(store: str, shapes: workload.Tree, runs: int, seconds: float) -> dict[str, Any]:
    """Where and on what the rows were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": f"CPU, {os.cpu_count()} cores, {platform.platform()}",
        "memory_bytes": memory,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "store": store,
        "mesh": {"fsdp": workload.DEVICES},
        "state_bytes": workload.nbytes(shapes),
        "leaves": len(workload.flat(shapes)),
        "page_cache": "warm, unless a row says otherwise",
        "rounds": runs,
        "ratio": "value / reference within a round, median over the rounds",
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds),
    }


def print_table(results: list[dict[str, Any]]) -> None:
    table = Table("row", "measured", "reference", "ratio", "budget", "")
    for row in results:
        budget = row["budget"]
        unit = "seconds" if "seconds" in row["reference"] else "bytes"
        table.add_row(
            row["row"],
            amount(row[unit], unit),
            f"{amount(row['reference'][unit], unit)}  {row['reference']['name']}",
            f"{row['ratio']:.3f}",
            "" if budget is None else f"{budget:g}",
            "" if budget is None else "over" if row["ratio"] > budget else "ok",
            style="dim" if is_peers(row["row"]) else None,
        )
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)


def amount(value: float, unit: str) -> str:
    """A number with its unit, short."""
    if unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
