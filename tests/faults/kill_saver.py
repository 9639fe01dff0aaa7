"""A training job that saves step after step until it is killed. It starts as any restart would."""

import itertools
import random

from cairn import Checkpointer, Run, RunNotFoundError
from tests.faults.contents import KEY, Keyed, contents, placed
from tests.faults.forked import Told

WRITER = "job"


def save_until_killed(told: Told, uri: str, seed: int, start: int, steps: int | None) -> None:
    """Save the steps after the latest; tell "begin", "returned" and "durable" with each.

    Args:
        told: the line to the driver.
        uri: the run.
        seed: of the whole experiment.
        start: counts the starts of this job; part of each step's key.
        steps: how many to save before it ends by itself; None: until killed.
    """
    draw = random.Random(f"{seed} {start}")
    with Checkpointer(uri, writer_id=WRITER) as checkpointer:
        first = 1 + latest(uri)
        last = None if steps is None else first + steps
        for step in itertools.count(first) if last is None else range(first, last):
            if told.is_orphan:
                return
            key = [seed, start, step]
            items = placed(contents(key))
            told.tell("begin", step)
            data = {"train": Keyed(key)}
            handle = checkpointer.save(step, items, meta={KEY: key}, iterators=data)
            told.tell("returned", step)
            if steps is not None or draw.random() < 0.5:  # else the next save waits for it
                handle.wait()
                told.tell("durable", step)


def latest(uri: str) -> int:
    """The run's latest step; -1 if there is none, or no run yet."""
    try:
        step = Run.open(uri).latest_step()
    except RunNotFoundError:
        return -1
    return -1 if step is None else step
