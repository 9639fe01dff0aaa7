"""What the list of runs says of each: what is failing, and what retention would free."""

from datetime import UTC, datetime, timedelta

import pytest

from cairn import Damage, StepFacts, annotate_step, promote_step
from cairn.service.actions import clean_up, failures, reclaimable
from cairn.service.actions import runs as runs_actions
from cairn.service.catalog.run_health import SizedStep
from cairn.service.schemas import RetentionPolicy
from cairn.storage.runs.annotate import note_verified
from tests.service.jobs import done, save_llama, serving, until, watch
from tests.service.stores import make_run

HTML = {"Accept": "text/html"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEEP_ONE = RetentionPolicy(keep_last=1)


def end(kind, state, number, step=None):
    return {"kind": kind, "state": state, "operation": f"op-{number}", "step": step}


def told(*ends):
    """Failures among ends, given oldest first."""
    return [(one.kind, one.operation, one.step) for one in failures.failures_of(reversed(ends))]


def test_the_last_end_of_each_kind_of_job_counts():
    assert told(end("convert", "failed", 1, 7)) == [("convert", "op-1", None)]
    assert told(end("convert", "failed", 1, 7), end("convert", "succeeded", 2, 8)) == []
    assert told(
        end("convert", "succeeded", 1), end("gc", "failed", 2), end("convert", "failed", 3)
    ) == [
        ("convert", "op-3", None),
        ("gc", "op-2", None),
    ]
    assert told() == []


def test_what_was_cancelled_is_no_end():
    assert told(end("gc", "failed", 1), end("gc", "cancelled", 2)) == [("gc", "op-1", None)]
    assert told(end("gc", "succeeded", 1), end("gc", "cancelled", 2)) == []


def test_damage_of_a_step_is_made_good_by_that_step_or_the_run_alone():
    damaged = end("verify", "failed", 1, 7)
    assert told(damaged, end("verify", "succeeded", 2, 8)) == [("verify", "op-1", 7)]
    assert told(damaged, end("verify", "succeeded", 2, 7)) == []
    assert told(damaged, end("verify", "succeeded", 2)) == []
    assert told(damaged, end("verify", "failed", 2)) == [("verify", "op-2", None)]


def test_kind_of_a_later_version_is_told_as_it_is():
    assert told(end("polish", "failed", 1)) == [("polish", "op-1", None)]


def test_a_step_goes_that_any_of_the_policies_does_not_keep():
    steps = [SizedStep(StepFacts(at, 1, NOW - timedelta(days=10 - at)), 2**at) for at in range(5)]
    every_two = RetentionPolicy(keep_every=2)
    assert reclaimable.reclaimable_bytes(steps, [KEEP_ONE], {}, now=NOW) == 1 + 2 + 4 + 8
    assert reclaimable.reclaimable_bytes(steps, [KEEP_ONE], {"best": (1, 1)}, now=NOW) == 1 + 4 + 8
    assert reclaimable.reclaimable_bytes(steps, [every_two], {}, now=NOW) == 2 + 8
    assert (
        reclaimable.reclaimable_bytes(steps, [every_two, RetentionPolicy(keep_last=2)], {}, now=NOW)
        == 1 + 2 + 4 + 8
    )
    assert reclaimable.reclaimable_bytes([], [KEEP_ONE], {}, now=NOW) == 0


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def listed(http):
    """The runs of the catalog, and what is said of them."""
    plane = http.app.state.plane
    runs = runs_actions.list_runs(plane, plane.roots, after=(), limit=100, refresh=True)[0]
    return plane, runs


@pytest.mark.parametrize(
    "policy",
    [
        KEEP_ONE,
        RetentionPolicy(keep_last=2),
        RetentionPolicy(keep_every=2),
        RetentionPolicy(keep_within_seconds=3600),
        RetentionPolicy(keep_best=[{"metric": "loss", "mode": "min", "count": 1}]),
        RetentionPolicy(keep_labelled=["data=v1"]),
    ],
    ids=str,
)
def test_list_says_of_a_run_what_its_preview_says(store, tmp_path, policy):
    run = make_run(store / "run", range(6))
    make_run(store / "other", [1, 2])
    make_run(store / "empty")
    for step in range(6):
        annotate_step(
            run, step, labels={"data": f"v{step % 3}"}, metrics={"loss": abs(step - 2)}, by="a"
        )
    promote_step(run, 3, "best", by="a", reason="", expect=None)
    note_verified(run, run.step(1), damage=Damage(at="2026-01-02T03:04:05Z"))
    with serving(store, tmp_path / "data", worker=False) as http:
        assert http.delete("/v1/roots/default/runs/run/checkpoints/4").is_success
        plane, runs = listed(http)
        found = reclaimable.reclaimable(plane, runs, policy)
        names = {}
        for one, other in zip(runs, found, strict=True):
            names[one.name] = other.nbytes
            assert other.policies == ()
        preview = clean_up.plan_retention(plane, "default", "run", policy)
        assert names["run"] == preview.delete_bytes
        assert names["empty"] == 0
        assert reclaimable.reclaimable(plane, runs, policy) == found  # as it is kept


def test_what_is_kept_goes_with_the_next_change_of_the_run(store, tmp_path):
    save_llama(store / "llama", (1, 2))
    with serving(store, tmp_path / "data", worker=False) as http:
        plane, runs = listed(http)
        (before,) = reclaimable.reclaimable(plane, runs, KEEP_ONE)
        assert before.nbytes > 1000
        path = "/v1/roots/default/runs/llama/checkpoints/1:promote"
        body, new = {"alias": "best"}, {"If-None-Match": "*"}
        assert http.post(path, json=body, headers=new).is_success
        plane, runs = listed(http)
        (after,) = reclaimable.reclaimable(plane, runs, KEEP_ONE)
        assert after.nbytes == 0


def test_policies_of_schedules_come_before_the_one_that_is_asked_about(store, tmp_path):
    make_run(store / "run", range(4))
    make_run(store / "scratch", range(4))
    nightly = {
        "kind": "retention",
        "name": "nightly",
        "cron": "0 3 * * *",
        "run": "scratch*",
        "keep_last": 4,
    }
    with serving(store, tmp_path / "data", worker=False, policies=[nightly]) as http:
        plane, runs = listed(http)
        run, scratch = reclaimable.reclaimable(plane, runs, KEEP_ONE)
        assert run.nbytes == 3 * runs[0].bytes // 4
        assert (scratch.nbytes, scratch.policies) == (0, ("nightly",))
        page = http.get("/?keep_last=1", headers=HTML)
        assert "policy: nightly" in page.text
        assert http.get("/?keep_last=0", headers=HTML).status_code == 422


def test_run_with_damaged_records_has_nothing_that_retention_frees(store, tmp_path):
    make_run(store / "run", range(3))
    (store / "run/manifests/1.1.json").write_text("{")
    with serving(store, tmp_path / "data", worker=False) as http:
        plane, runs = listed(http)
        assert runs[0].problems
        (found,) = reclaimable.reclaimable(plane, runs, KEEP_ONE)
        assert found.nbytes is None


def test_run_is_failing_from_a_verification_that_finds_damage_until_one_that_does_not(
    store, tmp_path
):
    save_llama(store / "llama")
    verify = "/v1/roots/default/runs/llama/checkpoints/1:verify"
    (values,) = sorted(
        (store / "llama/attempts/1/1/model").glob("**/d/*"), key=lambda one: -one.stat().st_size
    )[:1]
    whole = values.read_bytes()
    with serving(store, tmp_path / "data") as http:

        def failing(path="/"):
            page = http.get(path, headers=HTML)
            assert page.status_code == 200
            return "verify failed: step 1" in page.text

        assert not failing()
        values.write_bytes(bytes(len(whole)))
        started = http.post(verify).json()
        assert watch(http, started["id"])["state"] == "failed"
        until(failing)
        assert failing("/ui/default/llama")
        assert f"/operations/{started['id']}" in http.get("/", headers=HTML).text
        values.write_bytes(whole)
        done(http, verify, {})
        until(lambda: not failing())
        assert not failing("/ui/default/llama")
