"""A cheap way to see that nothing changed in a run on a local disk: its folders' times.

Everything that changes what is listed (a manifest, an alias, an attempt, a tombstone) comes into
its folder by a new name or a rename, and either moves the folder's modification time.
"""

import os
import time
from dataclasses import dataclass, field
from typing import Final

from cairn.storage.runs import ALIASES, ATTEMPTS, MANIFESTS, RUN_FILE, TRASH
from cairn.storage.store import StoreURI

# A change within one tick of the file system's clock leaves no trace in a time taken between; the
# coarsest clock in use (FAT) has ticks of two seconds.
SETTLED_NANOSECONDS: Final = 2_500_000_000
_WATCHED: Final = (
    RUN_FILE,
    MANIFESTS,
    ATTEMPTS,
    ALIASES,
    TRASH,
)


@dataclass(frozen=True)
class Stamp:
    """What the folders looked like; equal stamps of which the first was settled mean no change.

    Attributes:
        times: Inode and modification time of every watched name; None: it does not exist.
        settled: The last change was long enough before this look.
    """

    times: tuple[tuple[int, int] | None, ...]
    settled: bool = field(compare=False)


def take_stamp(run: StoreURI) -> Stamp | None:
    """The stamp of a run; None for a store whose folders tell nothing."""
    if run.scheme != "file":
        return None
    now = time.time_ns()
    times = tuple(_look(os.path.join(run.local_path, name)) for name in _WATCHED)
    newest = max((entry[1] for entry in times if entry is not None), default=0)
    return Stamp(times, settled=newest < now - SETTLED_NANOSECONDS)


def _look(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
