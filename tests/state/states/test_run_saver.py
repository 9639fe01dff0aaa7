import gc
import json
import logging
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cairn import (
    Annotation,
    ArgumentError,
    BestSteps,
    Checkpointer,
    DedupPolicy,
    DueReason,
    InvalidURIError,
    LeaseHeldError,
    PolicyError,
    RetentionPolicy,
    Run,
    RunSaver,
    SaveError,
    SavePolicy,
    SaveState,
    StepExistsError,
    TrainState,
    promote_step,
)
from cairn.state.checkpointing import exit_guard
from cairn.storage.runs.records.layout import annotation_file
from cairn.storage.runs.retention import step_facts
from tests.multi_process.launcher import free_port
from tests.programs.program import Program
from tests.state.my_model import my_model

ROOT = Path(__file__).parents[3]
TX = optax.sgd(1e-1)
WAIT_SECONDS = 60
BACK = {"overwrite": True}


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "run")


@pytest.fixture
def stuck(monkeypatch):
    """Saves do not become durable until this event is set."""
    event = threading.Event()
    monkeypatch.setattr(
        "cairn.state.checkpointing.saves.save_job.sync_folder",
        lambda folder: event.wait(WAIT_SECONDS),
    )
    monkeypatch.setattr(exit_guard, "_leaving", False)
    yield event
    event.set()


def at(step=0):
    return TrainState.create(params={"w": jnp.full((4, 4), float(step))}, tx=TX, step=step)


@jax.jit
def train_step(state):
    return state.apply_gradients(grads=state.params)


def listed(uri):
    return [info.step for info in Run.open(uri).steps()]


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def broken(folder):
    raise OSError(5, "the disk is on fire")


@pytest.mark.parametrize("make", [at, lambda: my_model().to_state(TX)])
def test_due_steps_of_any_state_are_saved_and_load(uri, make):
    state, kept = make(), {}
    with RunSaver(uri, SavePolicy(every_steps=3)) as saver:
        for _ in range(7):
            grads = getattr(state, "graphstate", None) or state.params
            state = state.apply_gradients(grads=grads)
            handle = saver.step(state, extras={"position": int(state.step)})
            if handle is not None:
                assert handle.reason is DueReason.EVERY_STEPS
                kept[handle.step] = jax.tree.map(np.array, jax.tree.leaves(state.params))
    assert listed(uri) == [3, 6]
    if isinstance(state, TrainState):
        loaded = TrainState.load_state(uri, state)
    else:
        loaded = type(state).load_state(
            uri, tx=TX, model_class=type(state.model), auto_shard_model=True, verbose=False
        )
    assert (int(loaded.step), loaded.extras) == (6, {"position": 6})
    for found, expected in zip(jax.tree.leaves(loaded.params), kept[6], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [np.int64, jnp.int32])
def test_steps_may_be_integers_of_numpy_or_jax(uri, kind):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        stepped = saver.step(at(1), step=kind(1))
        saved = saver.save(at(2), step=kind(2))
        assert [(one.step, type(one.step)) for one in (stepped, saved)] == [(1, int), (2, int)]
        with pytest.raises(InvalidURIError, match="invalid step"):
            saver.save(at(3), step=True)
    at(3).save_state(uri, step=kind(3)).wait()
    assert listed(uri) == [1, 2, 3]
    loaded = TrainState.load_state(uri, at(), step=kind(2))
    np.testing.assert_array_equal(loaded.params["w"], np.full((4, 4), 2.0))
    assert TrainState.load_state(f"{uri}/steps/1", at(), step=kind(1)).step == 1


class Watched:
    """A state that counts how often its step, which is on the device, was asked for."""

    def __init__(self, state):
        self.state, self.asked = state, 0

    @property
    def step(self):
        self.asked += 1
        return self.state.step

    def save_state(self, *args, **options):
        return self.state.save_state(*args, **options)


def test_only_the_first_call_asks_the_device_for_the_step(uri):
    asked = []
    with RunSaver(uri, SavePolicy(every_steps=4)) as saver:
        for step in range(41, 47):
            watched = Watched(at(step))
            saver.step(watched)
            asked.append(watched.asked)
    assert asked == [1, 0, 0, 0, 0, 0]
    assert listed(uri) == [44]


