"""Starts jobs of several processes on this machine, and ends them.

Every process runs `tests.multi_process.worker` with a scenario's name and arguments; it writes
what the scenario returned, or the error that ended it, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.devices import xla_flags
from tests.programs.program import Program

REPOSITORY = Path(__file__).parents[2]
LOG_TAIL = 6_000


@dataclass(frozen=True)
class Ended:
    """How one process ended.

    Attributes:
        status: its exit status; negative for a signal.
        result: what its scenario returned; None if it raised or never came that far.
        log: the end of what it wrote to stdout and stderr.
    """

    status: int
    result: Any
    log: str


@dataclass
class Job:
    """A job under way: one process per index, and what they write."""

    folder: Path
    processes: list[Program] = field(default_factory=list)

    def wait(self, seconds: float) -> list[Ended]:
        """How each process ended, in order.

        Raises:
            TimeoutError: some still run after `seconds`; all are killed, their logs are quoted.
        """
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as exc:
            running = [i for i, process in enumerate(self.processes) if process.poll() is None]
            self.kill()
            logs = "\n".join(f"--- process {i}\n{self._log(i)}" for i in range(len(self.processes)))
            raise TimeoutError(f"processes {running} still ran after {seconds} s\n{logs}") from exc
        return [self._ended(index) for index in range(len(self.processes))]

    def results(self, seconds: float) -> list[Any]:
        """What each process's scenario returned.

        Raises:
            AssertionError: a process failed; its log is quoted.
            TimeoutError: some still run after `seconds`.
        """
        ended = self.wait(seconds)
        failed = [i for i, one in enumerate(ended) if one.status != 0]
        assert not failed, "\n".join(f"--- process {i}\n{one.log}" for i, one in enumerate(ended))
        return [one.result for one in ended]

    def kill(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _ended(self, index: int) -> Ended:
        result = self.folder / f"{index}.json"
        found = json.loads(result.read_text()) if result.exists() else None
        return Ended(self.processes[index].returncode, found, self._log(index))

    def _log(self, index: int) -> str:
        return (self.folder / f"{index}.log").read_text(errors="replace")[-LOG_TAIL:]


def start(
    folder: Path,
    scenario: str,
    arguments: Mapping[str, Any],
    *,
    count: int,
    devices: int,
    environment: Mapping[str, str],
) -> Job:
    """Starts a job.

    Args:
        folder: for its logs and results; made here.
        scenario: name of a function in `tests.multi_process.scenarios`, or "module.function".
        arguments: JSON, given to the scenario in every process.
        count: of processes.
        devices: virtual CPU devices of each process.
        environment: variables on top of this process's own.
    """
    folder.mkdir(parents=True)
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        **environment,
    }
    address = f"127.0.0.1:{free_port()}"
    job = Job(folder)
    for index in range(count):
        with (folder / f"{index}.log").open("wb") as log:
            command = ["-m", "tests.multi_process.worker"]
            command += ["--coordinator", address, "--count", str(count), "--index", str(index)]
            command += ["--result", str(folder / f"{index}.json"), scenario, json.dumps(arguments)]
            job.processes.append(
                Program(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=variables
                )
            )
    return job


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
