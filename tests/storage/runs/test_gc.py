import os
from datetime import timedelta
from pathlib import Path

import pytest

from cairn import (
    CheckpointRef,
    FencedError,
    Run,
    StepNotFoundError,
    collect_garbage,
    delete_step,
    find_deletable_step,
    find_garbage,
    open_files,
    undelete_step,
)
from cairn.storage.runs.lease import LEASE_TTL_SECONDS
from cairn.storage.runs.records.exports import ExportKey, ExportManifest, publish_export
from cairn.storage.runs.records.layout import annotation_file, manifest_file
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.trash import read_tombstones
from cairn.storage.runs.usage import run_usage
from tests.storage.records import (
    DEAD_AFTER_SECONDS,
    AliasWriter,
    begin_attempt,
    ensure_newest,
    release,
    renew,
)
from tests.storage.stored_runs import begin, end, save, states, write_data


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


@pytest.fixture
def run(root_uri, clock):
    return Run.create(root_uri / "run", clock=clock)


def found(run):
    return {(one.kind.value, one.name) for one in find_garbage(run, clock=run.clock)}


def collect(run):
    return {(one.kind.value, one.name) for one in collect_garbage(run, by="gc", clock=run.clock)}


def names(run, folder=""):
    return {entry.name for entry in open_files(run.uri).walk(folder)}


def export(run, step, attempt, *, counts="a", tries=("a", "b")):
    key = ExportKey(step, attempt, "convert", "0123456789abcdef")
    files = open_files(run.uri)
    for name in tries:
        with files.open_write(f"{key.try_folder(name)}/config.json") as stream:
            stream.write(b"{}")
    manifest = ExportManifest(
        kind="convert",
        step=step,
        attempt=attempt,
        source="sha256:0",
        options={},
        rule_version=1,
        folder=counts,
        created="2026-11-21T12:00:00Z",
        files=(),
    )
    publish_export(run.objects, key, manifest)
    return key


