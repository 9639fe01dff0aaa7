"""Lets two jobs race for one run, again and again, and tells what came of it.

    python -m tests.faults.racing_driver '{"root": URI, "trials": N, "seed": N}'

Prints JSON: {"trials", "lost": [what broke], "refused": {error: how often}, "replaced": jobs that
were stopped while the other saved, "steps" and "attempts": in all runs}.
"""

import json
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from tests.faults.forked import ERROR, Forked, warm
from tests.faults.racing_history import judge
from tests.faults.racing_writer import race

PATIENCE = 60.0
STOPPED_SECONDS = 4.0
"""The longest that a job is stopped: far beyond its lease, which is dead after half a second."""

STOP_WITHIN_SECONDS = 0.5
"""A job is stopped at a moment of its first so many seconds of saving."""

SKEWS = (0.0, 0.0, 5.0, -5.0, 14.0, 40.0, 3600.0)
"""Seconds that a job's clock is ahead; beyond 15 a lease looks dead to it that is not."""


class Race:
    """The experiment on one store."""

    def __init__(self, root: str, seed: int, judge: Forked) -> None:
        self.root = root
        self.seed = seed
        self.draw = random.Random(seed)
        self.judge = judge
        self.lost: list[str] = []
        self.refused: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def trial(self, number: int) -> None:
        """Two jobs race; one may be stopped over its expiry; a third one goes on after both."""
        uri = f"{self.root}/race-{number}"
        draw = self.draw
        same_id, stops = draw.random() < 0.25, draw.random() < 0.6
        names = ["a#0", "a#1" if same_id else "b#1"]
        keys = {name: [self.seed, number, index] for index, name in enumerate(names)}
        steps, skews = [draw.randint(2, 4) for _ in names], [draw.choice(SKEWS) for _ in names]
        told: list[list[Any]] = []
        with (
            Forked(race, uri, "a", keys[names[0]], skews[0], steps[0]) as first,
            Forked(race, uri, names[1][0], keys[names[1]], skews[1], steps[1]) as second,
        ):
            start_together(first, second)
            if stops:
                told += self._stop_over_expiry(first, second, names)
            for name, job in zip(names, (first, second), strict=True):
                told += ([name, *event] for event in job.events(PATIENCE))
                told.append([name, "ended", job.ended(PATIENCE)])
        wrong = [f"{name} failed: {event}" for name, *event in told if event[0] == ERROR]
        wrong += [f"{name} {event}" for name, *event in told if event[0] == "ended" and event[1]]
        self.refused.update(event[2] for _, *event in told if event[0] == "refused")
        keys["after#2"] = [self.seed, number, 2]
        with Forked(race, uri, "after", keys["after#2"], 2 * max(SKEWS), 1) as third:
            start_together(third)
            told += (["after#2", *event] for event in third.events(PATIENCE))
        if not any(name == "after#2" and event[0] == "durable" for name, *event in told):
            wrong.append(f"the job after both came to {told[-3:]}")
        durable = [event for event in told if event[1] == "durable"]
        found = self.judge.ask(uri, keys, durable)
        wrong += found["wrong"]
        self.sums.update(steps=found["steps"], attempts=found["attempts"])
        if wrong:
            self.lost.append(f"{uri} (skews {skews}, stops {stops}): " + "; ".join(wrong))

    def _stop_over_expiry(self, first: Forked, second: Forked, names: list[str]) -> list[list[Any]]:
        """Stop the first job in one of its saves until the second has saved; what both told."""
        told = [[names[0], *event] for event in [first.event(PATIENCE)] if event]
        time.sleep(self.draw.uniform(0.0, STOP_WITHIN_SECONDS))
        first.signal(signal.SIGSTOP)
        told += ([names[1], *event] for event in second.events(0.0))
        for event in second.events(STOPPED_SECONDS):
            told.append([names[1], *event])
            if event[0] == "durable":
                self.sums["replaced"] += 1
                break
        first.signal(signal.SIGCONT)
        return told


def start_together(*jobs: Forked) -> None:
    """Let jobs begin to save once all of them are ready."""
    for job in jobs:
        if job.event(PATIENCE) != ["ready"]:
            raise RuntimeError("a job did not start; see stderr")
    for job in jobs:
        job.say("go")


def main(root: str, trials: int, seed: int) -> dict[str, Any]:
    """Run the experiment; see the top of this file."""
    warm(root)
    with Forked(judge) as judging:
        races = Race(root, seed, judging)
        for number in range(trials):
            races.trial(number)
    return {
        "trials": trials,
        "lost": races.lost,
        "refused": dict(races.refused.most_common()),
        **races.sums,
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
