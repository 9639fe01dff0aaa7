import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load

from cairn import Checkpointer
from tests.service.jobs import done, save_llama, serving

GATHER = "/v1/roots/default/runs/llama/checkpoints/1:gather"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    leaves = save_llama(root / "llama")[1]
    with Checkpointer(root / "plain") as checkpointer:
        tree = {
            "w": np.arange(6, dtype=np.int32).reshape(2, 3),
            "half": np.arange(4).astype(ml_dtypes.bfloat16),
            "scale": np.float32(2.5),
            "tiny": np.ones((4,), ml_dtypes.int4),
        }
        checkpointer.save(1, {"params": tree}, meta={}).wait()
    return root, leaves


@pytest.fixture(scope="module")
def http(store, tmp_path_factory):
    with serving(store[0], tmp_path_factory.mktemp("data")) as client:
        yield client


def gathered(http, body, path=GATHER):
    operation = done(http, path, body)
    artifact = http.get(f"/v1/artifacts/{operation['result']['artifact_id']}").json()
    assert [file["name"] for file in artifact["files"]] == ["gathered.safetensors"]
    return http.get(f"/v1/artifacts/{artifact['id']}/files/gathered.safetensors").content


def test_one_file_holds_the_model_by_path(http, store):
    found = load(gathered(http, {}))
    assert {*found} == {f"model/{path}" for path in store[1]}
    for path, leaf in store[1].items():
        np.testing.assert_array_equal(found[f"model/{path}"], leaf)


def test_items_are_chosen(http):
    found = load(gathered(http, {"items": ["optimizer", "model", "optimizer"]}))
    assert found["optimizer/count"] == 1
    np.testing.assert_array_equal(found["optimizer/mu/embedding"], np.ones((4, 4), np.float32))
    assert "model/model/norm/scale" in found


def test_dtype_changes_floating_leaves_only(http, store):
    found = load(gathered(http, {"items": ["model", "optimizer"], "dtype": "float16"}))
    assert found["optimizer/count"].dtype == np.int32
    name = "model/embed_tokens/embedding"
    np.testing.assert_array_equal(found[f"model/{name}"], store[1][name].astype(np.float16))


def test_order_of_items_does_not_make_another_artifact(http):
    one = done(http, GATHER, {"items": ["model", "optimizer"], "dtype": "float64"})
    two = done(http, GATHER, {"items": ["optimizer", "model"], "dtype": "float64"})
    assert one["result"]["artifact_id"] == two["result"]["artifact_id"]


def test_checkpoint_of_no_model_is_gathered_too(http):
    path = GATHER.replace("llama", "plain")
    named = http.post(path, json={"items": ["params"]})
    assert named.status_code == 202
    by_default = http.post(path, json={})
    assert by_default.json()["request"] == named.json()["request"]


def test_unknown_items_are_named(http):
    answer = http.post(GATHER, json={"items": ["model", "adapters", "ema"]})
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert "'adapters', 'ema'" in detail
    assert "model, optimizer" in detail


def test_unknown_dtype_is_refused(http):
    answer = http.post(GATHER, json={"dtype": "int8"})
    assert answer.status_code == 422
    assert "bfloat16" in answer.json()["detail"]
