"""Kills a saving job again and again, restarts it, and tells what came of it.

    python -m tests.faults.kill_driver '{"root": URI, "trials": N, "trials_per_run": N, "seed": N}'

Prints JSON: {"trials", "lost": [what broke], "moments": {what the job was doing: kills},
"steps": listed in the end, "save_seconds": [first, later]}.
"""

import json
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.faults.forked import ERROR, Forked, warm
from tests.faults.kill_saver import save_until_killed
from tests.faults.kill_witness import witness

PATIENCE = 60.0
"""Seconds within which a restart begins to save: far more than it takes."""

CALIBRATION_STEPS = 4
LATER_SAVES = 4


class Loop:
    """The experiment on one store."""

    def __init__(self, root: str, seed: int, witness: Forked) -> None:
        self.root = root
        self.seed = seed
        self.draw = random.Random(seed)
        self.witness = witness
        self.starts = 0
        self.lost: list[str] = []
        self.moments: Counter[str] = Counter()
        self.steps = 0
        self.first, self.later = 0.0, 0.0

    def calibrate(self) -> None:
        """How long the first save of a process takes here, and how long a later one."""
        begun: dict[int, float] = {}
        took: list[float] = []
        with self._start(f"{self.root}/calibration", CALIBRATION_STEPS) as job:
            for what, step in job.events(PATIENCE):
                if what == "begin":
                    begun[step] = time.monotonic()
                elif what == "durable":
                    took.append(time.monotonic() - begun[step])
        if len(took) != CALIBRATION_STEPS:
            raise RuntimeError(f"the job saved {len(took)} of {CALIBRATION_STEPS} steps")
        self.first, self.later = took[0], sorted(took[1:])[1]

    def trial(self, uri: str) -> None:
        """Start the job, kill it at a random moment of its first few saves, look at the run."""
        with self._start(uri, None) as job:
            event = job.event(PATIENCE)
            events = [] if event is None else [event]
            delay = self.draw.choice([self.draw.uniform(0.0, self.first), self._later_moment()])
            events += job.events(delay) if event else []
            status = job.kill()
            events += job.events(1.0)
        begun = [step for what, step in events if what == "begin"]
        durable = [step for what, step in events if what == "durable"]
        # A save waits for the one before it.
        durable += [step - 1 for what, step in events if what == "returned" and step > begun[0]]
        wrong = [f"the start failed: {text}" for what, text in events if what == ERROR]
        if status != -9 or not events:
            wrong.append(f"the start ended with {status} after {events}")
        found = self.witness.ask(
            "after_kill", uri, self.seed, self.starts, begun, max(durable, default=None)
        )
        self.moments[found["moment"]] += 1
        wrong += found["wrong"]
        if wrong:
            self.lost.append(f"{uri}, start {self.starts}: " + "; ".join(wrong))

    def _later_moment(self) -> float:
        """Seconds from the first save's begin to a moment of one of the saves after it."""
        return self.first + self.draw.uniform(0.0, LATER_SAVES * self.later)

    def finish(self, uri: str) -> None:
        """Collect the garbage, let the job save once more, and read all that is listed."""
        wrong = self.witness.ask("collect", uri)
        with self._start(uri, 2) as job:
            told = list(job.events(PATIENCE))
            if sum(what == "durable" for what, _ in told) != 2:
                wrong.append(f"after gc the job only came to {told}")
        found = self.witness.ask("load_all", uri)
        if wrong + found:
            self.lost.append(f"{uri}, in the end: " + "; ".join(wrong + found))
        self.steps += self.witness.ask("count", uri)

    def _start(self, uri: str, steps: int | None) -> Forked:
        self.starts += 1
        return Forked(save_until_killed, uri, self.seed, self.starts, steps)


def main(root: str, trials: int, trials_per_run: int, seed: int) -> dict[str, Any]:
    """Run the experiment; see the top of this file."""
    warm(root)
    with Forked(witness) as looking:
        loop = Loop(root, seed, looking)
        loop.calibrate()
        for number in range(trials):
            uri = f"{root}/run-{number // trials_per_run}"
            loop.trial(uri)
            if number + 1 == trials or (number + 1) % trials_per_run == 0:
                loop.finish(uri)
    return {
        "trials": trials,
        "lost": loop.lost,
        "moments": dict(loop.moments.most_common()),
        "steps": loop.steps,
        "save_seconds": [round(loop.first, 3), round(loop.later, 3)],
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
