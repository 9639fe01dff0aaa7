import pytest

from cairn import Client, Run
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import GRACE_SECONDS as GRACE_OF_THE_API
from cairn.storage.runs.records.layout import manifest_file, trash_file
from cairn.storage.runs.trash import GRACE_SECONDS, read_tombstones
from cairn.storage.store.clock import from_rfc3339, utc_now
from tests.service.seams import trash as removals
from tests.service.servers import serve
from tests.service.stores import (
    add_steps,
    begin_attempt,
    begin_saving,
    end_saving,
    make_run,
    publish,
    trash,
)
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
STEPS = f"{RUN}/checkpoints"


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6, 9])


def steps(http, **parameters):
    answer = http.get(STEPS, params=parameters)
    assert answer.status_code == 200, answer.text
    return [checkpoint["step"] for checkpoint in answer.json()["checkpoints"]]


def delete(http, step, **parameters):
    return http.delete(f"{STEPS}/{step}", params=parameters)


def undelete(http, step, **body):
    return http.post(f"{STEPS}/{step}:undelete", json=body)


def refused(answer, status, slug, *parts):
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (status, f"urn:cairn:problem:{slug}"), problem
    for part in parts:
        assert part in problem["detail"]


@pytest.mark.parametrize("parameter", ["atempt", "grace", "Attempt"])
def test_a_misspelt_parameter_deletes_nothing(http, run, parameter):
    refused(delete(http, 6, **{parameter: 1}), 422, "invalid-request", parameter, "attempt, grace")
    assert steps(http) == [9, 6, 3]


def test_deleted_step_is_listed_no_more_and_shown_on_request(http, run):
    assert steps(http) == [9, 6, 3]
    answer = delete(http, 6, reason="bad data")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["step"], body["attempt"], body["state"]) == (6, 1, "trashed")
    assert (body["deletion"]["by"], body["deletion"]["reason"]) == ("loopback", "bad data")
    assert body["deletion"]["removing"] is False
    assert steps(http) == [9, 3]
    assert http.get(STEPS, params={"state": "trashed"}).json()["checkpoints"] == [body]
    assert http.get(f"{STEPS}/6").json() == body
    assert http.get(RUN).json()["checkpoint_count"] == 2
    tombstone = read_tombstones(run.objects)[6, 1]
    assert (tombstone.by, tombstone.reason) == ("loopback", "bad data")
    assert run.objects.read(manifest_file(6, 1)) is not None


def test_undeleted_step_is_listed_again(http, run):
    before = http.get(f"{STEPS}/6").json()
    delete(http, 6)
    answer = undelete(http, 6)
    assert (answer.status_code, answer.json()) == (200, before)
    assert steps(http) == [9, 6, 3]
    assert steps(http, state="trashed") == []
    refused(undelete(http, 6), 404, "step-not-found", "in the trash, found step 6 of attempt 1")


def test_a_deletion_can_be_taken_back_for_seven_days_unless_said_otherwise(http, run):
    assert GRACE_OF_THE_API == GRACE_SECONDS
    delete(http, 3)
    delete(http, 6, grace_seconds=0)
    grace = {
        key: (from_rfc3339(one.expires) - from_rfc3339(one.at)).total_seconds()
        for key, one in read_tombstones(run.objects).items()
    }
    assert grace == {(3, 1): GRACE_SECONDS, (6, 1): 0}


@pytest.mark.parametrize(
    "parameters",
    [
        {"grace_seconds": "-1"},
        {"grace_seconds": "nan"},
        {"grace_seconds": "inf"},
        {"attempt": "-1"},
        {"attempt": "x"},
        {"reason": "x" * 2001},
    ],
)
def test_parameter_that_cannot_work_is_refused(http, run, parameters):
    (name,) = parameters
    answer = delete(http, 6, **parameters)
    refused(answer, 422, "invalid-request", name)
    assert read_tombstones(run.objects) == {}


