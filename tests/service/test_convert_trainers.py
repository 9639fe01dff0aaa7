"""Steps that other trainers stored, exported over HTTP and held against their trainer's logits.

The tree is one that MaxText's own code stored; see `tests/trainers`.
"""

import json
import os

import numpy as np
import pytest

from tests.service.jobs import artifact_of, done, serving, watch
from tests.service.test_convert_checked import forked, report_of
from tests.trainers.kept import kept, reference, store

__all__ = ["forked"]

NAME = "maxtext-llama3.1-scanned"
TREE = "/v1/roots/default/runs/tiny/checkpoints/1:convert"
OTHER = "/v1/roots/default/runs/other/checkpoints/1:convert"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    store(NAME, root / "theirs/checkpoints")
    store(NAME, root / "beside/checkpoints")
    tokens, logits = reference(NAME)
    np.savez(root / "theirs/reference.npz", tokens=tokens, logits=logits)
    np.savez(root / "theirs/wrong.npz", tokens=tokens, logits=logits[..., ::-1])
    _, told = kept(NAME)
    lines = (f"{key}: {json.dumps(value)}" for key, value in told.items())
    (root / "beside/config.yml").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def http(root, tmp_path_factory):
    with serving(root, tmp_path_factory.mktemp("data")) as client:
        for folder, run in (("theirs/checkpoints", "tiny"), ("beside/checkpoints", "other")):
            done(client, "/v1/roots/default/runs:adopt", {"folder": folder, "run": run})
        yield client


def refused(http, body):
    answer = http.post(TREE, json=body)
    assert answer.status_code == 422, answer.text
    return answer.json()["detail"]


def test_what_a_tree_does_not_tell_is_asked_for_by_name(http):
    detail = refused(http, {})
    for key in ("model_type", "max_position_embeddings", "rms_norm_eps", "rope_theta"):
        assert key in detail
    assert "llama or mistral" in detail
    assert "num_hidden_layers 3" in detail
    assert "config.yml" in detail
    _, told = kept(NAME)
    assert "rms_norm_eps" in refused(http, {"config": {"model_type": "llama", "rope_theta": 1.0}})
    another = refused(http, {"config": {**told, "decoder_block": "qwen3"}})
    assert "missing tensor: decoder/layers/self_attention/query_norm/scale" in another
    assert "look like those of llama or mistral" in another
    larger = refused(http, {"config": {**told, "base_emb_dim": 4096}})
    assert "hidden_size: stored 32, in the settings 4096" in larger


@pytest.mark.usefixtures("forked")
def test_an_export_is_held_against_the_logits_of_the_trainers_own_model(http, root):
    _, told = kept(NAME)
    body = {"config": told, "reference_logits": str(root / "theirs/reference.npz")}
    operation = done(http, TREE, body)
    assert operation["result"]["map"] == "maxtext, scanned along axis 1, llama"
    assert "unproved" not in operation["result"]
    report = report_of(http, operation)
    assert report["reference"]["file"].endswith("reference.npz")
    assert report["relative_difference"] <= report["tolerance"] == 1e-4
    started = http.post(TREE, json={**body, "reference_logits": str(root / "theirs/wrong.npz")})
    ended = watch(http, started.json()["id"])
    assert "does not compute what the trainer's model does" in ended["error"]["detail"]
    assert "that the config is the one that the trainer had" in ended["error"]["detail"]


@pytest.mark.usefixtures("forked")
def test_without_reference_logits_the_report_says_what_it_cannot_see(http):
    operation = done(http, OTHER, {"check_logits": True})  # the trainer's own file lies beside
    assert "cannot be seen" in operation["result"]["unproved"]
    assert "factor" in operation["result"]["assumed"]
    report = report_of(http, operation)
    assert report["compared"] is False
    assert "cannot be seen" in report["note"]
    assert {file["name"] for file in artifact_of(http, operation)["files"]} >= {"config.json"}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("theirs/none.npz", "found none"),
        ("beside/config.yml", "ends in .npz"),
        ("../outside.npz", "source-refused"),
    ],
)
def test_a_file_of_logits_that_cannot_be_used_is_named(http, root, file, told):
    _, settings = kept(NAME)
    body = {"config": settings, "reference_logits": os.path.abspath(root / file)}
    answer = http.post(TREE, json=body)
    if answer.status_code == 202:
        assert told in watch(http, answer.json()["id"])["error"]["detail"]
    else:
        assert told in answer.text
