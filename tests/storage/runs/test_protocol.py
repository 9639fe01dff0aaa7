"""The run protocol under every interleaving that the search comes upon, with the real code.

Jobs save, restart, overwrite; someone promotes, deletes, rolls back; a retention policy is carried
out, the collector runs. Processes die at any call to the store, clocks jump past a lease. Only
public verbs of `cairn.storage.runs` are called. The store is a bucket, which has no condition but
that of a write; in the long run a disk too. The last tests take one safeguard away each, and
show that the search then finds the bug. `CAIRN_FAULTS=long` draws a thousand schedules of each.
"""

import functools
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from cairn import (
    Manifest,
    NotFoundError,
    RetentionPolicy,
    Run,
    RunInfo,
    StorageError,
    StoreUnavailableError,
    Writer,
    apply_retention,
    collect_garbage,
    delete_step,
    find_deletable_step,
    promote_step,
    roll_back,
    undelete_step,
)
from cairn.storage.runs.records.layout import COMMIT_FILE, MANIFESTS, RUN_FILE, TRASH, step_dir
from cairn.storage.runs.records.manifest import ObjectRecord, PlainStep
from cairn.storage.store.clock import rfc3339
from cairn.storage.store.graves import GRAVE
from cairn.storage.store.records import RecordLocation
from tests.faults.report import is_long, trials
from tests.storage.records import counting, parse_attempt_file
from tests.storage.seams import writer
from tests.storage.simulated_store import Actor, Killed, ModelClock, Scheduler, SimulatedStore

TTL = 60.0
JUMP = 200.0
ATTEMPTS = "cairn.storage.runs.records.attempts"

anywhere = st.dictionaries(st.integers(0, 120), st.integers(0, 11), max_size=5)
early = st.dictionaries(st.integers(0, 40), st.integers(0, 1), max_size=5)
"""Finds sooner what needs the first two processes to take turns at their start: none dies."""


def at_their_moves(chosen):
    """What the scheduler is told, of moves since the last switch and what is moved then."""
    moves = accumulate((gap for gap, _ in chosen), lambda last, gap: last + 1 + gap)
    return dict(zip(moves, (move for _, move in chosen), strict=True))


soon_after_each_other = st.lists(st.tuples(st.integers(0, 24), st.integers(0, 11)), max_size=5).map(
    at_their_moves
)
"""Finds sooner what needs several processes stopped close together, and later what does not."""

turns = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1)), max_size=5).map(at_their_moves)
"""Finds sooner what needs two processes to take turns, and none dies."""

deep_in_the_second = st.tuples(st.integers(0, 3), st.integers(40, 60)).map(
    lambda gaps: {gaps[0]: 1, sum(gaps): 0}
)
"""Finds sooner what needs the second process stopped late, soon after the first."""


class ModelFiles:
    """Folders of data in the simulated store."""

    def __init__(self, store):
        self._store = store

    def list(self, rel=""):
        return []

    def walk(self, rel=""):
        return []

    def stat(self, rel):
        raise NotFoundError("not in the model", path=rel)

    def sweep(self, rel=""):
        pass

    def delete_tree(self, rel):
        for key in self._store.list(f"{rel}/"):
            self._store.delete(key)


class ModelRun(Run):
    """A run in the simulated store."""

    def __init__(self, store, clock):
        super().__init__(store.uri, clock=clock, objects=store)
        self.files = ModelFiles(store)

    files = None


