"""Damaged steps that loads in this process skipped: the next save continues below them.

A load only reads. The next save's attempt continues from the newest other sound step and thereby
supersedes the skipped steps, even if they are found sound meanwhile.
"""

from collections.abc import Iterable

from cairn.storage.store.uri import StoreURI

__all__ = ["pop_skipped", "record_skipped"]

_skipped: dict[str, frozenset[tuple[int, int]]] = {}


def record_skipped(run: StoreURI, steps: Iterable[tuple[int, int]] = ()) -> None:
    """Record that a load may skip damaged steps, and skipped `steps`, (step, attempt)."""
    _skipped[str(run)] = frozenset(steps)


def pop_skipped(run: StoreURI) -> frozenset[tuple[int, int]] | None:
    """Return and clear the steps that the last load skipped; None if no load was to skip any."""
    return _skipped.pop(str(run), None)
