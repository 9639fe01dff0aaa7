"""How fast the control plane answers, beside MLflow's registry and beside the same work in process.

One machine, one run, the same client for all: lists, gets and promotions by 8 and by 64 clients,
over 100,000 steps in 1,000 runs, with the catalog in SQLite and in PostgreSQL, and over a part of
them in the GCS double. MLflow has as many model versions in as many models, in SQLite as in its
default set-up, and in PostgreSQL beside our rows of PostgreSQL (`mlflow server`).

    python -m benchmarks.control_plane [--runs 1000] [--steps 100] [--json results.json]
    python -m benchmarks.control_plane --looks    # only looks into checkpoints; others stay
    python -m benchmarks.control_plane --many     # only pages of 10,000 runs; others stay

Each figure is of one load of a server that runs since its start; MLflow's loads come first.
`ratio` is p99 over MLflow's p99 of the same row and number of clients. Rows "in process" compare
requests a second of one server process with the same SQL and JSON in a loop without HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import control_plane_looks, control_plane_runs
from benchmarks.control_plane_load import Load, load, request
from benchmarks.control_plane_store import EVERY, FIRST, fill, name_of
from cairn.service.actions import checkpoints as checkpoints_actions
from cairn.service.actions import runs as runs_actions
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.roots import Roots
from cairn.service.schemas import AVAILABLE, CheckpointList, RunList
from cairn.service.settings import Settings
from examples.demo import servers
from tests.service.databases import running_postgresql

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = REPOSITORY / "benchmarks" / "results" / "control_plane.json"
MLFLOW_FOLDER: Final = REPOSITORY / ".bench"
PEER: Final = "MLflow"
MLFLOW_PACKAGES: Final = ("mlflow>=3.17,<4", "psycopg[binary]")
DATABASES: Final = ("SQLite", "PostgreSQL")
CLIENTS: Final = (8, 64)
ROWS: Final = ("list 100 checkpoints", "list 100 runs", "get checkpoint", "promote")
BUDGETS: Final = {
    ("list 100 checkpoints", 8): 0.03,
    ("list 100 runs", 8): 0.05,
    ("promote", 8): 0.05,
}
GCS_RUNS: Final = 100
TURNS: Final = {"promote": 25}
IDLE_SECONDS: Final = 60

Row = dict[str, Any]
Loads = dict[tuple[str, int], Load]
"""Loads of a server by row and number of clients."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--turns", type=int, default=50, help="requests of each client and row")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="few, then many")
    parser.add_argument("--alone", type=float, default=3.0, help="seconds of a row in process")
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="seconds watched at rest")
    parser.add_argument("--without-mlflow", action="store_true")
    parser.add_argument("--looks", action="store_true", help="only looks into checkpoints")
    parser.add_argument("--many", action="store_true", help="only pages of 10,000 runs")
    parser.add_argument("--listed", type=int, default=control_plane_runs.RUNS, help="of these rows")
    parser.add_argument("--looked", type=int, default=1 << 31, help="bytes of their large leaf")
    parser.add_argument("--leaves", type=int, default=100_000, help="of their other steps")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        if chosen.many:
            many = _many(
                chosen, Path(name), _peers(chosen, Path(name), [control_plane_runs.PEER_ROW])
            )
            _replace(chosen.json, many)
            _print(many)
            return 0
        looks = control_plane_looks.rows(Path(name), chosen)
        if chosen.looks:
            _replace(chosen.json, looks)
            _print(looks)
            return 0
        rows = [*_measure(chosen, Path(name)), *looks]
    report = {
        "device": f"CPU, {os.cpu_count()} cores, {platform.platform()}",
        "runs": chosen.runs,
        "steps": chosen.runs * chosen.steps,
        "steps_in_gcs": min(GCS_RUNS, chosen.runs) * chosen.steps,
        "peer": None if chosen.without_mlflow else _mlflow_version(),
        "rows": rows,
    }
    chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(rows)
    return 0


def _replace(results: Path, rows: list[Row]) -> None:
    """Write these rows over those of the same names, in the results that there are."""
    known = json.loads(results.read_text())
    names = {row["row"] for row in rows}
    known["rows"] = [row for row in known["rows"] if row["row"] not in names] + rows
    results.write_text(json.dumps(known, indent=1) + "\n")


