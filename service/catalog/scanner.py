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
            roots: Their URIs by name.
            seconds: From one look to the next, at least; 0: there is none.
        """
        self._index = index
        self._roots = dict(roots)
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scan, name="cairn-scanner", daemon=True)

    def start(self) -> None:
        """Begin with a first look."""
        if self._seconds:
            self._thread.start()

    def close(self) -> None:
        """End; a look under way is waited for."""
        self._stop.set()
        if self._seconds:
            self._thread.join()

    def _scan(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            for root, uri in self._roots.items():
                if not self._stop.is_set():
                    self._scan_root(root, uri)
            self._stop.wait(max(self._seconds, REST * (time.monotonic() - began)))

    def _scan_root(self, root: str, uri: StoreURI) -> None:
        try:
            self._index.scan_in_turn(root, uri, self._seconds)
        except (StorageError, SQLAlchemyError) as exc:
            logger.warning("root %s was not looked at: %s", root, exc)
        except Exception:  # the next look may go better; without any the catalog would grow old
            logger.exception("root %s was not looked at", root)
