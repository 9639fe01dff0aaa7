"""One of two jobs that save into the same run, each as if the run were its own.

Time runs fast here, so that leases expire within a second, and each job's clock is off by its own
amount. A job that is refused starts anew, as a supervisor would start it.
"""

import random
import time
from datetime import UTC, datetime

from cairn import Checkpointer, FencedError, LeaseHeldError, StepExistsError
from cairn.storage.store.clock import Clock
from tests.faults.contents import KEY, contents, placed
from tests.faults.forked import Told
from tests.faults.kill_saver import latest

LEASE_SECONDS = 1.0
TIME_RATE = 30.0
"""Seconds of the jobs' clocks per second: a lease is renewed every third of a real second, and is
dead, the margin of 15 s included, after half a second without renewal."""

SECONDS = 6.0
"""After which a job gives up."""

PAUSE_SECONDS = 0.1
"""The longest pause between two saves."""

REFUSALS = (FencedError, LeaseHeldError, StepExistsError)

_EPOCH = time.time()  # of the driver: its children were forked from it


def fast_clock(skew: float) -> Clock:
    """A clock that runs `TIME_RATE` times as fast as this machine's, `skew` seconds ahead."""
    return lambda: datetime.fromtimestamp(_EPOCH + (time.time() - _EPOCH) * TIME_RATE + skew, UTC)


def race(told: Told, uri: str, writer: str, key: list[int], skew: float, steps: int) -> None:
    """Save until `steps` are durable or time is up; tell how each save went.

    Tells ["ready"] and waits for any word, then ["begin", save], then ["durable", save,
    step, attempt] or ["refused", save, error]; saves are numbered, and the number ends the step's
    key.

    Args:
        told: the line to the driver.
        uri: the run.
        writer: id of the job.
        key: what the keys of its steps begin with.
        skew: seconds that its clock is ahead.
        steps: how many to save.
    """
    draw = random.Random(str(key))
    clock = fast_clock(skew)
    checkpointer = None
    saved, number = 0, 0
    placed(contents(key))  # what JAX does at its first use is no part of the race
    told.tell("ready")
    next(told.asked())
    end = time.monotonic() + SECONDS
    while saved < steps and time.monotonic() < end and not told.is_orphan:
        number += 1
        told.tell("begin", number)
        try:
            step = 1 + latest(uri)
            if checkpointer is None:
                checkpointer = Checkpointer(
                    uri, writer_id=writer, clock=clock, lease_ttl=LEASE_SECONDS
                )
            items = placed(contents([*key, number]))
            handle = checkpointer.save(step, items, meta={KEY: [*key, number]})
            handle.wait()
            saved += 1
            told.tell("durable", number, step, handle.attempt)
        except REFUSALS as exc:
            told.tell("refused", number, type(exc).__name__)
            if checkpointer is not None and not isinstance(exc, StepExistsError):
                checkpointer.close()
                checkpointer = None
        time.sleep(draw.uniform(0.0, PAUSE_SECONDS))
    if checkpointer is not None:
        checkpointer.close()
