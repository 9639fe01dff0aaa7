"""How far the clock of this host is from that of a store, which other writers' hosts go by, too."""

import os
import secrets
from typing import Final

from cairn.storage.errors import translate
from cairn.storage.soundness.record import probe_name
from cairn.storage.store import Clock, StoreURI, bucket_time, utc_now

__all__ = ["clock_ahead"]

_TOLD_EACH: Final = 1.0
"""A bucket tells whole seconds."""


def clock_ahead(folder: StoreURI, *, clock: Clock = utc_now) -> float | None:
    """Seconds by which this host's clock is ahead of the store's, less what asking took.

    On a disk a file is made for it, and removed: the disk of another host tells that host's time.

    Args:
        folder: of the store, which is there already if it is on a disk.
        clock: tells this host's time.

    Returns:
        None if the store tells no time.

    Raises:
        StorageError: it gives no answer, or can't be written.
    """
    before = clock().timestamp()
    match folder.scheme:
        case "file":
            told, precision = _time_of_disk(folder), 0.0
        case "gs":
            told, precision = bucket_time(folder), _TOLD_EACH
        case _:
            return None
    after = clock().timestamp()
    if before > told + precision:
        return before - told - precision
    return min(0.0, after - told)


def _time_of_disk(folder: StoreURI) -> float:
    path = os.path.join(
        folder.local_path, probe_name(int(utc_now().timestamp()), secrets.token_hex(8))
    )
    try:
        os.mkdir(path)
        try:
            return os.stat(path).st_mtime
        finally:
            os.rmdir(path)
    except OSError as exc:
        raise translate(exc, path=folder) from exc
