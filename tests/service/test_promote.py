import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn import promote_step
from cairn.service.access.callers import Caller, Scope
from cairn.service.actions import aliases as aliases_actions
from tests.service.seams import promotion
from tests.service.stores import add_steps, begin_saving, make_run, trash
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
CREATE = {"If-None-Match": "*"}


def promote(http, step, headers, alias="production", **body):
    path = f"{RUN}/checkpoints/{step}:promote"
    return http.post(path, json={"alias": alias, **body}, headers=headers)


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6, 9])


def test_promotion_moves_the_alias_in_the_store(http, run):
    answer = promote(http, 6, CREATE, reason="first release")
    assert answer.status_code == 200
    assert answer.headers["etag"] == '"1"'
    stored = run.aliases.get("production")
    assert (stored.step, stored.attempt, stored.sequence) == (6, 1, 1)
    assert stored.manifest_digest == run.step(6).manifest_digest
    assert (stored.by, stored.reason) == ("loopback", "first release")
    body = answer.json()
    assert body.pop("at").endswith("Z")
    assert body == {
        "alias": "production",
        "step": 6,
        "attempt": 1,
        "manifest_digest": stored.manifest_digest,
        "by": "loopback",
        "reason": "first release",
        "sequence": 1,
        "audited": True,
    }


def test_etag_of_the_alias_is_what_the_next_promotion_gives_back(http, run):
    assert promote(http, 3, CREATE).status_code == 200
    seen = http.get(f"{RUN}/aliases/production")
    answer = promote(http, 6, {"If-Match": seen.headers["etag"]})
    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert http.get(f"{RUN}/aliases/production").json()["step"] == 6
    assert http.get(f"{RUN}/checkpoints/6").json()["aliases"] == ["production"]
    assert http.get(f"{RUN}/checkpoints/3").json()["aliases"] == []


def test_stale_promotion_is_refused_with_the_alias_as_it_is(http, run):
    promote(http, 3, CREATE)
    promote(http, 6, {"If-Match": '"1"'}, reason="better")
    for headers in ({"If-Match": '"1"'}, CREATE):
        answer = promote(http, 9, headers)
        assert answer.status_code == 412
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["type"] == "urn:cairn:problem:precondition-failed"
        assert problem["current"]["step"] == 6
        assert problem["current"]["sequence"] == 2
    assert run.aliases.get("production").step == 6


def test_promotion_of_an_alias_that_should_exist_is_refused(http, run):
    answer = promote(http, 3, {"If-Match": '"1"'})
    assert (answer.status_code, answer.json()["current"]) == (412, None)
    assert run.aliases.list() == []


def test_promotion_without_precondition_is_refused(http, run):
    answer = promote(http, 3, {})
    assert answer.status_code == 428
    assert answer.json()["type"] == "urn:cairn:problem:precondition-required"
    assert "If-None-Match: *" in answer.json()["detail"]
    assert run.aliases.list() == []


@pytest.mark.parametrize(
    "headers",
    [
        {"If-Match": "1"},
        {"If-Match": 'W/"1"'},
        {"If-Match": "*"},
        {"If-Match": '"1", "2"'},
        {"If-Match": '"-1"'},
        {"If-None-Match": '"1"'},
    ],
)
def test_precondition_of_another_form_is_invalid(http, run, headers):
    answer = promote(http, 3, headers)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].startswith("header.if-")
    assert run.aliases.list() == []


def test_preconditions_that_exclude_each_other_are_never_fulfilled(http, run):
    promote(http, 3, CREATE)
    answer = promote(http, 6, {"If-Match": '"1"', "If-None-Match": "*"})
    assert answer.status_code == 412
    assert "and missing (If-None-Match)" in answer.json()["detail"]
    assert run.aliases.get("production").step == 3


def test_unknown_step_is_not_promoted(http, run):
    answer = promote(http, 4, CREATE)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:cairn:problem:step-not-found")
    assert run.aliases.list() == []


def test_step_in_flight_is_not_promoted(http, run):
    begin_saving(run, 12)
    answer = promote(http, 12, CREATE)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:step-in-flight")
    assert run.aliases.list() == []


