from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest

from cairn import (
    AliasNotFoundError,
    CorruptionError,
    PreconditionFailedError,
    Run,
    RunNotFoundError,
    StepChangedError,
    StepInUseError,
    StepNotFoundError,
    UnsupportedFormatError,
    collect_garbage,
    delete_alias,
    delete_step,
    parse_uri,
    promote_step,
    roll_back,
    undelete_step,
)
from cairn.storage.runs.records.layout import RUN_FILE, alias_file, manifest_file, trash_file
from cairn.storage.store.clock import rfc3339
from tests.storage.held_names import HeldNames
from tests.storage.records import ANNOUNCED_SECONDS, Hold, declare, hold_file, put_record, withdraw
from tests.storage.stored_runs import begin, end, save


def promote(run, step, expect=None, **more):
    return promote_step(run, step, "production", by="ann", expect=expect, **more)


def test_an_alias_comes_to_point_to_the_step_and_its_manifest(run):
    moved = promote(run, 3, reason="good")
    assert (moved.step, moved.attempt, moved.sequence) == (3, 1, 1)
    assert moved.manifest_digest == run.step(3).manifest_digest
    assert promote(run, 6, 1) == run.aliases.get("production")
    assert [event.by for event in run.aliases.history("production")] == ["ann", "ann"]


def test_the_first_promotion_and_deletion_of_a_run_survive_a_power_failure(run, monkeypatch):
    held = HeldNames(monkeypatch)
    folder = Path(run.uri.local_path)
    assert not (folder / "aliases").exists()
    promote(run, 3)
    assert held.lost(folder / "aliases", below=folder) == []
    delete_step(run, run.step(9), by="me", clock=run.clock)
    assert held.lost(folder / "trash", below=folder) == []


def test_a_step_that_does_not_exist_cannot_be_promoted(run):
    with pytest.raises(StepNotFoundError, match="expected step 4"):
        promote(run, 4)
    assert run.aliases.list() == []


def test_a_deleted_step_cannot_be_promoted(run, clock):
    delete_step(run, run.step(3), by="me", clock=clock)
    with pytest.raises(StepNotFoundError, match="trashed"):
        promote(run, 3)
    assert run.aliases.list() == []


def test_a_step_that_was_superseded_cannot_be_promoted(run):
    roll_back(run, 3, by="me")
    with pytest.raises(StepNotFoundError, match="superseded"):
        promote(run, 9)


def test_what_readers_hold_cannot_move_an_alias(run):
    assert not hasattr(run.aliases, "move")
    assert not hasattr(run.aliases, "delete")


def test_who_saw_an_older_sequence_is_refused_and_told_the_present_one(run):
    promote(run, 3)
    for expect in (None, 2):
        with pytest.raises(PreconditionFailedError) as caught:
            promote(run, 6, expect)
        assert caught.value.current.step == 3
    assert run.aliases.get("production").step == 3


def test_an_alias_may_be_a_member_of_an_enumeration(run):
    class Stage(str, Enum):  # noqa: UP042 (this is what others have)
        PRODUCTION = "production"

    promote_step(run, 3, Stage.PRODUCTION, expect=None)
    assert run.objects.list("aliases/") == ["aliases/production.json"]
    assert [one.alias for one in run.aliases.list()] == ["production"]
    assert run.aliases.require(Stage.PRODUCTION).step == 3
    assert delete_alias(run, Stage.PRODUCTION, expect=1).deleted


def test_an_alias_is_deleted_only_as_it_was_last_seen(run):
    promote(run, 3)
    with pytest.raises(PreconditionFailedError):
        delete_alias(run, "production", expect=2)
    assert delete_alias(run, "production", expect=1, by="ann").deleted
    with pytest.raises(AliasNotFoundError):
        delete_alias(run, "production", expect=2)


@pytest.mark.parametrize("before", [None, 6], ids=["it did not exist", "it pointed elsewhere"])
def test_a_step_that_is_about_to_be_deleted_is_refused_and_the_alias_as_before(run, clock, before):
    """The deletion has looked who needs the step, and found nobody."""
    expect = None if before is None else promote(run, before).sequence
    declare(run, (3, 1), by="you", reason="", now=clock())
    with pytest.raises(StepChangedError, match="deleted meanwhile"):
        promote(run, 3, expect)
    found = run.aliases.get("production")
    assert (found and found.step) == before
    assert len(run.aliases.history("production") if found else ()) == (before is not None)


def test_a_deletion_while_an_alias_moves_is_refused(run, clock, monkeypatch):
    write_if = type(run.objects).write_if
    refused = []

    def deleted_first(self, key, value, **options):
        if key == alias_file("production"):
            with pytest.raises(StepInUseError, match="ann, who is to promote it to 'production'"):
                delete_step(run, run.step(3), by="you", grace=0, clock=clock)
            refused.append(key)
        return write_if(self, key, value, **options)

    monkeypatch.setattr(type(run.objects), "write_if", deleted_first)
    assert promote(run, 3).step == 3
    assert refused
    assert run.objects.list("trash/") == []


def test_a_promoter_that_died_keeps_its_step_for_a_while_and_no_longer(run, clock):
    hold = Hold(at=rfc3339(clock()), by="ann", reason="promote it", token="0" * 16)
    put_record(run.objects, hold_file(3, 1, hold.token), hold)
    with pytest.raises(StepInUseError, match="ann"):
        delete_step(run, run.step(3), by="me", clock=clock)
    clock.now += timedelta(seconds=ANNOUNCED_SECONDS)
    delete_step(run, run.step(3), by="me", clock=clock)
    collect_garbage(run, by="gc", clock=clock)
    assert run.objects.list("trash/") == ["trash/3.1.json"]


