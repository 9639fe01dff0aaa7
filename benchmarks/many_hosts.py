"""What a save and a load ask of a store as processes grow in number: 1 to 8 real ones, 1,024 not.

Real ones share a state of some 100 MB through a server that speaks GCS's protocol and counts every
request; for a load each process has one of its own, with the same objects. The reference of what is
read are the bytes of the step's values.

Of 64 to 1,024 processes and a state of 5 TB Cairn's code runs once for each, over a simulated
network and bucket (`simulated/`); array bytes are left out. There a row's `requests`, `bytes`
or `seconds` stand over its `budget`, which gives the `ratio`; of objects `requests` is the number.

    python -m benchmarks.many_hosts [--counts 1 2 4 8] [--simulated 64 256 1024] [--json FILE]

Rows in the file that are not measured this time stay: `--counts` with nothing behind it leaves the
real ones as they are. Counts are what counts here: the seconds of real processes are those of some
that share one machine's cores. The plot is drawn beside the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.many_hosts_plot import drawing
from benchmarks.simulated import rows as simulated_rows
from tests.gcs.server import GcsServer
from tests.multi_process.launcher import start
from tests.multi_process.many_hosts import BUCKET

RESULTS = Path(__file__).resolve().parent / "results" / "many_hosts.json"
VALUES = re.compile(r"/(?:ocdbt\.process_[0-9]+/)?d/[0-9a-f]+$")
VOCABULARY = 65_536
"""Of the embedding, 33 MB; with Adam's moments 100 MB."""

JOB_SECONDS = 400


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--simulated", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, help="of the simulated state: fewer make it smaller")
    parser.add_argument("--latency", type=float, default=simulated_rows.LATENCY,
                        help="seconds of a request to the simulated bucket")  # fmt: skip
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes: several can't share an accelerator
    of_state = {"layers": options.layers, "latency": options.latency}
    rows: list[dict[str, Any]] = []
    for count in options.counts:
        rows += _printed(measure(count, options.vocabulary))
    for count in options.simulated:
        replicas = [one for one in options.replicas if one <= count // 2]
        rows += _printed(simulated_rows.measure(count, replicas, **of_state))
    rows = _with_others(rows, options.json)
    options.json.write_text(json.dumps(rows, indent=2) + "\n")
    options.json.with_suffix(".svg").write_text("\n".join(drawing(rows)) + "\n")
    return 0


def _with_others(rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The rows, and those in the file of what was not measured now, real ones first."""
    known = json.loads(file.read_text()) if file.exists() else []
    measured = {(_is_simulated(row), row["processes"]) for row in rows}
    kept = [row for row in known if (_is_simulated(row), row["processes"]) not in measured]
    return sorted([*kept, *rows], key=lambda row: (_is_simulated(row), row["processes"]))


def _is_simulated(row: dict[str, Any]) -> bool:
    return str(row["row"]).startswith("simulated")


def _printed(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in rows:
        print(json.dumps(one), flush=True)
        yield one


def measure(count: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """The rows of so many real processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with GcsServer(folder / "saved") as server:
            server.store.create_bucket(BUCKET)
            given = {"url": server.url, "vocabulary": vocabulary}
            saved = _results(folder / "save", "many_hosts.save", given, count)
            requests = list(server.requests)
        uploads = [one for one in requests if VALUES.search(one.name)]
        others = [one for one in requests if not VALUES.search(one.name)]
        stored = sum(one.received for one in uploads)
        seconds = max(one["seconds"] for one in saved)
        yield _row("save", count, requests=len(requests), bytes=_bytes(requests), seconds=seconds)
        yield _row("save, but for values", count, requests=len(others), bytes=_bytes(others))
        layouts = [("load, sharded", 1)] + [("load, replicated", count)] * (count > 1)
        for kind, replicas in layouts:
            yield from _loads(folder, kind, count, replicas, stored, saved[0]["digest"])


def _loads(
    folder: Path, kind: str, count: int, replicas: int, stored: int, digest: str
) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        servers = []
        for number in range(count):
            own = folder / f"{replicas}-{number}"
            shutil.copytree(folder / "saved", own)
            servers.append(stack.enter_context(GcsServer(own)))
        given = {"urls": [one.url for one in servers], "replicas": replicas}
        loaded = _results(folder / f"load-{replicas}", "many_hosts.load", given, count)
        assert {one["digest"] for one in loaded} == {digest}, "every value is what was saved"
        asked = [list(server.requests) for server in servers]
    seconds = max(one["seconds"] for one in loaded)
    metadata = [[one for one in all_ if not VALUES.search(one.name)] for all_ in asked]
    values = [[one for one in all_ if VALUES.search(one.name)] for all_ in asked]
    read = sum(one.answered for all_ in values for one in all_)
    yield _row(f"{kind}: values", count, requests=sum(map(len, values)), bytes=read,
              seconds=seconds, reference=stored, ratio=read / stored, budget=1.02)  # fmt: skip
    yield _row(f"{kind}: metadata, process 0", count, requests=len(metadata[0]),
              bytes=_bytes(metadata[0]))  # fmt: skip
    if count > 1:
        most = max(metadata[1:], key=len)
        yield _row(f"{kind}: metadata, any other process", count, requests=len(most),
                  bytes=_bytes(most), budget=4, ratio=len(most) / 4)  # fmt: skip


def _row(
    name: str,
    processes: int,
    *,
    requests: int | None = None,
    bytes: int | None = None,
    seconds: float | None = None,
    reference: float | None = None,
    ratio: float | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """What was counted; None is what the row does not tell."""
    return {
        "row": name,
        "processes": processes,
        "requests": requests,
        "bytes": bytes,
        "seconds": None if seconds is None else round(seconds, 3),
        "reference": reference,
        "ratio": None if ratio is None else round(ratio, 4),
        "budget": budget,
    }


def _bytes(requests: Sequence[Any]) -> int:
    return sum(one.received + one.answered for one in requests)


def _results(folder: Path, scenario: str, given: dict[str, Any], count: int) -> list[Any]:
    job = start(
        folder,
        scenario,
        given,
        count=count,
        devices=1,
        environment={"CAIRN_WRITER_ID": "benchmark"},
    )
    return job.results(JOB_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
