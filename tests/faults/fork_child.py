"""A process that forks a step until it is done or killed, and one that looks at what came of it."""

import os
import re
from typing import Any

from cairn import (
    Checkpointer,
    Run,
    RunNotFoundError,
    StorageError,
    StoreURI,
    check_run,
    fork_run,
    open_files,
    parse_uri,
    verify_step,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.layout import INDEX_FILE
from tests.faults.contents import KEY, contents, placed
from tests.faults.forked import Told

STEP = 3
WRITER = "fork"
ASSETS = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


def fork_until_killed(told: Told, source: str, target: str) -> None:
    """Fork the step, as a repeated call does; tell "begin" and "done"."""
    run = Run.open(source)
    told.tell("begin")
    forked = fork_run(run, run.step(STEP), parse_uri(target), by=WRITER)
    told.tell("done", forked.copied.files)


def witness(told: Told) -> None:
    """Answer the driver's questions: (name of a method, arguments)."""
    seen = Witness()
    for question, *arguments in told.asked():
        told.tell(getattr(seen, question)(*arguments))


class Witness:
    """Knows the source, byte for byte."""

    def __init__(self) -> None:
        self.bytes: dict[str, bytes] = {}

    def save(self, source: str, seed: int) -> int:
        """Save the step that is to be forked; how many files it has."""
        with Checkpointer(source, writer_id="job") as checkpointer:
            items = placed(contents([seed]))
            checkpointer.save(
                STEP, items, meta={KEY: [seed]}, assets=ASSETS, metrics={"loss": 0.5}
            ).wait()
        run = Run.open(source)
        self.bytes = _bytes(run.step_uri(run.step(STEP)))
        return len(self.bytes)

    def after_kill(self, target: str) -> dict[str, Any]:
        """What is wrong after a kill, where it struck, and what it left of writes."""
        left = sorted({_kind(name) for name in _halves(parse_uri(target))})
        try:
            run = Run.open(target)
        except RunNotFoundError:
            return {"wrong": [], "moment": "no run yet", "left": left}
        try:
            listed = run.steps()
            wrong = [text for info in listed for text in self._wrong_bytes(run.step_uri(info))]
            return {"wrong": wrong, "moment": self._moment(run, bool(listed)), "left": left}
        except StorageError as exc:
            return {"wrong": [f"{type(exc).__name__}: {exc}"], "moment": "?", "left": left}

    def _moment(self, run: Run, listed: bool) -> str:
        if listed:
            return "listed, nobody told"
        attempts = run.attempts()
        if not attempts:
            return "run begun, no attempt"
        present = len(open_files(run.uri / f"attempts/{attempts[-1].number}").walk())
        if not present:
            return "attempt begun, no file"
        return "all files, not listed" if present >= len(self.bytes) else "some files"

    def wrong_in_the_end(self, target: str) -> list[str]:
        """What is wrong with a fork that has ended well."""
        run = Run.open(target)
        steps = run.steps()
        if [(info.step, info.attempt) for info in steps] != [(STEP, 1)]:
            return [f"listed: {steps}"]
        wrong = self._wrong_bytes(run.step_uri(steps[0]))
        report, records = verify_step(run, STEP), check_run(run)
        wrong += [*report.problems, *records.problems, *(f"extra: {one}" for one in report.extra)]
        wrong += [f"left: {name}" for name in _halves(run.step_uri(steps[0]))]
        lease = read_lease(run.objects)
        if lease is None or not lease.released:
            wrong.append("the lease was not given back")
        return wrong

    def _wrong_bytes(self, folder: StoreURI) -> list[str]:
        found = _bytes(folder)
        names = {*found, *self.bytes}
        return [
            f"{name} is not as in the source"
            for name in sorted(names)
            if found.get(name) != self.bytes.get(name)
        ]


def _bytes(folder: StoreURI) -> dict[str, bytes]:
    """Every file but the index, which is a copy's own."""
    files = open_files(folder)
    entries = [one for one in files.walk() if one.name != INDEX_FILE]
    return {one.name: files.read_range(one.name, 0, one.size) for one in entries}


def _halves(folder: StoreURI) -> list[str]:
    """Names of what writes that were killed left on a disk, which no listing shows."""
    if folder.scheme != "file":
        return []
    names = [name for _, _, names in os.walk(folder.local_path) for name in names]
    return [name for name in names if name.endswith("__lock") or name.startswith(".cairn-tmp")]


def _kind(name: str) -> str:
    return re.sub(r"-?[0-9a-f]{16,64}", "<hash>", name)
