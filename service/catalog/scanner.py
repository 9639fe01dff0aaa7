"""Scanner that notices changes of the store which no job has announced."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from cairn.service.catalog.refresh import Index
from cairn.storage.errors import StorageError
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

REST: Final = 200
"""Pause after a scan, as a multiple of its CPU time: 0.5 % of a core."""

WAIT: Final = 10
"""Shortest pause after the scan of a disk, as a multiple of its duration."""


def rest_after(uri: StoreURI, took: float, worked: float) -> float:
    """Return the shortest pause after a scan of a root, in seconds; pure.

    On a disk the CPU time counts: a scan that only waits for a busy machine is cheap, and a long
    pause would make lists stale. In a bucket the duration counts, since it is as many requests,
    however little CPU time they take.

    Args:
        uri: Address of the root.
        took: Duration of the scan, in seconds.
        worked: CPU time of all threads of this process meanwhile, in seconds.
    """
    if uri.scheme != "file":
        return REST * took
    return max(REST * min(took, worked), WAIT * took)


class Scanner:
    """Thread that refreshes every root again and again."""

    def __init__(self, index: Index, roots: Mapping[str, StoreURI], seconds: float) -> None:
        """Prepare the thread.

        Args:
            index: Index to refresh.
            roots: Current URIs by name.
            seconds: Shortest interval between two scans; 0: never scan.
        """
        self._index = index
        self._roots = roots
        self._seconds = seconds
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._scan, name="cairn-scanner", daemon=True)

    def start(self) -> None:
        """Start, with a first scan."""
        if self._seconds:
            self._thread.start()

    def wake(self) -> None:
        """Scan now: roots were added or removed."""
        self._woken.set()

    def close(self) -> None:
        """Stop, and wait for a scan under way; a server that could not start has none."""
        self._stop.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _scan(self) -> None:
        looked_at: set[str] = set()
        while not self._stop.is_set():
            self._woken.clear()
            roots = dict(self._roots.items())
            # A scan under way may have written rows after its root was removed.
            for root in looked_at - roots.keys():
                try:
                    self._index.drop(root)
                except SQLAlchemyError as exc:
                    text = "root %s was removed, and its index is still there: %s"
                    logger.warning(text, root, exc)
            looked_at = {*roots}
            looks = [
                self._scan_root(root, uri) for root, uri in roots.items() if not self._stop.is_set()
            ]
            if not self._stop.is_set():
                self._woken.wait(max(self._seconds, sum(looks)))

    def _scan_root(self, root: str, uri: StoreURI) -> float:
        """Scan a root, and return the pause after it, in seconds."""
        began, worked = time.monotonic(), time.process_time()
        try:
            self._index.scan_in_turn(root, uri, self._seconds)
        except (StorageError, SQLAlchemyError) as exc:
            logger.warning("root %s was not looked at: %s", root, exc)
        except Exception:  # the thread must survive: the next scan may succeed
            logger.exception("root %s was not looked at", root)
        return rest_after(uri, time.monotonic() - began, time.process_time() - worked)
