"""Adoption over HTTP with a model: a config, and a caller's expressions that say where it lies."""

import json
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load

from cairn import Client
from cairn.service.errors import ProblemResponseError
from cairn.state.checkpointing.trees import nest
from tests.plain_orbax import manager
from tests.service.jobs import CONFIG, artifact_of, done, leaves_of, serving, watch
from tests.service.planes import running_plane
from tests.service.seams import schemas

ADOPT = "/v1/roots/default/runs:adopt"
MODEL = {"config": CONFIG.to_hf(), "map": {"state/params/(.*)": r"\1"}}
BODY = {"folder": "old", "run": "adopted", "model": MODEL}
SLOW = r"^(([a-z_/0-9]+)+)!$"


@pytest.fixture(scope="module")
def leaves():
    return leaves_of(seed=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, leaves):
    """What plain Orbax has saved, which nobody changes."""
    folder = tmp_path_factory.mktemp("saved") / "store"
    manager(folder / "old", {"params": nest(leaves), "count": np.zeros((), np.int32)}, steps=(5,))
    return folder


@pytest.fixture
def store(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "store")


@pytest.fixture
def http(store, tmp_path):
    with serving(store, tmp_path / "data") as client:
        yield client


def refused(http, model, told):
    content = json.dumps({**BODY, "model": model})  # what is no text is escaped
    answer = http.post(ADOPT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert told in answer.text
    return answer.json()


def test_adopted_model_is_exported_as_it_was_saved(http, leaves):
    operation = done(http, ADOPT, BODY)
    assert operation["result"]["adopted"] == [5]
    assert operation["request"]["model"]["map"] == [["state/params/(.*)", r"\1"]]
    step = "/v1/roots/default/runs/adopted/checkpoints/5"
    named = http.get(f"{step}/tensors", params={"item": "model", "page_size": 1000}).json()
    assert {one["path"] for one in named["tensors"]} == leaves.keys()
    artifact = artifact_of(http, done(http, f"{step}:convert", {}))
    found = load(http.get(f"/v1/artifacts/{artifact['id']}/files/model.safetensors").content)
    embedding = leaves["model/embed_tokens/embedding"]
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding)


def ended_of(http, body):
    answer = http.post(ADOPT, json=body)
    assert answer.status_code == 202, answer.text
    return watch(http, answer.json()["id"])


def test_the_first_rule_that_matches_counts(http, store):
    first = "model/norm/scale"
    model = {**MODEL, "map": {rf"state/params/{first}": first, "state/params/(.*)": r"\1"}}
    assert done(http, ADOPT, {**BODY, "model": model})["result"]["adopted"] == [5]
    swapped = {**MODEL, "map": {"state/params/(.*)": r"\1/x", f"state/params/{first}": first}}
    shutil.copytree(store / "old", store / "copy")
    ended = ended_of(http, {"folder": "copy", "run": "swapped", "model": swapped})
    assert ended["error"]["type"] == "urn:cairn:problem:not-all-adopted"
    assert f"state/params/{first}: mapped to {first}/x" in ended["error"]["problems"][0]


def test_the_same_again_is_as_it_was_and_another_map_is_refused(http):
    done(http, ADOPT, BODY)
    again = done(http, ADOPT, {**BODY, "model": {**MODEL, "map": {"state/params/(.+)": r"\1"}}})
    assert (again["result"]["adopted"], again["result"]["kept"]) == ([], [5])
    for model in (None, {**MODEL, "config": {**MODEL["config"], "rms_norm_eps": 0.5}}):
        ended = ended_of(http, {**BODY, "model": model})
        assert ended["error"]["type"] == "urn:cairn:problem:precondition-failed"
        assert "adopted with another model" in ended["error"]["detail"]


