from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest

from cairn.storage.errors import (
    AliasNotFoundError,
    PreconditionFailedError,
    StepChangedError,
    StepInUseError,
    StepNotFoundError,
)
from cairn.storage.runs.gc import collect_garbage
from cairn.storage.runs.promotion import delete_alias, promote_step
from cairn.storage.runs.records.layout import alias_file, hold_file
from cairn.storage.runs.records.placed import put_record
from cairn.storage.runs.rollback import roll_back
from cairn.storage.runs.trash import ANNOUNCED_SECONDS, Hold, declare, delete_step
from cairn.storage.store.clock import rfc3339
from tests.storage.held_names import HeldNames


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


def test_a_step_that_was_set_aside_cannot_be_promoted(run):
    roll_back(run, 3, by="me")
    with pytest.raises(StepNotFoundError, match="set_aside"):
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


def test_two_who_delete_one_step_do_it_once(run, clock):
    declare(run, (3, 1), by="ann", reason="", now=clock())
    with pytest.raises(StepInUseError, match="an intent of ann"):
        delete_step(run, run.step(3), by="me", clock=clock)
    assert [info.step for info in run.steps()] == [3, 6, 9]
