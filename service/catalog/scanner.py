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
"""So many times as long as a look took, nobody looks: of a core, that is half a hundredth."""


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
            began = time.monotonic()
            roots = dict(self._roots.items())
            for root in looked_at - roots.keys():
                self._drop(root)
            looked_at = {*roots}
            for root, uri in roots.items():
                if not self._stop.is_set():
                    self._scan_root(root, uri)
            if not self._stop.is_set():
                self._woken.wait(max(self._seconds, REST * (time.monotonic() - began)))

    def _scan_root(self, root: str, uri: StoreURI) -> None:
        try:
            self._index.scan_in_turn(root, uri, self._seconds)
        except (StorageError, SQLAlchemyError) as exc:
            logger.warning("root %s was not looked at: %s", root, exc)
        except Exception:  # the next look may go better; without any the catalog would grow old
            logger.exception("root %s was not looked at", root)

    def _drop(self, root: str) -> None:
        """What a look has found that was under way when the root was removed."""
        try:
            self._index.drop(root)
        except SQLAlchemyError as exc:
            logger.warning("root %s was removed, and its index is still there: %s", root, exc)
