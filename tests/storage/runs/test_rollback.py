from datetime import timedelta

import pytest

from cairn import (
    LeaseHeldError,
    PreconditionFailedError,
    StepChangedError,
    StepInUseError,
    StepNotFoundError,
    Writer,
    delete_step,
    promote_step,
    roll_back,
)
from cairn.storage.runs.lease import read_lease
from tests.storage.records import ANNOUNCED_SECONDS, attempt_file, declare
from tests.storage.seams import rollback
from tests.storage.stored_runs import begin, end, save, states


def listed(run):
    return list(run.step_attempts())


def test_later_steps_are_superseded_and_none_is_deleted(run):
    promote_step(run, 9, "production", expect=None)
    done = roll_back(run, 3, by="ann")
    assert (done.step, done.attempt, done.superseded, done.aliases) == (
        3,
        2,
        (6, 9),
        ("production",),
    )
    assert listed(run) == [3]
    assert states(run) == {(3, 1): "listed", (6, 1): "superseded", (9, 1): "superseded"}
    assert read_lease(run.objects).released


def test_an_alias_that_nobody_said_may_stay_keeps_all_as_it_is(run):
    promote_step(run, 9, "production", expect=None)
    before = states(run)
    with pytest.raises(PreconditionFailedError, match=r"production \(step 9\)"):
        roll_back(run, 3, by="ann", strand=["staging"])
    assert states(run) == before
    assert roll_back(run, 3, by="ann", strand=["production"]).aliases == ("production",)


def test_a_deleted_step_that_had_overwritten_another_is_not_told_as_superseded(run, clock):
    save(run, 9, begin(run, 9))
    end(run)
    delete_step(run, run.step(9), by="me", clock=clock)
    assert roll_back(run, 3, by="ann").superseded == (6,)


def test_the_same_request_again_tells_what_it_did_and_does_nothing(run):
    first = roll_back(run, 3, by="ann", request="r1")
    save(run, 4, begin(run, 3))
    end(run)
    assert roll_back(run, 3, by="ann", request="r1") == first
    assert len(run.attempts()) == 3
    assert listed(run) == [3, 4]


def test_an_interrupted_request_goes_on_where_it_was(run, monkeypatch):
    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cairn.storage.runs.rollback.release", killed)
        with pytest.raises(KeyboardInterrupt):
            roll_back(run, 3, by="ann", request="r1")
    assert not read_lease(run.objects).released
    assert roll_back(run, 3, by="ann", request="r1").superseded == (6, 9)
    assert len(run.attempts()) == 2
    assert read_lease(run.objects).released


def test_every_call_without_a_request_acts(run):
    roll_back(run, 6, by="ann")
    assert roll_back(run, 3, by="ann").superseded == (6,)
    assert listed(run) == [3]
    with pytest.raises(StepNotFoundError):
        roll_back(run, 777, by="ann")


def test_a_rollback_by_the_id_of_the_run_s_own_writer_acts(run):
    assert roll_back(run, 3, by="w").superseded == (6, 9)
    assert listed(run) == [3]


def test_a_request_used_for_another_step_is_refused(run):
    roll_back(run, 6, by="ann", request="r1")
    with pytest.raises(PreconditionFailedError, match="expected step 6, to which request 'r1'"):
        roll_back(run, 3, by="ann", request="r1")
    assert listed(run) == [3, 6]


@pytest.mark.parametrize("step", [4, 12])
def test_a_step_that_is_not_there_is_refused_and_nothing_changes(run, step):
    with pytest.raises(StepNotFoundError, match=f"expected step {step}"):
        roll_back(run, step, by="ann")
    assert len(run.attempts()) == 1
    assert listed(run) == [3, 6, 9]
    assert read_lease(run.objects).released


def test_a_deleted_step_is_refused(run, clock):
    delete_step(run, run.step(3), by="me", clock=clock)
    with pytest.raises(StepNotFoundError, match="trashed"):
        roll_back(run, 3, by="ann")
    assert listed(run) == [6, 9]


def test_a_step_that_was_saved_anew_since_it_was_looked_at_is_refused(run, clock):
    seen = run.step(6)
    save(run, 6, begin(run, 3))
    end(run)
    with pytest.raises(StepNotFoundError, match="saved anew"):
        roll_back(run, seen, by="ann")
    assert listed(run) == [3, 6]


def test_a_step_that_is_saved_anew_before_the_lease_is_taken_is_refused(run, monkeypatch):
    """The job comes after the look at the step, and has given the run back by then."""
    take = rollback.begin_attempt

    def after_a_job(*args, **options):
        save(run, 6, begin(run, 3))
        end(run)
        return take(*args, **options)

    monkeypatch.setattr(rollback, "begin_attempt", after_a_job)
    with pytest.raises(StepNotFoundError, match="saved anew"):
        roll_back(run, 6, by="ann")
    assert run.step_attempts() == {3: 1, 6: 2}
    assert len(run.attempts()) == 2


def test_a_live_writer_keeps_the_run(run, clock):
    writer = Writer(run, writer="job", clock=clock)
    writer.begin()
    with pytest.raises(LeaseHeldError, match="job"):
        roll_back(run, 3, by="ann")
    writer.close()
    assert roll_back(run, 3, by="ann").superseded == (6, 9)


def test_a_deletion_while_it_decides_is_refused(run, clock, monkeypatch):
    """It has the lease and not its attempt yet; even if it sleeps there past the lease's time."""
    write_if = type(run.objects).write_if
    refused = []

    def delete_first(self, key, value, **options):
        if key == attempt_file(2):
            clock.now += timedelta(seconds=500)
            with pytest.raises(StepInUseError, match="ann, who is to roll back to it") as caught:
                delete_step(run, run.step(3), by="you", grace=0, clock=clock)
            refused.append(caught.value)
        return write_if(self, key, value, **options)

    monkeypatch.setattr(type(run.objects), "write_if", delete_first)
    roll_back(run, 3, by="ann")
    assert refused
    assert listed(run) == [3]


def test_a_step_that_is_about_to_be_deleted_is_refused(run, clock):
    """The deletion has looked who needs the step, and found nobody."""
    declare(run, (3, 1), by="you", reason="", now=clock())
    with pytest.raises(StepChangedError, match="deleted meanwhile"):
        roll_back(run, 3, by="ann")
    assert listed(run) == [3, 6, 9]
    clock.now += timedelta(seconds=ANNOUNCED_SECONDS)  # whoever that was is dead
    assert roll_back(run, 3, by="ann").superseded == (6, 9)
