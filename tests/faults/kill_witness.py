"""Looks at a run after each kill: what is listed, whether it loads, and where the kill struck."""

from datetime import datetime, timedelta
from typing import Any

from cairn import (
    Run,
    RunNotFoundError,
    StepInfo,
    StepState,
    StorageError,
    collect_garbage,
    find_garbage,
)
from cairn.storage.runs.records.layout import COMMIT_FILE, step_dir
from cairn.storage.store.clock import utc_now
from tests.faults.contents import damage, key_of, position_of
from tests.faults.forked import Told
from tests.storage.records import DEAD_AFTER_SECONDS


def witness(told: Told) -> None:
    """Answer the driver's questions: (name of a method, uri, arguments)."""
    runs: dict[str, Witness] = {}
    for question, uri, *arguments in told.asked():
        seen = runs.setdefault(uri, Witness(uri))
        told.tell(getattr(seen, question)(*arguments))


class Witness:
    """What has been seen of one run so far.

    Attributes:
        uri: the run.
        listed: the attempt of every step ever seen listed.
        attempts: how many attempts there were.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.listed: dict[int, int] = {}
        self.attempts = 0

    def after_kill(
        self, seed: int, start: int, begun: list[int], durable: int | None
    ) -> dict[str, Any]:
        """What is wrong after a start was killed, and what it was doing.

        Args:
            seed: of the experiment.
            start: number of the start that was killed.
            begun: the steps that it began to save.
            durable: the last step that it knew to be durable.
        """
        try:
            run = Run.open(self.uri)
        except RunNotFoundError:
            lost = sorted(self.listed) + ([] if durable is None else [durable])
            return {"wrong": [f"no run, with steps {lost}"] if lost else [], "moment": "no run yet"}
        try:
            moment = self._moment(run, begun, durable)
            return {"wrong": self._wrong(run, seed, start, begun, durable), "moment": moment}
        except StorageError as exc:
            return {"wrong": [f"{type(exc).__name__}: {exc}"], "moment": "?"}

    def _wrong(
        self, run: Run, seed: int, start: int, begun: list[int], durable: int | None
    ) -> list[str]:
        held = run.step_attempts()
        wrong = [
            f"step {step} of attempt {attempt} was listed, now {held.get(step)}"
            for step, attempt in self.listed.items()
            if held.get(step) != attempt
        ]
        if max(held, default=-1) < max(self.listed, default=-1):
            wrong.append(f"latest went from {max(self.listed)} back to {max(held, default=-1)}")
        if durable is not None and durable not in held:
            wrong.append(f"step {durable} was durable and is not listed")
        for info in run.steps():
            if info.step in self.listed:
                continue
            wrong += damage(run, info)
            if key_of(run, info) != [seed, start, info.step] or info.step not in begun:
                wrong.append(f"step {info.step} is not what start {start} saved")
            elif position_of(run, info) != [[seed, start, info.step]]:
                wrong.append(f"step {info.step} has another position in the data")
        self.listed, self.attempts = held, len(run.attempts())
        return wrong

    def _moment(self, run: Run, begun: list[int], durable: int | None) -> str:
        """What the process was doing when it was killed, from what it left."""
        if not begun:
            return "before its first save"
        listed = run.step_attempts()
        if begun[-1] in listed:
            return "between two saves" if begun[-1] == durable else "step listed, nobody told"
        attempts = run.attempts()
        if len(attempts) == self.attempts:
            return "no attempt begun yet"
        # The next save is begun while the one before it is in flight, and waits for it.
        step = min(step for step in begun if step not in listed)
        left = [
            info
            for info in run.unpublished()
            if (info.step, info.attempt) == (step, attempts[-1].number)
        ]
        if not left:
            return "nothing of the step written"
        return "committed, no manifest" if _committed(run, left[0]) else "step half written"

    def load_all(self) -> list[str]:
        """What is wrong with any listed step, each read in full."""
        run = Run.open(self.uri)
        return [text for info in run.steps() for text in damage(run, info)]

    def count(self) -> int:
        """How many steps are listed."""
        return len(Run.open(self.uri).step_attempts())

    def collect(self) -> list[str]:
        """Collect the garbage of all those that were killed, a day later; what is wrong then."""
        run = Run.open(self.uri, clock=_days_later)
        before = run.step_attempts()
        collect_garbage(run, by="gc", clock=_days_later)
        wrong = [f"left after gc: {one.name}" for one in find_garbage(run, clock=_days_later)]
        wrong += [
            f"step {info.step} of attempt {info.attempt} is {info.state.value} after gc"
            for info in run.all_states()
            if info.state in (StepState.ABANDONED, StepState.IN_FLIGHT)
        ]
        if run.step_attempts() != before:
            wrong.append(f"listed before gc: {before}, after: {run.step_attempts()}")
        return wrong + self.load_all()


def _committed(run: Run, info: StepInfo) -> bool:
    return run.objects.read(f"{step_dir(info.attempt, info.step)}/{COMMIT_FILE}") is not None


def _days_later() -> datetime:
    return utc_now() + timedelta(seconds=2 * DEAD_AFTER_SECONDS)
