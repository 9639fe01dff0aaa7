import threading
from datetime import timedelta

import pytest

from cairn import (
    ObjectStore,
    Run,
    RunNotFoundError,
    StepInFlightError,
    StepInfo,
    StepInUseError,
    StepNotFoundError,
    StepState,
    Writer,
    delete_step,
    undelete_step,
)
from cairn.storage.runs.records.layout import manifest_file, trash_file
from cairn.storage.runs.trash import read_tombstones
from tests.storage.records import AliasWriter, begin_removal, intent_file
from tests.storage.seams import trash
from tests.storage.stored_runs import begin, end, publish, save, write_data


def delete(run, step, **options):
    return delete_step(run, run.step(step), by="me", clock=run.clock, **options)


def test_a_deleted_step_is_listed_no_more_and_can_be_had_back(run, clock):
    tombstone = delete(run, 6, reason="bad data", grace=60)
    assert (tombstone.by, tombstone.reason, tombstone.removing) == ("me", "bad data", False)
    assert [info.step for info in run.steps()] == [3, 9]
    assert {i.step for i in run.all_states() if i.state is StepState.TRASHED} == {6}
    clock.now += timedelta(seconds=30)
    undelete_step(run, 6, 1)
    assert [info.step for info in run.steps()] == [3, 6, 9]
    with pytest.raises(StepNotFoundError, match="no such deleted step"):
        undelete_step(run, 6, 1)


def test_deleting_twice_keeps_the_first_tombstone(run, clock):
    info = run.step(6)
    first = delete_step(run, info, by="me", clock=clock)
    clock.now += timedelta(days=1)
    assert delete_step(run, info, by="you", clock=clock) == first
    assert read_tombstones(run.objects) == {(6, 1): first}


def test_a_step_that_was_in_flight_when_it_was_looked_at_is_judged_anew(run, clock):
    writer = Writer(run, writer="job", clock=clock)
    attempt = writer.claim(12)
    write_data(run, 12, attempt)
    seen = StepInfo(12, attempt, StepState.IN_FLIGHT)
    with pytest.raises(StepInFlightError, match="the step is being saved"):
        delete_step(run, seen, by="me", clock=clock)
    publish(run, 12, attempt)
    with pytest.raises(StepInUseError, match="the latest step of writer job"):
        delete_step(run, seen, by="me", clock=clock)
    assert run.latest_step() == 12
    assert read_tombstones(run.objects) == {}
    writer.close()
    delete_step(run, seen, by="me", clock=clock)
    assert run.latest_step() == 9


@pytest.mark.parametrize("committed", [False, True])
def test_a_step_without_a_manifest_is_not_deleted(run, clock, committed):
    write_data(run, 12, 1, committed=committed)
    for step in (12, 15):  # one that has a folder alone, and one that nobody has begun
        with pytest.raises(StepNotFoundError, match="with a manifest"):
            delete_step(run, StepInfo(step, 1, StepState.SUPERSEDED), by="me", clock=clock)
    assert read_tombstones(run.objects) == {}
    assert run.objects.read(intent_file(12, 1)) is None


def test_a_step_that_an_alias_names_is_not_deleted(run):
    AliasWriter(run.objects).move("production", step=6, attempt=1, expect=None)
    with pytest.raises(StepInUseError, match="found alias production"):
        delete(run, 6)
    assert [info.step for info in run.steps()] == [3, 6, 9]


def test_a_step_whose_bytes_another_needs_is_not_deleted(run):
    with pytest.raises(StepInUseError, match="found step 9 of attempt 1"):
        delete(run, 6, needed_by=[(9, 1)])
    assert read_tombstones(run.objects) == {}


def test_a_promotion_during_a_deletion_wins(run, monkeypatch):
    """The alias is moved after the aliases were read and before the tombstone is laid."""
    write_if = type(run.objects).write_if

    def promoted_first(self, key, value, **options):
        if key == trash_file(6, 1):
            AliasWriter(run.objects).move("production", step=6, attempt=1, expect=None)
        return write_if(self, key, value, **options)

    monkeypatch.setattr(type(run.objects), "write_if", promoted_first)
    with pytest.raises(StepInUseError, match="alias production"):
        delete(run, 6)
    assert run.step(6).state is StepState.LISTED


def test_a_deletion_whose_run_was_removed_and_begun_anew_deletes_nothing(
    root_uri, clock, monkeypatch
):
    def saved(name):
        run = Run.create(root_uri / name / "run", clock=clock)
        attempt = begin(run, -1)
        for step in (3, 6, 9):
            save(run, step, attempt)
        end(run)
        return run

    run, another, lay = saved("one"), saved("another"), trash.lay_tombstone

    def replaced(*arguments):
        """Between the look and the tombstone, by somebody else."""
        there = ObjectStore(run.uri)
        there.delete_many(there.list())
        for name, stored in another.objects.read_many(another.objects.list()).items():
            there.write(name, stored.value)
        return lay(*arguments)

    monkeypatch.setattr(trash, "lay_tombstone", replaced)
    with pytest.raises(RunNotFoundError, match="another begun"):
        delete(run, 3)
    assert Run(run.uri, objects=ObjectStore(run.uri)).step_attempts() == {3: 1, 6: 1, 9: 1}


def test_removal_begins_only_after_the_grace_time(run, clock):
    delete(run, 6, grace=60)
    assert not begin_removal(run, (6, 1), now=clock(), keeps=lambda tombstone: False)
    clock.now += timedelta(seconds=60)
    assert begin_removal(run, (6, 1), now=clock(), keeps=lambda tombstone: False)
    assert begin_removal(
        run, (6, 1), now=clock(), keeps=lambda tombstone: False
    )  # an interrupted removal goes on
    with pytest.raises(StepNotFoundError, match="too late"):
        undelete_step(run, 6, 1)
    assert not begin_removal(run, (9, 1), now=clock(), keeps=lambda tombstone: False)
    assert run.objects.read(manifest_file(6, 1)) is not None  # marking removes nothing


def test_an_alias_found_at_removal_lifts_the_tombstone(run, clock):
    delete(run, 6, grace=0)
    AliasWriter(run.objects).move("production", step=6, attempt=1, expect=None)
    assert not begin_removal(run, (6, 1), now=clock(), keeps=lambda tombstone: False)
    assert run.step(6).state is StepState.LISTED


def test_undelete_and_removal_racing_agree_on_one_outcome(run, clock):
    for _ in range(40):
        delete(run, 6, grace=0)
        together = threading.Barrier(2)
        outcome = {}

        def undelete(together=together, outcome=outcome):
            together.wait()
            try:
                undelete_step(run, 6, 1)
            except StepNotFoundError:
                outcome["undeleted"] = False
            else:
                outcome["undeleted"] = True

        thread = threading.Thread(target=undelete)
        thread.start()
        together.wait()
        removing = begin_removal(run, (6, 1), now=clock(), keeps=lambda tombstone: False)
        thread.join()
        assert outcome["undeleted"] is not removing
        run.objects.delete(trash_file(6, 1))
