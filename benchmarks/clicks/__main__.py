"""Counts clicks in Cairn's dashboard and, where an environment has MLflow, in MLflow's.

    python -m benchmarks.clicks --mlflow /path/to/environment/bin/python

Without `--mlflow` its counts stay as they are. The table goes to `results/clicks.json`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from playwright.sync_api import expect

from benchmarks.clicks import cairn_pages, mlflow_pages
from benchmarks.clicks.hand import WAIT_MS, chromium, count, opened
from examples.demo.servers import control_plane

RESULTS = Path(__file__).resolve().parent.parent / "results" / "clicks.json"
START_SECONDS = 120


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mlflow", type=Path, help="the python of an environment that has MLflow")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    expect.set_options(timeout=WAIT_MS)
    before: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    counts = {name: before[name] | {"tasks": _tasks(before, name)} for name in before.get("of", [])}
    with tempfile.TemporaryDirectory(prefix="cairn-") as name, chromium() as browser:
        folder = Path(name)
        cairn_pages.make_store(folder / "runs")
        with (
            control_plane(str(folder / "runs"), folder, {}, port=0) as (url, _, _),
            opened(browser, url) as page,
        ):
            tasks = count(page, cairn_pages.JOURNEYS)
        counts["cairn"] = _found(importlib.metadata.version("cairn-checkpoints"), tasks)
        if options.mlflow is not None:
            with mlflow_server(options.mlflow, folder) as url, opened(browser, url) as page:
                mlflow_pages.settle(page)
                tasks = count(page, mlflow_pages.JOURNEYS)
            counts["mlflow"] = _found(_version(options.mlflow), tasks)
    rows = table(counts)
    options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows["rows"]:
        print(row)
    return 0


def table(counts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is written: whose page, in which version and when, and a row for each task."""
    rows = [
        {"row": task, **{name: found["tasks"].get(task) for name, found in counts.items()}}
        for task in cairn_pages.JOURNEYS
    ]
    of = {name: {"version": one["version"], "date": one["date"]} for name, one in counts.items()}
    return {"of": list(counts), **of, "rows": rows}


def _tasks(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {row["row"]: row[name] for row in results["rows"]}


def _found(version: str, tasks: dict[str, Any]) -> dict[str, Any]:
    return {"version": version, "date": datetime.date.today().isoformat(), "tasks": tasks}


def _version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('mlflow'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextmanager
def mlflow_server(python: Path, folder: Path) -> Iterator[str]:
    """MLflow on SQLite, with the contents that are counted with.

    Raises:
        TimeoutError: it does not answer.
        subprocess.CalledProcessError: it does not take the contents.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    environment.pop("PYTHONPATH", None)
    store = [f"--backend-store-uri=sqlite:///{folder}/mlflow.sqlite"]
    store += [f"--artifacts-destination={folder}/artifacts", "--workers=1"]
    with (folder / "mlflow.log").open("w") as log:
        server = subprocess.Popen(
            [python, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", *store],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it starts workers, which end with it
        )
        try:
            _wait(url, folder / "mlflow.log")
            contents = Path(__file__).with_name("mlflow_contents.py")
            subprocess.run([python, contents, url], check=True, env=environment, stderr=log)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait(url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer; it said:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