def test_a_step_is_stored_under_the_state_s_number_and_counting_goes_on_from_there(uri):
    with RunSaver(uri, SavePolicy(every_steps=4)) as saver:
        for step in range(10, 50, 10):  # ten training steps for each call
            saver.step(at(step))
        assert saver.last.step == 30  # the third call, counted as 12
        saver.step(at(50), step=50)
    assert listed(uri) == [30, 50]


def test_minutes_count_from_the_last_save_whatever_it_was_for(uri):
    now = [0.0]
    with RunSaver(uri, SavePolicy(every_minutes=1, at_steps=[2]), clock=lambda: now[0]) as saver:
        for step, seconds in enumerate([30, 50, 70, 109, 110, 169], start=1):
            now[0] = seconds
            saver.step(at(step), step=step)
    assert listed(uri) == [2, 5]


@pytest.mark.parametrize(("dedup", "shared"), [(None, True), (DedupPolicy(max_steps=1), False)])
def test_steps_share_what_stays_as_it_is_for_as_long_as_asked(uri, dedup, shared):
    state = at()
    with RunSaver(uri, SavePolicy(every_steps=1), dedup=dedup) as saver:
        for step in (1, 2):
            saver.step(state, step=step)
    run = Run.open(uri)
    assert bool(run.contents(run.step(2)).shared_files) == shared


def test_saves_copy_into_memory_that_is_kept_where_that_is_asked_for(uri):
    state = TrainState.create(params={"w": jnp.ones((256, 256))}, tx=TX)
    with RunSaver(uri, SavePolicy(every_steps=1), reuse_buffers=True, host_memory=1 << 30) as saver:
        checkpointer = Checkpointer.for_run(uri)
        assert checkpointer.buffer_bytes == 0
        saver.step(state, step=1)
        assert checkpointer.buffer_bytes == state.params["w"].nbytes
    assert checkpointer.buffer_bytes == 0
    assert listed(uri) == [1]


def test_the_best_steps_are_saved_also_across_a_restart(uri):
    policy = SavePolicy(best=BestSteps(metric="loss", count=2))
    with RunSaver(uri, policy) as saver:
        for step, loss in enumerate([0.5, 0.9, 0.9, float("nan"), 0.4], start=1):
            saver.step(at(step), step=step, metrics={"loss": loss})
            saver.last.wait()
    assert listed(uri) == [1, 2, 5]
    with RunSaver(uri, policy) as saver:
        for step, loss in [(6, 0.6), (7, 0.5), (8, 0.45)]:
            saver.step(at(step), step=step, metrics={"loss": loss})
    assert listed(uri) == [1, 2, 5, 8]
    stored = Run.open(uri).objects.read(annotation_file(8, 2))
    annotation = Annotation.parse(stored.value, uri)
    assert annotation.metrics == {"loss": 0.45}
    assert annotation.better == {"loss": "min"}  # as the policy says


def test_a_metric_of_the_policy_that_is_misspelt_or_contradicted_is_named(uri, caplog):
    policy = SavePolicy(best=BestSteps(metric="vall_loss"))
    with RunSaver(uri, policy) as saver:
        for step in (1, 2):
            saver.step(at(step), step=step, metrics={"val_loss": 0.5})
        assert saver.save(at(3), step=3, metrics={"val_loss": 0.5}, better={"val_loss": "min"})
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "the best by 'vall_loss', which step 1 does not have. Did you mean" in warning.message
    with pytest.raises(PolicyError, match="the nearest known is 'val_loss'"):
        RunSaver(uri, policy)
    with pytest.raises(PolicyError, match="say that 'min' is better, and the policy has 'max'"):
        RunSaver(uri, SavePolicy(best=BestSteps(metric="val_loss", mode="max")))


def test_a_due_step_waits_for_the_save_under_way(uri, stuck):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        first = saver.step(at(1), step=1)
        threading.Timer(0.05, stuck.set).start()
        second = saver.step(at(2), step=2)
        assert first.state is SaveState.DURABLE
        second.wait()
    assert listed(uri) == [1, 2]