def test_step_that_an_alias_names_is_kept_and_the_alias_named(http, run):
    body = {"alias": "production"}
    http.post(f"{STEPS}/6:promote", json=body, headers={"If-None-Match": "*"})
    refused(delete(http, 6), 409, "step-in-use", "alias production", "Move or delete the aliases")
    assert read_tombstones(run.objects) == {}
    http.delete(f"{RUN}/aliases/production", headers={"If-Match": '"1"'})
    assert delete(http, 6).status_code == 200


def test_latest_step_is_kept_while_a_job_writes_the_run(http, run):
    writing = begin_saving(run, 12)
    refused(delete(http, 12), 409, "step-in-flight")
    refused(delete(http, 9), 409, "step-in-use", "trainer (attempt 2)", "Delete it once a later")
    assert read_tombstones(run.objects) == {}
    assert delete(http, 6).status_code == 200
    publish(run, writing.number, 12)
    assert delete(http, 9).status_code == 200
    refused(delete(http, 12), 409, "step-in-use", "trainer (attempt 2)")
    end_saving(run, writing)
    assert delete(http, 12).status_code == 200
    assert steps(http) == [3]


def test_deletion_is_taken_back_if_a_writer_came_in_between(http, run, monkeypatch):
    write_if = type(run.objects).write_if

    def begun_first(self, key, value, **options):
        if key == trash_file(9, 1):
            begin_attempt(run, base_step=9)
        return write_if(self, key, value, **options)

    monkeypatch.setattr(type(run.objects), "write_if", begun_first)
    refused(delete(http, 9), 409, "step-in-use", "trainer (attempt 2)")
    assert read_tombstones(run.objects) == {}
    assert steps(http) == [9, 6, 3]


def test_writer_that_began_without_the_step_does_not_keep_it(http, run, monkeypatch):
    """It looked for the latest step when the tombstone was there."""
    write_if = type(run.objects).write_if

    def begun_after(self, key, value, **options):
        generation = write_if(self, key, value, **options)
        if key == trash_file(9, 1):
            begin_attempt(run, base_step=run.latest_step())
        return generation

    monkeypatch.setattr(type(run.objects), "write_if", begun_after)
    assert delete(http, 9).json()["state"] == "trashed"
    assert [attempt.base_step for attempt in run.attempts()] == [-1, 6]


def test_step_that_is_not_there_is_not_found(http, run):
    refused(delete(http, 7), 404, "step-not-found", "no step 7 in run", "(steps 3, 6, 9)")
    delete(http, 6)
    refused(delete(http, 6), 404, "step-not-found", "(step 6 trashed)")
    answer = delete(http, 9, attempt=2)
    refused(answer, 404, "step-not-found", "step 9 of attempt 2", "step 9 of attempt 1 listed")
    refused(undelete(http, 9), 404, "step-not-found", "found step 9 of attempt 1 listed")
    refused(undelete(http, 8), 404, "step-not-found", "expected step 8 in the trash, found none")
    assert steps(http) == [9, 3]


def test_step_that_was_superseded_is_deleted_by_its_attempt(http, run):
    add_steps(run, [9], base_step=6)
    assert delete(http, 9, attempt=1).json()["state"] == "trashed"
    assert http.get(f"{STEPS}/9").json()["attempt"] == 2
    answer = delete(http, 9, attempt=1)
    refused(answer, 404, "step-not-found", "(step 9 of attempt 2 listed, it in the trash")
    assert undelete(http, 9, attempt=1).json()["state"] == "superseded"


def test_several_deleted_attempts_at_a_step_are_told_apart(http, run):
    delete(http, 9)
    add_steps(run, [9], base_step=6)
    delete(http, 9)
    refused(undelete(http, 9), 422, "invalid-request", "Choose one of the attempts 1, 2.")
    answer = undelete(http, 9, attempt=3)
    refused(answer, 404, "step-not-found", "attempt 1 of it in the trash, attempt 2 of it")
    assert undelete(http, 9, attempt=2).json()["state"] == "listed"
    assert (
        undelete(http, 9).json()
        == http.get(STEPS, params={"state": "superseded"}).json()["checkpoints"][0]
    )
    assert steps(http, state="trashed") == []


