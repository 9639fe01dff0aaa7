"""The processes that the demo starts and ends: the control plane and a bucket's server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

BUCKET = "cairn-demo"
BUCKETS = {"gcs": "gs", "s3": "s3"}
"""Kinds of stores that are buckets, and their schemes: `tests.<kind>` has a server of each."""

ANNOUNCEMENT = "cairn: http://"  # what `cairn serve` prints once it answers, with the port


Start = Callable[[list[str], Mapping[str, str], IO[str]], Any]
"""Starts Python with arguments, environment and standard error; its output goes to a pipe."""


def start_fresh(
    arguments: list[str], environment: Mapping[str, str], errors: IO[str]
) -> subprocess.Popen[str]:
    """In an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )


@contextmanager
def _process(
    arguments: list[str], log: Path, environment: Mapping[str, str], start: Start
) -> Iterator[Any]:
    with log.open("a") as errors:
        process = start(arguments, {**os.environ, **environment}, errors)
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
def store(kind: str, folder: Path, *options: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the root URI of the demo's store and the environment that reaches it.

    Args:
        kind: "file", or one of `BUCKETS` for a server of the bucket's protocol.
        folder: where it keeps what is stored.
        options: of that server's command.
    """
    if kind == "file":
        root = folder / "store"
        root.mkdir(parents=True, exist_ok=True)
        yield f"file://{root.resolve()}", {}
        return
    arguments = [
        "-m",
        f"tests.{kind}",
        "--root",
        str(folder / kind),
        "--port",
        "0",
        "--bucket",
        BUCKET,
        *options,
    ]
    with _process(arguments, folder / f"{kind}.log", {}, start_fresh) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bucket's server did not start; see {folder / f'{kind}.log'}")
        yield f"{BUCKETS[kind]}://{BUCKET}/runs", json.loads(line)["env"]


@contextmanager
def control_plane(
    root: str,
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    start: Start = start_fresh,
) -> Iterator[tuple[str, float, Any]]:
    """Yields the URL of a fresh control plane, the seconds until it answered, and its process.

    Port 0 takes any free one.
    """
    arguments = [
        "-m", "cairn", "serve",
        "--root", root, "--data-dir", str(folder / "control-plane"), "--port", str(port),
    ]  # fmt: skip
    log = folder / "control-plane.log"
    began = time.perf_counter()
    with _process(arguments, log, environment, start) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANNOUNCEMENT):
                url = line.removeprefix("cairn: ").strip()
                break
        else:
            raise RuntimeError(f"the control plane did not start; see {log}")
        httpx.get(f"{url}/readyz", timeout=60).raise_for_status()
        yield url, time.perf_counter() - began, process
