"""A small disk of a process's own: a tmpfs that only it sees, and that goes away with it."""

import functools
import os
import subprocess
from pathlib import Path

_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'


def on_small_disk(folder: Path, size: str, *command: str) -> list[str]:
    """The command that runs `command` with a tmpfs of `size` ("3m") mounted at `folder`."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", _MOUNT, "sh", size, str(folder), *command]


@functools.cache
def can_mount(folder: Path = Path("/tmp")) -> bool:
    """Whether this user may do that on this machine; containers often forbid it."""
    try:
        tried = subprocess.run(on_small_disk(folder, "1m", "true"), capture_output=True)
    except FileNotFoundError:
        return False
    return tried.returncode == 0
