"""Taking a run from the writer that holds it: its attempt ends, and another may begin at once.

Nothing that was listed goes. What that writer publishes from then on does not count, wherever it
is: its next save raises, as for one whose job was started again.
"""

import secrets
from dataclasses import dataclass

from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs.records import Kept, begin_attempt, noted_key, read_lease, release
from cairn.storage.runs.run import Run

__all__ = ["TakeOver", "last_to_keep", "take_over"]


@dataclass(frozen=True)
class TakeOver:
    """What a take-over did.

    Attributes:
        writer: id of the one that held the run.
        ended: number of its attempt.
        attempt: number of the one that began, and ended, in its place.
        latest_step: the latest listed step, which stays; None: there is none.
    """

    writer: str
    ended: int
    attempt: int
    latest_step: int | None


def take_over(run: Run, attempt: int, *, by: str) -> TakeOver:
    """End the attempt of the writer that holds the run, dead or alive.

    Args:
        run: the run.
        attempt: number of the attempt whose lease is taken, as it was seen.
        by: who asks. The attempt that ends it has a writer that is named after it.

    Raises:
        PreconditionFailedError: nobody holds the run, or by another attempt.
        LeaseHeldError: another attempt took it just now.
        UnsoundStoreError: the store does not keep what runs rest on.
    """
    lease = read_lease(run.objects)
    if lease is None or not lease.is_alive(run.clock()) or lease.attempt != attempt:
        held = lease is not None and lease.is_alive(run.clock())
        raise PreconditionFailedError(
            "the run is not held as it was seen",
            path=run.uri,
            expected=f"a writer that holds it by attempt {attempt}",
            found=f"{lease.writer}, by attempt {lease.attempt}" if lease and held else "none",
            next_step="Look again who holds it; where nobody does, a job may begin at once.",
        )
    begun = begin_attempt(
        run.objects,
        writer=f"{by}/{secrets.token_hex(8)}",
        base_step=lambda: last_to_keep(run),
        clock=run.clock,
        ends=attempt,
    )
    release(run.objects, begun, clock=run.clock)
    latest = None if begun.base_step < 0 else begun.base_step
    return TakeOver(lease.writer, attempt, begun.number, latest)


def last_to_keep(run: Run) -> Kept:
    """The latest listed step, or the one that the lease notes if that is later; -1 for none."""
    keys = run.history().latest(), noted_key(run.objects)
    return max((key for key in keys if key is not None), default=-1)
