"""Kills forks of a step again and again, repeats each until it is done, and tells what came of it.

    python -m tests.faults.fork_driver '{"root": URI, "trials": N, "kills_per_fork": N, "seed": N}'

Prints JSON: {"trials": kills, "lost": [what broke], "moments": {what was there: kills}, "left":
{what killed writes left: kills}, "forks": that were done in the end, "seconds": one takes}.
"""

import json
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.faults.fork_child import fork_until_killed, witness
from tests.faults.forked import ERROR, Forked, warm

PATIENCE = 60.0


class Loop:
    """The experiment on one store."""

    def __init__(self, root: str, seed: int, looking: Forked) -> None:
        self.root = root
        self.draw = random.Random(seed)
        self.looking = looking
        self.files = looking.ask("save", f"{root}/source", seed)
        self.lost: list[str] = []
        self.moments: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.kills = self.forks = 0
        self.seconds = 0.0

    def calibrate(self) -> None:
        """How long a fork takes here."""
        took = []
        for number in range(3):
            with self._start(f"{self.root}/calibration-{number}") as job:
                job.event(PATIENCE)
                began = time.monotonic()
                told = job.event(PATIENCE)
                took.append(time.monotonic() - began)
                if told != ["done", self.files]:
                    raise RuntimeError(f"the fork told {told}")
        self.seconds = sorted(took)[1]

    def fork(self, target: str, kills: int) -> None:
        """Fork to `target`, killed so often on the way, then see that it ends well."""
        for _ in range(kills):
            if self._is_done_before_its_kill(target):
                break
        with self._start(target) as job:
            events = list(job.events(PATIENCE))
            status = job.ended(PATIENCE)
        if status != 0 or events != [["begin"], ["done", self.files]]:
            self.lost.append(f"{target}, repeated: ended with {status} after {events}")
        else:
            wrong = self.looking.ask("wrong_in_the_end", target)
            self.lost += [f"{target}, in the end: {'; '.join(wrong)}"] * bool(wrong)
        self.forks += 1

    def _is_done_before_its_kill(self, target: str) -> bool:
        with self._start(target) as job:
            events = [job.event(PATIENCE)]
            part = self.draw.choice([0.2, 1.0])  # a fork is hardly ever hit in its first records
            events += job.events(self.draw.uniform(0.0, part * self.seconds))
            status = job.kill()
            events += job.events(1.0)
        if status == 0:
            return True
        self.kills += 1
        found = self.looking.ask("after_kill", target)
        self.moments[found["moment"]] += 1
        self.left.update(found["left"])
        wrong = [f"it failed: {event}" for event in events if event and event[0] == ERROR]
        wrong += found["wrong"]
        if status != -9:
            wrong.append(f"it ended with {status}")
        self.lost += [f"{target}, killed: {'; '.join(wrong)}"] * bool(wrong)
        return False

    def _start(self, target: str) -> Forked:
        return Forked(fork_until_killed, f"{self.root}/source", target)


def main(root: str, trials: int, kills_per_fork: int, seed: int) -> dict[str, Any]:
    """Run the experiment; see the top of this file."""
    warm(root)
    with Forked(witness) as looking:
        loop = Loop(root, seed, looking)
        loop.calibrate()
        while loop.kills < trials and not loop.lost:
            left = min(kills_per_fork, trials - loop.kills)
            loop.fork(f"{root}/fork-{loop.forks}", loop.draw.randint(1, left))
    return {
        "trials": loop.kills,
        "lost": loop.lost,
        "moments": dict(loop.moments.most_common()),
        "left": dict(loop.left.most_common()),
        "forks": loop.forks,
        "seconds": round(loop.seconds, 3),
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
