"""What the demo takes, told and looked for before it begins."""

import shutil
from pathlib import Path
from typing import Final

from cairn.service.sizes import size_text

MINUTES: Final = 6  # on two cores that do nothing else
DISK_BYTES: Final = 6 * 10**9
MEMORY_BYTES: Final = 6 * 10**9

_MEMORY: Final = Path("/proc/meminfo")
_LIMIT, _USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))


def told(folder: Path) -> str:
    """What it takes, in one line."""
    return (
        f"It takes up to {MINUTES} minutes on 2 cores, {size_text(DISK_BYTES)} of disk in {folder} "
        f"and {size_text(MEMORY_BYTES)} of memory."
    )


def lacking(folder: Path) -> list[str]:
    """What there is too little of, and what helps.

    Args:
        folder: The demo's, which is there.
    """
    found = []
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        found.append(
            f"{folder}: expected {size_text(DISK_BYTES)} of free disk, found {size_text(free)}; "
            "make room, or name a folder on another disk: make demo DEMO_DIR=/other/disk/demo"
        )
    memory = free_memory()
    if memory is not None and memory < MEMORY_BYTES:
        found.append(
            f"expected {size_text(MEMORY_BYTES)} of memory to be had, found {size_text(memory)}; "
            "end other programs"
        )
    return found


def free_memory(memory: Path = _MEMORY, limit: Path = _LIMIT, used: Path = _USED) -> int | None:
    """Bytes that can be had, of the machine and, if smaller, of a container; None if nobody says.

    Args:
        memory: What Linux says of the machine.
        limit: What a container may have.
        used: What it has.
    """
    try:
        lines = memory.read_text().splitlines()
        (free,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return None
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
