"""Starts a Python program in a process of its own, as `subprocess` does, but forked."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Any, Self

from tests.programs.interpreter import MESSAGE_BYTES

REPOSITORY = Path(__file__).parents[2]
SHARED = "TESTS_INTERPRETER"
"""The variable that names a folder, for the interpreter of all processes of a run."""
FORKED_BEFORE = "JAX_"
"""Variables so named are read when JAX is imported, which was done before."""


class Program:
    """A program under way; what is used of `subprocess.Popen`, under the same names.

    Args:
        arguments: of the interpreter: `-m module ...`, `-c code ...` or `script.py ...`.
        env: its environment; this process's own by default.
        cwd: its folder; this process's own by default.
        stdin: `subprocess.PIPE` for one that stays open until `with` ends, or an open descriptor;
            nothing by default.
        stdout: `subprocess.PIPE`, `DEVNULL`, an open file, or None for this process's own.
        stderr: the same, or `subprocess.STDOUT`.

    Raises:
        ValueError: `env` holds other `JAX_` variables than this process.
    """

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        self.args = [os.fspath(argument) for argument in arguments]
        self.returncode: int | None = None
        self._told: list[str] | None = None
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = (
            (None, os.dup(out)) if stderr == subprocess.STDOUT else _stream(stderr, 2)
        )
        request = {
            "arguments": self.args,
            "environment": dict(os.environ if env is None else env),
            "folder": os.path.abspath(cwd or "."),
        }
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source, self.stdin = _source(stdin)
        hand_on(request, [theirs.fileno(), source, out, err])
        for file in (source, out, err):
            os.close(file)
        theirs.close()
        self.pid: int = json.loads(self._line.recv(64))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                status = self._line.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            assert status, "the interpreter that started this program is gone"
            self.returncode = json.loads(status)
            self._line.close()
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to the pipes until it ended: standard output and error.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self._told is None:
            self._told = ["", ""]
            streams = [(0, self.stdout), (1, self.stderr)]
            readers = [
                threading.Thread(target=self._read, args=(index, stream), daemon=True)
                for index, stream in streams
                if stream is not None
            ]
            for reader in readers:
                reader.start()
            self.wait(timeout)
            for reader in readers:
                reader.join(timeout)
        out, err = self._told
        return out, err

    def _read(self, index: int, stream: IO[str]) -> None:
        assert self._told is not None
        with stream:
            self._told[index] = stream.read()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def run(
    arguments: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; its status, standard output and error.

    Raises:
        subprocess.TimeoutExpired: it still ran after so many seconds, and was killed.
    """
    with Program(
        arguments, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        finally:
            program.kill()
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


def hand_on(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Has a program forked.

    Args:
        request: its `arguments`, `environment` and `folder`.
        files: a socket, over which its pid and then its exit status are told, and its streams.

    Raises:
        ValueError: its environment holds other `JAX_` variables than this process.
    """
    interpreter, imported_with = _interpreter()
    _check(request["environment"], imported_with)
    message = json.dumps(request).encode()
    assert len(message) < MESSAGE_BYTES, len(message)
    socket.send_fds(interpreter, [message], list(files))


def _source(chosen: int | None) -> tuple[int, IO[str] | None]:
    """The program's end of its standard input, and ours, if it has one."""
    if chosen == subprocess.PIPE:
        theirs, ours = os.pipe()
        return theirs, open(ours, "w", encoding="utf-8")
    return os.open(os.devnull, os.O_RDONLY) if chosen is None else os.dup(chosen), None


def _stream(chosen: int | IO[Any] | None, own: int) -> tuple[IO[str] | None, int]:
    """Our end of a stream, if it has one, and the program's."""
    if chosen == subprocess.PIPE:
        ours, theirs = os.pipe()
        return open(ours, encoding="utf-8"), theirs
    if chosen == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    if chosen is None:
        return None, os.dup(own)
    return None, os.dup(chosen if isinstance(chosen, int) else chosen.fileno())


def _of_jax(variables: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in variables.items() if key.startswith(FORKED_BEFORE)}


def _check(environment: Mapping[str, str], imported_with: dict[str, str]) -> None:
    if _of_jax(environment) != imported_with:
        raise ValueError(
            f"{FORKED_BEFORE}*: expected {imported_with}, with which JAX was imported, found "
            f"{_of_jax(environment)}. Start the program with subprocess."
        )


@functools.cache
def _interpreter() -> tuple[socket.socket, dict[str, str]]:
    """Where programs are asked for, and the variables with which JAX was imported there.

    Workers of one run share an interpreter, and so do the processes that they start: the first
    that needs one starts it. It ends with the last process that has asked, and the programs of each
    with that one.
    """
    folder = os.environ.get(SHARED)
    if own := not folder:
        made = TemporaryDirectory(prefix="tests-")
        atexit.register(made.cleanup)
        folder = os.environ[SHARED] = made.name
    imported_with = zlib.crc32(repr(sorted(_of_jax(os.environ).items())).encode())
    address = os.path.join(folder, f"{imported_with:x}")
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            ours, process = _connected(address), None
        except OSError:  # nobody has begun, or all have ended
            process = _started(address)
            ours = _connected(address)

    def end() -> None:
        ours.close()
        if own and process is not None:
            process.wait()

    atexit.register(end)
    return ours, _of_jax(os.environ)


def _connected(address: str) -> socket.socket:
    asks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        asks.connect(address)
    except OSError:
        asks.close()
        raise
    return asks


def _started(address: str) -> subprocess.Popen[bytes]:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.programs.interpreter", str(listening.fileno())],
            cwd=REPOSITORY,
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
        )