def test_a_policy_may_ask_for_due_steps_to_be_left_out_while_a_save_is_under_way(uri, stuck):
    with RunSaver(uri, SavePolicy(every_steps=1, when_busy="supersede")) as saver:
        first = saver.step(at(1), step=1)
        left_out = [saver.step(at(step), step=step) for step in (2, 3)]
        assert {one.state for one in left_out} == {SaveState.SUPERSEDED}
        assert [one.superseded_by for one in left_out] == [1, 1]
        assert saver.last is left_out[1]
        threading.Timer(0.05, stuck.set).start()
        asked_for = saver.save(at(4))
        first.wait()
        asked_for.wait()
        assert asked_for.reason is DueReason.ASKED
    assert listed(uri) == [1, 4]


def test_a_step_is_saved_once_even_if_it_is_asked_for_again(uri):
    state = at(2)
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        due = saver.step(state, metrics={"loss": float("nan")}, labels={"stage": "warmup"})
        assert saver.save(state) is due
        assert saver.save(state, metrics={"loss": float("nan")}) is due
    assert listed(uri) == [2]


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"labels": {"final": "yes"}}, "labels 'final'"),
        ({"labels": {"stage": "end"}}, "labels 'stage'"),
        ({"metrics": {"eval": 0.5}}, "metrics 'eval'"),
        ({"extras": {"why": "asked"}}, "extras 'why'"),
        ({}, "another state"),
    ],
)
def test_what_a_saved_step_does_not_have_is_refused_and_not_dropped(uri, new, named):
    state = at(2)
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        due = saver.step(state, metrics={"loss": 1.0}, labels={"stage": "warmup"})
        with pytest.raises(StepExistsError, match=named):
            saver.save(state if new else at(2), **new)
        assert saver.last.state is SaveState.REFUSED
        assert saver.save(state) is due
    assert listed(uri) == [2]


def test_a_step_that_was_just_saved_is_saved_anew_where_overwriting_is_asked_for(uri):
    policy = SavePolicy(every_steps=2)
    with RunSaver(uri, policy, save_options={"overwrite": True}) as saver:
        saver.step(at(2))
        saver.save(at(7), step=2, labels={"final": "yes"})
    run = Run.open(uri)
    (facts,) = step_facts(run)
    assert facts.labels == {"final": "yes"}
    assert float(TrainState.load_state(uri, at()).params["w"][0, 0]) == 7.0


def test_a_refused_save_raises_and_the_saver_and_the_error_say_so(uri):
    at(5).save_state(uri, verbose=False).wait()
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        with pytest.raises(StepExistsError) as caught:
            saver.step(at(5))
        assert caught.value.save is saver.last
        assert (saver.last.state, saver.last.step) == (SaveState.REFUSED, 5)
        saver.step(at(6))
    assert listed(uri) == [5, 6]


def test_a_failure_in_the_background_raises_at_the_next_due_step(uri, monkeypatch):
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        with monkeypatch.context() as patch:
            patch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
            failing = saver.step(at(2))
            assert failing.ended(WAIT_SECONDS)
        assert failing.state is SaveState.FAILED
        assert saver.step(at(3)) is None
        with pytest.raises(SaveError, match="on fire"):
            saver.step(at(4))
        saver.step(at(6), step=6).wait()
    assert listed(uri) == [6]


def test_a_failure_that_nobody_was_told_of_raises_at_close(uri, monkeypatch):
    monkeypatch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
    saver = RunSaver(uri, SavePolicy(every_steps=2))
    saver.step(at(2))
    with pytest.raises(SaveError, match="on fire"):
        saver.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    saver.close()
    with pytest.raises(ArgumentError, match="closed"):
        saver.step(at(3))


def test_after_the_signal_the_next_step_is_saved_and_durable_when_it_returns(uri):
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        assert saver.step(at(1)) is None
        assert not saver.should_stop
        terminate()
        assert saver.should_stop
        handle = saver.step(at(2))
        assert (handle.state, handle.reason) == (SaveState.DURABLE, DueReason.PREEMPTION)
        assert saver.should_stop
        assert saver.step(at(3)) is None  # who goes on training goes on by the policy
        assert saver.step(at(100), step=100).reason is DueReason.EVERY_STEPS
    assert listed(uri) == [2, 100]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_after_the_last_step_is_answered_by_close(uri):
    state = at(7)
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(state)
        saver.preempt()
    assert listed(uri) == [7]


def test_a_step_that_is_saved_already_is_not_saved_again_at_the_end(uri):
    state = at(7)
    with RunSaver(uri, SavePolicy(every_steps=7)) as saver:
        handle = saver.step(state)
        terminate()
    assert saver.last is handle
    assert listed(uri) == [7]


