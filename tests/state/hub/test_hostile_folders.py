"""Folders of weights that contradict themselves are refused, and nothing is taken for a weight."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn import (
    ArgumentError,
    ConfigError,
    ConversionError,
    CorruptionError,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    StorageError,
    UnsupportedFormatError,
)
from cairn.interop.weights.files import open_pretrained
from tests.contract.subjects import make_decoder
from tests.hostile.safetensors_files import hostile_files, packed, tensor, tensors
from tests.state.hf_models import save, tiny_llama
from tests.state.hub.test_easydel_folder import save_as_easydel

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


OUTSIDE = ["../a", "/a", "a/../../b", "a//b", "./a", "a\\b", "a\nb"]


@pytest.mark.parametrize(
    "name",
    [["x"], 1, None, {"a": 1}, True, "", ".", "a/b", *(f"{name}.safetensors" for name in OUTSIDE)],
)
def test_an_index_with_what_is_no_file_name_is_refused(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    with pytest.raises(ConversionError, match='expected a "weight_map"'):
        open_pretrained(folder)


@pytest.mark.parametrize("shard", ["shards/a.safetensors", "my shards/part 1 of 1.safetensors"])
def test_shards_are_where_the_index_says_below_the_folder_and_with_any_name(folder, shard):
    tensors = load_file(folder / "model.safetensors")
    (folder / shard).parent.mkdir()
    (folder / "model.safetensors").rename(folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    weights = open_pretrained(folder).weights
    np.testing.assert_array_equal(weights.read("model.norm.weight"), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", INDEX, "model.safetensors", "pytorch_model.bin", "a.gguf"],
)
def test_a_pointer_of_git_lfs_is_told_as_what_it_is(folder, name):
    if name in (INDEX, "pytorch_model.bin"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    )
    with pytest.raises((ConversionError, CorruptionError), match=r"Git LFS.* git lfs pull") as told:
        open_pretrained(folder / name if name == "a.gguf" else folder)
    assert name in str(told.value)


@pytest.mark.parametrize("levels", [150, 900, 2000])
@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_json_of_many_levels_is_refused_by_its_name(folder, name, levels):
    nested = "[" * levels + "]" * levels
    config = (folder / "config.json").read_text().strip().removesuffix("}")
    header = f'{{"a": {{"dtype": "F32", "shape": {nested}, "data_offsets": [0, 4]}}}}'.encode()
    content = {
        "config.json": f'{config}, "_deep": {nested}}}'.encode(),
        INDEX: f'{{"weight_map": {nested}}}'.encode(),
        "model.safetensors": len(header).to_bytes(8, "little") + header,
    }
    (folder / name).write_bytes(content[name])
    with pytest.raises((ConversionError, CorruptionError), match=name):
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
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' (true or false"),
        ({"attention_bias": 0}, "attention_bias=0 (true or false belongs there)"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' (a number belongs there)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan (a number belongs there)"),
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


@pytest.mark.parametrize("name", sorted(hostile_files()))
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_file_that_lies_is_refused_by_its_name(name, sharded, folder):
    (folder / "model.safetensors").unlink()
    file = folder / (SHARD if sharded else "model.safetensors")
    file.write_bytes(hostile_files()[name])
    if sharded:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SHARD}}))
    kind = UnsupportedFormatError if name.startswith("unknown") else CorruptionError
    with pytest.raises(kind) as caught:
        EasyDeLBaseModule.from_pretrained(folder)
    error: StorageError = caught.value
    assert file.name in error.path
    assert error.expected
    assert error.found


@pytest.mark.parametrize("left", [0, 7, 8, 100, 4000, -4, -1])
def test_a_file_that_is_cut_short_is_refused_by_its_name(left, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CorruptionError, match=r"model\.safetensors"):
        EasyDeLBaseModule.from_pretrained(folder)


def test_tensors_of_shared_bytes_are_refused_by_name_and_file(folder):
    file = folder / "model.safetensors"
    four, six = tensor("F4", [4], [0, 2]), tensor("F6_E2M3", [4], [2, 5])
    file.write_bytes(tensors(bytes(13), a=four, b=six, c=tensor(offsets=[5, 13])))
    with pytest.raises(ConversionError, match=r"model\.safetensors: .*2 of others") as caught:
        EasyDeLBaseModule.from_pretrained(folder)
    assert caught.value.problems == ("a: F4", "b: F6_E2M3")


def test_a_shard_that_lacks_what_the_index_promises_is_refused_by_its_name(folder):
    (folder / "model.safetensors").rename(folder / SHARD)
    names = load_file(folder / SHARD)
    promised = dict.fromkeys([*names, "model.one", "model.two"], SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": promised}))
    with pytest.raises(ConversionError, match="in the file that the index names") as caught:
        EasyDeLBaseModule.from_pretrained(folder)
    assert caught.value.problems == (
        f"{SHARD}: lacks model.one, which is nowhere",
        f"{SHARD}: lacks model.two, which is nowhere",
    )


def test_an_index_may_promise_copies_that_a_conversion_has_dropped(tmp_path):
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path)
    (folder / "model.safetensors").rename(folder / SHARD)
    spare = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    promised = dict.fromkeys([*load_file(folder / SHARD), *spare], SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": promised}))
    DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    with pytest.raises(ConversionError, match="in the file that the index names") as caught:
        open_pretrained(folder, config_kwargs={"tie_word_embeddings": False})
    assert caught.value.problems == (f"{SHARD}: lacks lm_head.weight, which is nowhere",)


def test_a_shard_that_holds_more_than_the_index_says_is_as_transformers_takes_it(folder):
    (folder / "model.safetensors").rename(folder / SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": SHARD}}))
    assert len(open_pretrained(folder).weights.shapes) == len(load_file(folder / SHARD))


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_says_two_things_at_once_is_refused_by_its_name(name, folder):
    (folder / "model.safetensors").rename(folder / SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": SHARD}}))
    file = folder / name
    text = file.read_text().strip()
    key, value = next(iter(json.loads(text).items()))
    file.write_text(f"{text[:-1]}, {json.dumps(key)}: {json.dumps(value)}}}")
    open_pretrained(folder)
    file.write_text(f"{text[:-1]}, {json.dumps(key)}: 3}}")
    with pytest.raises(ConversionError, match=f"{name}: .*two values of the key '{key}'"):
        open_pretrained(folder)


def test_a_header_of_another_files_data_is_refused(folder):
    """As a download leaves it that went on with another version of the file."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [64]
    file.write_bytes(packed(json.dumps(header).encode(), data[8 + length :]))
    with pytest.raises(CorruptionError, match=r"'model\.norm\.weight' to be 256 bytes"):
        EasyDeLBaseModule.from_pretrained(folder)
