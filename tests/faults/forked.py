"""Children forked from a driver that has imported everything and used nothing of it.

Such a child begins to work within milliseconds, and may be killed at any of its instructions. The
driver itself must stay clean: no JAX backend and no TensorStore, whose threads no fork survives.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.devices import xla_flags
from tests.programs.program import run

ROOT = Path(__file__).parents[2]
DEVICES = 4

ERROR = "error"
"""What a child tells of the exception that ends it: [ERROR, text]."""

_FORK = multiprocessing.get_context("fork")


class Told:
    """A child's end of the line to its driver: JSON in both directions."""

    def __init__(self, line: Connection, driver: int) -> None:
        self._line = line
        self._driver = driver

    def tell(self, *event: Any) -> None:
        """Say something to the driver, in a message that arrives whole or not at all."""
        self._line.send_bytes(json.dumps(event).encode())

    def asked(self) -> Iterator[list[Any]]:
        """What the driver says, until it hangs up."""
        while (message := _received(self._line)) is not None:
            yield message

    @property
    def is_orphan(self) -> bool:
        """Whether the driver is gone: nobody would end this child then."""
        return os.getppid() != self._driver


class Forked:
    """A child that does `work(told, *arguments)`, and what it tells; killed at the end if alive."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._line, theirs = _FORK.Pipe()
        self.process = _FORK.Process(
            target=_child, args=(work, self._line, theirs, os.getpid(), arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.join()
        self._line.close()

    def say(self, *message: Any) -> None:
        """Send the child a message."""
        self._line.send_bytes(json.dumps(message).encode())

    def ask(self, *message: Any) -> Any:
        """What the child says to a message.

        Raises:
            RuntimeError: it is gone.
        """
        self.say(*message)
        answer = _received(self._line)
        if answer is None:
            raise RuntimeError("the child that looks at the store is gone; see stderr")
        return answer[0]

    def event(self, seconds: float) -> list[Any] | None:
        """The next thing that the child tells; None if it ended first, or took longer."""
        return _received(self._line) if self._line.poll(max(0.0, seconds)) else None

    def events(self, seconds: float) -> Iterator[list[Any]]:
        """What the child tells from now on for so many seconds, or until it ends."""
        end = time.monotonic() + seconds
        while (event := self.event(end - time.monotonic())) is not None:
            yield event

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def kill(self) -> int:
        """Kill the child; its exit status, which is -9 unless it had ended by itself."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def ended(self, seconds: float) -> int | None:
        """The exit status of a child that ends by itself; None if it still runs then."""
        self.process.join(seconds)
        return self.process.exitcode


def _child(
    work: Callable[..., None], others: Connection, line: Connection, driver: int, arguments: Any
) -> None:
    others.close()
    told = Told(line, driver)
    try:
        work(told, *arguments)
    except BaseException as exc:
        told.tell(ERROR, f"{type(exc).__name__}: {exc}")
        raise


def _received(line: Connection) -> list[Any] | None:
    try:
        return json.loads(line.recv_bytes())
    except (EOFError, OSError):  # the other end is closed, maybe in the middle of a message
        return None


def warm(root: str) -> None:
    """Import what the first use of a store imports, once for all children."""
    if root.startswith("gs://"):
        importlib.import_module("gcsfs")
    if root.startswith("s3://"):
        importlib.import_module("botocore.session")


def drive(
    module: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    seconds: float,
    through: Sequence[str] = (),
) -> Any:
    """What the driver `tests.faults.<module>` finds, run as a process of its own.

    Args:
        module: the driver.
        arguments: its own, JSON.
        environment: variables on top of this process's.
        seconds: how long it may take.
        through: a module, with arguments, that runs the driver.

    Raises:
        AssertionError: it failed; its stderr is quoted.
    """
    return _finding(
        run(
            ["-m", *through, f"tests.faults.{module}", json.dumps(arguments)],
            env=variables(environment),
            cwd=ROOT,
            timeout=seconds,
        )
    )


def variables(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a driver, with what is `added`."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(DEVICES),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONPATH": str(ROOT),
        **added,
    }


def _finding(ended: subprocess.CompletedProcess[str]) -> Any:
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout)
