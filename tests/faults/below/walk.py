"""Walks a verb: each call of it below its folder fails in each way, and is the last before a kill.

    python -m tests.faults.below.walk '{"names": [...], "folder": PATH, "control": PATH, ...}'

This process is preloaded with the library (`failing_calls.py`), has imported everything and used
nothing of it: each case is a child of it. Prints JSON: a row for each verb, see `Row`.
"""

import contextlib
import errno
import importlib
import json
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tests.faults.below import verbs
from tests.faults.below.failing_calls import CHANGE, KILL, READ, Call, Control, kind_of
from tests.faults.below.seen import witness
from tests.faults.below.verbs import VERBS, Verb
from tests.faults.forked import ERROR, Forked, Told

PATIENCE: Final = 120.0

WAYS: Final = {
    CHANGE: (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, KILL),
    READ: (errno.EIO,),
}
"""How calls of each kind fail. What is killed while it reads has changed as much as what is killed
at its next change."""

ANNOUNCED_MINUTES: Final = 16
"""After so many an intent or a hold of somebody who was killed counts no more."""

SYNCS: Final = ("fsync", "fdatasync", "sync_file_range")

BAD: Final = (
    "silent",
    "not synced",
    "history of nobody",
    "false deleted",
    "false not deleted",
    "false damage",
    "retry refused",
    "retry without effect",
    "left for good",
    "hung",
)
"""Outcomes that must not be; the others are how it may go."""


@dataclass
class Row:
    """What came of one verb.

    Attributes:
        verb: its name.
        calls: how many calls each kind has, without a fault.
        cases: how many faults there were.
        outcomes: how often each came of them.
        wrong: what must not be, a line each.
        seconds: that it took.
    """

    verb: str
    calls: dict[str, int] = field(default_factory=dict)
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def caller(told: Told, name: str, folder: str) -> None:
    """A caller of a verb, who calls it whenever the driver says so; tells how that ended."""
    logging.disable()  # what fails is what is tried
    with VERBS[name].begin(Path(folder)) as act:
        told.tell("ready")
        for (minutes,) in told.asked():
            verbs.late = timedelta(minutes=minutes)
            try:
                value = act()
            except Exception as exc:
                already = isinstance(exc, VERBS[name].already)
                told.tell("raised", already, f"{type(exc).__name__}: {exc}")
            else:
                told.tell("returned", False, value)


def prepare(told: Told, name: str, folder: str) -> None:
    """Fill the folder of a verb."""
    VERBS[name].prepare(Path(folder))
    told.tell("ready")


