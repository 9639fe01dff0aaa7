"""A GGUF file of a checkpoint, over HTTP."""

import gguf
import numpy as np
import pytest

from cairn import parse_uri
from tests.service.jobs import CONFIG, artifact_of, done, save_llama, serving, watch

CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"
DOWN = ("blk.1.ffn_down.weight", "model/layers/1/mlp/down_proj/kernel")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    return root, save_llama(root / "llama")[1]


@pytest.fixture(scope="module")
def http(saved, tmp_path_factory):
    with serving(saved[0], tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.mark.parametrize(
    ("dtype", "kind"), [(None, "F16"), ("float32", "F32"), ("q8_0", "Q8_0"), ("bfloat16", "BF16")]
)
def test_a_file_of_the_dtype_that_is_asked_for_holds_the_weights(http, saved, dtype, kind):
    made = done(http, CONVERT, {"format": "gguf", "dtype": dtype})
    artifact = artifact_of(http, made)
    assert [file["name"] for file in artifact["files"]] == ["model.gguf"]
    reader = gguf.GGUFReader(f"{parse_uri(artifact['uri']).local_path}/model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors[DOWN[0]].tensor_type.name == kind
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    found = gguf.quants.dequantize(tensors[DOWN[0]].data, tensors[DOWN[0]].tensor_type)
    np.testing.assert_allclose(found, saved[1][DOWN[1]].T, atol=0.03)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == CONFIG.num_hidden_layers
    assert "left out" in made["result"]["tokenizer"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"format": "gguf", "dtype": "float64"}, "for GGUF one of"),
        ({"format": "huggingface", "dtype": "q8_0"}, "a floating dtype"),
        ({"format": "gguf", "lora": "keep"}, "lora: expected for GGUF 'merge'"),
    ],
)
def test_an_option_of_another_format_is_refused_at_once(http, body, told):
    answer = http.post(CONVERT, json=body)
    assert answer.status_code == 422
    assert told in answer.json()["detail"]


def test_a_file_that_does_not_fit_the_memory_is_refused(http):
    body = {"format": "gguf", "memory": "1MB", "allow_nonfinite": True}  # asked for only here
    operation = http.post(CONVERT, json=body).json()
    assert "memory: expected at least" in watch(http, operation["id"])["error"]["detail"]
