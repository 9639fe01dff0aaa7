"""Folders of weights that contradict themselves are refused, and nothing is taken for a weight."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.state.decoder.decoder import DecoderForCausalLM
from cairn.state.errors import ArgumentError, ConfigError, ConversionError
from cairn.state.weights import open_pretrained
from tests.contract.subjects import make_decoder
from tests.state.hf_models import save, tiny_llama
from tests.state.hub.test_easydel_folder import save_as_easydel

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", [["x"], 1, None, {"a": 1}, True, "", ".", "a/b"])
def test_an_index_with_what_is_no_file_name_is_refused(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    with pytest.raises(ConversionError, match='expected a "weight_map"'):
        open_pretrained(folder)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "bool", "complex64"])
def test_numbers_that_are_not_floating_are_no_weights(folder, dtype):
    tensors = load_file(folder / "model.safetensors")
    names = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    tensors |= {name: tensors[name].astype(dtype) for name in names}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConversionError, match="floating tensors for floating weights") as caught:
        DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        f"dtype of {name}" for name in reversed(names)
    ]
    assert dtype in caught.value.problems[0]


def test_weights_of_any_floating_dtype_are_cast_to_the_one_asked_for(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    assert model.model.norm.scale[...].dtype == np.float32


@pytest.mark.parametrize("argument", ["dtype", "param_dtype"])
def test_weights_are_never_made_complex(folder, argument):
    for dtype in ("complex64", np.complex128):
        with pytest.raises(ArgumentError, match=f"{argument}: expected a floating dtype"):
            DecoderForCausalLM.from_pretrained(folder, **{argument: dtype})


def test_weights_of_easydel_beside_others_are_refused_by_name(folder, tmp_path):
    save_as_easydel(tmp_path / "old", make_decoder())
    shutil.copy(folder / "model.safetensors", tmp_path / "old")
    with pytest.raises(ConversionError, match=r"both: easydel-model\.parameters and model\.safe"):
        open_pretrained(tmp_path / "old")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tie_word_embeddings": "false"}, "these must be True or False"),
        ({"attention_bias": 0}, "these must be True or False"),
        ({"rms_norm_eps": "1e-5"}, "these must be numbers"),
        ({"rms_norm_eps": float("nan")}, "these must be numbers"),
        ({"rms_norm_eps": -1e-5}, "these must be numbers"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"rope_parameters": "default"}, "no object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "no number"),
        ({"rope_theta": 123.0}, "rope_theta=123.0 in rope_theta, and 10000.0 in rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' in rope_scaling"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default"}},
            "type='linear' and rope_type='default'",
        ),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_or_has_text_for_numbers_is_refused(folder, changes, said):
    change(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    open_pretrained(folder)
    change(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match="config") as caught:
        open_pretrained(folder)
    assert said in str(caught.value)


def test_a_rope_that_is_asked_for_is_never_ignored(folder):
    change(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(ConfigError, match="rope_parameters that agree"):
        open_pretrained(folder, config_kwargs={"rope_theta": 5e5})
    asked = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    rope = open_pretrained(folder, config_kwargs=asked).config.rope
    assert (rope.theta, rope.scaling, rope.factor) == (5e5, "linear", 2.0)