def test_trashed_and_superseded_steps_are_not_promoted(http, run):
    trash(run, 3)
    add_steps(run, [7], base_step=6)
    for step, state in ((3, "trashed"), (9, "superseded")):
        answer = promote(http, step, CREATE)
        assert answer.status_code == 404
        assert state in answer.json()["detail"]
    assert run.aliases.list() == []


@pytest.mark.parametrize("alias", ["latest", "7", "", "a/b", "..", "a b", "x" * 65])
def test_name_that_cannot_be_an_alias_is_invalid(http, run, alias):
    answer = promote(http, 3, CREATE, alias=alias)
    assert answer.status_code == 422
    assert run.aliases.list() == []


def test_unknown_field_in_the_body_is_invalid(http, run):
    answer = promote(http, 3, CREATE, attempts=6)
    assert answer.status_code == 422
    assert answer.json()["errors"] == [
        {"field": "body.attempts", "detail": "Extra inputs are not permitted, found 6"}
    ]


@pytest.mark.parametrize("before", [None, 3])
def test_a_step_that_is_deleted_once_it_was_looked_at_is_not_promoted(
    http, run, monkeypatch, before
):
    headers = CREATE
    if before is not None:
        headers = {"If-Match": promote(http, before, CREATE).headers["etag"]}
    held = promotion.held

    def held_after_deletion(*args, **kwargs):
        trash(run, 9)
        return held(*args, **kwargs)

    monkeypatch.setattr(promotion, "held", held_after_deletion)
    answer = promote(http, 9, headers)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:step-changed")
    stored = run.aliases.get("production")
    assert (stored and stored.step) == before
    aliases = http.get(f"{RUN}/aliases").json()["aliases"]
    assert [alias["step"] for alias in aliases] == ([] if before is None else [before])


def test_of_racing_promotions_exactly_one_wins(http, run):
    promote(http, 3, CREATE)
    gate = threading.Barrier(8)

    def race(number):
        gate.wait()
        return promote(http, 6 if number % 2 else 9, {"If-Match": '"1"'}).status_code

    with ThreadPoolExecutor(8) as pool:
        codes = sorted(pool.map(race, range(8)))
    assert codes == [200] + [412] * 7
    assert run.aliases.get("production").sequence == 2


def test_promotion_is_audited(http, run):
    promote(http, 3, CREATE, reason="first")
    promote(http, 9, {"If-Match": '"1"'})
    promote(http, 6, {"If-Match": '"1"'})  # stale: nothing happened
    entries = audit_trail(http)
    assert {(entry.action, entry.caller, entry.root, entry.run) for entry in entries} == {
        ("alias.promote", "loopback", "default", "run")
    }
    assert [(entry.detail["step"], entry.outcome) for entry in entries] == [
        (3, "done"),
        (9, "done"),
        (6, "refused"),
    ]
    assert entries[0].detail["reason"] == "first"
    assert [entry.detail.get("sequence") for entry in entries] == [1, 2, None]
    assert entries[2].detail["problem"] == "urn:cairn:problem:precondition-failed"
    assert all(entry.at <= entry.completed for entry in entries)


def test_promotion_is_in_the_catalog_without_a_refresh(http, run):
    http.get(f"{RUN}/checkpoints")
    promote(http, 3, CREATE)
    promote(http, 9, {"If-Match": '"1"'})
    (alias,) = http.get(f"{RUN}/aliases").json()["aliases"]
    assert (alias["alias"], alias["step"], alias["sequence"]) == ("production", 9, 2)


def test_nothing_is_promoted_that_the_audit_trail_cannot_note(app, http, run):
    with app.state.plane.catalog.write() as session:
        session.connection().exec_driver_sql("DROP TABLE audit_events")
    answer = promote(http, 3, CREATE)
    assert (answer.status_code, answer.json()["type"]) == (
        503,
        "urn:cairn:problem:database-unavailable",
    )
    assert run.aliases.get("production") is None


