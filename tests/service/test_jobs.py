"""The job engine, with jobs that only count."""

import threading

import pytest
from dbos import DBOS

from cairn import StoreUnavailableError, parse_uri
from cairn.service.errors import InvalidRequestError, ProblemError
from cairn.service.filters.search import EVERYTHING
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.errors import (
    IdempotencyKeyReusedError,
    JobsBusyError,
    OperationNotFoundError,
)
from tests.service.seams import context, database, job_search, progress, worker, worker_names

PATIENCE = 20.0


class Counting:
    """A kind of job of three steps; the test may hold it in the second."""

    def __init__(self):
        self.ran: list[str] = []
        self.abandoned: list[str] = []
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.ended = threading.Event()
        self.kind = context.JobKind("gather", self.run, self.abandon)

    def run(self, context, request):
        for number in range(3):
            context.step(
                f"step {number}", lambda number=number: self.step(context, request, number)
            )
        self.ended.set()
        return {"counted": 3}

    def step(self, context, request, number):
        self.ran.append(f"{request['name']} {number}")
        context.progress.set(done_bytes=number * 10, total_bytes=30, message=f"step {number}")
        if number == 1 and request.get("hold"):
            self.reached.set()
            while not self.opened.wait(0.01):
                context.check()
        if number == 1 and request.get("fail"):
            raise InvalidRequestError("step 1 was told to fail")
        if number == 1 and request.get("lose"):
            raise StoreUnavailableError("no answer", path="gs://bucket")
        context.progress.advance(10)
        return {"number": number}

    def abandon(self, roots, request, operation_id):
        self.abandoned.append(operation_id)


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def launch(tmp_path, counting):
    """Launches engines on one database, one after the other."""
    live = []

    def start(kind=counting.kind):
        url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
        what = {"roots": {"default": parse_uri(tmp_path / "store")}, "kinds": {"gather": kind}}
        engine = Jobs(database.open_database(url), **what, search=job_search.JobSearch(url))
        name = worker_names.FileName(tmp_path, "test")
        working = worker.Worker(database_url=url, name=name, **what)
        live.append(engine)
        working.launch()
        engine.worker = working
        return engine

    yield start
    for engine in live:
        engine.close()


def ended(engine, operation):
    """The operation once it has ended."""
    done = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        found = engine.get(operation.id)
        if found.state.final:
            return found
        done.wait(0.05)
    raise AssertionError(f"{found} has not ended")


def test_job_ends_with_its_result_and_full_progress(launch, counting):
    engine = launch()
    operation = ended(engine, engine.start("gather", {"name": "a"}))
    assert (operation.state, operation.result) == ("succeeded", {"counted": 3})
    assert (operation.progress.done_bytes, operation.progress.total_bytes) == (30, 30)
    assert operation.request == {"name": "a"}
    assert counting.ran == ["a 0", "a 1", "a 2"]
    assert counting.abandoned == []


def test_equal_request_is_the_same_operation_only_while_it_runs(launch, counting):
    engine = launch()
    first = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    assert engine.start("gather", {"hold": True, "name": "a"}).id == first.id
    assert engine.start("gather", {"name": "b"}).id != first.id
    counting.opened.set()
    ended(engine, first)
    assert engine.start("gather", {"name": "a", "hold": True}).id != first.id


def test_cancel_stops_a_step_in_its_middle_and_cleans_up_before_it_returns(launch, counting):
    engine = launch()
    operation = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    assert engine.cancel(operation.id).state == "cancelled"
    assert counting.abandoned == [operation.id]
    assert not counting.ended.is_set()
    assert engine.cancel(operation.id).state == "cancelled"


def test_cancelled_job_that_never_ran_is_cleaned_up_too(launch, counting):
    engine = launch()
    held = [engine.start("gather", {"name": str(n), "hold": True}) for n in range(3)]
    assert counting.reached.wait(PATIENCE)
    assert engine.cancel(held[2].id).state == "cancelled"
    assert {*counting.abandoned} == {held[2].id}  # twice, if a worker had just taken it


def test_resumed_job_starts_over_under_the_same_id(launch, counting):
    engine = launch()
    operation = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    engine.cancel(operation.id)
    counting.opened.set()
    engine.resume(operation.id)
    assert ended(engine, operation).state == "succeeded"
    assert counting.ran == ["a 0", "a 1", "a 0", "a 1", "a 2"]


