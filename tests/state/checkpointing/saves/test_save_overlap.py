"""Saves that were given up or left alone: nothing else may write where they still do."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest

from cairn import Checkpointer, LeaseHeldError, Run, SaveError, SaveHandle, delete_step
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.runs.lease import read_lease
from tests.state.seams import HostTrees, last_to_keep, save_job
from tests.state.seams import checkpointer as checkpointer_module
from tests.storage.states import abstract, assert_same, state


@pytest.fixture
def made(tmp_path):
    with Checkpointer(tmp_path / "run", writer_id="job") as checkpointer:
        yield checkpointer


@pytest.fixture
def held_back(monkeypatch):
    """Saves stop before they are published, until this is set."""
    go_on, sync = threading.Event(), save_job.sync_folder

    def waiting(folder):
        assert go_on.wait(60)
        sync(folder)

    monkeypatch.setattr(save_job, "sync_folder", waiting)
    yield go_on
    go_on.set()


def save(checkpointer, step):
    return checkpointer.save(step, state(step), meta={"step": step})


def assert_listed(checkpointer, *steps):
    run = Run.open(checkpointer.uri)
    assert [info.step for info in run.steps()] == list(steps)
    for info in run.steps():
        for item, tree in state(info.step).items():
            assert_same(restore_item(run.step_uri(info), item, abstract(tree)), tree)


def test_a_save_that_was_given_up_keeps_others_out_until_it_has_ended(made, held_back, monkeypatch):
    monkeypatch.setattr(checkpointer_module, "_ENDING_SECONDS", 0.05)
    first = save(made, 1)
    assert first.abandon("no time left")
    with pytest.raises(SaveError, match="abandoned"):
        first.wait()
    for step in (1, 2):
        with pytest.raises(SaveError, match="given up is still being written"):
            save(made, step)
    held_back.set()
    assert made._work.over.wait(60)
    save(made, 2).wait()
    assert_listed(made, 2)  # what was given up is not published later


def test_the_work_of_a_save_begins_once_its_call_is_over(made, monkeypatch):
    monkeypatch.setattr(checkpointer_module, "_LEAVING_SECONDS", 60.0)
    begun, at_the_end = threading.Event(), []
    describe, record = HostTrees.describe, checkpointer_module.record_started

    def noted(self):
        begun.set()
        describe(self)

    def last(handle):
        record(handle)
        at_the_end.append((begun.is_set(), gc.isenabled()))

    monkeypatch.setattr(HostTrees, "describe", noted)
    monkeypatch.setattr(checkpointer_module, "record_started", last)
    save(made, 1).wait()
    assert at_the_end == [(False, False)]  # nor was garbage collected at the caller's expense
    assert begun.is_set()
    assert gc.isenabled()
    assert_listed(made, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_is_interrupted_at_its_end_has_its_save_go_on(made, monkeypatch, error):
    def interrupted(_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, "_LEAVING_SECONDS", 60.0)
        patch.setattr(checkpointer_module, "record_started", interrupted)
        with pytest.raises(error):
            save(made, 1)
    made.wait_until_finished()
    assert_listed(made, 1)


def test_the_work_of_a_save_begins_by_itself_if_nobody_tells_it_to(made, monkeypatch):
    monkeypatch.setattr(checkpointer_module, "_LEAVING_SECONDS", 0.01)
    monkeypatch.setattr(checkpointer_module._BackgroundWork, "go", lambda _: None)
    save(made, 1).wait()
    assert_listed(made, 1)


def test_an_interrupted_close_keeps_the_run_until_the_save_has_ended(
    tmp_path, held_back, monkeypatch
):
    made = Checkpointer(tmp_path / "run", writer_id="job")
    handle = save(made, 1)
    with monkeypatch.context() as patch:
        patch.setattr(SaveHandle, "join", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.close()
    with (
        Checkpointer(made.uri, writer_id="other") as other,
        pytest.raises(LeaseHeldError, match="job"),
    ):
        save(other, 2)
    held_back.set()
    handle.wait(60)
    assert made._work.over.wait(60)
    wait_until(lambda: read_lease(made._run.objects).released)
    with Checkpointer(made.uri, writer_id="other") as other:
        save(other, 2).wait()
    assert_listed(made, 1, 2)


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _interrupted(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("lost", ["model/d", "commit_success.txt"])
def test_a_step_whose_files_went_before_it_was_published_is_not_listed(made, monkeypatch, lost):
    sync = save_job.sync_folder

    def then_lost(folder):
        sync(folder)
        path = Path(folder.local_path) / lost
        (next(path.iterdir()) if path.is_dir() else path).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(save_job, "sync_folder", then_lost)
        with pytest.raises(SaveError, match="are not what was written"):
            save(made, 1).wait()
    assert_listed(made)
    save(made, 1).wait()
    assert_listed(made, 1)


def test_a_forked_child_is_told_that_the_checkpointer_is_not_its_own(made, monkeypatch):
    save(made, 1).wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: made._process + 1)
        with pytest.raises(SaveError, match="another process's"):
            save(made, 2)
    save(made, 2).wait()
    assert_listed(made, 1, 2)


def test_a_restart_does_not_keep_a_line_that_was_deleted(made):
    for step in (1, 2, 3):
        save(made, step).wait()
    run = Run.open(made.uri)
    assert last_to_keep(run) == (3, 1)
    made.close()
    delete_step(run, run.step(3), by="test", reason="diverged")
    assert read_lease(run.objects).durable == (3, 1)
    assert last_to_keep(run) == (2, 1)


def test_what_is_called_when_a_save_is_done_may_wait_for_it(made):
    seen = []
    handle = save(made, 1)
    handle.when_done(lambda one: seen.append((one.wait(5), one.state)))
    handle.wait(60)
    assert [state for _, state in seen] == ["durable"]
