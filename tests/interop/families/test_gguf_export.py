"""GGUF files that we write: every family's is read again, by us and by others."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn import (
    ArgumentError,
    ConfigError,
    ConversionError,
    DecoderForCausalLM,
    open_files,
    parse_uri,
    write_shard,
)
from cairn.interop import registry
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.conversion.tensor_streams import MemoryLeaf
from cairn.interop.families.family import get_family
from cairn.state.paths import named_leaves
from examples.demo.weights import carried_tokenizer, smollm2_gguf
from tests.examples.layers import first_layers
from tests.interop.families.matrix import WHOLE, assert_close, padded
from tests.interop.families.test_gguf import GGUF_CONFIGS, ONE_GROUP, V3_YARN, converted, saved
from tests.interop.seams import GGUF_FILE, gguf_shard
from tests.state.forward import logits_of
from tests.state.gguf_files import opened
from tests.state.hf_models import LLAMA3_ROPE, torch_logits

LOADABLE = {
    "deepseek_v2": ONE_GROUP,
    "falcon": {"bias": False},
    "mistral": {"sliding_window": 64},
    "mixtral": {"sliding_window": None},
    "olmo2": {"head_dim": 8},
    "olmo3": {"attention_bias": False, "head_dim": 8},
    "phi3": {"sliding_window": None},
    "qwen2": {"head_dim": 8},
    "qwen2_moe": {"head_dim": 8},
    "qwen3": {"attention_bias": False},
    "starcoder2": {"sliding_window": None},
}
"""What llama.cpp has no code or no tensors for is left out of a family's first config."""
SAID = {
    "falcon": {"falcon.tensor_data_layout": "jploski"},
    "gpt_oss": {"gpt-oss.feed_forward_length": 52},
    "phi3": {"phi3.attention.sliding_window": 0},
    "stablelm": {"stablelm.use_parallel_residual": False},
}
"""What llama.cpp's converter says too, though nothing has to."""
OTHERWISE = ("falcon", "gpt_oss", "mistral")
"""What their files say differs from the converter's: logits are compared, and not configs.

What the converter's files are read as is compared in `test_gguf.py`, in `make families` logits too.
"""


def loadable(model_type):
    """A family's first config, without what llama.cpp has nothing for."""
    return {**next(iter(GGUF_CONFIGS[model_type].values())), **LOADABLE.get(model_type, {})}


def read(path):
    """Ours of a folder or a file, on one device: for eight a program takes longer to compile."""
    return DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)


def leaves_of(model):
    return {
        named.path: MemoryLeaf(
            named.leaf.shape,
            np.dtype(named.leaf.dtype),
            lambda at, leaf=named.leaf: np.asarray(leaf if at is None else leaf[at]),
        )
        for named in named_leaves(nnx.state(model))
        if named.path in leaf_shapes(model.config)
    }


def write(folder, model, assets=None, dtype="float32"):
    """The file, and why it has no tokenizer."""
    made, problem = gguf_shard(
        model.config, leaves_of(model), assets or {}, dtype=dtype, path="the model"
    )
    files = open_files(parse_uri(folder))
    size = write_shard(files, made.file_name, made).size
    assert size == (folder / GGUF_FILE).stat().st_size
    return folder / GGUF_FILE, problem


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    theirs, folder = saved(
        tmp_path_factory.mktemp("llama"), "llama", **GGUF_CONFIGS["llama"]["plain"]
    )
    return theirs, read(folder)


@pytest.mark.parametrize("model_type", GGUF_CONFIGS)
def test_what_is_written_is_read_again_as_the_same_model(model_type, tmp_path):
    theirs, folder = saved(tmp_path / "theirs", model_type, **loadable(model_type))
    model = read(folder)
    path, _ = write(tmp_path, model)
    assert SAID.get(model_type, {}).items() <= opened(path).metadata.items()
    again = read(path)
    assert again.config.model_type == ("llama" if model_type == "mistral" else model_type)
    ours = {named.path: named.leaf for named in named_leaves(nnx.state(model, nnx.Param))}
    ours.setdefault("lm_head/kernel", np.transpose(model.model.embed_tokens.embedding[...]))
    if again.config.tie_word_embeddings:
        del ours["lm_head/kernel"]
    for named in named_leaves(nnx.state(again, nnx.Param)):
        # Norms that hold 1 + scale round it once.
        np.testing.assert_allclose(named.leaf, ours.pop(named.path), atol=1e-6, rtol=0)
    assert ours == {}
    if model_type not in OTHERWISE:
        reference = converted(tmp_path / "reference.gguf", folder, theirs)
        assert opened(path).config() == opened(reference).config()
    if model_type in OTHERWISE or WHOLE:
        ids, mask = padded()
        found = logits_of(again, ids, attention_mask=mask)
        assert_close(found, torch_logits(theirs, ids, mask), mask)