def test_a_state_whose_memory_went_to_a_training_step_is_not_saved_at_the_end(uri, caplog):
    donating = jax.jit(lambda state: state.apply_gradients(grads=state.params), donate_argnums=0)
    state = at(7)
    with RunSaver(uri, SavePolicy(every_steps=7)) as saver:
        saver.step(state).wait()
        state = donating(state)
        saver.step(state)
        donating(state)
        terminate()
    assert listed(uri) == [7]
    assert "preempted after step 8, whose state is gone" in caplog.text


def test_a_save_blocks_for_as_long_as_the_call_of_the_saver_takes(uri):
    class Slow:
        def __index__(self):
            time.sleep(0.2)  # at least so long is to be told
            return 1

    with RunSaver(uri, policy=SavePolicy(every_steps=1)) as saver:
        assert saver.step(at(1), step=Slow()).blocked_seconds >= 0.2


def test_the_saver_does_not_keep_a_state_alive(uri):
    with RunSaver(uri, SavePolicy(every_steps=7)) as saver:
        state = at(1)
        leaf = state.params["w"]
        saver.step(state)
        del state
        gc.collect()
        assert not any(isinstance(one, TrainState) for one in gc.get_referrers(leaf))
        terminate()
    assert listed(uri) == []


def test_the_address_of_a_step_is_refused_before_training(uri):
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(2, {"model": {"w": np.ones(4)}}, meta={}).wait()
    with pytest.raises(InvalidURIError, match="address of step 2 of"):
        RunSaver(f"{uri}/steps/2", SavePolicy(every_steps=1, on_preemption=False))