def test_promotion_stands_though_the_audit_trail_cannot_note_its_end(
    app, http, run, caplog, monkeypatch
):
    write = aliases_actions.promote_step

    def then_lost(*arguments, **options):
        moved = write(*arguments, **options)
        with app.state.plane.catalog.write() as session:
            session.connection().exec_driver_sql("DROP TABLE audit_events")
        return moved

    monkeypatch.setattr(aliases_actions, "promote_step", then_lost)
    assert promote(http, 3, CREATE).status_code == 200
    assert run.aliases.get("production").step == 3
    assert "alias.promote of default/run: done, which could not be noted" in caplog.text


def test_a_step_is_let_go_also_where_the_answer_is_an_error(app, http, run, monkeypatch):
    def lost(*_arguments):
        raise RuntimeError("after the alias was moved")

    monkeypatch.setattr(aliases_actions, "_position", lost)
    with pytest.raises(RuntimeError, match="after the alias was moved"):
        promote(http, 3, CREATE)
    assert run.aliases.get("production").step == 3
    assert run.objects.list("trash/") == []


def test_entry_without_an_outcome_is_left_by_a_server_that_dies(app, http, run, monkeypatch):
    class Killed(BaseException):
        """What no code of the server sees coming."""

    def die(*_arguments, **_options):
        raise Killed

    monkeypatch.setattr(aliases_actions, "promote_step", die)
    plane, caller = app.state.plane, Caller("loopback", Scope.ADMIN)
    with pytest.raises(Killed):
        aliases_actions.promote(
            plane, caller, "default", "run", 3, alias="production", reason="", expect=None
        )
    (entry,) = audit_trail(http)
    assert (entry.detail["alias"], entry.outcome, entry.completed) == ("production", None, None)


def test_entry_names_the_request_that_its_answer_and_the_log_name(http, run):
    own = promote(http, 3, {**CREATE, "X-Request-ID": "pipeline-7"})
    given = promote(http, 6, {"If-Match": '"1"', "X-Request-ID": "not plain"})
    refused = promote(http, 9, {**CREATE, "X-Request-ID": "pipeline-8"})
    assert refused.status_code == 412
    noted = [entry.request_id for entry in audit_trail(http)]
    assert noted == [answer.headers["X-Request-ID"] for answer in (own, given, refused)]
    assert (noted[0], noted[2]) == ("pipeline-7", "pipeline-8")


def test_deleted_alias_is_gone_and_its_history_stays(http, run):
    promote(http, 3, CREATE)
    promote(http, 9, {"If-Match": '"1"'}, reason="better")
    path = f"{RUN}/aliases/production"
    assert http.delete(path).status_code == 428
    assert http.delete(path, headers=CREATE).status_code == 428
    stale = http.delete(path, headers={"If-Match": '"1"'})
    assert (stale.status_code, stale.json()["current"]["sequence"]) == (412, 2)
    assert http.delete(path, headers={"If-Match": '"2"'}).status_code == 204
    assert http.get(path).status_code == 404
    assert http.delete(path, headers={"If-Match": '"3"'}).status_code == 404
    assert http.get(f"{RUN}/aliases").json()["aliases"] == []
    assert http.get(f"{RUN}/checkpoints/9").json()["aliases"] == []
    events = http.get(f"{path}/history").json()["events"]
    assert [(event["sequence"], event["step"], event["deleted"]) for event in events] == [
        (3, 9, True),
        (2, 9, False),
        (1, 3, False),
    ]
    assert promote(http, 3, CREATE).headers["etag"] == '"4"'


def test_alias_moved_behind_the_servers_back_is_seen(http, run):
    promote(http, 3, CREATE)
    promote_step(run, 9, "production", by="else", expect=1)
    assert http.get(f"{RUN}/aliases/production").headers["etag"] == '"2"'
    assert http.get(f"{RUN}/checkpoints").json()["checkpoints"][0]["aliases"] == ["production"]
    assert promote(http, 6, {"If-Match": '"1"'}).status_code == 412


def test_unknown_alias_is_not_found(http, run):
    promote(http, 3, CREATE, alias="staging")
    for path in (f"{RUN}/aliases/production", f"{RUN}/aliases/production/history"):
        answer = http.get(path)
        assert answer.status_code == 404
        assert answer.json()["type"] == "urn:cairn:problem:alias-not-found"
        assert "staging" in answer.json()["detail"]
