import math

import pytest

from cairn import StepState
from cairn.service.schemas import Checkpoint, CheckpointState
from cairn.storage.runs.records.layout import manifest_file
from tests.service.stores import (
    BYTES_PER_STEP,
    add_steps,
    annotate,
    begin_saving,
    end_saving,
    make_run,
    publish,
    trash,
)

CHECKPOINTS = "/v1/roots/default/runs/run/checkpoints"


def steps(http, **parameters):
    answer = http.get(CHECKPOINTS, params=parameters)
    assert answer.status_code == 200, answer.text
    return [checkpoint["step"] for checkpoint in answer.json()["checkpoints"]]


def test_states_of_the_api_are_those_of_the_store():
    """But for `damaged`, which the protocol of saves does not know: such a step is listed."""
    states = {state.value for state in CheckpointState} - {"damaged"}
    assert states == {state.value for state in StepState}


def test_checkpoint_tells_what_its_manifest_says(http, root):
    run = make_run(root / "run", [3])
    annotate(run, 3, labels={"eval": "passed"}, metrics={"loss": 1.5})
    body = http.get(f"{CHECKPOINTS}/3").json()
    assert body.pop("created").endswith("Z")
    assert body == {
        "root": "default",
        "run": "run",
        "step": 3,
        "attempt": 1,
        "state": "listed",
        "uri": f"file://{root}/run/attempts/1/3",
        "bytes": BYTES_PER_STEP,
        "leaves": 2,
        "items": ["model", "optimizer"],
        "iterators": {},
        "manifest_digest": run.step(3).manifest_digest,
        "model_type": "llama",
        "aliases": [],
        "labels": {"eval": "passed"},
        "metrics": {"loss": 1.5},
        "better": {},
        "verified": None,
        "damaged": None,
        "deletion": None,
    }
    assert http.get(CHECKPOINTS).json()["checkpoints"][0]["labels"] == {"eval": "passed"}


def test_checkpoint_tells_of_which_iterators_it_has_the_position(http, root):
    run = make_run(root / "run", [3])
    publish(run, 1, 4, iterators={"train": 4, "test": 4})
    assert http.get(f"{CHECKPOINTS}/4").json()["iterators"] == {"train": 4, "test": 4}
    assert [one["iterators"] for one in http.get(CHECKPOINTS).json()["checkpoints"]][1] == {}


def test_highest_step_comes_first_by_number(http, root):
    make_run(root / "run", [9, 10, 100])
    assert steps(http) == [100, 10, 9]


def test_pages_hold_every_step_once_while_new_ones_arrive(http, root):
    run = make_run(root / "run", range(10))
    first = http.get(CHECKPOINTS, params={"page_size": 4}).json()
    add_steps(run, [10], base_step=9)
    second = http.get(
        CHECKPOINTS, params={"page_size": 4, "page_token": first["next_page_token"]}
    ).json()
    third = http.get(
        CHECKPOINTS, params={"page_size": 4, "page_token": second["next_page_token"]}
    ).json()
    seen = [entry["step"] for page in (first, second, third) for entry in page["checkpoints"]]
    assert seen == list(range(9, -1, -1))
    assert third["next_page_token"] is None


def test_step_saved_a_moment_ago_is_in_the_next_list_that_looks(http, root):
    run = make_run(root / "run", [1])
    for step in range(2, 6):  # faster than the clock of any file system
        publish(run, 1, step)
        assert steps(http, refresh=True)[0] == step


def test_step_that_was_announced_is_in_the_next_list(http, root):
    run = make_run(root / "run", [1])
    assert steps(http) == [1]
    publish(run, 1, 2)
    assert steps(http) == [1]
    answer = http.post(CHECKPOINTS, json={"step": 2})
    assert (answer.status_code, answer.json()["state"]) == (200, "listed")
    assert steps(http) == [2, 1]


def test_announcement_of_what_is_not_in_the_store_changes_nothing(http, root):
    make_run(root / "run", [1])
    answer = http.post(CHECKPOINTS, json={"step": 7})
    assert (answer.status_code, answer.json()["type"]) == (
        404,
        "urn:cairn:problem:step-not-found",
    )
    assert steps(http) == [1]
    nowhere = "/v1/roots/default/runs/none/checkpoints"
    assert http.post(nowhere, json={"step": 7}).status_code == 404


def test_manifests_are_opened_once(http, root, monkeypatch):
    run = make_run(root / "run", range(5))
    assert len(steps(http)) == 5
    opened = []
    read_each = type(run.objects).read_each
    monkeypatch.setattr(
        type(run.objects),
        "read_each",
        lambda self, keys: read_each(self, [opened.append(key) or key for key in keys]),
    )
    publish(run, 1, 7)
    assert steps(http, refresh=True)[0] == 7
    assert opened.count(manifest_file(7, 1)) == 1


def test_half_written_step_is_never_listed(http, root):
    run = make_run(root / "run", [3])
    begin_saving(run, 6)
    assert steps(http) == [3]
    assert steps(http, state="in_flight") == [6]
    assert steps(http, state="all", page_size=1) == [6]
    body = http.get(f"{CHECKPOINTS}/6").json()
    assert (body["state"], body["attempt"], body["bytes"]) == ("in_flight", 2, None)


