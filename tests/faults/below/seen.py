"""What a healthy reader finds of the runs in a folder, and of what nothing will ever remove."""

import os
from pathlib import Path
from typing import Any

from cairn import (
    CheckpointReader,
    Run,
    StepState,
    StorageError,
    check_run,
    collect_garbage,
    list_runs,
    parse_uri,
    verify_step,
)
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.exports import exports_of_run
from cairn.storage.runs.trash import read_tombstones
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX
from cairn.storage.store.files_local import TEMPORARY_PREFIX
from cairn.storage.store.records import sha256_of
from tests.faults.below.verbs import KEY, OTHER, days_later
from tests.faults.forked import Told


def witness(told: Told) -> None:
    """Answer the driver's questions: (name of a function, folder)."""
    for question, folder in told.asked():
        told.tell({"seen": seen, "left": left}[question](Path(folder)))


def seen(folder: Path) -> dict[str, Any]:
    """All that is promised of the runs in a folder, by what it is of.

    Attempts have no place in it: a verb that is tried again begins another one.
    """
    facts: dict[str, Any] = {}
    for name in list_runs(folder):
        facts[name] = "a run"
        try:
            facts |= {f"{name}: {key}": one for key, one in _of_run(folder / name).items()}
        except StorageError as exc:
            facts[f"{name}: unreadable"] = type(exc).__name__
    if (pulled := folder / "pulled").exists():
        facts["pulled: current"] = _sums(pulled / "current")
        facts |= {f"pulled: {one.name}": "there" for one in (pulled / "versions").iterdir()}
    return facts


def _sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder, which may be a link."""
    files = [Path(place) / name for place, _, names in os.walk(folder) for name in names]
    return {str(one.relative_to(folder)): sha256_of(one.read_bytes()) for one in sorted(files)}


def _of_run(folder: Path) -> dict[str, Any]:
    run = Run(parse_uri(folder))
    facts: dict[str, Any] = {
        "problems": sorted(one.split(":")[0] for one in check_run(run).problems)
    }
    if facts["problems"]:  # a record is lost: what it told can't be asked
        return facts
    facts["labels"] = dict(run.info().labels)
    listed = run.steps()
    for info in listed:
        key = CheckpointReader.open(run.step_uri(info), run.manifest(info)).meta().get(KEY, "")
        facts[f"step {info.step}"] = key
        if problems := verify_step(run, info).problems:
            facts[f"step {info.step} is damaged"] = list(problems)
        noted = annotation_of(run, info)
        facts[f"notes of {info.step}"] = [
            dict(noted.labels), dict(noted.metrics), noted.verified is not None,
            noted.damaged is not None,
        ]  # fmt: skip
    published = set(run.published())
    for info in run.all_states():
        if info.state is StepState.SUPERSEDED and (info.step, info.attempt) in published:
            key = CheckpointReader.open(run.step_uri(info), run.manifest(info)).meta().get(KEY, "")
            if key.startswith("old"):  # else a save that was given up, and is to be tried again
                facts[f"set aside: {key}"] = info.step
    lease = read_lease(run.objects)
    if lease is not None and lease.writer == OTHER and lease.is_alive(run.clock()):
        facts["held"] = OTHER
    facts |= {f"alias {one.alias}": one.step for one in run.aliases.list()}
    for (step, attempt), one in read_tombstones(run.objects).items():
        facts[f"trash {step}.{attempt}"] = "removed" if one.removed else "deleted"
    facts |= {f"export of {one.step}": one.kind for one in exports_of_run(run.objects, 9)[0]}
    return facts


def left(folder: Path) -> list[str]:
    """What is in the runs a month later that nobody uses, though garbage was collected."""
    names: list[str] = []
    for run in list_runs(folder):
        collect_garbage(Run.open(folder / run), by="later", clock=days_later)
        names += [name for _, _, files in os.walk(folder / run) for name in files]
    return sorted(
        one for one in names if one.endswith(LOCK_SUFFIX) or one.startswith(TEMPORARY_PREFIX)
    )
