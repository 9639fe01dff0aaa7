"""The commit protocol under every interleaving that the search comes upon, with the real code.

Jobs save, restart, overwrite; someone promotes, someone deletes, the collector runs; processes die
at any call to the store, clocks jump past a lease. The last tests take one safeguard away each, and
show that the search then finds the bug.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from cairn.service.errors import ServiceError
from cairn.service.preconditions import Expectation
from cairn.service.promotion import promote
from cairn.storage.errors import NotFoundError, StorageError
from cairn.storage.runs import keeper as attempt_keeper
from cairn.storage.runs.aliases import Aliases
from cairn.storage.runs.gc import collect_garbage
from cairn.storage.runs.keeper import AttemptKeeper
from cairn.storage.runs.layout import COMMIT_FILE, step_dir
from cairn.storage.runs.manifest import ObjectRecord
from cairn.storage.runs.publish import publish_manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import delete_step
from cairn.storage.training.checkpointer import Checkpointer
from cairn.storage.training.save_handle import SaveHandle
from cairn.storage.training.save_job import SaveJob
from tests.storage.simulated_store import Actor, ModelClock, Scheduler, SimulatedStore

TTL = 60.0
JUMP = 200.0

switches = st.dictionaries(st.integers(0, 90), st.integers(0, 11), max_size=5)

COMMITTED = (ObjectRecord(name=COMMIT_FILE, size=0),)


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

    def delete_tree(self, rel):
        for key in self._store.list(f"{rel}/"):
            self._store.delete(key)


@dataclass
class World:
    """One run, and what its processes were told."""

    scheduler: Scheduler
    clock: ModelClock
    store: SimulatedStore
    durable: list = field(default_factory=list)
    overwritten: list = field(default_factory=list)
    deleted: list = field(default_factory=list)

    def run(self):
        made = Run.__new__(Run)
        made.uri, made.objects, made._clock = self.store.uri, self.store, self.clock
        made.aliases = Aliases(self.store, self.clock)
        return made

    def listed(self):
        return self.run().step_attempts()


class Response:
    """Orbax's part: the data is written into the attempt's folder, and committed."""

    def __init__(self, world, handle, content):
        self._world, self._handle, self._content = world, handle, content

    def result(self, timeout=None):
        folder = step_dir(self._handle.attempt, self._handle.step)
        self._world.store.write(f"{folder}/data", self._content)


class Job:
    """One process of a training job: claims attempts and publishes steps with the real code."""

    def __init__(self, world, name, writer):
        self.world, self.name, self.writer = world, name, writer
        self.keeper = AttemptKeeper(world.store, writer=writer, clock=world.clock, ttl=TTL)
        made = Checkpointer.__new__(Checkpointer)
        made.uri, made._clock, made._keeper = world.store.uri, world.clock, self.keeper
        made._run, made._latest, made._goes_back = world.run(), None, False
        self.checkpointer = made

    def save(self, step, *, overwrite=False):
        number = self.checkpointer._claim(step, overwrite)
        if overwrite:
            self.world.overwritten.append((step, number))
        handle = SaveHandle(step=step, attempt=number, uri=self.world.store.uri / "x")
        SaveJob(
            handle=handle,
            start=lambda: Response(self.world, handle, self.name.encode()),
            items={},
            names=("model",),
            leaves=(),
            model=None,
            assets={},
            annotation=None,
            goes_back=self.checkpointer._goes_back,
            objects=self.world.store,
            keeper=self.keeper,
            clock=self.world.clock,
            writer=self.name,
        ).run(self.checkpointer._saved)
        handle.wait()
        self.world.durable.append((step, number, self.name))

    def train(self, *steps):
        """Go on from the latest step, as a restarted job does; stop when told to."""

        def body():
            try:
                latest = self.world.run().latest_step() or 0
                for step in steps:
                    if step > latest:
                        self.save(step)
            except StorageError:
                return

        return Actor(self.name, body)

    def overwrite(self, step):
        def body():
            try:
                self.save(step, overwrite=True)
            except StorageError:
                return

        return Actor(self.name, body)


@pytest.fixture(scope="module", autouse=True)
def _model():
    """What lies outside of the model: threads that renew leases, disks, versions of packages."""
    with ExitStack() as stack:
        for target, value in {
            "cairn.storage.runs.keeper.AttemptKeeper._keep": lambda self, attempt, stop: None,
            "cairn.storage.training.save_job.sync_folder": lambda folder: None,
            "cairn.storage.training.save_job.list_objects": lambda folder, **known: COMMITTED,
            "cairn.storage.training.save_job.job_environment": dict,
            "cairn.storage.training.save_job.remove_leftovers": lambda objects, handle: None,
            "cairn.storage.training.checkpointer.job_environment": dict,
            "cairn.storage.training.checkpointer.Run.create": lambda *args, **options: None,
        }.items():
            stack.enter_context(patch(target, value))
        yield


def world(switches, **limits):
    clock = ModelClock()
    scheduler = Scheduler(switches, clock, pause_seconds=JUMP, **limits)
    return World(scheduler, clock, SimulatedStore(scheduler))


def problems(made, *actors):
    """Run the actors; what was promised and not kept."""
    with ExitStack() as stack:
        for module in ("attempts", "run_info", "step_states"):
            place = f"cairn.storage.runs.{module}.open_files"
            stack.enter_context(patch(place, lambda uri: ModelFiles(made.store)))
        made.scheduler.run(*actors)
        found = [f"{actor.name} failed: {actor.error!r}" for actor in actors if actor.error]
        listed = made.listed()
        for step, attempt, name in made.durable:
            # Only an overwrite that began later may set it aside.
            gone = any(step >= low and number > attempt for low, number in made.overwritten)
            gone = gone or step in made.deleted
            if not gone and listed.get(step) != attempt:
                found.append(f"{name}: durable step {step}.{attempt} is not listed")
        for step, attempt in listed.items():
            data = made.store.values.get(f"{step_dir(attempt, step)}/data")
            manifest = made.run().manifest(made.run().step(step))
            if data is None:
                found.append(f"listed step {step}.{attempt} has no bytes")
            elif data.value.decode() != manifest.writer:
                found.append(f"step {step}.{attempt} of {manifest.writer} has bytes of another")
        for alias in made.run().aliases.list():
            key = f"{step_dir(alias.attempt, alias.step)}/data"
            if key not in made.store.values:
                found.append(f"alias {alias.alias} names step {alias.step}, whose bytes are gone")
    return found


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
    """A process overwrites a step while its own successor goes on."""
    made = world(switches)
    Job(made, "before", "job").train(1, 2, 3).body()
    first, second = Job(made, "first", "job"), Job(made, "second", "job")
    return problems(made, first.overwrite(2), second.train(3, 4)), made


def a_deletion(switches):
    """Somebody promotes the step that another deletes, and the collector runs."""
    made = world(switches, kills=2)
    Job(made, "before", "job").train(1, 2).body()

    def promoting():
        try:
            promote(made.run(), 1, "production", by="p", reason="", expect=Expectation(None))
        except (StorageError, ServiceError):
            return

    def deleting():
        try:
            run = made.run()
            made.deleted.append(1)
            delete_step(run, run.step(1), by="d", grace=0, clock=made.clock)
        except StorageError:
            return

    def collecting():
        try:
            for _ in range(2):
                collect_garbage(made.run(), by="gc", clock=made.clock)
        except StorageError:
            return

    actors = (
        Actor("deleter", deleting),
        Actor("collector", collecting),
        Actor("promoter", promoting),
    )
    return problems(made, *actors), made


SCENARIOS = [two_starts, two_jobs, an_overwrite, a_deletion]
search = settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_no_interleaving_breaks_a_promise(scenario):
    @search
    @given(switches)
    def run(choices):
        found, made = scenario(choices)
        assert not found, "\n".join([*found, *made.scheduler.history])

    run()
    undisturbed = scenario({})[1]
    assert undisturbed.durable, "where nothing is saved, every promise is kept"


def no_fence(objects, manifest, fence):
    publish_manifest(objects, manifest, lambda: None)


def without_fence():
    """A writer that was replaced publishes all the same, and calls the step durable."""
    stack = ExitStack()
    stack.enter_context(patch("cairn.storage.training.save_job.publish_manifest", no_fence))
    stack.enter_context(patch.object(AttemptKeeper, "ensure_counts", lambda self, step: None))
    return stack


def without_the_look_back():
    """The fence is checked before the manifest is written, and not after it."""
    return patch.object(AttemptKeeper, "ensure_counts", lambda self, step: None)


def without_if_absent():
    """An attempt's number is taken whether another start has it or not."""
    return patch.object(SimulatedStore, "if_absent_holds", False, create=True)


def without_own_attempt():
    """A process begins an attempt without asking whether its last one is still the newest."""
    begin = attempt_keeper.begin_attempt
    return patch.object(
        attempt_keeper, "begin_attempt", lambda *a, **o: begin(*a, **{**o, "before": None})
    )


def without_backing_out():
    """A promotion leaves its alias where it is, although the step was deleted meanwhile."""
    return patch("cairn.service.promotion._back_out", lambda run, moved, before, by: None)


@pytest.mark.parametrize(
    ("safeguard", "scenario"),
    [
        (without_fence, two_starts),
        (without_the_look_back, two_starts),
        (without_if_absent, two_starts),
        (without_own_attempt, an_overwrite),
        (without_backing_out, a_deletion),
    ],
    ids=lambda one: one.__name__,
)
def test_without_a_safeguard_the_search_finds_the_bug(safeguard, scenario):
    with safeguard():
        broken = find(
            switches,
            lambda choices: bool(scenario(choices)[0]),
            settings=settings(search, max_examples=3000, phases=[Phase.generate], derandomize=True),
        )
        found, made = scenario(broken)
    print(f"\n{safeguard.__name__}: {found}")
    print("\n".join(made.scheduler.history))
    assert found