def test_a_run_in_order_has_no_garbage(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    export(run, 3, attempt, tries=("a",))
    assert find_garbage(run, clock=run.clock) == []
    before = names(run)
    assert collect(run) == set()
    assert names(run) == before


def test_trash_goes_after_its_grace_time_with_all_that_belongs_to_it(run, clock):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    run.objects.write(annotation_file(3, attempt), b"{}")
    export(run, 3, attempt)
    export(run, 6, attempt, tries=("a",))
    delete_step(run, run.step(3), by="me", grace=60, clock=clock)
    assert ("trash", "attempts/1/3") not in found(run)
    clock.now += timedelta(seconds=60)
    assert ("trash", "attempts/1/3") in found(run)
    assert [info.step for info in run.steps()] == [6]  # a plan changes nothing
    assert manifest_file(3, attempt) in names(run)
    assert ("trash", "attempts/1/3") in collect(run)
    left = names(run)
    assert not [name for name in left if "3.1" in name or name.startswith("attempts/1/3/")]
    assert manifest_file(6, attempt) in left
    assert read_tombstones(run.objects) == {}
    assert [info.step for info in run.steps()] == [6]
    assert collect(run) == set()


def test_what_was_overwritten_stays_aside_when_its_successor_is_deleted_and_gone(run, clock):
    first = begin(run, -1)
    for step in (10, 20, 30):
        save(run, step, first)
    second = begin(run, 30)  # an overwrite of the latest step, which sets nothing aside
    save(run, 30, second)
    end(run)
    AliasWriter(run.objects).move("before", step=30, attempt=first, expect=None)
    delete_step(run, run.step(30), by="me", grace=0, clock=clock)
    for _ in range(2):
        assert run.step_attempts() == {10: first, 20: first}
        assert states(run)[30, first] == "superseded"
        with pytest.raises(StepNotFoundError):
            run.step(30)
        assert resolve_step(run, CheckpointRef(run.uri, alias="before")).state.value == "superseded"
        collect(run)
    assert f"attempts/{second}/30/model/data" not in names(run)
    assert manifest_file(30, second) not in names(run)
    assert read_tombstones(run.objects)[30, second].removed
    assert collect(run) == set()  # it is no garbage, and nobody collects it again and again
    with pytest.raises(StepNotFoundError, match="too late"):
        undelete_step(run, 30, second)


def test_the_tombstone_of_an_overwrite_goes_once_what_it_overwrote_is_gone(run, clock):
    first = begin(run, -1)
    save(run, 30, first)
    second = begin(run, 30)
    save(run, 30, second)
    end(run)
    delete_step(run, run.step(30), by="me", grace=0, clock=clock)
    collect(run)
    delete_step(run, find_deletable_step(run, 30, first), by="me", grace=0, clock=clock)
    collect(run)
    assert run.step_attempts() == {}
    collect(run)
    assert read_tombstones(run.objects) == {}


def test_an_overwrite_s_tombstone_goes_with_a_rollback_before_both(run, clock):
    first = begin(run, -1)
    for step in (10, 30):
        save(run, step, first)
    save(run, 30, begin(run, 30))
    end(run)
    delete_step(run, run.step(30), by="me", grace=0, clock=clock)
    begin(run, 10)
    collect(run)
    assert read_tombstones(run.objects) == {}
    assert run.step_attempts() == {10: first}


def test_an_aliased_step_in_the_trash_stays(run, clock):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    delete_step(run, run.step(3), by="me", grace=0, clock=clock)
    AliasWriter(run.objects).move("production", step=3, attempt=attempt, expect=None)
    assert collect(run) == set()
    assert f"attempts/{attempt}/3/model/data" in names(run)


def test_an_interrupted_removal_is_taken_up_by_the_next_call(run, clock, monkeypatch):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    delete_step(run, run.step(3), by="me", grace=0, clock=clock)

    def killed(self, rel):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(open_files(run.uri)), "delete_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(run)
    with pytest.raises(StepNotFoundError):
        run.step(3)
    assert collect(run) == {("trash", "attempts/1/3")}
    assert not [name for name in names(run) if name.startswith("attempts/1/3/")]


def test_what_a_live_writer_writes_is_never_garbage(run, clock):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    write_data(run, 6, attempt, committed=False)
    write_data(run, 9, attempt, committed=False, suffix=".orbax-checkpoint-tmp")
    assert found(run) == set()
    clock.now += timedelta(seconds=LEASE_TTL_SECONDS + 60)
    assert states(run)[6, attempt] == "abandoned"  # or paused: it may go on
    assert collect(run) == set()
    assert "attempts/1/6/model/data" in names(run)


def test_halves_of_an_attempt_that_was_taken_over_go(run):
    first = begin(run, -1)
    save(run, 3, first)
    write_data(run, 6, first, committed=False)
    write_data(run, 7, first, committed=False, suffix=".orbax-checkpoint-tmp-1")
    second = begin(run, 3)
    write_data(run, 6, second, committed=False)
    halves = {("abandoned", "attempts/1/6"), ("abandoned", "attempts/1/7.orbax-checkpoint-tmp-1")}
    assert found(run) == halves
    assert collect(run) == halves
    assert names(run, "attempts") >= {"1/3/model/data", "2/6/model/data"}
    assert collect(run) == set()


def test_halves_of_a_writer_that_closed_go(run, clock):
    attempt = begin_attempt(run.objects, writer="w", base_step=-1, clock=clock)
    write_data(run, 6, attempt.number, committed=False)
    release(run.objects, attempt, clock=clock)
    assert collect(run) == {("abandoned", "attempts/1/6")}


def test_a_writer_dead_for_long_is_ended_before_its_halves_go(run, clock):
    dead = begin_attempt(run.objects, writer="w", base_step=-1, clock=clock)
    save(run, 3, dead.number)
    write_data(run, 6, dead.number, committed=False)
    clock.now += timedelta(seconds=LEASE_TTL_SECONDS + DEAD_AFTER_SECONDS - 1)
    assert collect(run) == set()
    clock.now += timedelta(seconds=1)
    assert found(run) == {("abandoned", "attempts/1/6")}
    assert [one.number for one in run.attempts()] == [1]  # a plan ends nobody
    assert collect(run) == {("abandoned", "attempts/1/6")}
    with pytest.raises(FencedError):
        renew(run.objects, dead, clock=clock)
    with pytest.raises(FencedError):
        ensure_newest(run.objects, dead)
    assert [info.step for info in run.steps()] == [3]
    again = begin_attempt(run.objects, writer="w", base_step=3, clock=clock)  # at once
    assert again.number == 3


def test_superseded_and_unverified_steps_stay(run):
    first = begin(run, -1)
    for step in (3, 6):
        save(run, step, first)
    write_data(run, 5, first)
    begin(run, 4)
    assert states(run) == {(3, 1): "listed", (5, 1): "superseded", (6, 1): "superseded"}
    assert collect(run) == set()


def test_exports_that_lost_or_whose_step_is_gone_go(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    kept = export(run, 3, attempt, counts="b", tries=("a", "b", "c"))
    gone = export(run, 6, attempt)
    unpublished = ExportKey(3, attempt, "gather", "0123456789abcdef")
    with open_files(run.uri).open_write(f"{unpublished.try_folder('x')}/data") as stream:
        stream.write(b"being written")
    run.objects.delete(manifest_file(6, attempt))
    assert collect(run) == {
        ("export", kept.try_folder("a")),
        ("export", kept.try_folder("c")),
        ("export", f"exports/6.{attempt}"),
    }
    left = names(run, "exports")
    assert left == {
        name.removeprefix("exports/")
        for name in (
            kept.manifest,
            f"{kept.try_folder('b')}/config.json",
            f"{unpublished.try_folder('x')}/data",
        )
    }
    assert gone.manifest.removeprefix("exports/") not in left


def test_a_try_that_counts_by_the_time_it_would_go_stays(run):
    attempt = begin(run, -1)
    for step in (3, 6):
        save(run, step, attempt)
    key = export(run, 3, attempt, counts="b")
    other = export(run, 6, attempt, counts="b")

    def swap(garbage):
        """Another process withdraws the export, and publishes the other try."""
        assert garbage.step == 3
        run.objects.delete(other.manifest)
        export(run, 6, attempt, counts="a", tries=())

    removed = collect_garbage(run, by="gc", progress=swap, clock=run.clock)
    assert [one.name for one in removed] == [key.try_folder("a")]
    assert f"{other.try_folder('a')}/config.json" in names(run)


def test_garbage_is_told_with_its_bytes_and_why(run):
    first = begin(run, -1)
    write_data(run, 6, first, committed=False)
    begin(run, -1)
    (garbage,) = find_garbage(run, clock=run.clock)
    assert (garbage.step, garbage.attempt, garbage.nbytes) == (6, 1, 4)
    assert garbage.reason == "attempt 1 ended before the step was complete"


def test_bytes_of_garbage_are_those_that_go(run, clock):
    attempt = begin(run, -1)
    for step in (3, 6, 9):
        save(run, step, attempt)
    export(run, 3, attempt)
    if run.uri.scheme == "file":
        folder = Path(run.uri.local_path, "attempts", str(attempt))
        for name, (first, *others) in {"stays": (9, 3, 6), "goes": (3, 6)}.items():
            (folder / str(first) / name).write_bytes(bytes(100))
            for step in others:
                os.link(folder / str(first) / name, folder / str(step) / name)

    def held():
        uses = run_usage(run).uses
        return uses["steps"] + uses["exports"]

    for step in (3, 6):
        delete_step(run, run.step(step), by="ana", grace=0, clock=clock)
    told, before = sum(one.nbytes for one in find_garbage(run, clock=clock)), held()
    collect_garbage(run, by="gc", clock=clock)
    assert told == before - held() > 100 * (run.uri.scheme == "file")