@dataclass
class World:
    """One run, and what its processes were told."""

    scheduler: Scheduler
    clock: ModelClock
    store: SimulatedStore
    durable: list = field(default_factory=list)
    overwritten: list = field(default_factory=list)
    deleted: list = field(default_factory=list)
    undeleted: list = field(default_factory=list)
    policy: RetentionPolicy | None = None
    wrong: set = field(default_factory=set)

    def __post_init__(self):
        self.store.changed = self.look

    def look(self, key, store):
        """What a reader sees now that `key` has changed, and nobody wrote."""
        if not (key.startswith((MANIFESTS, TRASH)) or parse_attempt_file(key)):
            return
        history = ModelRun(store, self.clock).history()
        listed = history.listed()
        for step, number in self.overwritten:
            for later, other in listed.items():
                if listed.get(step) == number and later > step and other < number:
                    self.wrong.add(
                        f"the new {step}.{number} is listed beside the old {later}.{other}"
                    )
        if self.policy is not None:
            return
        begun = {one.number: one for one in history.attempts.known}
        for step, number in listed.items():
            one = begun[number]
            base, overwrites = (one.base_step, one.base_attempt), one.overwrites
            if base[0] in (-1, *self.deleted) or (overwrites is not None and overwrites <= base[0]):
                continue
            if listed.get(base[0]) != base[1]:
                self.wrong.add(f"{step}.{number} is listed, which came after {base[0]}.{base[1]}")

    def run(self):
        return ModelRun(self.store, self.clock)

    def listed(self):
        return self.run().step_attempts()


class Job:
    """One process of a training job: writes data where its claim says, and publishes it."""

    def __init__(self, world, name, writer_id):
        self.world, self.name = world, name
        self.writer = Writer(world.run(), writer=writer_id, clock=world.clock, ttl=TTL)

    def save(self, step, *, overwrite=False):
        try:
            number = self.writer.claim(step, overwrite=overwrite)
            if overwrite:
                self.world.overwritten.append((step, number))
            folder = step_dir(number, step)
            self.world.store.write(f"{folder}/data", self.name.encode())
            self.world.store.write(f"{folder}/{COMMIT_FILE}", b"")
            self.writer.publish(
                Manifest(
                    step=step,
                    attempt=number,
                    created=rfc3339(self.world.clock()),
                    writer=self.name,
                    items=("model",),
                    objects=(ObjectRecord(name=COMMIT_FILE, size=0, crc32c="00000000"),),
                    plain=PlainStep(trees={"model": ""}),
                )
            )
        except BaseException:
            self.writer.drop()
            raise
        self.world.durable.append((step, number, self.name))

    def train(self, *steps):
        """Go on from the latest step, as a restarted job does; stop when told to."""

        def body():
            latest = self.world.run().latest_step() or 0
            for step in steps:
                if step > latest:
                    self.save(step)

        return actor(self.name, body)

    def overwrite(self, *steps):
        def body():
            for step in steps:
                self.save(step, overwrite=True)

        return actor(self.name, body)


def actor(name, body):
    """A process that stops at an error of ours, as it should."""

    def run():
        try:
            body()
        except StorageError:
            return

    return Actor(name, run)


@pytest.fixture(scope="module", autouse=True)
def _no_threads_that_renew_leases():
    with patch.object(Writer, "_keep", lambda self, attempt, stop: None):
        yield


def world(switches, **limits):
    clock = ModelClock()
    scheduler = Scheduler(switches, clock, pause_seconds=JUMP, **limits)
    store = SimulatedStore(scheduler)
    info = RunInfo(name="run", created=rfc3339(clock()))
    store.write(RUN_FILE, info.with_location(RecordLocation("1" * 32, RUN_FILE)).to_bytes())
    return World(scheduler, clock, store)


def world_after(steps, switches, *, closed=False, **limits):
    """A world in which a job has saved `steps` already, and maybe told that it is over."""
    before, made = _past(steps, closed, SimulatedStore.is_bucket), world(switches, **limits)
    made.store, made.durable = before.store.copied(made.scheduler), list(before.durable)
    made.store.changed = made.look
    return made


@functools.cache
def _past(steps, closed, is_bucket):
    """Nobody else was there yet: every search can begin where this one job got to."""
    made = world({})
    job = Job(made, "before", "job")
    job.train(*steps).body()
    if closed:
        job.writer.close()
    return made


