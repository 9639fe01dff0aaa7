"""Runs whose damaged steps this process has skipped in a load: its next save goes on below them.

A load only reads. What it skipped is set aside once the process saves: the attempt that begins then
goes on from the newest sound step. No JAX.
"""

from cairn.storage.store import StoreURI

__all__ = ["note_skip", "take_skip"]

_runs: set[str] = set()


def note_skip(run: StoreURI) -> None:
    """A load of the run was asked to skip damaged steps."""
    _runs.add(str(run))


def take_skip(run: StoreURI) -> bool:
    """Whether one was since the last time that somebody asked."""
    if str(run) not in _runs:
        return False
    _runs.discard(str(run))
    return True
