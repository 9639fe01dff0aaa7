"""Offset between this host's clock and the store's, an estimate for other writers' clocks."""

import os
import secrets
from typing import Final

from cairn.storage.errors import translate_error
from cairn.storage.store.buckets import bucket_driver
from cairn.storage.store.clock import Clock, utc_now
from cairn.storage.store.uri import StoreURI
from cairn.storage.store_checks.record import probe_name

__all__ = ["seconds_ahead"]

_TOLD_EACH: Final = 1.0
"""Precision of a bucket's time in seconds."""


def seconds_ahead(folder: StoreURI, *, clock: Clock = utc_now) -> float | None:
    """Return the seconds by which this host's clock is certainly ahead of the store's.

    The duration of the request counts against the difference. On a disk it creates and removes a
    folder: a network disk stamps it with its own host's time.

    Args:
        folder: a folder of the store; on a disk it must exist.
        clock: this host's clock.

    Returns:
        Seconds, negative if behind; None if the store has no clock.

    Raises:
        StorageError: the store gives no answer, or can't be written.
    """
    before = clock().timestamp()
    match folder.scheme:
        case "file":
            store_time, precision = _time_of_disk(folder), 0.0
        case "memory":
            return None
        case _:
            store_time, precision = bucket_driver(folder).bucket_time(folder), _TOLD_EACH
    after = clock().timestamp()
    if before > store_time + precision:
        return before - store_time - precision
    return min(0.0, after - store_time)


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
        raise translate_error(exc, path=folder) from exc