def test_failed_job_tells_its_problem_and_can_be_resumed(launch, counting):
    engine = launch()
    operation = ended(engine, engine.start("gather", {"name": "a", "fail": True}))
    assert operation.state == "failed"
    assert operation.error.status == 422
    assert operation.error.detail == "step 1 was told to fail"
    assert operation.error.instance == f"/v1/operations/{operation.id}"
    assert counting.abandoned == [operation.id]
    engine.resume(operation.id)
    assert ended(engine, operation).state == "failed"


def test_store_that_does_not_answer_is_asked_again_before_the_job_fails(
    launch, counting, monkeypatch
):
    monkeypatch.setattr("cairn.service.jobs.execution.STEP_RETRY_SECONDS", (0.0, 0.0))
    engine = launch()
    operation = ended(engine, engine.start("gather", {"name": "a", "lose": True}))
    assert (operation.state, operation.error.status) == ("failed", 503)
    assert counting.ran == ["a 0", "a 1", "a 1", "a 1"]


def test_unexpected_error_says_nothing_of_the_inside(launch):
    def crash(context, request):
        return context.step("crash", lambda: {"never": {}["secret"]})

    engine = launch(context.JobKind("gather", crash, lambda *_: None))
    operation = ended(engine, engine.start("gather", {}))
    assert operation.error.status == 500
    assert "secret" not in operation.error.model_dump_json()


def test_stopped_engine_leaves_a_job_for_the_next_which_repeats_no_finished_step(launch, counting):
    first = launch()
    operation = first.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    first.close()
    assert counting.abandoned == []
    counting.opened.set()
    second = launch()
    assert ended(second, operation).result == {"counted": 3}
    assert counting.ran == ["a 0", "a 1", "a 1", "a 2"]


def test_a_process_has_one_engine(launch):
    launch()
    with pytest.raises(JobsBusyError, match="found a running one"):
        launch()


def test_database_is_in_wal_mode(launch, tmp_path):
    import sqlite3

    launch()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_database_holds_no_pickle(launch, tmp_path, counting):
    import sqlite3

    engine = launch()
    ended(engine, engine.start("gather", {"name": "a"}))
    ended(engine, engine.start("gather", {"name": "a", "fail": True}))
    connection = sqlite3.connect(tmp_path / "jobs.sqlite")
    kinds = connection.execute("SELECT DISTINCT serialization FROM workflow_status").fetchall()
    kinds += connection.execute("SELECT DISTINCT serialization FROM operation_outputs").fetchall()
    connection.close()
    assert {kind for (kind,) in kinds} == {"portable_json"}


def test_unknown_and_finished_operations_are_told_apart(launch):
    engine = launch()
    with pytest.raises(OperationNotFoundError, match="op-nothing"):
        engine.get("op-nothing")
    operation = ended(engine, engine.start("gather", {"name": "a"}))
    with pytest.raises(ProblemError, match="succeeded"):
        engine.resume(operation.id)


def test_job_taken_over_elsewhere_is_left_alone(launch, counting):
    """Another worker took the row: this one stops, and removes nothing that the other needs."""
    engine = launch()
    operation = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    DBOS.resume_workflow(operation.id, queue_name="cairn-gather")  # as an operator's takeover does
    counting.opened.set()
    assert ended(engine, operation).state == "succeeded"
    assert counting.abandoned == []
    assert counting.ran.count("a 2") == 1


def test_progress_is_reported_a_few_times_a_second():
    now = [0.0]
    reports = []
    meter = progress.ProgressMeter(reports.append, clock=lambda: now[0], interval=0.2)
    meter.set(total_bytes=1050, message="counting")
    for _ in range(1050):
        now[0] += 0.001
        meter.advance(1)
    assert len(reports) <= 7
    assert reports[-1]["done_bytes"] < 1050
    meter.flush()
    whole = {"done_bytes": 1050, "total_bytes": 1050, "message": "counting"}
    assert reports[-1] == whole | {"seconds_left": None}
    before = len(reports)
    meter.flush()
    assert len(reports) == before


