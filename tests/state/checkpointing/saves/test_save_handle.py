import importlib
import logging
import threading
import time
from contextvars import copy_context

import pytest
from prometheus_client import REGISTRY

from cairn import LeaseHeldError, SaveError, SaveHandle, SaveState, StepExistsError, parse_uri
from cairn.state.checkpointing.save_handle import call_of_save, superseded_save
from cairn.state.checkpointing.saves.save_metrics import (
    record_outcome,
    record_refusal,
    record_started,
)
from tests.state.seams import pop_call_time, refused_save, save_metrics

RUN = parse_uri("/runs/a run")


@pytest.fixture
def handle():
    return SaveHandle(step=3, attempt=1, uri=RUN / "attempts/1/3")


def counted(name="cairn_saves_total", **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_save_ends_durable_or_failed_and_stays_so(handle):
    assert (handle.state, handle.done, handle.seconds) == (SaveState.SAVING, False, None)
    assert handle.finish(None)
    assert (handle.state, handle.done, handle.error) == (SaveState.DURABLE, True, None)
    assert handle.seconds >= 0
    handle.wait()
    assert not handle.finish(SaveError("too late"))
    assert not handle.abandon("too late")
    assert handle.state is SaveState.DURABLE


def test_a_failed_save_says_so_and_raises_for_everyone_who_waits(handle):
    handle.finish(OSError(28, "full"))
    assert handle.state is SaveState.FAILED
    assert "failed" in repr(handle)
    for _ in range(2):
        with pytest.raises(SaveError, match="full"):
            handle.wait()


def test_an_abandoned_save_has_failed_even_if_it_becomes_durable_later(handle):
    assert not handle.ended(0)
    assert handle.abandon("out of time")
    assert handle.ended(0)
    assert not handle.finish(None)
    assert handle.state is SaveState.FAILED
    with pytest.raises(SaveError, match=r"abandoned.*out of time"):
        handle.wait()


def test_a_superseded_save_has_nothing_to_wait_for_and_names_the_one_in_its_way():
    handle = superseded_save(step=4, uri=RUN, by=3)
    handle.wait()
    assert (handle.state, handle.superseded_by, handle.attempt) == (SaveState.SUPERSEDED, 3, 0)
    assert handle.error is None


def test_a_skipped_save_is_not_called_durable(handle):
    handle.skip()
    handle.wait()
    assert handle.state is SaveState.SKIPPED


def test_a_refused_save_raises_what_refused_it():
    handle = refused_save(step=4, uri=RUN, error=StepExistsError("the step exists"))
    assert handle.state is SaveState.REFUSED
    with pytest.raises(StepExistsError):
        handle.wait()


def test_what_follows_a_save_happens_before_those_who_wait_go_on(handle):
    order = []
    waiting = threading.Thread(target=lambda: (handle.wait(), order.append("waited")))
    waiting.start()
    handle.when_done(lambda ended: order.append(ended.state))
    handle.finish(None)
    waiting.join()
    handle.when_done(lambda ended: order.append("at once"))
    assert order == [SaveState.DURABLE, "waited", "at once"]


def test_what_follows_a_save_can_not_make_it_fail(handle, caplog):
    def broken(ended):
        raise RuntimeError("no metrics today")

    handle.when_done(broken)
    handle.finish(None)
    handle.wait()
    assert "no metrics today" in caplog.text


def test_a_call_s_time_is_that_of_its_first_save_and_of_no_task_that_outlives_it():
    with call_of_save():
        inside = time.monotonic()
        with call_of_save():
            task = copy_context()
            assert pop_call_time() <= inside
            assert pop_call_time() >= inside
    with call_of_save():
        other = copy_context()
    after = time.monotonic()
    assert min(task.run(pop_call_time), other.run(pop_call_time)) >= after


def test_each_outcome_is_one_line_in_the_log_and_one_count(handle, caplog):
    caplog.set_level(logging.INFO, "cairn.save")
    before = {state: counted(outcome=state.value) for state in SaveState}
    handle.nbytes, handle.reason = 10, "every_steps"
    failing = SaveHandle(step=5, attempt=1, uri=RUN / "attempts/1/5")
    for one in (handle, failing):
        one.when_done(record_outcome)
    record_outcome(handle)  # still under way: nothing to say
    handle.finish(None)
    record_outcome(handle)  # a second time
    failing.finish(OSError(28, "full"))
    record_outcome(superseded_save(step=6, uri=RUN, by=5))
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "INFO"]
    durable, failed, superseded = caplog.messages
    assert durable.startswith("outcome=durable step=3 attempt=1 reason=every_steps")
    assert 'uri="file:///runs/a run/attempts/1/3"' in durable
    assert "bytes=10" in durable
    assert failed.startswith("outcome=failed step=5 attempt=1")
    assert 'error=OSError found="[Errno 28] full"' in failed
    assert superseded == 'outcome=superseded step=6 superseded_by=5 uri="file:///runs/a run"'
    for state in (SaveState.DURABLE, SaveState.FAILED, SaveState.SUPERSEDED):
        assert counted(outcome=state.value) == before[state] + 1
    assert counted("cairn_save_last_durable_step") == 3


def test_the_error_of_a_refused_save_carries_it_and_counts_once_for_each_step(caplog):
    before = counted(outcome="refused")
    error = LeaseHeldError("another writer holds the run")
    refused = record_refusal(error, step=7, uri=RUN)
    assert record_refusal(error, step=7, uri=RUN) is refused is error.save
    assert (refused.state, refused.step, refused.error) == (SaveState.REFUSED, 7, error)
    assert counted(outcome="refused") == before + 1
    assert "outcome=refused step=7" in caplog.text
    record_refusal(error, step=8, uri=RUN)
    assert counted(outcome="refused") == before + 2


def test_how_long_training_was_kept_counts_once_for_each_save(handle):
    before = counted("cairn_save_blocked_seconds_count"), counted("cairn_save_blocked_seconds_sum")
    handle.blocked_seconds = 0.5
    record_started(handle)
    record_started(handle)
    assert counted("cairn_save_blocked_seconds_count") == before[0] + 1
    assert counted("cairn_save_blocked_seconds_sum") == before[1] + 0.5


def test_the_metrics_outlive_a_second_import_of_the_module():
    before = counted(outcome="skipped")
    save_metrics.prepare_metrics()
    again = importlib.util.module_from_spec(save_metrics.__spec__)
    save_metrics.__spec__.loader.exec_module(again)
    for module in (again, save_metrics):
        skipped = SaveHandle(step=9, attempt=1, uri=RUN)
        skipped.skip()
        module.record_outcome(skipped)
    assert counted(outcome="skipped") == before + 2
