"""A store that stops answering within a call: the call ends, and nothing of it comes later.

A trial lets so many requests of a call pass, then has the double hang: at one request, or at every
one from then on. Once the call has ended the double is well again, whatever is still under way goes
on, and the run is looked at.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from cairn import Checkpointer, Run, StorageError, promote_step, verify_step
from cairn.state.checkpointing.restore import restore_item
from tests.faults.gcs_schedules import make_items
from tests.gcs.plugin import Gcs
from tests.storage.seams import deadlines
from tests.storage.states import abstract, raws

DOWNLOAD = "media.get"

DEADLINE_SECONDS = 1.0
"""Instead of 90."""

PATIENCE_SECONDS = 30.0
"""A call that has not ended by then hangs."""

LATER_SECONDS = 0.5
"""So long a call that was given up may try to go on before the run is looked at."""


@contextmanager
def short_deadline(seconds: float = DEADLINE_SECONDS) -> Iterator[None]:
    """Give calls up sooner than users would want."""
    with patch.object(deadlines, "DEADLINE_SECONDS", seconds):
        yield


def save(uri: str, step: int) -> Checkpointer:
    """As a job that starts anew; the checkpointer, still open."""
    checkpointer = Checkpointer(uri, writer_id="job")
    try:
        save_with(checkpointer, step)
    except BaseException as exc:
        exc.checkpointer = checkpointer  # type: ignore[attr-defined]  # goes on with it
        raise
    return checkpointer


def save_with(checkpointer: Checkpointer, step: int) -> None:
    """As its next step."""
    handle = checkpointer.save(step, make_items(step), meta={"step": step})
    handle.wait(PATIENCE_SECONDS)


def load(uri: str, step: int) -> None:
    """Every item, onto devices."""
    run = Run.open(uri)
    folder = run.step_uri(run.step(step))
    for item, tree in make_items(step).items():
        found = restore_item(folder, item, abstract(tree))
        assert raws(found) == raws(tree)


def promote(uri: str, step: int) -> None:
    """To an alias that may be there."""
    run = Run.open(uri)
    held = run.aliases.get("production")
    expect = None if held is None else held.sequence
    promote_step(run, step, "production", by="ann", expect=expect)


def verify(uri: str, step: int) -> None:
    """Every byte."""
    run = Run.open(uri)
    assert verify_step(run, step).ok


READS: dict[str, Callable[[str, int], None]] = {
    "load": load,
    "promote": promote,
    "verify": verify,
}


@dataclass
class Hangs:
    """Trials of one run, which has step 1.

    Attributes:
        double: of the bucket.
        uri: the run's.
        durable: the steps that it must list.
        problems: promises that were broken.
        hung: how often a call met a request that hung.
    """

    double: Gcs
    uri: str
    durable: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hung: int = 0

    def requests(self, call: Callable[[], Any], kind: str) -> int:
        """How many requests of a call can hang in this way, if none does."""
        self.double.server.requests.clear()  # of which the server keeps so many
        call()
        asked = [one.operation for one in self.double.server.requests]
        return asked.count(DOWNLOAD) if kind == "stall_download" else len(asked)

    def begin(self, kind: str) -> int:
        """Save the first step, and one more; how many requests the second took of a new job."""
        save(self.uri, 1).close()
        count = self.requests(lambda: save(self.uri, 2).close(), kind)
        self.durable = [1, 2]
        return count

    def read(self, name: str, at: int, kind: str, count: int | None) -> None:
        """A call that only reads, or moves an alias."""
        where = f"{name}, {kind} at request {at}" + (" alone" if count == 1 else "")
        with self._hanging(kind, at, count):
            self._ended(where, lambda: READS[name](self.uri, 1))
        time.sleep(LATER_SECONDS)  # what was given up may be done yet, as its error says
        problem = self._ended(f"{where}: again", lambda: READS[name](self.uri, 1))
        if problem is not None:
            self.problems.append(f"{where}: afterwards {problem}")

    def save(self, at: int, kind: str, count: int | None) -> None:
        """A save of a job that starts anew, and the one after it."""
        where = f"save, {kind} at request {at}" + (" alone" if count == 1 else "")
        step = max(self.durable) + 1
        made: list[Checkpointer] = []
        self.double.server.requests.clear()
        with self._hanging(kind, at, count):
            failure = self._ended(where, lambda: made.append(save(self.uri, step)))
        time.sleep(LATER_SECONDS)
        checkpointer = made[0] if made else getattr(failure, "checkpointer", None)
        if checkpointer is None:
            return  # it hangs, and is told of
        if failure is None:
            self.durable.append(step)
        elif kind != "mute":  # which may have done the very work that makes a step count
            self._look(where, on_its_way=step if self._manifest_hung(step) else None)
        again = self._ended(f"{where}: next", lambda: save_with(checkpointer, step + 1))
        if again is None:
            self.durable.append(step + 1)
        else:
            self.problems.append(f"{where}: the next save failed: {again}"[:400])
        self._ended(f"{where}: close", checkpointer.close)
        self._look(where)

    @contextmanager
    def _hanging(self, kind: str, at: int, count: int | None) -> Iterator[None]:
        nbytes = 20 if kind == "stall_download" else 0
        operation = re.escape(DOWNLOAD) if kind == "stall_download" else None
        fault = self.double.faults.add(
            kind,
            skip=at,
            count=count,
            nbytes=nbytes,
            operation=operation,  # type: ignore[arg-type]
        )
        try:
            yield
        finally:
            self.hung += bool(fault.fired)
            self.double.faults.clear()

    def _ended(self, where: str, call: Callable[[], Any]) -> Exception | None:
        """What the call raised, if anything; a problem if it does not end, or raises another's."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as exc:
                raised.append(exc)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS + 5)
        if thread.is_alive() or any(type(one) is TimeoutError for one in raised):
            self.problems.append(f"{where}: hangs")
        elif raised and not isinstance(raised[0], StorageError):
            self.problems.append(f"{where}: {type(raised[0]).__name__}: {raised[0]}"[:400])
        elif raised and f"{self.uri.partition(':')[0]}://" not in str(raised[0]):
            self.problems.append(f"{where}: names no store: {raised[0]}"[:400])
        return raised[0] if raised else None

    def _manifest_hung(self, step: int) -> bool:
        """Whether a manifest of the step was on its way, and was not answered."""
        return any(
            one.status == 0 and f"/manifests/{step}." in one.name
            for one in list(self.double.server.requests)
        )

    def _look(self, where: str, on_its_way: int | None = None) -> None:
        found = [info.step for info in Run.open(self.uri).steps()]
        if found != self.durable and found != [*self.durable, on_its_way]:
            self.problems.append(f"{where}: lists {found}, durable are {self.durable}")