class Walk:
    """The experiment on one verb."""

    def __init__(self, verb: Verb, folder: Path, control: Control, look: Forked) -> None:
        self.verb = verb
        self.folder = folder
        self.control = control
        self.look = look
        self.row = Row(verb.name)
        self.template = folder / "template"
        self.number = 0

    def walk(self, kinds: dict[int, tuple[int, ...]], every: int) -> Row:
        """Go through all calls, or every so manieth."""
        began = time.monotonic()
        for module in self.verb.imports:
            importlib.import_module(module)
        self.template.mkdir(parents=True)
        with self.verb.around(self.folder) as given:
            (self.template / "given").write_text(given)
            with Forked(prepare, self.verb.name, str(self.template)) as child:
                _expect(child.event(PATIENCE), "ready")
            for kind, ways in kinds.items():
                name = {CHANGE: "changes", READ: "reads"}[kind]
                self.row.calls[name] = self._without_fault(kind)
                for way in ways:
                    at = 1
                    while self._case(kind, way, at):
                        at += every
        self.row.seconds = round(time.monotonic() - began, 1)
        shutil.rmtree(self.folder)
        return self.row

    @contextlib.contextmanager
    def _copy(self) -> Iterator[Path]:
        self.number += 1
        folder = self.folder / str(self.number)
        shutil.copytree(self.template, folder, symlinks=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _without_fault(self, kind: int) -> int:
        with self._copy() as folder, self._caller(folder) as child:
            self.before = self.look.ask("seen", str(folder))
            with self.control.armed(folder, kinds=kind):
                child.say(0)
                told = child.event(PATIENCE)
            if told is None or told[0] != "returned":
                raise RuntimeError(f"{self.verb.name}, without a fault: {told}")
            self.after = self.look.ask("seen", str(folder))
            self.truth = told[2]
            return len(self.control.calls())

    def _case(self, kind: int, way: int, at: int) -> bool:
        """One fault; whether there was such a call at all."""
        with self._copy() as folder:
            with self._caller(folder) as child:
                with self.control.armed(folder, kinds=kind, error=way, at=at):
                    child.say(0)
                    told = child.event(PATIENCE)
                    if told is None and way == KILL:
                        child.ended(PATIENCE)
                calls = self.control.calls()
                if not self.control.failed:
                    return False
                call = next(one for one in calls if one.number == at)
                where = kind_of(call.path).removeprefix(str(folder)).lstrip("/")
                case = f"{_name(way)} at {at}, {call.name} {where}"
                self.row.cases += 1
                if told is None and way != KILL:
                    self._wrong("hung", case, "no answer")
                    return True
                seen = self.look.ask("seen", str(folder))
                state = self._state(seen)
                self._judge(case, way, told, state, seen, call, calls)
                if way != KILL:
                    child.say(0)
                    again = child.event(PATIENCE)
            if way == KILL:
                try:
                    with self._caller(folder) as child:
                        child.say(0)
                        again = child.event(PATIENCE)
                        if "the step is being deleted" in str(again):
                            self.row.outcomes["of these, the retry waits for an intent"] += 1
                            child.say(ANNOUNCED_MINUTES)
                            again = child.event(PATIENCE)
                except RuntimeError as exc:
                    again = ["raised", False, str(exc)]
            litters = kind == CHANGE and way in (errno.EIO, KILL)  # which error it was is one
            self._judge_again(case, again, state, folder, litters)
        return True

    @contextlib.contextmanager
    def _caller(self, folder: Path) -> Iterator[Forked]:
        """A caller that is about to begin."""
        with Forked(caller, self.verb.name, str(folder)) as child:
            _expect(child.event(PATIENCE), "ready")
            yield child

    def _state(self, seen: dict[str, Any]) -> str:
        """How much of the verb is done: "absent", "done", "part"; or what nobody has done."""
        names = {*seen, *self.before, *self.after}
        changed = {one for one in names if self.before.get(one) != self.after.get(one)}
        odd = [
            f"{one}: {seen.get(one)!r}"
            for one in sorted(names)
            if seen.get(one) not in (self.before.get(one), self.after.get(one))
        ]
        done = {one for one in changed if seen.get(one) == self.after.get(one)}
        if odd or (done and done != changed and not self.verb.in_parts):
            return "; ".join(odd) or f"done: {sorted(done)}, not: {sorted(changed - done)}"
        if done == changed:
            return "done"
        return "part" if done else "absent"

    def _judge(
        self,
        case: str,
        way: int,
        told: list[Any] | None,
        state: str,
        seen: dict[str, Any],
        call: Call,
        calls: list[Call],
    ) -> None:
        if state not in ("absent", "done", "part"):
            self._wrong("history of nobody", case, f"{told}: {state}")
            return
        if told is None:
            self.row.outcomes[f"killed, {state}"] += 1
            return
        how, _, value = told
        if how == "returned":
            if problem := self._lie(value, seen):
                self._wrong(problem, case, f"{value}, {seen}")
            elif value != self.truth or state != "done":
                if _tells(value):
                    self.row.outcomes[f"told, {state}"] += 1
                else:
                    self._wrong("silent", case, f"{state}, returned {value}")
            elif (
                call.name in SYNCS and way != errno.EACCES and not _synced_all_the_same(call, calls)
            ):
                self._wrong("not synced", case, "success")
            else:
                self.row.outcomes["done all the same"] += 1
        elif state == "done" and self.verb.name == "delete step" and not _admits(value):
            self._wrong("false not deleted", case, value)
        else:
            said = " and said so" if state != "absent" and _admits(value) else ""
            self.row.outcomes[f"error, {state}{said}"] += 1

    def _lie(self, value: Any, seen: dict[str, Any]) -> str | None:
        """What is not true of what a verb tells."""
        if self.verb.name == "retention":
            told = {one.removeprefix("deleted ") for one in value if one.startswith("deleted ")}
            trash = {one.removeprefix("run: trash ") for one in seen if "trash " in one}
            if told - trash:
                return "false deleted"
            if trash - told:
                return "false not deleted"
        if self.verb.name == "verify" and any(one.startswith("damage ") for one in value):
            return "false damage"
        return None

    def _judge_again(
        self, case: str, again: list[Any] | None, state: str, folder: Path, litters: bool
    ) -> None:
        if again is None:
            self._wrong("hung", case, "the retry gave no answer")
            return
        how, already, value = again
        if how == "raised" and not (already and state == "done"):
            self._wrong("retry refused", case, f"{state}; {value}")
            return
        seen = self.look.ask("seen", str(folder))
        if seen != self.after:
            differ = {
                one: (seen.get(one), self.after.get(one))
                for one in {*seen, *self.after}
                if seen.get(one) != self.after.get(one)
            }
            self._wrong("retry without effect", case, f"{value}: {differ}")
        elif litters and (left := self.look.ask("left", str(folder))):
            self._wrong("left for good", case, str(left))

    def _wrong(self, outcome: str, case: str, found: object) -> None:
        self.row.outcomes[outcome] += 1
        self.row.wrong.append(f"{outcome}: {case}: {found}")


def _synced_all_the_same(call: Call, calls: list[Call]) -> bool:
    """Whether nothing rests on a sync that failed: it was done later, or was of what is no promise.

    No disk answers a sync by EACCES: that is of folders above a run that one may not open. That an
    announcement is gone is no promise, nor that a lease was given back, nor anything of a probe.
    """
    if any((one.name, one.path) == (call.name, call.path) for one in calls[call.number :]):
        return True
    before = [one.path for one in calls[: call.number] if os.path.dirname(one.path) == call.path]
    path = (before or [call.path])[-1].removesuffix(".__lock")
    return ".cairn-" in path or path.endswith((".hold.json", ".intent.json", "/lease.json"))


def _tells(value: Any) -> bool:
    """Whether an answer says that not all is as it was asked for."""
    return isinstance(value, list) and any(
        one.startswith(("error ", "problem ", "left ")) for one in value
    )


def _admits(text: str) -> bool:
    """Whether an error says that it may have been done, or was."""
    return any(
        words in text
        for words in ("may or may not", "is made", "in the trash", "is deleted", "has gone back")
    )


def _expect(event: list[Any] | None, name: str) -> None:
    if event is None or event[0] != name:
        text = event[1] if event and event[0] == ERROR else event
        raise RuntimeError(f"expected {name}, found {text}")


def _name(way: int) -> str:
    return "kill" if way == KILL else errno.errorcode[way]


def main(
    names: list[str], folder: str, control: str, kinds: dict[str, list[int]] | None, every: int
) -> list[dict[str, Any]]:
    """Run the experiment; see the top of this file."""
    rows = []
    ways = WAYS if kinds is None else {int(one): tuple(kinds[one]) for one in kinds}
    armed = Control(Path(control))
    with Forked(witness) as look:
        for number, name in enumerate(names):
            row = Walk(VERBS[name], Path(folder) / str(number), armed, look).walk(ways, every)
            rows.append(vars(row))
    return rows


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
