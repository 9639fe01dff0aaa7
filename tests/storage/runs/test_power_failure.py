"""What a verb reports as done may have been done by another process, which died before its sync.

A power failure takes that unless the verb has it synced.
"""

from pathlib import Path

import pytest

from cairn import (
    Run,
    StepInfo,
    StepNotFoundError,
    StepState,
    annotate_run,
    annotate_step,
    delete_step,
    find_deletable_step,
    fork_run,
    repair_run,
    roll_back,
)
from cairn.storage.runs.records.assets import put_assets
from tests.storage.forks import WRITER
from tests.storage.held_names import HeldNames


def mend(run):
    repair_run(run, by="me", dry_run=False)
    return "run.json"


def delete(run):
    delete_step(run, StepInfo(6, 1, StepState.LISTED), by="me", clock=run.clock)
    return "trash/6.1.json"


def see_that_it_is_deleted(run):
    if 6 in run.step_attempts():
        delete(run)
    with pytest.raises(StepNotFoundError, match="in the trash already"):
        find_deletable_step(run, 6, 1)
    return "trash/6.1.json"


def annotate(run):
    annotate_step(run, 6, labels={"kind": "good"})
    return "annotations/6.1.json"


def label(run):
    annotate_run(run, {"kind": "good"})
    return "run.json"


def go_back(run):
    roll_back(run, 6, by="me", request="1")
    return "attempts/2.json"


def create(run):
    Run.create(run.uri)
    return "run.json"


def put_an_asset(run):
    put_assets(run.objects, {"tokenizer.json": b"{}"})
    return run.objects.list("assets/")[0]


@pytest.mark.parametrize(
    "verb",
    [mend, delete, see_that_it_is_deleted, annotate, label, go_back, create, put_an_asset],
    ids=lambda one: one.__name__,
)
def test_what_is_there_already_is_synced_before_it_is_reported(run, monkeypatch, verb):
    verb(run)
    held = HeldNames(monkeypatch)
    record = Path(run.uri.local_path) / verb(run)
    assert record.name in (held.names(record.parent) or {})


def test_a_fork_that_was_finished_is_synced_before_its_step_is_reported(on_disk, monkeypatch):
    child = on_disk.uri.parent / "child"
    fork_run(on_disk, on_disk.step(3), child, by=WRITER)
    held = HeldNames(monkeypatch)
    fork_run(on_disk, on_disk.step(3), child, by=WRITER)
    assert "3.1.json" in (held.names(f"{child.local_path}/manifests") or {})
