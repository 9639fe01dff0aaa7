import threading

import pytest

from cairn import Client, Decision, Run, StoreUnavailableError, promote_step
from cairn.service.errors import ProblemResponseError
from cairn.storage.runs import retention
from cairn.storage.runs.records.layout import annotation_file, trash_file
from cairn.storage.runs.trash import read_tombstones
from tests.service.jobs import serving, watch
from tests.service.servers import serve
from tests.service.stores import BYTES_PER_STEP, annotate, begin_saving, end_saving, make_run
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
APPLY = f"{RUN}:applyRetention"
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def run(root):
    return make_run(root / "run", range(1, 11))


@pytest.fixture
def jobs(root, tmp_path):
    with serving(root, tmp_path / "data", scan_seconds=0) as client:
        yield client


def plan(http, **policy):
    answer = http.post(APPLY, json={"policy": policy})
    assert answer.status_code == 200, answer.text
    return answer.json()


def kept(http, **policy):
    return {one["step"]: one["reasons"] for one in plan(http, **policy)["decisions"] if one["keep"]}


def applied(http, *, grace_seconds=3600, **policy):
    body = {"policy": policy, "dry_run": False, "grace_seconds": grace_seconds}
    answer = http.post(APPLY, json=body)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/operations/{answer.json()['id']}"
    return watch(http, answer.json()["id"])


def listed(run):
    return [info.step for info in run.steps()]


def test_plan_says_what_stays_and_why_and_changes_nothing(http, run):
    http.post(f"{RUN}/checkpoints/3:promote", json={"alias": "best"}, headers=CREATE)
    body = plan(http, keep_last=2, keep_every=5)
    assert (body["root"], body["run"]) == ("default", "run")
    assert (body["delete_count"], body["delete_bytes"]) == (6, 6 * BYTES_PER_STEP)
    assert [(one["step"], one["keep"]) for one in body["decisions"][:3]] == [
        (10, True),
        (9, True),
        (8, False),
    ]
    assert {one["step"]: one["reasons"] for one in body["decisions"] if one["keep"]} == {
        10: ["latest", "last 2", "every 5"],
        9: ["last 2"],
        5: ["every 5"],
        3: ["alias best"],
    }
    assert body["decisions"][2]["bytes"] == BYTES_PER_STEP
    assert body["decisions"][2]["created"].endswith("Z")
    assert listed(run) == list(range(1, 11))
    assert read_tombstones(run.objects) == {}


def test_plan_knows_labels_metrics_and_times(http, run):
    annotate(run, 2, metrics={"loss": 0.1})
    annotate(run, 4, metrics={"loss": 0.3, "accuracy": 0.9})
    annotate(run, 6, labels={"eval": "passed"}, metrics={"loss": float("nan")})
    best = [{"metric": "loss", "count": 2}, {"metric": "accuracy", "mode": "max"}]
    assert kept(http, keep_best=best, keep_labelled=["eval=passed"]) == {
        10: ["latest"],
        6: ["label eval=passed"],
        4: ["best 2 by loss (min)", "best 1 by accuracy (max)"],
        2: ["best 2 by loss (min)"],
    }
    assert len(kept(http, keep_within_seconds=3600)) == 10
    assert list(kept(http, keep_within_seconds=1e-9)) == [10]


def test_policy_without_rules_keeps_everything(http, run):
    assert plan(http)["delete_count"] == 0
    assert kept(http)[1] == ["no rule deletes"]


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"keep_last": 0}, "body.policy.keep_last"),
        ({"keep_last": True}, "body.policy.keep_last"),
        ({"keep_last": "3"}, "body.policy.keep_last"),
        ({"keep_last": 2**53}, "body.policy.keep_last"),
        ({"keep_every": -5}, "body.policy.keep_every"),
        ({"keep_within_seconds": 0}, "body.policy.keep_within_seconds"),
        ({"keep_within_seconds": "nan"}, "body.policy.keep_within_seconds"),
        ({"keep_within_seconds": 1e300}, "body.policy.keep_within_seconds"),
        ({"keep_best": [{"metric": ""}]}, "body.policy.keep_best.0.metric"),
        ({"keep_best": [{"metric": "loss", "mode": "low"}]}, "body.policy.keep_best.0.mode"),
        ({"keep": 3}, "body.policy.keep"),
    ],
)
def test_policy_that_cannot_act_is_refused_by_field(http, run, policy, field):
    for dry_run in (True, False):
        answer = http.post(APPLY, json={"policy": policy, "dry_run": dry_run})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert listed(run) == list(range(1, 11))