def test_a_second_job_is_refused_before_it_trains(uri, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    with Checkpointer(uri, writer_id="first") as first:
        first.begin()
        monkeypatch.setenv("CAIRN_WRITER_ID", "second")
        with pytest.raises(LeaseHeldError, match="first"):
            RunSaver(uri, SavePolicy(every_steps=1))
        assert signal.getsignal(signal.SIGTERM) == handler
    Checkpointer.for_run(uri).close()
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        saver.step(at(1))
    assert listed(uri) == [1]


def test_a_saver_that_saved_nothing_gives_the_run_back(uri):
    with RunSaver(uri, SavePolicy(every_steps=7)) as saver:
        saver.step(at(1))
    with Checkpointer(uri, writer_id="another") as other:
        other.begin()


def test_a_save_past_the_deadline_is_abandoned_and_everything_says_so(uri, stuck, caplog):
    saver = RunSaver(uri, SavePolicy(every_steps=100, deadline_seconds=0.05))
    terminate()
    handle = saver.step(at(3))
    assert (handle.state, handle.step) == (SaveState.FAILED, 3)
    assert "not durable 0.05 s after the process was told to end" in str(handle.error)
    assert "outcome=failed step=3 attempt=1 reason=preemption" in caplog.text
    with pytest.raises(SaveError, match="abandoned"):
        saver.close()
    assert exit_guard._leaving


def test_a_save_that_does_not_end_in_time_takes_the_last_step_with_it(uri, stuck):
    saver = RunSaver(uri, SavePolicy(every_steps=2, deadline_seconds=0.05))
    before = saver.step(at(2))
    terminate()
    handle = saver.step(at(3))
    assert (handle.step, handle.attempt, handle.state) == (3, 0, SaveState.FAILED)
    assert before.state is SaveState.FAILED
    with pytest.raises(SaveError, match="abandoned"):
        saver.close()


def test_the_next_step_waits_no_longer_than_its_deadline_and_training_goes_on(uri, stuck):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        first = saver.step(at(1))
        with pytest.raises(SaveError, match="step 1 still under way"):
            saver.step(at(2), deadline=0.1)
        assert (saver.last.state, saver.last.step) == (SaveState.REFUSED, 2)
        with pytest.raises(SaveError, match="step 1 still under way"):
            saver.save(at(2), deadline=0.1)
        assert not first.done
        stuck.set()
        assert saver.step(at(3), deadline=WAIT_SECONDS).ended(WAIT_SECONDS)
    assert listed(uri) == [1, 3]


def test_a_deadline_may_be_given_for_every_step(uri, stuck):
    with RunSaver(uri, SavePolicy(every_steps=1), save_options={"deadline": 0.1}) as saver:
        saver.step(at(1))
        with pytest.raises(SaveError, match="step 1 still under way"):
            saver.step(at(2))
        stuck.set()


@pytest.mark.parametrize("deadline", [0, "5", float("inf")])
def test_a_deadline_that_is_no_time_is_refused(uri, deadline):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        for call in (saver.step, saver.save):
            with pytest.raises(ArgumentError, match="deadline"):
                call(at(1), deadline=deadline)
        with pytest.raises(ArgumentError, match="deadline"):
            at(1).save_state(uri, deadline=deadline)


def test_a_state_that_is_saved_at_once_waits_no_longer_than_its_deadline(uri, stuck):
    with pytest.raises(TimeoutError, match="the save goes on"):
        at(1).save_state(uri, wait=True, deadline=0.5, verbose=False)
    with pytest.raises(SaveError, match="step 1 still under way"):
        at(2).save_state(uri, deadline=0.1, verbose=False)
    stuck.set()
    Checkpointer.for_run(uri).close()
    assert listed(uri) == [1]


def test_a_job_that_is_told_to_end_waits_for_a_silent_store_no_longer_than_it_has(
    gcs, stuck, caplog
):
    uri = f"{gcs.bucket_uri}/run"
    saver = RunSaver(uri, SavePolicy(every_steps=100, deadline_seconds=0.5), save_options=BACK)
    stuck.set()
    saver.save(at(5)).wait()
    hung = gcs.faults.add("hang", count=None)
    terminate()
    handle = saver.step(at(3), step=3)
    assert hung.fired
    assert handle.state in (SaveState.REFUSED, SaveState.FAILED)
    assert saver.should_stop
    assert exit_guard._leaving
    gcs.faults.clear()
    saver.close()


class HeldUp:
    """A state whose `save_state` does not return before it is allowed to."""

    def __init__(self, state, go_on):
        self.step, self._state, self._go_on = state.step, state, go_on

    def save_state(self, *args, **options):
        assert self._go_on.wait(WAIT_SECONDS)
        return self._state.save_state(*args, **options)


def test_a_call_that_is_held_up_past_the_deadline_is_told_of_while_it_lasts(uri, stuck):
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: "could not begin in time" in record.getMessage() and told.set()
    logger = logging.getLogger("cairn.save")
    logger.addHandler(handler)
    try:
        saver = RunSaver(uri, SavePolicy(deadline_seconds=0.05))
        saver.preempt()
        handle = saver.step(HeldUp(at(3), told))
        assert handle.state is SaveState.FAILED
        with pytest.raises(SaveError, match="abandoned"):
            saver.close()
    finally:
        logger.removeHandler(handler)


def test_a_failed_save_does_not_cost_the_last_step(uri, monkeypatch, caplog):
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        with monkeypatch.context() as patch:
            patch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
            assert saver.step(at(2)).ended(WAIT_SECONDS)
        terminate()
        assert saver.step(at(3)).state is SaveState.DURABLE
    assert listed(uri) == [3]
    assert "outcome=failed step=2" in caplog.text


def test_an_error_in_training_still_leaves_the_saves_durable(uri):
    def train():
        with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
            saver.step(at(1))
            raise ValueError("the training broke")

    with pytest.raises(ValueError, match="the training broke"):
        train()
    assert listed(uri) == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_no_rule_keeps_is_deleted_after_each_durable_save(uri, caplog):
    caplog.set_level(logging.INFO, "cairn.save")
    policy = SavePolicy(every_steps=1)
    with RunSaver(uri, policy, keep=RetentionPolicy(keep_last=2, keep_every=3)) as saver:
        for step in range(1, 8):
            saver.step(at(step))
            if step == 2:
                saver.last.wait()
                promote_step(Run.open(uri), 2, "production", expect=None)
    assert listed(uri) == [2, 3, 6, 7]
    assert caplog.text.count("outcome=durable") == 7


def keeping(metric):
    return RetentionPolicy(keep_last=1, keep_best=[BestSteps(metric=metric)])


def test_until_a_step_carries_the_metric_retention_deletes_nothing_and_says_so(uri, caplog):
    with RunSaver(uri, SavePolicy(every_steps=1), keep=keeping("loss")) as saver:
        assert saver.retention_error is None
        for step in range(1, 4):
            saver.step(at(step)).wait()
    assert listed(uri) == [1, 2, 3]
    assert "no step carries the metric 'loss'" in str(saver.retention_error)
    assert caplog.text.count("retention=withheld") == 1
    with RunSaver(uri, SavePolicy(every_steps=1), keep=keeping("loss")) as saver:
        for step in range(4, 7):
            saver.step(at(step), metrics={"loss": step}).wait()
    assert listed(uri) == [4, 6]
    assert saver.retention_error is None


def test_a_misspelt_metric_is_refused_before_training_and_the_run_stays_free(uri):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        for step in range(1, 4):
            saver.step(at(step), metrics={"loss": step})
    with pytest.raises(PolicyError, match="'los': the nearest known is 'loss'"):
        RunSaver(uri, SavePolicy(every_steps=1), keep=keeping("los"))
    assert listed(uri) == [1, 2, 3]
    with RunSaver(uri, SavePolicy(every_steps=1), keep=keeping("eval/accuracy")) as saver:
        saver.step(at(4), metrics={"loss": 4})
    assert listed(uri) == [1, 2, 3, 4]


def test_what_is_no_retention_policy_is_refused(uri):
    with pytest.raises(PolicyError, match="expected a RetentionPolicy"):
        RunSaver(uri, SavePolicy(every_steps=1), keep={"keep_last": 3})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"save_options": {"step": 3, "wait": True}}, "found step, wait"),
        ({"agree_every": 0}, "agree_every"),
        *(
            ({"grace_seconds": grace}, "grace_seconds")
            for grace in (timedelta(days=7), "7d", float("inf"), float("nan"), -1.0, True)
        ),
    ],
)
def test_options_that_cannot_act_are_refused_and_leave_the_signal_alone(uri, options, match):
    with pytest.raises(ArgumentError, match=match):
        RunSaver(uri, SavePolicy(every_steps=1), **options)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_policy_without_preemption_works_in_any_thread_and_cannot_be_preempted(uri):
    found = []

    def train():
        with pytest.raises(PolicyError, match="main thread"):
            RunSaver(uri, SavePolicy(every_steps=1))
        with RunSaver(uri, SavePolicy(every_steps=1, on_preemption=False)) as saver:
            saver.step(at(1))
            with pytest.raises(ArgumentError, match="on_preemption"):
                saver.preempt()
        found.extend(listed(uri))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [1]


