"""The processes that the demo starts and ends: the control plane and a GCS-protocol server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

BUCKET = "cairn-demo"
ANNOUNCEMENT = "cairn: http://"  # what `cairn serve` prints once it answers, with the port


@contextmanager
def _process(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **environment},
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def store(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the root URI of the demo's store and the environment that reaches it."""
    if kind == "file":
        root = folder / "store"
        root.mkdir(parents=True, exist_ok=True)
        yield f"file://{root.resolve()}", {}
        return
    command = [
        sys.executable,
        "-m",
        "tests.gcs",
        "--root",
        str(folder / "gcs"),
        "--port",
        "0",
        "--bucket",
        BUCKET,
    ]
    with _process(command, folder / "gcs.log", {}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the GCS-protocol server did not start; see {folder / 'gcs.log'}")
        yield f"gs://{BUCKET}/runs", json.loads(line)["env"]


@contextmanager
def control_plane(
    root: str, folder: Path, environment: Mapping[str, str], port: int
) -> Iterator[tuple[str, float, subprocess.Popen[str]]]:
    """Yields the URL of a fresh control plane, the seconds until it answered, and its process.

    Port 0 takes any free one.
    """
    command = [
        sys.executable, "-m", "cairn", "serve",
        "--root", root, "--data-dir", str(folder / "control-plane"), "--port", str(port),
    ]  # fmt: skip
    log = folder / "control-plane.log"
    began = time.perf_counter()
    with _process(command, log, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANNOUNCEMENT):
                url = line.removeprefix("cairn: ").strip()
                break
        else:
            raise RuntimeError(f"the control plane did not start; see {log}")
        httpx.get(f"{url}/readyz", timeout=60).raise_for_status()
        yield url, time.perf_counter() - began, process
