"""Has the n-th call fail that a program makes below a folder; see `failing_calls.c`."""

import contextlib
import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_suffix(".c")
CHANGE, READ = 1, 2
KILL: Final = -1

_LOG_BYTES: Final = 1 << 20


class _Fields(ctypes.Structure):
    """`struct control` of the library."""

    _fields_ = (
        ("folder", ctypes.c_char * 1024),
        ("kinds", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("at", ctypes.c_int64),
        ("lasts", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("failed", ctypes.c_int64),
        ("logged", ctypes.c_int64),
        ("log", ctypes.c_char * _LOG_BYTES),
    )


class Call(NamedTuple):
    """A call of the C library."""

    number: int
    name: str
    path: str


class Control:
    """What the library is to do in all processes that have this file, and what it saw."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(ctypes.sizeof(_Fields))
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_Fields))
        self._fields = _Fields.from_buffer(self._memory)
        self.path = path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a program whose calls are to be seen."""
        return {"LD_PRELOAD": str(library()), "CAIRN_FAULT_CONTROL": str(self.path)}

    @contextlib.contextmanager
    def armed(
        self, folder: Path, *, kinds: int, error: int = 0, at: int = 1, lasts: bool = False
    ) -> Iterator[None]:
        """Count calls from now on, and have one fail.

        Args:
            folder: of what they touch.
            kinds: `CHANGE`, `READ` or both.
            error: errno of the failure; `KILL`; 0: none fails.
            at: which call fails, from 1 on.
            lasts: whether all calls after it fail, too.
        """
        fields = self._fields
        fields.calls = fields.failed = fields.logged = 0
        fields.folder = os.fsencode(folder.resolve())
        fields.kinds, fields.error, fields.lasts = kinds, error, lasts
        fields.at = at
        try:
            yield
        finally:
            self.disarm()

    def disarm(self) -> None:
        """Count no more; also what a process began that was killed."""
        self._fields.at = 0

    @property
    def failed(self) -> int:
        """How many calls failed, or killed, since it was armed."""
        return self._fields.failed

    def calls(self) -> list[Call]:
        """All calls since it was armed; without those of threads that ended within the log."""
        start = _Fields.log.offset
        text = os.fsdecode(self._memory[start : start + min(self._fields.logged, _LOG_BYTES)])
        # Such a thread had taken its place in the log, and had yet to write there.
        lines = [line.split(" ", 2) for line in text.replace("\0", "").splitlines()]
        return [Call(int(number), name, path) for number, name, path in lines]


def library() -> Path:
    """The library, compiled once for each of its sources.

    Raises:
        RuntimeError: there is no compiler, or it refuses.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(gettempdir()) / f"cairn-failing-calls-{os.getuid()}-{digest}.so"
    if built.exists():
        return built
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            f"{SOURCE}: expected a C compiler on PATH, found none. Install one (Debian: sudo "
            "apt-get install gcc libc6-dev), or run `make faults` as root, which does."
        )
    made = built.with_suffix(f".{os.getpid()}")
    ended = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", made, SOURCE, "-ldl"],
        capture_output=True,
        text=True,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{SOURCE}: {compiler} refuses it:\n{ended.stderr}")
    made.replace(built)  # several workers may be at it
    return built


def kind_of(path: str) -> str:
    """A path without what is random in it, for reports."""
    return re.sub(r"[0-9a-f]{16,64}", "…", path)
