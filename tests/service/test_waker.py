"""Jobs start soon, although DBOS hardly ever looks at its queues by itself."""

import logging
import threading
import time

import pytest
from dbos._sys_db import SystemDatabase
from sqlalchemy.exc import OperationalError

from cairn.service.jobs.dbos_engine.jobs import Jobs
from tests.service.seams import context, counts, database, waker, worker, worker_names

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

    return {"gather": context.JobKind("gather", run, lambda *_: None)}


@pytest.fixture
def launch(database_url, tmp_path, kinds):
    """Launches a worker, on a database with tables."""
    with_tables = database.open_database(database_url)
    launched = []

    def start():
        name = worker_names.FileName(tmp_path, "test")
        started = worker.Worker(database_url=database_url, name=name, roots={}, kinds=kinds)
        launched.append(started)
        started.launch()
        return started

    yield start
    for started in launched:
        started.close()
    with_tables.destroy()


def test_a_job_that_another_process_enqueues_starts(launch, database_url, kinds, ran):
    launch()
    jobs = Jobs(database.open_database(database_url), roots={}, kinds=kinds)
    for number in range(5):  # more than may run at a time
        jobs.start("gather", {"number": number})
    for _ in range(5):
        assert ran.acquire(timeout=PATIENCE)
    jobs.close()


def test_a_job_of_this_process_starts_at_once(launch, database_url, kinds, ran, monkeypatch):
    monkeypatch.setattr(counts.JobCounts, "any_waits", lambda *_: False)  # nobody looks
    jobs = Jobs(database.open_database(database_url), roots={}, kinds=kinds)
    jobs.worker = launch()
    jobs.start("gather", {})
    assert ran.acquire(timeout=PATIENCE)
    jobs.close()


def test_a_wake_while_a_queue_looks_has_it_look_again():
    looks, looked, woken = waker.Waker(lambda: False), threading.Event(), threading.Event()

    def look_and_wait_again():
        looks.wait(lambda: True, None)
        looked.set()  # and found nothing
        woken.wait(PATIENCE)
        looks.wait(lambda: False, None)

    queue = threading.Thread(target=look_and_wait_again, daemon=True)
    queue.start()
    assert looked.wait(PATIENCE)
    looks.wake()
    woken.set()
    queue.join(PATIENCE)
    assert not queue.is_alive()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_worker_ends_without_waiting_for_its_queues(launch, caplog):
    launched = launch()
    caplog.set_level(logging.WARNING)
    launched.close()
    assert [record for record in caplog.records if "did not exit" in record.getMessage()] == []
    assert not [one for one in threading.enumerate() if one.name.startswith("queue-worker")]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_jobs_with_a_delay_of_which_there_are_none_are_not_looked_for(launch, monkeypatch):
    looks, look = [], SystemDatabase.transition_delayed_workflows
    monkeypatch.setattr(
        SystemDatabase,
        "transition_delayed_workflows",
        lambda self, *more: (looks.append(1), look(self, *more))[1],
    )
    launched = launch()
    time.sleep(3)  # three looks, as DBOS has it
    launched.close()
    assert len(looks) == 1


def test_a_database_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr(waker, "POLL_SECONDS", 0.01)
    asked = threading.Semaphore(0)

    def fail():
        asked.release()
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    asking = waker.Waker(fail)
    asking.start()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE)
    asking.close()