def test_step_whose_bytes_are_going_cannot_be_had_back(http, run):
    expires = delete(http, 6, grace_seconds=0).json()["deletion"]["expires"]
    tombstone = read_tombstones(run.objects)[6, 1]
    assert tombstone.expires == expires
    assert removals.begin_removal(run, (6, 1), now=utc_now(), keeps=lambda tombstone: False)
    refused(undelete(http, 6), 404, "step-not-found", "too late to undelete")
    found = http.get(f"{STEPS}/6", params={"refresh": True}).json()
    assert found["deletion"]["removing"] is True


def test_step_without_a_manifest_is_left_to_the_collector(http, run):
    end_saving(run, begin_saving(run, 12))
    refused(delete(http, 12), 404, "step-not-found", "step 12 abandoned")
    answer = delete(http, 12, attempt=2)
    refused(answer, 404, "step-not-found", "attempt 2 abandoned", "collecting garbage")
    begin_saving(run, 15)
    refused(delete(http, 15, attempt=3), 409, "step-in-flight")


def test_step_whose_manifest_is_damaged_can_be_deleted_and_had_back(http, run):
    assert steps(http) == [9, 6, 3]
    run.objects.write(manifest_file(8, 1), b"{half")
    body = delete(http, 8).json()
    assert (body["state"], body["bytes"], body["deletion"]["by"]) == ("trashed", None, "loopback")
    assert steps(http) == [9, 6, 3]
    assert undelete(http, 8).json()["state"] == "listed"


def test_tombstone_that_cannot_be_read_does_not_hide_its_step(http, run):
    trash(run, 6)  # without its format
    body = http.get(f"{STEPS}/6").json()
    assert (body["state"], body["deletion"]) == ("trashed", None)
    assert steps(http, state="all") == [9, 6, 3]


def test_deletions_are_in_the_audit_trail(http, run):
    delete(http, 6, reason="bad data")
    undelete(http, 6)
    delete(http, 7)
    entries = audit_trail(http)
    assert [(entry.action, entry.caller, entry.run, entry.outcome) for entry in entries] == [
        ("checkpoint.delete", "loopback", "run", "done"),
        ("checkpoint.undelete", "loopback", "run", "done"),
        ("checkpoint.delete", "loopback", "run", "refused"),
    ]
    assert entries[0].detail["reason"] == "bad data"
    assert [(entry.detail["step"], entry.detail["attempt"]) for entry in entries] == [
        (6, 1),
        (6, 1),
        (7, None),
    ]


def test_nothing_is_deleted_that_the_audit_trail_cannot_note(app, http, run):
    with app.state.plane.catalog.write() as session:
        session.connection().exec_driver_sql("DROP TABLE audit_events")
    assert delete(http, 6).status_code == 503
    assert steps(http) == [9, 6, 3]


def test_client_deletes_and_undeletes(app, root):
    make_run(root / "run", [3, 6])
    with serve(app) as url, Client(url) as cairn:
        gone = cairn.delete("run", 3, reason="bad data", grace_seconds=60)
        assert gone.deletion is not None
        assert gone.deletion.reason == "bad data"
        assert (gone.deletion.expires - gone.deletion.at).total_seconds() == 60
        assert [one.step for one in cairn.checkpoints("run", state="trashed")] == [3]
        with pytest.raises(ProblemResponseError, match="step 3 trashed"):
            cairn.delete("run", 3)
        assert cairn.undelete("run", 3, attempt=1).deletion is None
    assert [info.step for info in Run.open(root / "run").steps()] == [3, 6]
