"""A small disk of a process's own: a tmpfs that only it sees, and that goes away with it.

    python -m tests.bad_input.disks FOLDER SIZE MODULE ...

runs a module with such a disk at the folder; the program can be forked, which a command cannot.
"""

import ctypes
import functools
import os
import runpy
import subprocess
import sys
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
"""CLONE_NEWNS and CLONE_NEWUSER of linux/sched.h."""

_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'


def on_small_disk(folder: Path, size: str, *command: str) -> list[str]:
    """The command that runs `command` with a tmpfs of `size` ("3m") mounted at `folder`."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", _MOUNT, "sh", size, str(folder), *command]


def mount(folder: str, size: str) -> None:
    """Mount a tmpfs of `size` that this process alone sees."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS | (_NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"0 {user} 1")
        (own / "gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)


@functools.cache
def can_mount(folder: Path = Path("/tmp")) -> bool:
    """Whether this user may do that on this machine; containers often forbid it."""
    try:
        tried = subprocess.run(on_small_disk(folder, "1m", "true"), capture_output=True)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


if __name__ == "__main__":
    mount(*sys.argv[1:3])
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