def test_a_family_without_such_files_is_refused(llama, tmp_path, monkeypatch):
    without = dataclasses.replace(get_family("llama"), gguf=None)
    monkeypatch.setattr(registry, "family", lambda model_type: without)
    with pytest.raises(ConfigError, match="a family that has GGUF files; found llama"):
        write(tmp_path, llama[1])


LLAMA3 = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
UNCUT = {"head_dim": 64, "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False}}
"""Of the published models."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
BOUNDS = {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5}}

OWN_BASES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


@pytest.mark.parametrize(
    ("model_type", "options", "why"),
    [
        ("mistral", {"sliding_window": 63}, r"sliding_window=63 below max_position_embeddings=64"),
        ("phi3", {"sliding_window": 9}, r"'phi3' has; found sliding_window=9"),
        ("olmo2", {"attention_bias": True}, r"attention_bias=True \(only False\)"),
        ("qwen3", {"attention_bias": True}, r"attention_bias=True \(only False\)"),
        ("gpt_neox", {"attention_bias": False}, r"attention_bias=False \(only True\)"),
        ("gemma", {"tie_word_embeddings": False}, r"tie_word_embeddings=False \(only True\)"),
        ("qwen2", {"head_dim": 12}, r"head_dim=12 \(only heads"),
        (
            "cohere2",
            {"num_attention_heads": 12},
            r"num_attention_heads=12, .*only heads",
        ),
        ("olmo3", OWN_BASES, r"rope_theta=10000 of layers with a window \(only .*: 500000\)"),
        ("gpt2", {"n_embd": 4, "n_head": 4}, r"head_dim=1 \(heads of one number end"),
        ("gemma", {"rope_scaling": LLAMA3}, r"of the kind 'llama3' \(there is no tensor"),
        ("gpt_oss", UNCUT, r"YaRN with .*, truncate=False \(32, 1 and True are taken always"),
        ("llama", BOUNDS, r"YaRN with beta_fast=4\.0, beta_slow=0\.5, truncate=True \(32, 1"),
        ("deepseek_v2", GGUF_CONFIGS["deepseek_v2"]["groups"], r"4 groups of experts, chosen by"),
        ("deepseek_v2", {"q_lora_rank": None}, r"q_lora_rank=None of 1 layers \(None only"),
        ("deepseek_v3", {"rms_norm_eps": 0.1}, r"rms_norm_eps=0\.1 \(only 1e-06"),
        ("deepseek_v3", {"attention_bias": True}, r"attention_bias=True \(only False\)"),
        ("deepseek_v3", {"rope_parameters": V3_YARN}, r"mscale=1\.0, mscale_all_dim=0\.7 \(one"),
        ("deepseek_v3", {"rope_parameters": LINEAR}, r"linear scaling by 4 \(attention"),
        ("glm4_moe", {"topk_group": 4}, r"4 of 4 groups of 8 experts \(as many groups"),
        ("smollm3", {"no_rope_layers": [0]}, r"a GGUF file can say; found layers_without_rope"),
    ],
)
def test_what_llama_cpp_has_nothing_for_is_named(model_type, options, why, tmp_path):
    options = {**loadable(model_type), **options, "num_hidden_layers": 1}
    _, folder = saved(tmp_path, model_type, **options)
    with pytest.raises(ConfigError, match=why):
        write(tmp_path, read(folder))


def test_experts_without_a_shared_one_are_not_written_for_llama_cpp(tmp_path):
    _, folder = saved(tmp_path, "glm4_moe", **loadable("glm4_moe"))
    model = read(folder)
    experts = dataclasses.replace(model.config.experts, shared_size=None)
    alone = DecoderForCausalLM(model.config.replace(experts=experts), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"no shared expert \(it is computed always"):
        write(tmp_path, alone)


def test_yarn_that_cuts_its_bounds_is_read_again_as_such(tmp_path):
    ropes = {"head_dim": 64, "rope_parameters": {**UNCUT["rope_parameters"], "truncate": True}}
    options = {**loadable("gpt_oss"), **ropes, "num_hidden_layers": 1}
    _, folder = saved(tmp_path, "gpt_oss", **options)
    model = read(folder)
    assert opened(write(tmp_path, model)[0]).config().rope == model.config.rope


def test_a_window_that_no_text_exceeds_is_left_out(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
    _, folder = saved(tmp_path, "smollm3", **{**loadable("smollm3"), **window})
    model = read(folder)
    assert model.config.sliding_window == 64
    assert opened(write(tmp_path, model)[0]).config().sliding_window is None


def test_a_tied_head_is_written_too_where_llama_cpp_asks_for_one(tmp_path):
    _, folder = saved(tmp_path, "olmo2", **{**loadable("olmo2"), "tie_word_embeddings": True})
    file = opened(write(tmp_path, read(folder))[0])
    np.testing.assert_array_equal(file.read("output.weight"), file.read("token_embd.weight"))


def test_a_scaling_for_long_texts_is_said_with_its_factor(tmp_path):
    """Public report: ggml-org/llama.cpp, files of Phi-3.5 that say none."""
    scaling = {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.5] * 4}
    options = {**loadable("phi3"), "rope_scaling": scaling}
    options |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 1.0}
    _, folder = saved(tmp_path, "phi3", **options)
    said = opened(write(tmp_path, read(folder))[0]).metadata
    assert said["phi3.rope.scaling.type"] == "longrope"
    expected = np.sqrt(1 + np.log(64 / 16) / np.log(16))
    assert said["phi3.rope.scaling.attn_factor"] == pytest.approx(expected, rel=1e-6)


def test_windows_by_layer_and_their_base_are_said(tmp_path):
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    options = {**loadable("gemma3_text"), "num_hidden_layers": 3}
    options |= {"layer_types": types, "rope_parameters": ropes}
    _, folder = saved(tmp_path, "gemma3_text", **options)
    file = opened(write(tmp_path, read(folder))[0])
    assert file.metadata["gemma3.rope.freq_base_swa"] == 2e4
    assert file.config().layer_types == tuple(types)
    assert file.config().window_rope.theta == 2e4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_smaller_weights_are_as_near_as_their_format_allows(llama, tmp_path, dtype):
    _, model = llama
    whole, small = tmp_path / "whole", tmp_path / "small"
    before = opened(write(whole, model)[0])
    path, _ = write(small, model, dtype=dtype)
    after = opened(path)
    assert after.shapes == before.shapes
    assert path.stat().st_size < 0.7 * (whole / GGUF_FILE).stat().st_size
    for name, shape in before.shapes.items():
        ours, found = before.read(name), after.read(name)
        if len(shape) == 1:
            np.testing.assert_array_equal(found, ours)
        elif dtype == "q8_0" and shape[-1] % 32 == 0:
            largest = np.abs(ours).reshape(-1, 32).max(axis=1, keepdims=True)
            error = np.abs(found - ours).reshape(-1, 32)
            assert (error <= 0.57 * largest / 127).all()
            assert error.any()
        else:
            digits = {"float16": 11, "bfloat16": 8, "q8_0": 11}[dtype]
            np.testing.assert_allclose(found, ours, rtol=2.0**-digits, atol=1e-7)
    read(path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize(
    ("model_type", "name", "whole"),
    [
        ("gpt2", "inner", "position_embd.weight"),
        ("gpt_oss", "windows", "blk.0.ffn_gate_exps.bias"),
        ("mixtral", "plain", "blk.0.ffn_gate_inp.weight"),
        ("stablelm", "normalised_heads", "blk.0.attn_q_norm.weight"),
    ],
)
def test_what_llama_cpp_has_in_float32_stays_so(model_type, name, whole, dtype, tmp_path):
    configs = GGUF_CONFIGS[model_type]
    options = configs.get(name, next(iter(configs.values())))
    _, folder = saved(tmp_path / "theirs", model_type, **options)
    path, _ = write(tmp_path, read(folder), dtype=dtype)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types[whole] == "F32"
    assert {"F16", "BF16", "Q8_0"} & {*types.values()}


@pytest.mark.parametrize("ends", [2, [2], [2, 5], [5, 2, 7]])
def test_every_token_that_ends_a_text_is_in_the_file(llama, tmp_path, ends):
    model = llama[1]
    extra = {**model.config.hf_extra, "eos_token_id": ends}
    ending = DecoderForCausalLM(model.config.replace(hf_extra=extra), rngs=nnx.Rngs(0))
    path, _ = write(tmp_path, ending)
    again = opened(path).config().to_hf()["eos_token_id"]
    assert again == (2 if ends == [2] else ends)


def test_more_ends_than_a_file_can_name_are_refused(llama, tmp_path):
    model = llama[1]
    extra = {**model.config.hf_extra, "eos_token_id": [2, 5, 7, 9]}
    ending = DecoderForCausalLM(model.config.replace(hf_extra=extra), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"at most 3 tokens .* found eos_token_id=\[2, 5, 7, 9\]"):
        write(tmp_path, ending)


def test_transformers_reads_the_same_model_and_tokenizer(tmp_path):
    file = opened(first_layers(smollm2_gguf(), tmp_path / "first.gguf", 1))
    small = file.config().replace(hidden_size=72, intermediate_size=64)
    one = DecoderForCausalLM(small.replace(head_dim=8), rngs=nnx.Rngs(0))
    assets = dict(file.tokenizer_files())
    path, problem = write(tmp_path, one, assets)
    assert problem is None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    ids, mask = padded()
    assert_close(logits_of(one, ids, attention_mask=mask), torch_logits(theirs, ids, mask), mask)
    original, read = (
        carried_tokenizer(assets),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    )
    for text in ("Once upon a time, in 1984.", "def f(x):\n    return x ** 2", "naïve ☃"):
        assert read(text)["input_ids"] == original(text)["input_ids"]


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_left_out_and_told(llama, tmp_path):
    _, model = llama
    unknown = json.dumps({"model": {"type": "Unigram"}, "pre_tokenizer": None}).encode()
    for assets, why in (
        ({}, "the step has no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "can't be read"),
        ({"tokenizer.json": unknown}, "no byte-level BPE"),
    ):
        path, note = write(tmp_path, model, assets)
        assert note.startswith("left out: ")
        assert why in note
        assert b"tokenizer.ggml.tokens" not in path.read_bytes()
        assert opened(path).tokenizer_files() == {}
        kinds = gguf.GGUFReader(path).fields
        assert kinds["tokenizer.ggml.model"].contents() == "none"
        assert kinds["llama.vocab_size"].contents() == model.config.vocab_size


@pytest.mark.parametrize(
    ("number", "message"),
    [(np.nan, "expected finite weights"), (1e7, r"expected weights up to 8319008.*found 1e\+07")],
)
def test_weights_that_q8_0_can_not_hold_are_refused(llama, tmp_path, number, message):
    _, model = llama
    leaves = leaves_of(model)
    path = "model/layers/0/mlp/up_proj/kernel"
    bad = np.asarray(leaves[path].fetch(None)).copy()
    bad[0, 0] = number
    leaves[path] = MemoryLeaf(bad.shape, bad.dtype, lambda at: bad)
    made, _ = gguf_shard(model.config, leaves, {}, dtype="q8_0", path="the model")
    with pytest.raises(ConversionError, match=f"ffn_up.weight: {message}"):
        write_shard(open_files(parse_uri(tmp_path)), made.file_name, made)
    assert not (tmp_path / GGUF_FILE).exists()


def test_another_dtype_is_refused(llama, tmp_path):
    with pytest.raises(ArgumentError, match="for GGUF one of float32, float16, bfloat16, q8_0"):
        write(tmp_path, llama[1], dtype="q4_k")