def start_job(uri, *arguments):
    return Program(
        ["-m", "tests.state.preempted_job", uri, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "CAIRN_WRITER_ID": "job", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end_job(processes, signalled):
    """Wait until every process trains, send one of them SIGTERM; status and output of each."""
    for process in processes:
        while (line := process.stdout.readline().strip()) != "3":
            assert line, process.communicate()[1]
    processes[signalled].send_signal(signal.SIGTERM)
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=WAIT_SECONDS)
        ended.append((process.returncode, out.splitlines(), err))
    return ended


def test_a_job_that_is_told_to_end_saves_its_last_step_and_exits(uri):
    ((status, lines, err),) = end_job([start_job(uri, "saves")], 0)
    assert status == 0, err
    said = json.loads(lines[-2])
    assert said == {"step": said["taken"], "state": "durable", "taken": said["taken"]}
    assert lines[-1] == "exit handlers run"
    assert listed(uri) == [1, said["step"]]


def test_a_job_whose_store_hangs_gives_up_at_the_deadline_and_exits_with_a_failure(uri):
    ((status, lines, err),) = end_job([start_job(uri, "hangs")], 0)
    assert status == exit_guard.FAILED_STATUS, err
    assert json.loads(lines[-2])["state"] == "failed"
    assert lines[-1] == "exit handlers run"
    assert "abandoned" in err
    assert listed(uri) == [1]


def test_a_signal_to_one_process_stops_all_at_the_same_saved_step(uri):
    port = free_port()
    jobs = [start_job(uri, "saves", index, port) for index in (0, 1)]
    try:
        ended = end_job(jobs, signalled=1)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert [status for status, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(lines[-2]) for _, lines, _ in ended)
    assert first == second
    assert first["state"] == "durable"
    assert first["step"] % 4 == 0  # where they agree
    assert listed(uri) == [1, first["step"]]
