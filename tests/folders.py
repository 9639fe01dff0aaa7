"""Where the tests' files lie: in memory, where there is room for them, and on a disk if need be."""

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "cairn-tests-"
DISK = "TESTS_DISK"
"""The variable that names a folder on a disk, where `TMPDIR` names one in memory."""

NEEDED_BYTES = 6 << 30
"""Of all files of all tests at once."""


def in_memory() -> dict[str, str]:
    """Variables of a run whose `TMPDIR` is a new folder in memory; none where there is no room.

    A disk's file system takes up to a third of the CPU of a test of storage, and more of its time,
    to make files and to wait until each is safe. What is given a TMPDIR lies there instead.
    """
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return {}
    for left in MEMORY.glob(f"{PREFIX}*"):  # by runs that were killed
        if not Path("/proc", left.name.removeprefix(PREFIX).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    if os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:  # tests start scripts of theirs
        return {}
    if min(shutil.disk_usage(MEMORY).free, _available()) < NEEDED_BYTES:
        return {}
    disk = tempfile.gettempdir()
    tempfile.tempdir = None  # which remembers what the variable was
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY)
    os.chmod(folder, 0o711)  # databases run as another user, in folders of theirs
    return {"TMPDIR": folder, DISK: disk}


def remove() -> None:
    """Remove the folder in memory that this process has made."""
    for folder in MEMORY.glob(f"{PREFIX}{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _available() -> int:
    """Bytes that programs can have."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    return 0