def test_what_is_left_is_reckoned_with_the_pace_of_late():
    now = [0.0]
    reports = []
    meter = progress.ProgressMeter(reports.append, clock=lambda: now[0], interval=0)

    def after(seconds, nbytes):
        now[0] += seconds
        meter.advance(nbytes)
        return reports[-1]["seconds_left"]

    assert after(1, 10) is None, "nobody knows how much it is in all"
    meter.set(done_bytes=0, total_bytes=10_000)
    assert after(1, 100) is None, "there is no pace yet"
    assert after(1, 100) == 98
    assert [after(1, 10) for _ in range(40)][-1] == (10_000 - 600) / 10
    assert after(1, 0) > 940
    meter.set(done_bytes=0, total_bytes=500, message="another piece of work")
    assert reports[-1]["seconds_left"] is None
    assert after(5, 500) == 0


def test_idempotency_key_names_its_operation_although_an_equal_one_was_under_way(launch, counting):
    engine = launch()
    request = {"name": "a", "hold": True}
    first = engine.start("gather", request)
    assert counting.reached.wait(PATIENCE)
    keyed = engine.start("gather", request, idempotency_key="k")
    with pytest.raises(IdempotencyKeyReusedError):
        engine.start("gather", {"name": "b"}, idempotency_key="k")
    counting.opened.set()
    ended(engine, first)
    ended(engine, keyed)
    assert engine.start("gather", request, idempotency_key="k").id == keyed.id


def test_used_idempotency_key_is_refused_although_the_new_request_is_under_way(launch, counting):
    engine = launch()
    ended(engine, engine.start("gather", {"name": "a"}, idempotency_key="k"))
    engine.start("gather", {"name": "b", "hold": True})
    assert counting.reached.wait(PATIENCE)
    with pytest.raises(IdempotencyKeyReusedError):
        engine.start("gather", {"name": "b", "hold": True}, idempotency_key="k")
    counting.opened.set()


def test_pages_hold_every_operation_of_one_moment_once(launch, counting, tmp_path):
    """SQLite keeps seconds; what a token names may have left the list meanwhile."""
    import sqlite3

    engine = launch()
    ids = {ended(engine, engine.start("gather", {"name": str(n)})).id for n in range(7)}
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        connection.execute("UPDATE workflow_status SET created_at = 1700000000000")
    connection.close()
    succeeded = EVERYTHING.equal(state="succeeded")
    seen, last = engine.list(succeeded, limit=3)
    told = [one.id for one in seen]
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        connection.execute(
            "UPDATE workflow_status SET status = 'ERROR' WHERE workflow_uuid = ?", (told[-1],)
        )
    connection.close()
    while last:
        seen, last = engine.list(succeeded, limit=3, after=last)
        told += [one.id for one in seen]
    assert len(told) == 7
    assert {*told} == ids


def test_job_cancelled_while_the_server_stops_is_cleaned_up(launch, counting):
    engine = launch()
    operation = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    engine.stopping = True  # as the server says first, while requests under way still end
    assert engine.cancel(operation.id).state == "cancelled"
    assert counting.abandoned == [operation.id]


def test_second_resume_at_once_is_a_conflict(launch, counting, monkeypatch):
    engine = launch()
    operation = engine.start("gather", {"name": "a", "hold": True})
    assert counting.reached.wait(PATIENCE)
    stale = engine.cancel(operation.id)
    engine.resume(operation.id)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "get", lambda _: stale)
        with pytest.raises(ProblemError, match="resumed by another request"):
            engine.resume(operation.id)
    counting.opened.set()
    assert ended(engine, operation).state == "succeeded"


def test_job_that_its_server_never_survives_says_so_and_can_be_resumed(launch, counting, tmp_path):
    import sqlite3

    engine = launch()
    operation = ended(engine, engine.start("gather", {"name": "a", "fail": True}))
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        connection.execute(
            "UPDATE workflow_status SET status = 'MAX_RECOVERY_ATTEMPTS_EXCEEDED', error = NULL"
        )
    connection.close()
    given_up = engine.get(operation.id)
    assert (given_up.state, given_up.error.type) == ("failed", "urn:cairn:problem:given-up")
    assert "resume" in given_up.error.detail
    engine.resume(operation.id)
    ended(engine, operation)
