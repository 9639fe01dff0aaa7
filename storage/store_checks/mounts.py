"""File system type and lock options of the mount that holds a path.

Source: proc(5), `/proc/pid/mountinfo`; nfs(5), `local_lock`; mount.lustre(8), `localflock`;
mount.cifs(8), `nobrl`; gfs2(5) and the kernel's `filesystems/ocfs2.rst`, `localflocks`.
"""

import os
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Mount", "mount_of", "mount_problems"]

_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
_LOCKS_OF_ONE_HOST: Final = {
    "nfs": {"local_lock=all", "local_lock=posix"},
    "nfs4": {"local_lock=all", "local_lock=posix"},
    "lustre": {"localflock"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
    "gfs2": {"localflocks"},
    "ocfs2": {"localflocks"},
}
"""Mount options that make TensorStore's locks invisible to other hosts."""


@dataclass(frozen=True)
class Mount:
    """Mounted file system.

    Attributes:
        point: absolute path at which it is mounted.
        kind: file system type, such as "ext4", "nfs4" or "fuse.gcsfuse".
        source: the kernel's name of what is mounted; for gcsfuse the bucket.
        options: options of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @property
    def is_in_user_space(self) -> bool:
        """True for a FUSE file system; "fuseblk" is a disk and does not count."""
        return self.kind == "fuse" or self.kind.startswith("fuse.")

    @property
    def local_locks(self) -> list[str]:
        """Options that make its locks invisible to other hosts; empty if there are none."""
        return sorted(self.options & _LOCKS_OF_ONE_HOST.get(self.kind, set()))


def mount_of(path: str) -> Mount | None:
    """Return the mount of `path`, which need not exist; None if the kernel doesn't list mounts."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:  # not Linux, or a sandbox without it
        return None
    real = os.path.join(os.path.realpath(path), "")
    closest = None
    # A later mount hides an earlier one at the same point.
    for line in lines:
        mount_fields, _, filesystem_fields = line.partition(" - ")
        fields, rest = mount_fields.split(" "), filesystem_fields.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        options = {*fields[5].split(","), *rest[2].split(",")}
        mount = Mount(_unescape(fields[4]), rest[0], _unescape(rest[1]), frozenset(options))
        if real.startswith(os.path.join(mount.point, "")) and (
            closest is None or len(mount.point) >= len(closest.point)
        ):
            closest = mount
    return closest


def _unescape(text: str) -> str:
    """Return a decoded field of mountinfo, which escapes blanks and backslashes as octal digits."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


def mount_problems(mount: Mount) -> list[str]:
    """Return the problems that the mount's type and options show, one line each."""
    if mount.kind == "fuse.gcsfuse" or "subtype=gcsfuse" in mount.options:
        return [
            f"the mount {mount.point}: expected a file system with atomic renames and with locks "
            f"that all hosts see, found the bucket {mount.source} through gcsfuse; "
            f"give the bucket itself, gs://{mount.source}/…"
        ]
    return [
        f"the mount {mount.point} ({mount.kind}): expected locks that all hosts see, found "
        f"the option {option}, by which they are this host's alone; mount it without"
        for option in mount.local_locks
    ]