def test_a_deleted_step_that_somebody_tries_to_promote_stays_deleted(run, clock, monkeypatch):
    """The collector would take a hold for a need, and lift the tombstone."""
    delete_step(run, run.step(3), by="me", grace=0, clock=clock)
    write_if, written = type(run.objects).write_if, []

    def noted(self, key, value, **options):
        if self.uri == run.objects.uri:  # checkpointers of other tests may renew their leases
            written.append(key)
        return write_if(self, key, value, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(run.objects), "write_if", noted)
        with pytest.raises(StepNotFoundError, match="trashed"):
            promote(run, 3)
    assert written == []
    assert [one.step for one in collect_garbage(run, by="gc", clock=clock)] == [3]


def test_a_tombstone_stays_while_somebody_holds_the_step_and_goes_with_the_next_collection(
    run, clock, monkeypatch
):
    """They may have seen the manifest before it went."""
    delete_step(run, run.step(3), by="me", grace=0, clock=clock)
    delete = type(run.objects).delete
    hold = Hold(at=rfc3339(clock()), by="ann", reason="promote it", token="0" * 16)

    def held_just_before(self, key):
        if key == manifest_file(3, 1):
            put_record(self, hold_file(3, 1, hold.token), hold)
        delete(self, key)

    with monkeypatch.context() as patched:
        patched.setattr(type(run.objects), "delete", held_just_before)
        collect_garbage(run, by="gc", clock=clock)
    assert run.objects.read(manifest_file(3, 1)) is None
    assert run.objects.read(trash_file(3, 1)) is not None
    with pytest.raises(StepNotFoundError, match="too late"):
        undelete_step(run, 3, 1)
    run.objects.delete(hold_file(3, 1, hold.token))
    collect_garbage(run, by="gc", clock=clock)
    assert run.objects.list("trash/") == []


@pytest.mark.parametrize(
    "wrong",
    [["attempts/1.json"], ["lease.json"], ["attempts/2.json"], ["attempts/2.json", "lease.json"]],
    ids=", ".join,
)
def test_a_step_is_promoted_if_it_is_listed_also_where_records_are_amiss(run, wrong):
    """What the first looks can't tell for certain the whole history does, or says what is wrong."""
    begin(run, 6)
    end(run)
    for name in wrong:
        run.objects.write(name, b"{}")

    def listed(step):
        try:
            return run.step(step).attempt
        except (CorruptionError, UnsupportedFormatError, StepNotFoundError) as exc:
            return type(exc), str(exc)

    def promoted(step):
        try:
            return promote_step(run, step, f"best-{step}", expect=None).attempt
        except (CorruptionError, UnsupportedFormatError, StepNotFoundError) as exc:
            return type(exc), str(exc)

    assert [promoted(step) for step in (3, 9)] == [listed(step) for step in (3, 9)]
    assert run.objects.list("trash/") == []


def test_a_step_that_was_overwritten_is_promoted_as_it_is_also_where_lists_are_old(gcs):
    run = Run.create(f"{gcs.bucket_uri}/run")
    save(run, 3, begin(run, -1))
    gcs.faults.add("stale_list", count=None)
    save(run, 3, begin(run, 2))
    assert run.step(3).attempt == 2
    assert promote(run, 3).attempt == 2
    assert gcs.names("run/trash/") == []


def test_a_run_that_is_not_there_is_told_and_nothing_is_written(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such run"):
        promote(Run(parse_uri(tmp_path / "none")), 3, opened=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_lost_its_record_is_told_to_who_has_not_opened_it(run):
    run.objects.delete(RUN_FILE)
    with pytest.raises(CorruptionError, match="the run has lost its record"):
        promote(run, 3, opened=False)
    assert run.aliases.list() == []


def test_who_is_to_let_the_step_go_later_is_given_that_to_do(run, clock):
    left = []
    promote(run, 3, later=left.append)
    delete_alias(run, "production", expect=1)
    with pytest.raises(StepInUseError, match="ann, who is to promote it"):
        delete_step(run, run.step(3), by="me", clock=clock)
    left.pop()()
    delete_step(run, run.step(3), by="me", clock=clock)
    assert not left


def test_a_promotion_that_is_refused_lets_the_step_go_at_once(run):
    promote(run, 3)
    left = []
    with pytest.raises(PreconditionFailedError):
        promote(run, 6, later=left.append)
    assert (left, run.objects.list("trash/")) == ([], [])


def test_who_deletes_a_step_that_another_was_about_to_delete_goes_on_at_once(run, clock):
    declare(run, (3, 1), by="ann", reason="", now=clock())  # and is killed
    delete_step(run, run.step(3), by="me", clock=clock)
    assert [info.step for info in run.steps()] == [6, 9]


def test_a_deletion_that_is_refused_leaves_the_intent_of_another_in_its_place(run, clock):
    """That one has looked who needs the step, and has yet to lay the tombstone."""
    slow = declare(run, (3, 1), by="ann", reason="", now=clock())
    with pytest.raises(StepInUseError, match="step 9 of attempt 1"):
        delete_step(run, run.step(3), by="me", needed_by=[(9, 1)], clock=clock)
    withdraw(run, (3, 1), slow)
    with pytest.raises(StepChangedError, match="found its deletion"):
        promote(run, 3)
    clock.now += timedelta(seconds=ANNOUNCED_SECONDS)
    promote(run, 3)
