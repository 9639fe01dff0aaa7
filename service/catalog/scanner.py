"""Looks at the store on its own: what nobody announced is found all the same."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from cairn.service.catalog.refresh import Index
from cairn.storage.errors import StorageError
from cairn.storage.store import StoreURI

logger = logging.getLogger(__name__)

REST: Final = 200
"""So many times as long as a look worked, nobody looks: of a core, that is half a hundredth."""

WAIT: Final = 10
"""So many times as long as a look at a disk took, nobody looks, however little it has worked."""


def rest_after(uri: StoreURI, took: float, worked: float) -> float:
    """How long nobody should look at a root after a look at it; pure.

    A look at a disk that waits for a busy machine costs nobody anything, and lists would grow old.
    One at a bucket is as many requests, however little of them is work.

    Args:
        uri: Of the root.
        took: Seconds that the look took.
        worked: Seconds that all threads of this process worked meanwhile.
    """
    if uri.scheme != "file":
        return REST * took
    return max(REST * min(took, worked), WAIT * took)


class Scanner:
    """Brings the catalog up to date with every root, again and again, in a thread of its own."""

    def __init__(self, index: Index, roots: Mapping[str, StoreURI], seconds: float) -> None:
        """Of these roots.

        Args:
            index: What looks.
            roots: Their URIs by name, as they are at each look.
            seconds: From one look to the next, at least; 0: there is none.
        """
        self._index = index
        self._roots = roots
        self._seconds = seconds
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._scan, name="cairn-scanner", daemon=True)

    def start(self) -> None:
        """Begin with a first look."""
        if self._seconds:
            self._thread.start()

    def wake(self) -> None:
        """Look now: there are other roots than at the last look."""
        self._woken.set()

    def close(self) -> None:
        """End; a look under way is waited for."""
        self._stop.set()
        self._woken.set()
        if self._seconds:
            self._thread.join()

    def _scan(self) -> None:
        looked_at: set[str] = set()
        while not self._stop.is_set():
            self._woken.clear()
            roots = dict(self._roots.items())
            for root in looked_at - roots.keys():
                self._drop(root)
            looked_at = {*roots}
            looks = [
                self._scan_root(root, uri) for root, uri in roots.items() if not self._stop.is_set()
            ]
            if not self._stop.is_set():
                self._woken.wait(max(self._seconds, sum(looks)))

    def _scan_root(self, root: str, uri: StoreURI) -> float:
        """Look at a root; how long nobody should afterwards."""
        began, worked = time.monotonic(), time.process_time()
        try:
            self._index.scan_in_turn(root, uri, self._seconds)
        except (StorageError, SQLAlchemyError) as exc:
            logger.warning("root %s was not looked at: %s", root, exc)
        except Exception:  # the next look may go better; without any the catalog would grow old
            logger.exception("root %s was not looked at", root)
        return rest_after(uri, time.monotonic() - began, time.process_time() - worked)

    def _drop(self, root: str) -> None:
        """What a look has found that was under way when the root was removed."""
        try:
            self._index.drop(root)
        except SQLAlchemyError as exc:
            logger.warning("root %s was removed, and its index is still there: %s", root, exc)
