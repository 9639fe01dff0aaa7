"""Peak resident memory of this process between two moments. Linux only."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """The peak from when this is made, and how far it lies above what was resident then.

    The kernel keeps the peak itself (VmHWM), so none is missed between samples. What the page
    cache holds of written files is not resident memory of the process and does not count; pages
    of the libraries that are first touched meanwhile do.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(
            0
        )  # else the peak would hide in memory freed but not returned
        _CLEAR.write_text(_RESET_PEAK)
        self.before = _status_bytes("VmRSS")

    @property
    def peak(self) -> int:
        """Bytes resident at the worst moment so far."""
        return _status_bytes("VmHWM")

    @property
    def extra(self) -> int:
        """Bytes of the peak above what was resident before."""
        return max(0, self.peak - self.before)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS}: expected a line {name}, found none")