def test_label_without_a_name_is_refused_at_once(jobs, run):
    for dry_run in (True, False):
        body = {"policy": {"keep_labelled": ["=passed"]}, "dry_run": dry_run}
        answer = jobs.post(APPLY, json=body)
        assert (answer.status_code, answer.json()["type"]) == (
            422,
            "urn:cairn:problem:invalid-policy",
        )
        assert "label without a name" in answer.json()["detail"]
    assert jobs.get("/v1/operations").json()["operations"] == []


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"keep_best": [{"metric": "los"}]}, "the metric 'los': the nearest known is 'loss'"),
        ({"keep_labelled": ["finl"]}, "the label 'finl': the nearest known is 'final'"),
    ],
)
def test_policy_that_names_what_no_step_carries_is_refused_at_once(jobs, run, policy, said):
    annotate(run, 1, metrics={"loss": 0.1}, labels={"final": "yes"})
    for dry_run in (True, False):
        body = {"policy": {"keep_last": 1, **policy}, "dry_run": dry_run}
        answer = jobs.post(APPLY, json=body)
        assert (answer.status_code, answer.json()["type"]) == (
            422,
            "urn:cairn:problem:invalid-policy",
        )
        assert said in answer.text
    assert jobs.get("/v1/operations").json()["operations"] == []
    assert listed(run) == list(range(1, 11))


def test_request_without_a_policy_is_refused(http, run):
    answer = http.post(APPLY, json={"dry_run": False})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "body.policy")


def test_labels_that_cannot_be_read_stop_it(http, run):
    """What they would have kept must not go."""
    run.objects.write(annotation_file(4, 1), b'{"format": "cairn.annotation", "labels": []}')
    answer = http.post(APPLY, json={"policy": {"keep_last": 1}})
    assert (answer.status_code, answer.json()["type"]) == (
        422,
        "urn:cairn:problem:unsupported-format",
    )
    assert "annotations/4.1.json" in answer.json()["detail"]


def test_applied_policy_deletes_what_the_plan_said(jobs, run):
    jobs.post(f"{RUN}/checkpoints/3:promote", json={"alias": "best"}, headers=CREATE)
    said = [one["step"] for one in plan(jobs, keep_last=2)["decisions"] if not one["keep"]]
    operation = applied(jobs, keep_last=2)
    assert operation["state"] == "succeeded", operation
    result = operation["result"]
    assert [one["step"] for one in result["deleted"]] == sorted(said) == [1, 2, 4, 5, 6, 7, 8]
    assert (result["run"], result["kept"], result["refused"]) == ("run", 3, [])
    progress = operation["progress"]
    assert progress["done_bytes"] == progress["total_bytes"] == 7 * BYTES_PER_STEP
    assert listed(run) == [3, 9, 10]
    trashed = jobs.get(f"{RUN}/checkpoints", params={"state": "trashed"}).json()["checkpoints"]
    assert [one["step"] for one in trashed] == [8, 7, 6, 5, 4, 2, 1]
    deletion = trashed[0]["deletion"]
    assert (deletion["by"], deletion["reason"]) == (
        "loopback",
        f"retention {operation['id']}: keep_last=2",
    )
    assert jobs.post(f"{RUN}/checkpoints/7:undelete", json={}).status_code == 200
    assert listed(run) == [3, 7, 9, 10]
    again = applied(jobs, keep_last=3, keep_every=7)
    assert (again["result"]["deleted"], again["result"]["kept"]) == ([], 4)


def test_run_that_is_being_written_keeps_its_latest_step(jobs, run):
    end_saving(run, begin_saving(run, 11))
    begin_saving(run, 12)
    assert [one["step"] for one in applied(jobs, keep_every=4)["result"]["deleted"]] == [
        1, 2, 3, 5, 6, 7, 9,
    ]  # fmt: skip
    assert listed(run) == [4, 8, 10]


def test_step_that_is_promoted_meanwhile_stays_and_is_named(jobs, run, monkeypatch):
    def promoted_after(decisions):
        promote_step(run, 4, "production", expect=None)
        return [Decision(one.step, one.attempt, one.reasons) for one in decisions]

    decide = retention.evaluate_retention
    monkeypatch.setattr(
        retention,
        "evaluate_retention",
        lambda *args, **more: promoted_after(decide(*args, **more)),
    )
    result = applied(jobs, keep_last=5)["result"]
    assert [one["step"] for one in result["deleted"]] == [1, 2, 3, 5]
    assert [one["step"] for one in result["refused"]] == [4]
    assert "alias production" in result["refused"][0]["detail"]
    assert listed(run) == [4, 6, 7, 8, 9, 10]


