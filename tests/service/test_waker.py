"""Jobs start soon, although DBOS hardly ever looks at its queues by itself."""

import logging
import threading
import time

import pytest
from dbos._sys_db import SystemDatabase
from sqlalchemy.exc import OperationalError

from cairn.service.jobs.context import JobKind
from cairn.service.jobs.dbos_engine import database
from cairn.service.jobs.dbos_engine.counts import JobCounts
from cairn.service.jobs.dbos_engine.database import open_database
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.dbos_engine.waker import Waker
from cairn.service.jobs.dbos_engine.worker import Worker
from cairn.service.jobs.worker_names import FileName

PATIENCE = 30


@pytest.fixture(autouse=True)
def _rarely(monkeypatch):
    """By itself, DBOS would look too late for any test."""
    monkeypatch.setattr(database, "QUEUE_POLL_SECONDS", 600.0)


@pytest.fixture
def ran():
    return threading.Semaphore(0)


@pytest.fixture
def kinds(ran):
    def run(context, request):
        ran.release()
        return {}

    return {"gather": JobKind("gather", run, lambda *_: None)}


@pytest.fixture
def worker(database_url, tmp_path, kinds):
    with_tables = open_database(database_url)
    one = Worker(database_url=database_url, name=FileName(tmp_path, "test"), roots={}, kinds=kinds)
    one.launch()
    yield one
    one.close()
    with_tables.destroy()


def test_a_job_that_another_process_enqueues_starts(worker, database_url, kinds, ran):
    jobs = Jobs(open_database(database_url), roots={}, kinds=kinds)
    for number in range(5):  # more than may run at a time
        jobs.start("gather", {"number": number})
    for _ in range(5):
        assert ran.acquire(timeout=PATIENCE)
    jobs.close()


def test_a_job_of_this_process_starts_at_once(worker, database_url, kinds, ran, monkeypatch):
    monkeypatch.setattr(JobCounts, "any_waits", lambda *_: False)  # nobody looks
    jobs = Jobs(open_database(database_url), roots={}, kinds=kinds)
    jobs.worker = worker
    jobs.start("gather", {})
    assert ran.acquire(timeout=PATIENCE)
    jobs.close()


def test_a_wake_while_a_queue_looks_has_it_look_again():
    waker, looked, woken = Waker(lambda: False), threading.Event(), threading.Event()

    def look_and_wait_again():
        waker.wait(lambda: True, None)
        looked.set()  # and found nothing
        woken.wait(PATIENCE)
        waker.wait(lambda: False, None)

    queue = threading.Thread(target=look_and_wait_again, daemon=True)
    queue.start()
    assert looked.wait(PATIENCE)
    waker.wake()
    woken.set()
    queue.join(PATIENCE)
    assert not queue.is_alive()


def test_a_worker_ends_without_waiting_for_its_queues(worker, caplog):
    caplog.set_level(logging.WARNING)
    worker.close()
    assert [record for record in caplog.records if "did not exit" in record.getMessage()] == []
    assert not [one for one in threading.enumerate() if one.name.startswith("queue-worker")]


def test_jobs_with_a_delay_of_which_there_are_none_are_not_looked_for(
    database_url, tmp_path, kinds, monkeypatch
):
    looks, look = [], SystemDatabase.transition_delayed_workflows
    monkeypatch.setattr(
        SystemDatabase,
        "transition_delayed_workflows",
        lambda self, *more: (looks.append(1), look(self, *more))[1],
    )
    with_tables = open_database(database_url)
    one = Worker(database_url=database_url, name=FileName(tmp_path, "test"), roots={}, kinds=kinds)
    one.launch()
    time.sleep(3)  # three looks, as DBOS has it
    one.close()
    with_tables.destroy()
    assert len(looks) == 1


def test_a_database_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr("cairn.service.jobs.dbos_engine.waker.POLL_SECONDS", 0.01)
    asked = threading.Semaphore(0)

    def fail():
        asked.release()
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    waker = Waker(fail)
    waker.start()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE)
    waker.close()
