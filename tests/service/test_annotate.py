"""Labels and metrics over HTTP, after the save: based on what was seen, noted in the trail."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn import Annotation
from cairn.storage.runs.records.layout import annotation_file
from cairn.storage.runs.records.placed import read_record
from tests.service.stores import add_steps, begin_saving, make_run, trash
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
STEP = f"{RUN}/checkpoints/6"
ANY = {"If-Match": "*"}


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6], labels={"team": "nlp"})


def test_an_evaluation_marks_a_step_that_it_has_seen(http, run):
    seen = http.get(STEP)
    change = {
        "labels": {"eval": "passed"},
        "metrics": {"eval/loss": 1.25, "acc": "nan"},
        "better": {"eval/loss": "min"},
    }
    answer = http.patch(STEP, json=change, headers={"If-Match": seen.headers["etag"]})
    assert answer.status_code == 200
    body = answer.json()
    assert body["labels"] == {"eval": "passed"}
    assert body["metrics"] == {"eval/loss": 1.25, "acc": "nan"}
    assert body["better"] == {"eval/loss": "min"}
    assert {**body, **{name: seen.json()[name] for name in change}} == seen.json()
    again = http.get(STEP)
    assert (again.json(), again.headers["etag"]) == (body, answer.headers["etag"])
    assert again.headers["etag"] != seen.headers["etag"]
    stored, _ = read_record(run.objects, annotation_file(6, 1), Annotation)
    assert stored.labels == {"eval": "passed"}
    assert [one["labels"] for one in http.get(f"{RUN}/checkpoints").json()["checkpoints"]] == [
        {"eval": "passed"},
        {},
    ]


def test_null_removes_an_entry(http, run):
    http.patch(STEP, json={"labels": {"a": "1", "b": "2"}, "metrics": {"m": 1}}, headers=ANY)
    change = {"labels": {"a": None}, "metrics": {"m": None}}
    body = http.patch(STEP, json=change, headers=ANY).json()
    assert (body["labels"], body["metrics"], body["better"]) == ({"b": "2"}, {}, {})


def test_labels_of_a_run_change(http, run):
    seen = http.get(RUN)
    answer = http.patch(
        RUN,
        json={"labels": {"owner": "ann", "team": None}},
        headers={"If-Match": seen.headers["etag"]},
    )
    assert (answer.status_code, answer.json()["labels"]) == (200, {"owner": "ann"})
    assert http.get("/v1/runs").json()["runs"][0]["labels"] == {"owner": "ann"}
    assert run.info().labels == {"owner": "ann"}


@pytest.mark.parametrize("path", [RUN, STEP])
def test_a_change_of_what_has_changed_is_refused_with_how_it_is_now(http, run, path):
    seen = http.get(path).headers["etag"]
    http.patch(path, json={"labels": {"a": "theirs"}}, headers=ANY)
    refused = http.patch(path, json={"labels": {"a": "mine"}}, headers={"If-Match": seen})
    assert refused.status_code == 412
    assert refused.json()["current"] == http.get(path).json()
    assert http.get(path).json()["labels"]["a"] == "theirs"


@pytest.mark.parametrize("path", [RUN, STEP])
def test_of_changes_that_are_based_on_the_same_one_is_made(http, run, path):
    seen = {"If-Match": f'"of,another" , {http.get(path).headers["etag"]}'}

    def change(number):
        return http.patch(path, json={"labels": {"by": str(number)}}, headers=seen)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(change, range(6)))
    made = [answer for answer in answers if answer.status_code == 200]
    assert len(made) == 1
    assert {answer.status_code for answer in answers} == {200, 412}
    assert http.get(path).json()["labels"]["by"] == made[0].json()["labels"]["by"]


@pytest.mark.parametrize("path", [RUN, STEP])
def test_what_was_seen_is_sent_once(http, run, path):
    seen = http.get(path)
    again = http.get(path, headers={"If-None-Match": seen.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == seen.headers["etag"]
    http.patch(path, json={"labels": {"a": "b"}}, headers=ANY)
    assert http.get(path, headers={"If-None-Match": seen.headers["etag"]}).status_code == 200


@pytest.mark.parametrize("path", [RUN, STEP])
def test_a_change_says_what_it_is_based_on(http, run, path):
    assert http.patch(path, json={"labels": {"a": "b"}}).status_code == 428
    for odd in ("6", '"a", b', "W/"):
        refused = http.patch(path, json={"labels": {"a": "b"}}, headers={"If-Match": odd})
        assert refused.status_code == 422, odd


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": {"": "x"}}, "body.labels"),
        ({"labels": {"a": 1}}, "body.labels.a"),
        ({"labels": {"a": "x" * 2001}}, "body.labels.a"),
        ({"labels": {"a" * 257: "x"}}, "body.labels"),
        ({"labels": {f"l{n}": "x" for n in range(101)}}, "body.labels"),
        ({"metrics": {"m": "0.5"}}, "body.metrics.m"),
        ({"metrics": {"m": True}}, "body.metrics.m"),
        ({"metrics": {"m": 1.0}, "better": {"m": "low"}}, "body.better.m"),
        ({"label": {"a": "b"}}, "body.label"),
        ({"better": {"none": "min"}}, "better['none']"),
    ],
)
def test_entries_that_cannot_be_kept_are_refused(http, run, change, named):
    refused = http.patch(STEP, content=json.dumps(change), headers={**ANY, **JSON})
    assert refused.status_code == 422
    assert named in refused.text
    assert http.get(STEP).json()["labels"] == {}


JSON = {"Content-Type": "application/json"}


def test_notes_do_not_grow_without_end(http, run):
    for part in range(10):
        labels = {f"l{part}-{n}": "x" for n in range(100)}
        assert http.patch(STEP, json={"labels": labels}, headers=ANY).status_code == 200
    refused = http.patch(STEP, json={"labels": {"one more": "x"}}, headers=ANY)
    assert refused.status_code == 422
    assert "1000" in refused.json()["detail"]
    assert http.patch(STEP, json={"labels": {"l0-0": None}}, headers=ANY).status_code == 200


def test_what_is_not_listed_takes_no_notes(http, run):
    trash(run, 3)
    for step in (3, 7):
        path = f"{RUN}/checkpoints/{step}"
        assert http.patch(path, json={"labels": {"a": "b"}}, headers=ANY).status_code == 404
    begin_saving(run, 9)
    path = f"{RUN}/checkpoints/9"
    assert http.patch(path, json={"labels": {"a": "b"}}, headers=ANY).status_code == 409
    nobody = "/v1/roots/default/runs/nobody"
    assert http.patch(nobody, json={"labels": {}}, headers=ANY).status_code == 404


def test_notes_are_in_the_audit_trail(http, run):
    http.patch(STEP, json={"metrics": {"loss": "inf"}, "better": {"loss": "min"}}, headers=ANY)
    http.patch(RUN, json={"labels": {"owner": "ann"}}, headers=ANY)
    step, of_run = audit_trail(http)
    assert (step.action, step.outcome, step.run) == ("checkpoint.annotate", "done", "run")
    assert step.detail["metrics"] == {"loss": "inf"}
    assert step.detail["after"]["better"] == {"loss": "min"}
    assert (of_run.action, of_run.outcome) == ("run.annotate", "done")
    assert of_run.detail["after"] == {"team": "nlp", "owner": "ann"}


def test_a_later_attempt_at_a_step_has_its_own_notes(http, run):
    http.patch(STEP, json={"labels": {"a": "first"}}, headers=ANY)
    add_steps(run, [6], base_step=3)
    assert http.get(STEP, params={"refresh": True}).json()["labels"] == {}


def test_the_store_holds_the_longest_entries_that_the_api_takes(http, run):
    longest = {"n" * 256: "t" * 2000}  # with one more of either it is refused, above
    answer = http.patch(STEP, json={"labels": longest}, headers=ANY)
    assert (answer.status_code, answer.json()["labels"]) == (200, longest)
