import os
import signal
import threading
from pathlib import Path

import pytest

from cairn import PolicyError
from cairn.state.checkpointing.preemption import Preemption
from tests.programs.program import run

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _handler_of_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, before)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_signal_is_noted_and_nothing_else_happens():
    with Preemption() as preemption:
        assert not preemption.announced
        terminate()
        assert preemption.announced
        first = preemption.at
        terminate()
        assert preemption.at == first


def test_news_that_come_another_way_are_noted_the_same():
    with Preemption() as preemption:
        preemption.announce()
        assert preemption.announced


def test_a_handler_that_was_there_before_is_called_too_and_is_back_afterwards():
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        with Preemption() as preemption:
            terminate()
            assert preemption.announced
            assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_two_hear_the_same_signal_whichever_is_closed_first():
    first = Preemption()
    second = Preemption()
    terminate()
    assert first.announced
    assert second.announced
    second.close()
    first.close()


def test_only_the_main_thread_may_listen():
    found = []

    def listen():
        try:
            Preemption()
        except PolicyError as error:
            found.append(str(error))

    thread = threading.Thread(target=listen, name="worker")
    thread.start()
    thread.join()
    assert "expected the main thread, found thread 'worker'" in found[0]


CLOSED_IN_THE_ORDER_THEY_WERE_MADE = """
import os, signal
from cairn.state.checkpointing.preemption import Preemption
first, second = Preemption(), Preemption()
first.close()
second.close()
os.kill(os.getpid(), signal.SIGTERM)
print("still there")
"""


def test_once_all_are_closed_the_signal_ends_the_process_as_before():
    ended = run(["-c", CLOSED_IN_THE_ORDER_THEY_WERE_MADE], cwd=ROOT, timeout=60)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert "still there" not in ended.stdout