def _measure(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    root = folder / "store"
    root.mkdir()
    began = time.perf_counter()
    fill(str(root), runs=chosen.runs, steps=chosen.steps)
    print(f"filled the store in {time.perf_counter() - began:.0f} s", flush=True)
    rows: list[Row] = []
    peers = _peers(chosen, folder)
    for kind in ("SQLite", "PostgreSQL", "SQLite, GCS double"):
        place = folder / kind.replace(", ", "-").replace(" ", "-")
        place.mkdir()
        with ExitStack() as servers_of_kind:
            uri, environment, count = str(root), {}, chosen.runs
            if kind == "PostgreSQL":
                environment = servers_of_kind.enter_context(_postgresql())
            if "GCS" in kind:
                count = min(GCS_RUNS, chosen.runs)
                uri, environment = servers_of_kind.enter_context(servers.store("gcs", place))
                _fill_elsewhere(uri, environment, count, chosen.steps)
            peer = peers.get(kind, peers.get(DATABASES[0], {}))
            rows += _server(kind, uri, place, environment, count, chosen, peer)
    rows += _in_process(root, folder / "SQLite" / "control-plane", chosen, rows)
    return rows + _many(chosen, folder, peers)


def _peers(
    chosen: argparse.Namespace, folder: Path, rows: Sequence[str] = ROWS
) -> dict[str, Loads]:
    """Measure MLflow's server with each database; nothing without MLflow."""
    peers: dict[str, Loads] = {}
    for database in DATABASES if not chosen.without_mlflow else ():
        place = folder / f"mlflow-{database}"
        place.mkdir()
        with ExitStack() as stack:
            uri = f"sqlite:///{place / 'mlflow.sqlite'}"
            if database == "PostgreSQL":
                uri = stack.enter_context(running_postgresql()).create()
            url = stack.enter_context(_mlflow(place, uri, chosen.runs, chosen.steps))
            requests = _mlflow_requests(url, chosen.runs, chosen.steps)
            peers[database] = _loads(url, {row: requests[row] for row in rows}, chosen)
    return peers


def _many(chosen: argparse.Namespace, folder: Path, peers: dict[str, Loads]) -> list[Row]:
    """The rows of pages of many runs, sorted by a metric."""
    root = folder / "many"
    root.mkdir()
    control_plane_runs.fill(str(root), chosen.listed)
    rows: list[Row] = []
    for kind in DATABASES:
        place = folder / f"many-{kind}"
        place.mkdir()
        with ExitStack() as stack:
            environment = stack.enter_context(_postgresql()) if kind == "PostgreSQL" else {}
            url, _, _ = stack.enter_context(servers.control_plane(str(root), place, environment, 0))
            httpx.get(f"{url}/v1/runs", params={"refresh": True}, timeout=600).raise_for_status()
            asked = control_plane_runs.requests(url, chosen.listed)
            load(url, asked, clients=2, turns=3)
            for clients in chosen.clients:
                number = max(3, chosen.turns * chosen.clients[0] // clients)
                found = load(url, asked, clients=clients, turns=number)
                reference = peers.get(kind, {}).get((control_plane_runs.PEER_ROW, clients))
                row = _row(f"{control_plane_runs.ROW}, {kind}", "", clients, found, reference)
                is_bound = reference is not None and clients == chosen.clients[0]
                rows.append(row | {"budget": control_plane_runs.BUDGET if is_bound else None})
    return rows


def _server(
    kind: str,
    uri: str,
    folder: Path,
    environment: dict[str, str],
    runs: int,
    chosen: argparse.Namespace,
    peer: Loads,
) -> list[Row]:
    """The rows of one server, from its start on an empty catalog."""
    began = time.perf_counter()
    with servers.control_plane(uri, folder, environment, 0) as (url, ready, process):
        until = _indexed(url, runs, chosen.steps) - began
        rows: list[Row] = [
            _plain(f"start until it answers, {kind}", ready),
            _plain(f"start until {runs * chosen.steps:,} steps are listed, {kind}", until),
        ]
        for (row, clients), found in _loads(
            url, _requests(url, runs, chosen.steps, alias=kind[:4].lower()), chosen
        ).items():
            rows.append(_row(f"{row}, {kind}", row, clients, found, peer.get((row, clients))))
        rows += _at_rest(kind, process.pid, chosen.idle)
    return rows


def _indexed(url: str, runs: int, steps: int) -> float:
    """When every step was listed."""
    while True:
        answer = httpx.get(f"{url}/v1/runs", params={"page_size": 1000}, timeout=120)
        found = answer.json().get("runs", []) if answer.status_code == 200 else []
        if len(found) == runs and all(one["checkpoint_count"] == steps for one in found):
            return time.perf_counter()
        time.sleep(0.5)


def _requests(url: str, runs: int, steps: int, *, alias: str) -> dict[str, Any]:
    place = "/v1/roots/default/runs"
    body = json.dumps({"alias": alias, "reason": "better"}).encode()
    moved: dict[int, int] = {}

    def promote(client: int, turn: int) -> bytes:
        step = FIRST + EVERY * (turn % steps)
        sequence = moved.get(client, 0)
        moved[client] = sequence + 1
        expect = f'If-Match: "{sequence}"' if sequence else "If-None-Match: *"
        path = f"{place}/{name_of(client % runs)}/checkpoints/{step}:promote"
        return request(url, "POST", path, body, [expect])

    def spread(client: int, turn: int) -> str:
        return name_of((client * 37 + turn * 101) % runs)

    return {
        "list 100 checkpoints": lambda client, turn: request(
            url, "GET", f"{place}/{spread(client, turn)}/checkpoints?page_size=100"
        ),
        "list 100 runs": lambda client, turn: request(url, "GET", "/v1/runs?page_size=100"),
        "get checkpoint": lambda client, turn: request(
            url,
            "GET",
            f"{place}/{spread(client, turn)}/checkpoints/{FIRST + EVERY * (turn % steps)}",
        ),
        "promote": promote,
    }


def _mlflow_requests(url: str, models: int, versions: int) -> dict[str, Any]:
    place = "/api/2.0/mlflow"

    def spread(client: int, turn: int) -> str:
        return name_of((client * 37 + turn * 101) % models)

    def alias(client: int, turn: int) -> bytes:
        body = {
            "name": name_of(client % models),
            "alias": "production",
            "version": str(1 + turn % versions),
        }
        return request(url, "POST", f"{place}/registered-models/alias", json.dumps(body).encode())

    return {
        "list 100 checkpoints": lambda client, turn: request(
            url,
            "GET",
            f"{place}/model-versions/search?filter=name%3D%27{spread(client, turn)}%27"
            "&max_results=100",
        ),
        "list 100 runs": lambda client, turn: request(
            url, "GET", f"{place}/registered-models/search?max_results=100"
        ),
        "get checkpoint": lambda client, turn: request(
            url,
            "GET",
            f"{place}/model-versions/get?name={spread(client, turn)}&version={1 + turn % versions}",
        ),
        "promote": alias,
    }


def _loads(url: str, requests: dict[str, Any], chosen: argparse.Namespace) -> Loads:
    found = {}
    for row in requests:
        # Each of a server's processes makes something with its first requests.
        load(url, requests[row], clients=chosen.clients[0], turns=10)
        turns = min(chosen.turns, TURNS.get(row, chosen.turns))
        for clients in chosen.clients:
            number = max(3, turns * chosen.clients[0] // clients)
            found[row, clients] = load(url, requests[row], clients=clients, turns=number)
    return found


def _row(name: str, row: str, clients: int, found: Load, peer: Load | None) -> Row:
    return {
        "row": name,
        "clients": clients,
        "p50_ms": round(found.p50 * 1e3, 2),
        "p99_ms": round(found.p99 * 1e3, 2),
        "per_second": round(found.per_second, 1),
        "reference": None if peer is None else {"name": PEER, "p99_ms": round(peer.p99 * 1e3, 2)},
        "ratio": None if peer is None else round(found.p99 / peer.p99, 4),
        "budget": None if peer is None else BUDGETS.get((row, clients)),
    }


def _plain(name: str, seconds: float, **more: object) -> Row:
    """A row that is no load."""
    empty = dict.fromkeys(("clients", "p50_ms", "p99_ms", "per_second", "ratio", "budget"))
    return {"row": name, **empty, "reference": None, "seconds": round(seconds, 3), **more}


def _at_rest(kind: str, process: int, seconds: float) -> list[Row]:
    """What a server takes while nobody asks: its memory, and its share of one core."""
    time.sleep(min(5.0, seconds))
    before = _cpu_seconds(process)
    time.sleep(seconds)
    share = (_cpu_seconds(process) - before) / seconds
    memory = next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return [_plain(f"at rest, {kind}", seconds, core_share=round(share, 4), resident_bytes=memory)]


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _in_process(root: Path, data: Path, chosen: argparse.Namespace, rows: list[Row]) -> list[Row]:
    """The same SQL and JSON without HTTP: what the machine can do at most."""
    settings = Settings(root=str(root), data_dir=data, scan_seconds=0)
    catalog = Catalog.open(settings.database_url)
    plane = ControlPlane(settings, Roots(catalog, settings.root_uris), Index(catalog), None)

    def checkpoints(turn: int) -> str:
        page, _ = checkpoints_actions.list_checkpoints(
            plane,
            "default",
            name_of(turn * 101 % chosen.runs),
            state=AVAILABLE,
            after=(),
            limit=100,
            refresh=False,
        )
        return CheckpointList(checkpoints=page).model_dump_json()

    def runs(turn: int) -> str:
        page, _ = runs_actions.list_runs(plane, plane.roots, after=(), limit=100, refresh=False)
        return RunList(runs=page).model_dump_json()

    def one(turn: int) -> str:
        name = name_of(turn * 101 % chosen.runs)
        return checkpoints_actions.get_checkpoint(
            plane, "default", name, FIRST, refresh=False
        ).model_dump_json()

    made = []
    for row, do in (
        ("list 100 checkpoints", checkpoints),
        ("list 100 runs", runs),
        ("get checkpoint", one),
    ):
        do(0)
        began, turns = time.perf_counter(), 0
        while time.perf_counter() - began < chosen.alone:
            turns += 1
            do(turns)
        rate = turns / (time.perf_counter() - began)
        served = next(
            r for r in rows if r["row"] == f"{row}, SQLite" and r["clients"] == chosen.clients[0]
        )
        made.append(
            {
                **served,
                "row": f"{row}, SQLite, in process",
                "reference": {
                    "name": "the same SQL and JSON in process",
                    "per_second": round(rate, 1),
                },
                "ratio": round(rate / served["per_second"], 2),
                "budget": 3.0,
            }
        )
    catalog.close()
    return made


@contextmanager
def _postgresql() -> Iterator[dict[str, str]]:
    with running_postgresql() as server:
        names = ("CAIRN_DATABASE_URL", "CAIRN_JOBS_DATABASE_URL")
        yield {name: server.create() for name in names}


def _fill_elsewhere(uri: str, environment: dict[str, str], runs: int, steps: int) -> None:
    """In a process of its own: clients of the double read their environment when they start."""
    script = "from benchmarks.control_plane_store import fill; "
    script += f"fill({uri!r}, runs={runs}, steps={steps})"
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        check=True,
    )


@contextmanager
def _mlflow(folder: Path, uri: str, models: int, versions: int) -> Iterator[str]:
    python = _mlflow_environment()
    filler = REPOSITORY / "benchmarks" / "control_plane_mlflow.py"
    subprocess.run([python, filler, uri, str(models), str(versions)], check=True)
    port = _free_port()
    arguments = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--backend-store-uri", uri]
    with (folder / "mlflow.log").open("w") as log:
        process = subprocess.Popen([python, *arguments], stdout=log, stderr=log, cwd=folder)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                time.sleep(0.5)
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    continue
            else:
                raise RuntimeError(f"MLflow did not start: {(folder / 'mlflow.log').read_text()}")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def _mlflow_environment() -> str:
    """MLflow's own environment, made where it is missing: it wants other versions than ours."""
    python = MLFLOW_FOLDER / "bin" / "python"
    stamp = MLFLOW_FOLDER / ".made"
    packages = "\n".join(MLFLOW_PACKAGES)
    if not stamp.exists() or stamp.read_text() != packages:
        shutil.rmtree(MLFLOW_FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", MLFLOW_FOLDER], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *MLFLOW_PACKAGES]
        subprocess.run(install, check=True)
        stamp.write_text(packages)
    return str(python)


def _mlflow_version() -> str:
    asked = [
        str(MLFLOW_FOLDER / "bin" / "python"),
        "-c",
        "import mlflow; print(mlflow.__version__)",
    ]
    found = subprocess.run(asked, capture_output=True, text=True, check=True)
    return f"{PEER} {found.stdout.strip()}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _print(rows: list[Row]) -> None:
    table = Table("row", "clients", "p50 ms", "p99 ms", "per s", "ratio", "budget")
    for row in rows:
        if row["clients"] is None:
            told = (
                f"{row['seconds']} s"
                if "core_share" not in row
                else (f"{row['core_share']:.2%} of a core, {row['resident_bytes'] / 1e6:.0f} MB")
            )
            table.add_row(row["row"], "", "", told, "", "", "")
            continue
        shown = (
            row[key] for key in ("clients", "p50_ms", "p99_ms", "per_second", "ratio", "budget")
        )
        table.add_row(row["row"], *("" if value is None else str(value) for value in shown))
    Console(width=130).print(table)


if __name__ == "__main__":
    sys.exit(main())
