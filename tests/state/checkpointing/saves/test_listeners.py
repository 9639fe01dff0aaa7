"""Others are told of durable steps, and nothing waits for them."""

import importlib.metadata
import os
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from cairn import Checkpointer
from tests.state.seams import listeners

TREE = {"w": jnp.zeros(4)}


@pytest.fixture
def listen(monkeypatch):
    """Puts functions in the place of those that installed packages name."""

    def install(*functions):
        entries = [
            SimpleNamespace(name=one.__name__, value=one.__name__, load=lambda one=one: one)
            for one in functions
        ]
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda *, group: entries if group == "cairn.durable_steps" else [],
        )
        monkeypatch.setattr(listeners, "_publishers", {})

    return install


def test_listeners_are_told_of_each_durable_step_in_order(listen, tmp_path):
    told, last = [], threading.Event()

    def listener(run, step, attempt):
        told.append((run, step, attempt))
        if step == 3:
            last.set()

    listen(listener)
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, TREE).wait()
        assert last.wait(30)
    assert told == [(f"file://{tmp_path}/run", step, 1) for step in (1, 2, 3)]


def test_a_listener_that_fails_or_cannot_be_loaded_keeps_no_other_from_being_told(
    listen, tmp_path, caplog, monkeypatch
):
    told = threading.Event()

    def failing(run, step, attempt):
        raise ZeroDivisionError

    def listener(run, step, attempt):
        told.set()

    listen(failing, listener)
    broken = SimpleNamespace(name="broken", value="no.such:thing", load=lambda: 1 / 0)
    entries = importlib.metadata.entry_points(group=listeners.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [broken, *entries])
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, TREE).wait()
        assert told.wait(30)
    assert "failing was not told of step 1 of file://" in caplog.text
    assert "no.such:thing can't be loaded" in caplog.text


def test_no_save_waits_for_a_listener_that_hangs(listen, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(listeners, "_KEPT", 1)
    called, over = threading.Event(), threading.Event()

    def hanging(run, step, attempt):
        called.set()
        over.wait(60)

    listen(hanging)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, TREE).wait()
        assert called.wait(30)
        for step in (2, 3, 4):
            checkpointer.save(step, TREE).wait()
        assert checkpointer.steps() == [1, 2, 3, 4]
        assert not over.is_set()
    over.set()
    assert "nobody is told of step 3: others waiting: 1" in caplog.text


def test_a_failed_save_is_told_to_nobody(listen, tmp_path, monkeypatch):
    told = []
    listen(lambda run, step, attempt: told.append(step))
    monkeypatch.setattr(
        "cairn.state.checkpointing.saves.save_job.check_files", lambda *_args, **_more: 1 / 0
    )
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(Exception, match="division by zero"):
        checkpointer.save(1, TREE).wait()
    assert listeners._publishers.get(os.getpid()) is None
    assert told == []
