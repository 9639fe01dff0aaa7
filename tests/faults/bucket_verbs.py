"""Verbs of a run in a bucket, each as a caller does it, and all that a healthy reader finds then.

Steps have names and small files, and no arrays: what fails are requests of the protocol.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cairn import (
    ObjectStore,
    PreconditionFailedError,
    RetentionPolicy,
    Run,
    StepExistsError,
    StepInfo,
    StepNotFoundError,
    StepState,
    StoreURI,
    Writer,
    annotate_step,
    apply_retention,
    check_run,
    collect_garbage,
    delete_step,
    fork_run,
    promote_step,
    roll_back,
    undelete_step,
)
from cairn.storage.runs.annotate import annotation_of
from tests.storage.runs.test_writer import manifest
from tests.storage.stored_runs import write_data

STEPS = (1, 2, 3)


def opened(uri: StoreURI) -> Run:
    """The run as a process sees it that has not looked before."""
    return Run(uri, objects=ObjectStore(uri))


class Job:
    """A job that saves steps; it has one writer over its calls."""

    def __init__(self, uri: StoreURI, step: int = 1, *, overwrite: bool = False) -> None:
        self.uri, self.step, self.overwrite = uri, step, overwrite
        self.writer: Writer | None = None

    def begin(self) -> "Job":
        """Hold the run from now on."""
        self._take().begin()
        return self

    def __call__(self) -> int:
        return self.save(self.step, overwrite=self.overwrite)

    def save(self, step: int, *, overwrite: bool = False) -> int:
        """Save a step, durably; the attempt that has it."""
        writer = self._take()
        number = writer.claim(step, overwrite=overwrite)
        write_data(opened(self.uri), step, number)
        writer.publish(manifest(step, number))
        return number

    def die(self) -> None:
        """Do nothing more, as a process that was killed."""
        if self.writer is not None:
            self.writer._pause()

    def _take(self) -> Writer:
        if self.writer is None:
            self.writer = Writer(Run.begin(self.uri, environment={})[0], writer="job")
        return self.writer


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        prepare: fills the run's folder.
        begin: gives the verb itself, of a new process.
        already: what a second call raises where the first has done it all.
        agrees: whether what the verb returned is so.
        attempts: how many there were before it.
    """

    prepare: Callable[[StoreURI], object]
    begin: Callable[[StoreURI], Callable[[], Any]]
    already: tuple[type[Exception], ...] = ()
    agrees: Callable[[Any], bool] = lambda _: True
    attempts: int = 1


def saved(uri: StoreURI) -> None:
    """Steps 1, 2 and 3 of attempt 1, which has ended; an alias names the first."""
    job = Job(uri)
    for step in STEPS:
        job.save(step)
    assert job.writer is not None
    job.writer.close()
    promote_step(Run.open(uri), 1, "serving", by="me", expect=None)


def deleted(uri: StoreURI, grace: float = 3600) -> None:
    """The same, and 2 is in the trash."""
    saved(uri)
    delete_step(Run.open(uri), StepInfo(2, 1, StepState.LISTED), by="me", grace=grace)


def expired(uri: StoreURI) -> None:
    """The same, and its bytes may go."""
    deleted(uri, grace=0)


def _of_run(do: Callable[[Run], Any]) -> Callable[[StoreURI], Callable[[], Any]]:
    return lambda uri: partial(do, opened(uri))


def _prune(run: Run) -> None:
    for error in apply_retention(run, RetentionPolicy(keep_last=1), by="me").errors:
        raise error


VERBS = {
    "first save": Verb(lambda _: None, Job, (StepExistsError,), attempts=0),
    "save": Verb(saved, lambda uri: Job(uri, 4), (StepExistsError,)),
    "overwrite": Verb(saved, lambda uri: Job(uri, 2, overwrite=True)),
    "overwrite, held": Verb(saved, lambda uri: Job(uri, 2, overwrite=True).begin()),
    "roll back": Verb(
        saved,
        _of_run(lambda run: roll_back(run, 2, by="me", request="one")),
        agrees=lambda done: done.superseded == (3,),
    ),
    "delete": Verb(
        saved, _of_run(lambda run: delete_step(run, StepInfo(2, 1, StepState.LISTED), by="me"))
    ),
    "undelete": Verb(deleted, _of_run(lambda run: undelete_step(run, 2, 1)), (StepNotFoundError,)),
    "promote": Verb(
        saved,
        _of_run(lambda run: promote_step(run, 2, "production", expect=None)),
        (PreconditionFailedError,),
    ),
    "annotate": Verb(saved, _of_run(lambda run: annotate_step(run, 3, labels={"kind": "good"}))),
    "prune": Verb(saved, _of_run(_prune)),
    "collect garbage": Verb(expired, _of_run(lambda run: collect_garbage(run, by="me"))),
    "fork": Verb(
        saved,
        _of_run(
            lambda run: fork_run(
                run, StepInfo(2, 1, StepState.LISTED), run.uri.parent / "fork", by="me"
            )
        ),
    ),
}


def seen(uri: StoreURI, attempts: int = 1) -> dict[str, Any]:
    """All that is promised of a run, and of the fork beside it.

    Args:
        uri: the run's.
        attempts: how many had saved before the verb: what later ones have is new.
    """
    facts: dict[str, Any] = {}
    for run in (opened(uri), opened(uri.parent / "fork")):
        name = run.uri.name
        if run.objects.read("run.json") is None:
            continue
        steps = run.steps()
        facts |= {
            f"{name}: problems": list(check_run(run).problems),
            f"{name}: steps": [
                (one.step, name == "run" and one.attempt <= attempts) for one in steps
            ],
            f"{name}: latest": run.latest_step(),
            f"{name}: deleted": sorted(step for step, _ in run.trashed()),
            f"{name}: aliases": {one.alias: (one.step, one.attempt) for one in run.aliases.list()},
            f"{name}: labels": [dict(annotation_of(run, one).labels) for one in steps],
        }
    return {key: fact for key, fact in facts.items() if fact not in ([], {}, None)}
