"""What a bucket that misbehaves does to a run, trial by trial: random faults from a seed.

A trial saves, loads and restarts while the double plays one kind of fault, then asks an honest
store what is left. A save may fail, and a load may; neither may say that it did not.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from cairn import Checkpointer, CheckpointReader, Run, StorageError, parse_uri
from cairn.state.checkpointing.restore import restore_item
from tests.gcs.faults import Faults
from tests.gcs.wire import Request
from tests.storage.states import abstract, floats, mesh, put, raw, raws

REQUESTS = 100
"""About how many requests a save makes: faults start anywhere among them."""

WAIT_SECONDS = 60.0

UPLOADS = r"upload|objects\.put"
"""Operations of either double that bring bytes."""

Order = Callable[[Faults, Random], None]


def answers(status: int) -> Order:
    """An error status: a few times, or for good."""

    def order(faults: Faults, rng: Random) -> None:
        _some(faults, rng, "status", status=status)

    return order


def slow(faults: Faults, rng: Random) -> None:
    """Answers that take their time."""
    seconds = rng.uniform(0.01, 0.1)
    faults.add("slow", seconds=seconds, skip=rng.randrange(REQUESTS), count=rng.randint(1, 20))


def cut_upload(faults: Faults, rng: Random) -> None:
    """Connections that end inside the body of an upload."""
    nbytes = rng.choice([0, 1, rng.randrange(1000), rng.randrange(20_000)])
    _some(faults, rng, "cut_upload", operation=UPLOADS, nbytes=nbytes, within=REQUESTS // 3)


def truncated_download(faults: Faults, rng: Random) -> None:
    """Bodies that end early, some of which look whole."""
    kind = rng.choice(["truncate", "cut_download"])
    operation = rng.choice([r"media\.get", r"media\.get|objects\..*"])
    nbytes = rng.choice([0, 1, rng.randrange(100), rng.randrange(5000)])
    _some(faults, rng, kind, operation=operation, nbytes=nbytes)


def lost_response(faults: Faults, rng: Random) -> None:
    """Work that is done, and an answer that never comes."""
    _some(faults, rng, "lost_response", operation=rng.choice([UPLOADS, r".*", r".*"]))


def stale_list(faults: Faults, rng: Random) -> None:
    """Lists from before everything that happens from now on: all, or those of one folder."""
    folder = rng.choice(["", "manifests/", "attempts/", "attempts/"])

    def asks_for_it(request: Request) -> bool:
        return folder in f"{request.query}"

    count = rng.choice([None, rng.randint(1, 8)])
    skip = rng.choice([0, rng.randrange(8), rng.randrange(40)])
    faults.add("stale_list", predicate=asks_for_it, skip=skip, count=count)


FAULTS: dict[str, Order] = {
    "429": answers(429),
    "503": answers(503),
    "slow": slow,
    "cut upload": cut_upload,
    "truncated download": truncated_download,
    "lost response": lost_response,
    "stale list": stale_list,
}


def _some(
    faults: Faults, rng: Random, kind: Any, *, within: int = REQUESTS, **options: Any
) -> None:
    """Now and then for good, mostly at a few places."""
    if rng.random() < 0.15:
        faults.add(kind, skip=rng.randrange(within), count=None, **options)
        return
    for _ in range(rng.randint(1, 3)):
        faults.add(kind, skip=rng.randrange(within), count=rng.randint(1, 4), **options)


def make_items(step: int) -> dict[str, Any]:
    """What is saved as `step`: small, sharded over four devices."""
    four = mesh(4, dp=1)
    weights = {
        "kernel": put(floats(32, 16, seed=step), "fsdp", None, on=four),
        "bias": put(floats(16, seed=step + 1), on=four),
    }
    return {"model": weights, "optimizer": {"count": put(np.int32(step), on=four)}}


def read_without_jax(run: Run, step: int) -> dict[str, dict[str, Any]]:
    """Every leaf of a step, raw, by item and path."""
    info = run.step(step)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    return {
        item: {path: raw(reader.read(item, path)) for path in reader.leaves(item)}
        for item in reader.items()
    }


@dataclass
class Trial:
    """One run under one kind of fault.

    Attributes:
        uri: the run's, not there yet.
        faults: of the double that holds it.
        order: orders some more faults.
        rng: decides everything.
        durable: steps whose save returned.
        problems: promises that were broken; empty at the end, or the trial is lost.
        refused: calls that failed, as they may.
        fired: how often a fault happened.
        behind: how often a stale list hid the latest step, while it was stale.
    """

    uri: str
    faults: Faults
    order: Order
    rng: Random
    durable: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    refused: int = 0
    fired: int = 0
    behind: int = 0

    def play(self) -> None:
        """Save, load and restart under faults; then look at what an honest store holds."""
        with Checkpointer(self.uri, writer_id="job") as checkpointer:
            checkpointer.save(1, make_items(1), meta={"step": 1}).wait(WAIT_SECONDS)
            self.durable.add(1)
        for _ in range(self.rng.randint(1, 2)):
            with self._misbehaving():
                for _ in range(self.rng.randint(1, 2)):
                    self._job()
        self._after()

    def _job(self) -> None:
        """A job that starts anew as the same writer, saves and ends."""
        with (
            self._may_fail("start"),
            Checkpointer(self.uri, writer_id="job") as checkpointer,
        ):
            for _ in range(self.rng.randint(1, 2)):
                self._save(checkpointer)
        self._load()

    @contextlib.contextmanager
    def _misbehaving(self) -> Iterator[None]:
        self.order(self.faults, self.rng)
        try:
            yield
        finally:
            self.fired += sum(fault.fired for fault in self.faults.all())
            self.faults.clear()

    @contextlib.contextmanager
    def _may_fail(self, what: str) -> Iterator[None]:
        """In our own terms, and in time."""
        try:
            yield
        except StorageError:
            self.refused += 1
        except Exception as error:
            self.problems.append(f"{what}: {type(error).__name__}: {error}"[:300])

    def _save(self, checkpointer: Checkpointer) -> None:
        step = max(self.durable) + 1
        with self._may_fail(f"save {step}"):
            checkpointer.save(step, make_items(step), meta={"step": step}).wait(WAIT_SECONDS)
            self.durable.add(step)

    def _load(self) -> None:
        """A durable step, both ways: what comes must be right."""
        step = self.rng.choice(sorted(self.durable))
        run = Run(parse_uri(self.uri))
        with self._may_fail("latest"):
            self._compare_latest(run.latest_step())
        with self._may_fail(f"read {step}"):
            self._compare("read", step, read_without_jax(run, step))
        with self._may_fail(f"restore {step}"):
            self._compare("restored", step, self._restored(run, step))

    def _compare_latest(self, latest: int | None) -> None:
        """It never goes back, save in a list that is stale itself."""
        if latest is None or latest < max(self.durable):
            if self.order is stale_list:
                self.behind += 1
            else:
                self.problems.append(f"latest went back to {latest} from {max(self.durable)}")

    def _restored(self, run: Run, step: int) -> dict[str, dict[str, Any]]:
        folder = run.step_uri(run.step(step))
        return {
            item: raws(restore_item(folder, item, abstract(tree)))
            for item, tree in make_items(step).items()
        }

    def _compare(self, what: str, step: int, found: dict[str, dict[str, Any]]) -> None:
        expected = {item: raws(tree) for item, tree in make_items(step).items()}
        if found != expected:
            self.problems.append(f"step {step} {what} with other bits")

    def _after(self) -> None:
        """The store is well again: nothing is lost, and the next start needs no help."""
        run = Run(parse_uri(self.uri))
        self._look(run)
        with Checkpointer(self.uri, writer_id="job") as checkpointer:
            step = max(run.step_attempts(), default=0) + 1
            checkpointer.save(step, make_items(step), meta={"step": step}).wait(WAIT_SECONDS)
        self.durable.add(step)
        self._look(run)

    def _look(self, run: Run) -> None:
        listed = [info.step for info in run.steps()]
        lost = self.durable - set(listed)
        if lost:
            states = {(info.step, info.attempt): info.state.value for info in run.all_states()}
            self.problems.append(f"durable and not listed: {sorted(lost)}; {states}")
        if run.latest_step() != max(listed, default=None):
            self.problems.append(f"latest is {run.latest_step()}, listed {listed}")
        for step in listed:
            try:
                self._compare("read", step, read_without_jax(run, step))
            except StorageError as error:
                self.problems.append(f"step {step} is listed and does not load: {error}"[:300])
        if listed:
            self._compare("restored", listed[-1], self._restored(run, listed[-1]))
