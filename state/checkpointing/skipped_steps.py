"""Damaged steps that loads in this process skipped.

A load only reads. The next save begins an attempt that continues from the newest undamaged step,
and so supersedes the skipped steps, even if a new verification has found them undamaged.
"""

from collections.abc import Iterable

from cairn.storage.store.uri import StoreURI

__all__ = ["pop_skipped", "record_skipped"]

_skipped: dict[str, frozenset[tuple[int, int]]] = {}


def record_skipped(run: StoreURI, steps: Iterable[tuple[int, int]] = ()) -> None:
    """Record that a load allowed to skip damaged steps skipped `steps`: (step, attempt) of each."""
    _skipped[str(run)] = frozenset(steps)


def pop_skipped(run: StoreURI) -> frozenset[tuple[int, int]] | None:
    """Return and clear the steps that the last load skipped; None if no load might skip any."""
    return _skipped.pop(str(run), None)