def problems(made, *actors):
    """Run the actors; what was promised and not kept."""
    made.scheduler.run(*actors)
    run = made.run()
    found = [f"{one.name} failed: {one.error!r}" for one in actors if one.error]
    found += [*sorted(made.wrong), *taken_back(made)]
    listed = made.listed()
    for step, attempt, name in made.durable:
        # Only an overwrite or a rollback that began later may set it aside.
        gone = any(step >= low and number > attempt for low, number in made.overwritten)
        gone = gone or step in made.deleted or made.policy is not None
        if not gone and listed.get(step) != attempt:
            found.append(f"{name}: durable step {step}.{attempt} is not listed")
    for step in made.undeleted:
        if step not in listed:
            found.append(f"step {step} was undeleted, and is not listed")
    for step, attempt in listed.items():
        data = made.store.values.get(f"{step_dir(attempt, step)}/data")
        manifest = run.manifest(run.step(step))
        if data is None:
            found.append(f"listed step {step}.{attempt} has no bytes")
        elif data.value.decode() != manifest.writer:
            found.append(f"step {step}.{attempt} of {manifest.writer} has bytes of another")
    for alias in run.aliases.list():
        key = f"{step_dir(alias.attempt, alias.step)}/data"
        if key not in made.store.values:
            found.append(f"alias {alias.alias} names step {alias.step}, whose bytes are gone")
    if made.policy is not None:
        found += kept_and_gone(made, listed)
    return found


def taken_back(made):
    """Who saved in an attempt after that of another who had replaced them."""
    savers = [name for _, name in sorted({(number, name) for _, number, name in made.durable})]
    for at, name in enumerate(savers):
        if name in savers[:at] and savers[at - 1] != name:
            yield f"{name} has taken the run back from {savers[at - 1]}"


def kept_and_gone(made, listed):
    """What the policy keeps, judged on the history as it ended, and is not there.

    The policies here keep the last step, and nobody deletes by hand.
    """
    run = made.run()
    saved = [(step, number) for step, number, _ in made.durable]
    # One that died before it was told that its overwrite is listed has overwritten all the same.
    saved += run.trashed().union(run.published()).intersection(made.overwritten)
    history = counting(saved, run.attempts())
    if history and listed.get(max(history)) != history[max(history)]:
        yield f"step {max(history)}.{history[max(history)]} is the last of the history, and gone"


def two_starts(switches):
    """One job started twice under one id: the first was paused, not dead."""
    made = world(switches)
    first, second = Job(made, "first", "job"), Job(made, "second", "job")
    return problems(made, first.train(1, 2, 3), second.train(1, 2, 3, 4)), made


def two_jobs(switches):
    """Two jobs of different ids on one run; clocks jump past the lease."""
    made = world(switches, pauses=2)
    first, second = Job(made, "first", "a"), Job(made, "second", "b")
    return problems(made, first.train(1, 2, 3), second.train(1, 2, 3)), made


def an_overwrite(switches):
    """A process overwrites a step, and another, while its own successor goes on."""
    made = world_after((1, 2, 3), switches)
    first, second = Job(made, "first", "job"), Job(made, "second", "job")
    return problems(made, first.overwrite(2, 1), second.train(3, 4)), made


def a_deletion(switches):
    """Somebody promotes the step that another deletes, and the collector runs."""
    made = world_after((1, 2), switches, closed=True, kills=2)
    going = find_deletable_step(made.run(), 1)

    def promoting():
        promote_step(made.run(), 1, "production", by="p", expect=None)

    def deleting():
        made.deleted.append(1)
        delete_step(made.run(), going, by="d", grace=0, clock=made.clock)

    return problems(
        made, actor("promoter", promoting), actor("deleter", deleting), collector(made)
    ), made


def an_undeletion(switches):
    """Somebody takes a deletion back, deletes again and takes that back, and bytes go."""
    made = world_after((1, 2), switches, closed=True)
    made.deleted.append(1)
    delete_step(made.run(), made.run().step(1), by="d", grace=0, clock=made.clock)

    def undeleting():
        undelete_step(made.run(), 1, 1)
        made.undeleted.append(1)
        back = made.run().step(1)
        made.undeleted.clear()
        delete_step(made.run(), back, by="d", grace=99 * JUMP, clock=made.clock)
        undelete_step(made.run(), 1, 1)
        made.undeleted.append(1)

    return problems(made, actor("undeleter", undeleting), collector(made)), made


def a_rollback(switches):
    """A run goes back while a policy is carried out that keeps its last step, and bytes go."""
    made = world_after((1, 2, 3), switches, closed=True)
    policy, rollback = _policy_and_rollback(made)
    return problems(made, policy, rollback, collector(made)), made