def test_operation_that_is_taken_up_again_names_all_that_it_deleted(jobs, run, monkeypatch):
    """The store went away in the middle, or the process did."""
    monkeypatch.setattr("cairn.service.jobs.execution.STEP_RETRY_SECONDS", (0.0,))
    lost = threading.Event()

    lay_tombstone = retention.lay_tombstone

    def lose_once(found, key, tombstone):
        if key == (4, 1) and not lost.is_set():
            lost.set()
            raise StoreUnavailableError("no answer", path="trash/4.1.json")
        return lay_tombstone(found, key, tombstone)

    monkeypatch.setattr(retention, "lay_tombstone", lose_once)
    operation = applied(jobs, keep_last=2)
    assert lost.is_set()
    assert [one["step"] for one in operation["result"]["deleted"]] == list(range(1, 9))


def test_cancelled_operation_deletes_no_more_and_keeps_what_it_did(jobs, root, monkeypatch):
    run = make_run(root / "run", range(1, 31))
    reached = threading.Event()

    lay_tombstone = retention.lay_tombstone

    def pause_in_the_second_batch(found, key, tombstone):
        if key == (9, 1) and not reached.is_set():
            (execution,) = jobs.app.state.plane.jobs.worker._running()
            reached.set()
            assert execution.interrupted.wait(60)
        return lay_tombstone(found, key, tombstone)

    monkeypatch.setattr(retention, "lay_tombstone", pause_in_the_second_batch)
    assert jobs.get(RUN).json()["checkpoint_count"] == 30
    started = jobs.post(APPLY, json={"policy": {"keep_last": 1}, "dry_run": False}).json()
    assert reached.wait(60)
    assert jobs.post(f"/v1/operations/{started['id']}:cancel").json()["state"] == "cancelled"
    assert listed(run) == list(range(17, 31))
    assert jobs.get(RUN).json()["checkpoint_count"] == 14
    assert "deleted steps stay in the trash" in jobs.get(f"/operations/{started['id']}/card").text
    jobs.post(f"/v1/operations/{started['id']}:resume")
    result = watch(jobs, started["id"])["result"]
    assert [one["step"] for one in result["deleted"]] == list(range(1, 30))
    assert listed(run) == [30]


def test_request_is_the_same_operation_under_the_same_key(jobs, run):
    body = {"policy": {"keep_last": 8}, "dry_run": False}
    ids = {
        jobs.post(APPLY, json=body, headers={"Idempotency-Key": "nightly"}).json()["id"]
        for _ in range(2)
    }
    assert len(ids) == 1
    body["policy"]["keep_last"] = 1
    answer = jobs.post(APPLY, json=body, headers={"Idempotency-Key": "nightly"})
    assert answer.json()["type"] == "urn:cairn:problem:idempotency-key-reused"
    watch(jobs, ids.pop())
    assert listed(run) == list(range(3, 11))
    entries = audit_trail(jobs)  # each request has one of its own
    assert [entry.outcome for entry in entries] == ["done", "done", "refused"]
    assert entries[0].detail["operation"] == entries[1].detail["operation"]


def test_application_is_in_the_audit_trail_and_a_plan_is_not(jobs, run):
    plan(jobs, keep_last=2)
    operation = applied(jobs, keep_last=2)
    (entry,) = audit_trail(jobs)
    assert (entry.action, entry.caller, entry.run) == ("run.retention", "loopback", "run")
    assert entry.detail["operation"] == operation["id"]
    assert entry.detail["policy"]["keep_last"] == 2


def test_plan_needs_no_job_engine_and_deletion_does(http, run):
    assert plan(http, keep_last=2)["delete_count"] == 8
    answer = http.post(APPLY, json={"policy": {"keep_last": 2}, "dry_run": False})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cairn:problem:not-ready")


def test_client_plans_and_applies(root, tmp_path):
    from cairn.service.app import create_app
    from cairn.service.settings import Settings

    make_run(root / "run", range(5))
    app = create_app(Settings(root=str(root), data_dir=tmp_path / "data"))
    with serve(app) as url, Client(url) as cairn:
        for ask in (cairn.plan_retention, cairn.apply_retention):
            with pytest.raises(ProblemResponseError, match="no step carries the label 'final'"):
                ask("run", {"keep_labelled": ["final"]})
        said = cairn.plan_retention("run", {"keep_last": 2})
        assert [(one.step, one.keep) for one in said.decisions if not one.keep] == [
            (2, False),
            (1, False),
            (0, False),
        ]
        ended = cairn.wait(cairn.apply_retention("run", {"keep_last": 2}, grace_seconds=0).id)
        assert [one["step"] for one in ended.result["deleted"]] == [0, 1, 2]
        found = cairn.wait(cairn.collect_garbage("run").id)
        assert (found.result["dry_run"], found.result["count"]) == (True, 3)
        cairn.wait(cairn.collect_garbage("run", dry_run=False).id)
        assert list(cairn.checkpoints("run", state="trashed")) == []
    run = Run.open(root / "run")
    assert listed(run) == [3, 4]
    assert run.objects.read(trash_file(0, 1)) is None