def test_the_same_key_with_another_map_is_refused(http):
    key = {"Idempotency-Key": "one"}
    first = http.post(ADOPT, json=BODY, headers=key)
    assert http.post(ADOPT, json=BODY, headers=key).json()["id"] == first.json()["id"]
    other = {**BODY, "model": {**MODEL, "map": {"state/(.*)": r"\1"}}}
    answer = http.post(ADOPT, json=other, headers=key)
    assert (answer.status_code, "model.map" in answer.json()["detail"]) == (422, True)


def test_trail_names_the_model_and_not_all_of_it(http):
    done(http, ADOPT, BODY)
    (event,) = http.get("/v1/audit-events").json()["audit_events"]
    assert (event["action"], event["detail"]["model"]) == ("run.adopt", "llama")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"config": MODEL["config"]}, "body.model.map"),
        ({"map": MODEL["map"]}, "body.model.config"),
        ({**MODEL, "map": {}}, "body.model.map"),
        ({**MODEL, "map": {"state/x": 1}}, "body.model.map"),
        ({**MODEL, "config": {"model_type": "none"}}, "expected model_type to be one of"),
        ({**MODEL, "config": {"model_type": "llama"}}, "found no"),
        (
            {**MODEL, "config": {**MODEL["config"], "num_hidden_layers": 10**9}},
            f"{schemas.MAX_LAYERS}",
        ),
        (
            {**MODEL, "config": {"a": "x" * schemas.MAX_MODEL_BYTES}},
            f"at most {schemas.MAX_MODEL_BYTES}",
        ),
        ({**MODEL, "config": {"a": "\ud800"}}, "surrogate"),
    ],
)
def test_model_that_can_not_be_is_refused_before_anything_is_made(http, store, model, told):
    refused(http, model, told)
    assert not (store / "adopted").exists()
    assert http.get("/v1/operations").json()["operations"] == []


def test_config_with_what_json_does_not_have_is_refused(http):
    text = '{"folder": "old", "run": "a", "model": {"config": {"a": NaN}, "map": {"a": "b"}}}'
    headers = {"Content-Type": "application/json"}
    answer = http.post(ADOPT, content=text, headers=headers)
    assert answer.status_code == 422, answer.text


def test_every_rule_that_is_none_is_named(http, store):
    rules = {"(": "x", "state/x": "x", "state/(.)": r"\2", "a**": "x", "b(?P<n>.)": r"\g<m>"}
    told = refused(http, {**MODEL, "map": rules}, "missing ), unterminated subpattern")
    assert [one["field"] for one in told["errors"]] == [
        "body.model.map.(",
        "body.model.map.state/(.)",
        "body.model.map.a**",
        "body.model.map.b(?P<n>.)",
    ]
    assert not (store / "adopted").exists()


def test_rules_that_take_for_ever_fail_the_job_and_stop_nobody(http, monkeypatch):
    monkeypatch.setattr("cairn.service.jobs.rule_matches.MATCH_SECONDS", 0.5)
    started = http.post(ADOPT, json={**BODY, "model": {**MODEL, "map": {SLOW: "x"}}})
    assert started.status_code == 202, started.text
    answered = threading.Event()

    def ask():
        http.get("/v1/runs")
        answered.set()

    threading.Thread(target=ask).start()
    ended = watch(http, started.json()["id"])
    assert answered.wait(10)
    assert (ended["state"], ended["error"]["status"]) == ("failed", 422)
    assert (
        "model.map: expected regular expressions that are matched within 0.5"
        in (ended["error"]["detail"])
    )


def test_client_sends_the_config_and_the_map(store, tmp_path):
    (tmp_path / "data").mkdir()
    with running_plane(store, tmp_path / "data") as (url, _), Client(url) as cairn:
        started = cairn.adopt("old", "adopted", **MODEL)
        assert cairn.wait(started.id).result["adopted"] == [5]
        named = {one.path for one in cairn.tensors("adopted", 5, item="model")}
        assert named == leaves_of().keys()
        with pytest.raises(ProblemResponseError, match=r"body\.model\.map"):
            cairn.adopt("old", "adopted", config=MODEL["config"])
