"""The processes that the demo starts and ends: the control plane and a GCS-protocol server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

BUCKET = "cairn-demo"


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
    """Yields the URL of a fresh control plane, the seconds until it answered, and its process."""
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "service.cli", "serve",
        "--root", root, "--data-dir", str(folder / "control-plane"), "--port", str(port),
    ]  # fmt: skip
    log = folder / "control-plane.log"
    began = time.perf_counter()
    with _process(command, log, environment) as process:
        while True:
            try:
                if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.perf_counter() - began > 60:
                raise RuntimeError(f"the control plane did not answer at {url}; see {log}")
            time.sleep(0.05)
        yield url, time.perf_counter() - began, process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
