"""Damaged steps of runs that this process has skipped in a load: its next save goes on below them.

A load only reads. What it skipped is set aside once the process saves, be it found sound meanwhile:
the attempt that begins then goes on from the newest other sound step. No JAX.
"""

from collections.abc import Iterable

from cairn.storage.store import StoreURI

__all__ = ["note_skip", "take_skip"]

_skipped: dict[str, frozenset[tuple[int, int]]] = {}


def note_skip(run: StoreURI, steps: Iterable[tuple[int, int]] = ()) -> None:
    """A load of the run was asked to skip damaged steps, and did skip `steps`, (step, attempt)."""
    _skipped[str(run)] = frozenset(steps)


def take_skip(run: StoreURI) -> frozenset[tuple[int, int]] | None:
    """The steps that the last load skipped since somebody asked; None if none was to skip any."""
    return _skipped.pop(str(run), None)