def a_rollback_while_no_bytes_go(switches):
    """As before, but nobody removes what the policy deletes."""
    made = world_after((1, 2), switches, closed=True)
    return problems(made, *_policy_and_rollback(made)), made


def _policy_and_rollback(made):
    made.policy = RetentionPolicy(keep_last=1)

    def retaining():
        apply_retention(made.run(), made.policy, by="r", grace=0, clock=made.clock)

    def going_back():
        roll_back(made.run(), 1, by="somebody")

    return actor("retention", retaining), actor("rollback", going_back)


def an_overwrite_and_a_policy(switches):
    """A job overwrites a step while a policy is carried out that keeps the last one."""
    made = world_after((1, 2, 3), switches)
    made.policy = RetentionPolicy(keep_last=1)

    def retaining():
        apply_retention(made.run(), made.policy, by="r", grace=0, clock=made.clock)

    job = Job(made, "first", "job")
    return problems(made, actor("retention", retaining), job.overwrite(2), collector(made)), made


def collector(made):
    def collecting():
        for _ in range(2):
            collect_garbage(made.run(), by="gc", clock=made.clock)

    return actor("collector", collecting)


SCENARIOS = [
    two_starts,
    two_jobs,
    an_overwrite,
    a_deletion,
    an_undeletion,
    a_rollback,
    a_rollback_while_no_bytes_go,
    an_overwrite_and_a_policy,
]
search = settings(
    max_examples=trials(short=25, long=1000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


class FailingStore(SimulatedStore):
    """Fails once, at one of its writes, before it is done or after it."""

    fails_at, error, is_after = None, None, False

    def _put(self, key, value):
        self.writes = getattr(self, "writes", 0) + 1
        if self.writes != self.fails_at:
            return super()._put(key, value)
        if self.is_after:
            super()._put(key, value)
        raise self.error


@pytest.mark.parametrize("is_after", [False, True], ids=["before it is done", "after it"])
@pytest.mark.parametrize("error", [Killed(), StoreUnavailableError("no answer")], ids=type)
@pytest.mark.parametrize("step", [2, 3])
def test_an_overwrite_that_fails_at_any_write_leaves_one_of_two_histories(step, error, is_after):
    """And who goes on then, the same writer or its successor, goes on from that one."""
    old, new = {1: 1, 2: 1, 3: 1}, dict.fromkeys(range(1, step), 1)
    for fails_at in range(1, 50):
        made = world_after((1, 2, 3), {}, closed=True)
        made.store.__class__ = FailingStore
        made.store.fails_at, made.store.error = fails_at, error
        made.store.is_after = is_after
        job = Job(made, "first", "job")
        with suppress(Killed, StorageError):
            job.save(step, overwrite=True)
        has_failed, made.store.fails_at = made.store.writes >= fails_at, None
        seen = made.listed()
        assert seen in (old, new | {step: 2})
        if type(error) is Killed:
            job = Job(made, "second", "job")
        elif has_failed:
            seen = old  # a step that has failed does not come back
        job.save(5)
        assert {**made.listed(), 5: 0} == {**seen, 5: 0}
        assert not made.wrong
        if not has_failed:
            break
    assert fails_at > 5


@pytest.mark.parametrize("is_bucket", [True, False] if is_long() else [True])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_no_interleaving_breaks_a_promise(scenario, is_bucket, monkeypatch):
    monkeypatch.setattr(SimulatedStore, "is_bucket", is_bucket)

    @search
    @given(anywhere | soon_after_each_other if scenario is a_deletion else anywhere)
    def run(choices):
        found, made = scenario(choices)
        assert not found, "\n".join([*found, *made.scheduler.history])

    run()
    undisturbed = scenario({})[1]
    assert undisturbed.durable, "where nothing is saved, every promise is kept"


def without_fence():
    """A writer that was replaced publishes all the same, and calls the step durable."""
    stack = ExitStack()
    stack.enter_context(patch.object(Writer, "_fence", lambda self: None))
    stack.enter_context(
        patch.object(Writer, "_ensure_counts", lambda self, manifest, generation: None)
    )
    return stack


def without_the_look_back():
    """The fence is checked before the manifest is written, and not after it."""
    return patch.object(Writer, "_ensure_counts", lambda self, manifest, generation: None)


def without_if_absent():
    """An attempt's number is taken whether another start has it or not."""
    return patch.object(SimulatedStore, "if_absent_holds", False, create=True)


def without_own_attempt():
    """A process begins an attempt without asking whether its last one is still the newest."""
    begin = writer.start_attempt
    return patch.object(writer, "start_attempt", lambda *a, **o: begin(*a, **{**o, "before": None}))


def without_the_condition_of_a_grave():
    """A grave is written whatever is there by then."""
    return patch.object(
        SimulatedStore,
        "delete_if",
        lambda store, key, *, generation: store.write(key, GRAVE) and None,
    )


def without_holding():
    """A promotion says nobody that it is about to need its step."""
    return patch("cairn.storage.runs.promotion.held", lambda *args, **options: nullcontext())


def without_looking_at_the_history_again():
    """A policy is asked once, and what it let go is deleted whatever became of the run since."""
    stack = ExitStack()
    look = "cairn.storage.runs.retention._Pass"
    stack.enter_context(patch(f"{look}._changed", lambda self, attempts: False))
    return stack


def without_looking_for_intents():
    """Who has begun to hold a step does not ask whether it is about to be deleted."""
    return patch(
        "cairn.storage.runs.trash._is_going",
        lambda run, key, beside: (False, None if beside is None else beside()),
    )


def without_one_event():
    """An attempt replaces what its base step says, whatever it was begun to overwrite."""
    return patch(f"{ATTEMPTS}._last_kept", lambda one, has_saved: one.base_step)


def without_looking_who_came_too_late():
    """An overwrite counts though others went on meanwhile from what it replaces."""
    return patch(f"{ATTEMPTS}._came_too_late", lambda one, after: False)


FOUND = [
    (without_fence, two_starts, {13: 1}),
    (without_the_look_back, two_starts, {26: 0}),
    (without_if_absent, two_starts, {11: 1, 25: 0}),
    (without_own_attempt, an_overwrite, {18: 1}),
    (without_the_condition_of_a_grave, an_undeletion, {2: 1, 51: 0}),
    (without_holding, a_deletion, {3: 0, 12: 2}),
    (without_looking_for_intents, a_deletion, {3: 0, 12: 2}),
    (without_looking_at_the_history_again, a_rollback, {9: 0}),
    (without_looking_for_intents, a_rollback_while_no_bytes_go, {32: 1, 33: 1, 70: 1}),
    (without_one_event, an_overwrite, {}),
    (without_looking_who_came_too_late, an_overwrite, {13: 0}),
]
"""A safeguard, and the switches of a scenario with which the search has found the bug."""


@pytest.mark.parametrize(
    ("safeguard", "scenario", "switches"),
    FOUND,
    ids=[f"{safeguard.__name__}-{scenario.__name__}" for safeguard, scenario, _ in FOUND],
)
def test_without_a_safeguard_the_search_finds_the_bug(safeguard, scenario, switches):
    """The long run searches anew, and so does any in which those switches find nothing more."""
    with safeguard():
        is_found = bool(broken_promises(scenario, switches))
    if is_long() or not is_found:
        search_without(safeguard, scenario)


def broken_promises(scenario, switches):
    """What was promised and not kept; a process that breaks instead has no safeguard less."""
    found, _ = scenario(switches)
    assert not [line for line in found if " failed: " in line], found
    return found


def search_without(safeguard, scenario):
    by_scenario = {a_deletion: soon_after_each_other, a_rollback_while_no_bytes_go: turns}
    by_safeguard = {
        without_if_absent: early,
        without_looking_who_came_too_late: soon_after_each_other,
        without_the_condition_of_a_grave: deep_in_the_second,
    }
    switches = by_safeguard.get(safeguard, by_scenario.get(scenario, anywhere))
    with safeguard():
        broken = find(
            switches,
            lambda choices: bool(broken_promises(scenario, choices)),
            settings=settings(
                search, max_examples=10_000, phases=[Phase.generate], derandomize=True
            ),
        )
        found, made = scenario(broken)
    print(f"\n{safeguard.__name__}: {found}")
    print("\n".join(made.scheduler.history))
    assert found
