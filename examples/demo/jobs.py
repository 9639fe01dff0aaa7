"""Starts training jobs as processes of their own and follows the events that they print."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Jobs:
    """Where the demo's training jobs run."""

    folder: Path
    environment: Mapping[str, str]

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a job; its diagnostics go to `<folder>/<name>.log`."""
        return self._start(name, "examples.demo.job", arguments)

    def _start(self, name: str, module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        environment = {
            # The compiled step is kept, as clusters do, so that a restart does not compile again.
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.resolve() / "compilation-cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5",
            # glibc keeps 0.7 GB of what was freed, unless large blocks are mapped one by one.
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_MMAP_THRESHOLD_": "1048576",
            **os.environ,
            **self.environment,
        }
        with self._log(name).open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _end(self, name: str, process: subprocess.Popen[str]) -> None:
        if process.wait() != 0:
            tail = "\n".join(self._log(name).read_text().splitlines()[-25:])
            raise RuntimeError(
                f"{name} exited with {process.returncode}; end of {self._log(name)}:\n{tail}"
            )

    def call(self, name: str, module: str, *arguments: str) -> Event:
        """Runs a program that prints one JSON object and returns that.

        Raises:
            RuntimeError: It exited with another status than zero.
        """
        process = self._start(name, module, arguments)
        found = list(events(process))
        self._end(name, process)
        return found[-1]

    def run(self, name: str, *arguments: str, on_event: Callable[[Event], None]) -> list[Event]:
        """Runs a job to its end and returns its events.

        Raises:
            RuntimeError: The job exited with another status than zero.
        """
        process = self.start(name, *arguments)
        seen = []
        for event in events(process):
            seen.append(event)
            on_event(event)
        self._end(name, process)
        return seen


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yields the events of a job until it ends."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith("{"):
                yield json.loads(line)


def losses(seen: list[Event]) -> dict[int, str]:
    """Returns the exact loss of each step, as hexadecimal floats."""
    return {event["step"]: event["exact"] for event in seen if event["event"] == "step"}
