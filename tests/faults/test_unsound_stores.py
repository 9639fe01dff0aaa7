"""A store that does conditional writes whatever their conditions: nobody writes there.

Several jobs begin at once, in a new root or in one whose run was written while the store was sound.
None may be told that it holds the run, and what was there stays what it was.
"""

import threading
from concurrent.futures import wait
from random import Random

import pytest

from cairn import (
    LeaseHeldError,
    ObjectStore,
    Run,
    StorageError,
    StoreCheckError,
    Writer,
    check_run,
    fork_run,
    parse_uri,
    roll_back,
)
from tests.faults import report
from tests.faults.gcs_schedules import UPLOADS
from tests.service.stores import make_run
from tests.storage.records import RECORD_FILE, list_attempts
from tests.storage.seams import probe

STEPS = [3, 6, 9]
FORGETS = (UPLOADS, rf"{UPLOADS}|objects\.delete")
REFUSALS = (StoreCheckError, LeaseHeldError)

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)


class Race:
    """What those who want to write a run are told, all at once."""

    def __init__(self, uri, rng):
        self.uri = uri
        self.told = []
        verbs = [self.claim, self.claim, self.go_back, self.fork]
        self.wanted = rng.choices(verbs, k=rng.randint(1, 5))
        self.ready = threading.Barrier(len(self.wanted))

    def claim(self, number):
        writer = Writer(Run(self.uri), writer=f"job-{number}")
        try:
            return writer.claim(STEPS[-1] + 1)
        finally:
            writer.close()

    def go_back(self, number):
        return roll_back(Run(self.uri), STEPS[0], by=f"somebody-{number}")

    def fork(self, number):
        run = Run(self.uri)
        return fork_run(run, run.step(STEPS[0]), self.uri.parent / f"child-{number}", by="me")

    def run(self):
        threads = [
            threading.Thread(target=self._ask, args=(number, verb))
            for number, verb in enumerate(self.wanted)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.told

    def _ask(self, number, verb):
        self.ready.wait()
        try:
            self.told.append(f"{verb.__name__} won: {verb(number)}")
        except Exception as exc:
            self.told.append(exc)


def play(double, root, rng):
    """One trial: what was broken, and how many were refused as the store is unsound."""
    uri = root / "run"
    begun = rng.random() < 0.5
    if begun:
        make_run(uri, STEPS)
        ObjectStore.open(root).delete(RECORD_FILE)
    else:
        Run.create(uri)
    probe._answers.clear()  # as a process that starts
    double.faults.add("unconditional", operation=rng.choice(FORGETS), count=None)
    race = Race(uri, rng)
    told = race.run()
    wait(list(probe._answers.values()))  # some were refused before theirs was answered
    double.faults.clear()
    problems = [f"{one!r}" for one in told if not isinstance(one, StorageError)]
    if begun:
        problems += [repr(one) for one in told if not isinstance(one, REFUSALS)]
    run = Run(uri, objects=ObjectStore(uri))
    listed = [info.step for info in run.steps()]
    if listed != (STEPS if begun else []) or len(list_attempts(run.objects)) != begun:
        problems.append(f"lists {listed} of attempts {run.attempts()}")
    if not check_run(run).ok:
        problems.append(f"{check_run(run).problems}")
    if ObjectStore(root).read(RECORD_FILE) is not None:
        problems.append("the root remembers a good answer")
    for entry in ObjectStore(root).list():
        if entry.startswith("child-") and "/manifests/" in entry:
            problems.append(f"a fork was made: {entry}")
    return problems, sum(isinstance(one, StoreCheckError) for one in told)


def test_nobody_is_told_that_it_writes_to_a_store_that_forgets_conditions(double):
    count = report.trials(short=8, long=200)
    lost, refused, problems = 0, 0, []
    for number in range(count):
        rng = Random(f"{report.seed()} unsound {number}")
        found, by_store = play(double, parse_uri(double.bucket_uri) / f"root-{number}", rng)
        lost += bool(found)
        refused += by_store
        problems += [f"trial {number}: {text}" for text in found]
    report.record(
        fault="k an unsound store",
        store=double.kind,
        trials=count,
        survived=count - lost,
        lost=lost,
        note=f"{refused} calls were told so",
    )
    assert refused >= count / 2
    assert not problems, "\n".join(problems)