def test_step_superseded_by_a_rollback_can_be_asked_for(http, root):
    run = make_run(root / "run", [1, 2, 3])
    assert steps(http) == [3, 2, 1]
    add_steps(run, [2], base_step=1)
    assert steps(http, refresh=True) == [2, 1]
    answer = http.get(CHECKPOINTS, params={"state": "all"}).json()["checkpoints"]
    assert [(entry["step"], entry["attempt"], entry["state"]) for entry in answer] == [
        (3, 1, "superseded"),
        (2, 2, "listed"),
        (2, 1, "superseded"),
        (1, 1, "listed"),
    ]
    assert http.get(f"{CHECKPOINTS}/2").json()["attempt"] == 2
    assert http.get(f"{CHECKPOINTS}/3").json()["state"] == "superseded"
    assert http.get("/v1/roots/default/runs/run").json()["checkpoint_count"] == 2


def test_trashed_step_can_be_asked_for(http, root):
    run = make_run(root / "run", [1, 2])
    assert steps(http) == [2, 1]
    trash(run, 2)
    assert steps(http, refresh=True) == [1]
    assert steps(http, state="trashed") == [2]
    assert http.get(f"{CHECKPOINTS}/2").json()["state"] == "trashed"


def test_step_whose_manifest_is_gone_is_not_listed(http, root):
    run = make_run(root / "run", [1, 2])
    assert steps(http) == [2, 1]
    run.objects.delete(manifest_file(1, 1))
    assert steps(http, refresh=True) == [2]
    assert steps(http, state="unverified") == [1]
    assert http.get(f"{CHECKPOINTS}/1").json()["state"] == "unverified"


def test_pages_of_all_states_hold_every_step_once(http, root):
    run = make_run(root / "run", [1, 2, 3])
    run.objects.delete(manifest_file(2, 1))
    trash(run, 1)
    begin_saving(run, 4)
    seen, token = [], None
    while token is not None or not seen:
        parameters = {"state": "all", "page_size": 1} | ({"page_token": token} if token else {})
        answer = http.get(CHECKPOINTS, params=parameters).json()
        seen += [(entry["step"], entry["state"]) for entry in answer["checkpoints"]]
        token = answer["next_page_token"]
    assert seen == [(4, "in_flight"), (3, "listed"), (2, "unverified"), (1, "trashed")]


def test_step_that_its_writer_left_is_abandoned(http, root):
    run = make_run(root / "run", [3])
    end_saving(run, begin_saving(run, 6))
    assert steps(http) == [3]
    assert http.get(f"{CHECKPOINTS}/6").json()["state"] == "abandoned"


def test_changed_labels_are_in_the_next_list(http, root):
    run = make_run(root / "run", [1])
    annotate(run, 1, labels={"eval": "running"})
    assert http.get(CHECKPOINTS).json()["checkpoints"][0]["labels"] == {"eval": "running"}
    annotate(run, 1, labels={"eval": "passed"}, metrics={"loss": 2})
    entry = http.get(CHECKPOINTS, params={"refresh": True}).json()["checkpoints"][0]
    assert (entry["labels"], entry["metrics"]) == ({"eval": "passed"}, {"loss": 2.0})


def test_metric_that_is_no_finite_number_is_told(http, root):
    run = make_run(root / "run", [1])
    annotate(run, 1, metrics={"loss": math.nan, "scale": math.inf, "accuracy": 0.5})
    for _ in range(2):
        body = http.get(CHECKPOINTS).json()["checkpoints"][0]
        assert body["metrics"] == {"loss": "nan", "scale": "inf", "accuracy": 0.5}
    read = Checkpoint.model_validate(body).metrics
    assert math.isnan(read["loss"])
    assert read["scale"] == math.inf


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"format": "cairn.manifest", "version": 2}'])
def test_manifest_that_cannot_be_read_does_not_hide_the_others(http, root, text):
    run = make_run(root / "run", [1, 2])
    run.objects.write(manifest_file(3, 1), text)
    assert steps(http) == [2, 1]


def test_annotation_that_cannot_be_read_is_left_out(http, root):
    run = make_run(root / "run", [1])
    run.objects.write(
        "annotations/1.1.json",
        b'{"format": "cairn.annotation", "version": 1, "metrics": {"loss": "low"}}',
    )
    assert http.get(f"{CHECKPOINTS}/1").json()["metrics"] == {}


@pytest.mark.parametrize("step", ["4", "9007199254740991"])
def test_unknown_step_is_not_found(http, root, step):
    make_run(root / "run", [1, 2])
    answer = http.get(f"{CHECKPOINTS}/{step}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:cairn:problem:step-not-found"
    assert "steps 1, 2" in answer.json()["detail"]


@pytest.mark.parametrize(
    "step", ["-1", "+1", "01", "1.0", "1_0", "latest", "9007199254740992", "%EF%BC%91"]
)
def test_step_that_is_no_plain_number_is_invalid(http, root, step):
    make_run(root / "run", [1, 10])
    answer = http.get(f"{CHECKPOINTS}/{step}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "path.step"
