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
TIED = "maxtext-gemma2-scanned"
TREE = "/v1/roots/default/runs/tiny/checkpoints/1:convert"
OTHER = "/v1/roots/default/runs/other/checkpoints/1:convert"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    store(NAME, root / "theirs/checkpoints")
    store(TIED, root / "beside/checkpoints")
    tokens, logits = reference(NAME)
    np.savez(root / "theirs/wrong.npz", tokens=tokens, logits=logits[..., ::-1])
    tokens, logits = reference(TIED)
    np.savez(root / "beside/reference.npz", tokens=tokens, logits=logits)
    _, told = kept(TIED)
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
    others = {"base_emb_dim": 4096, "base_mlp_dim": 96, "vocab_size": 200}
    larger = refused(http, {"config": {**told, **others}})
    assert "hidden_size: stored 32, in the settings 4096" in larger
    assert "intermediate_size: stored 24, in the settings 96" in larger
    assert "vocab_size: stored 40, in the settings 200" in larger


@pytest.mark.usefixtures("forked")
def test_an_export_is_held_against_the_logits_of_the_trainers_own_model(http, root):
    # The trainer's own file lies beside. It reads a tied head in bfloat16, even in float32.
    operation = done(http, OTHER, {"reference_logits": str(root / "beside/reference.npz")})
    assert operation["result"]["map"] == "maxtext, scanned along axis 1, gemma2"
    assert "unproved" not in operation["result"]
    assert "agree with the trainer's: " in operation["result"]["logits"]
    assert "rounds the tied head to bfloat16" in operation["result"]["logits"]
    assert http.get(f"/artifacts/{operation['result']['artifact_id']}").status_code == 200
    report = report_of(http, operation)
    assert report["reference"]["file"].endswith("reference.npz")
    assert report["reference"]["head_dtype"] == "bfloat16"
    assert report["relative_difference"] <= report["tolerance"] == 1e-4
    _, told = kept(NAME)
    body = {"config": told, "reference_logits": str(root / "theirs/wrong.npz")}
    started = http.post(TREE, json=body)
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
        ("../outside.npz", "reference logits lies where this server may not read"),
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
