"""GGUF files of every family: logits, beside transformers' reader, and what is refused."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from flax import nnx
from transformers import AutoModelForCausalLM

from cairn import ConfigError, ConversionError, DecoderForCausalLM
from cairn.interop import registry
from cairn.interop.config.decoder import FULL, WINDOW
from cairn.interop.families.family import get_family
from cairn.state.paths import named_leaves
from tests.interop.families.gguf_conversion import write_gguf
from tests.interop.families.matrix import SIZES, WHOLE, assert_close, padded, tiny
from tests.state.forward import logits_of
from tests.state.gguf_files import opened
from tests.state.hf_models import torch_logits

ROOT = Path(__file__).parents[3]
Types = gguf.GGMLQuantizationType
TWO = {"num_hidden_layers": 2}
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}


def known(model_type, name):
    """A config of the family's own test."""
    return importlib.import_module(f"tests.interop.families.known.test_{model_type}").CONFIGS[name]


FALCON = {"hidden_size": 48, "ffn_hidden_size": 192}
LATENT_NORMS = {"rms_norm_eps": 1e-6}
"""Of published models of DeepSeek: transformers has it in the norms of latents always."""
V3 = {**known("deepseek_v3", "yarn"), **LATENT_NORMS}
V3_YARN = V3["rope_parameters"]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ONE_GROUP = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
V2 = {**known("deepseek_v2", "groups"), **LATENT_NORMS, **ONE_GROUP}

GGUF_CONFIGS = {
    "cohere": {
        "scaled": {"head_dim": 8, "logit_scale": 0.8, **TWO},
        "normalised_heads": {"head_dim": 8, "use_qk_norm": True, "num_hidden_layers": 64},
    },
    "cohere2": {
        "one_of_four": {**known("cohere2", "one_of_four"), "num_hidden_layers": 5},
        "layer_norm": {**TWO, "layer_norm_eps": 1e-3},
    },
    "deepseek_v2": {
        "groups": {**known("deepseek_v2", "groups"), **LATENT_NORMS},
        "one_group": V2,
        "lite": {
            **V2,
            "q_lora_rank": None,
            "num_hidden_layers": 27,
            "rope_parameters": {**V3_YARN, **MSCALES},
        },
    },
    "deepseek_v3": {
        "one_mscale": {**V3, "rope_parameters": {**V3_YARN, **MSCALES}},
        "published": {**V3, "rope_parameters": {**V3_YARN, "mscale_all_dim": 1.0}},
        "one_group": {**V3, "rope_parameters": PLAIN_ROPE, "n_group": 1, "topk_group": 1},
    },
    "falcon": {
        "newer": {**known("falcon", "newer"), **FALCON, **TWO},
        "one_key": {**known("falcon", "one_key"), **FALCON},
        "newer_one_norm": {**known("falcon", "newer_one_norm"), **FALCON},
    },
    "gemma": {"tied": TWO},
    "gemma2": {"windows": {"sliding_window": 9, "query_pre_attn_scalar": 12, **TWO}},
    "gemma3_text": {"turns": {"sliding_window": 9, "query_pre_attn_scalar": 12}},
    "glm4": {"biases": TWO, "tied": known("glm4", "tied")},
    "glm4_moe": {
        "groups_biases": known("glm4_moe", "groups_biases"),
        "normalised_heads": known("glm4_moe", "normalised_heads"),
        "not_normalised": known("glm4_moe", "not_normalised"),
    },
    "gpt2": {"tied": {**known("gpt2", "tied"), "n_layer": 2}},
    "gpt_neox": {
        "parallel": {**known("gpt_neox", "parallel"), **TWO},
        "one_after_the_other": known("gpt_neox", "one_after_the_other"),
    },
    "gpt_oss": {"windows": {**known("gpt_oss", "windows"), **TWO}},
    "granite": {
        "scaled": {**known("granite", "scaled"), "head_dim": 8, **TWO},
        "tied": {**known("granite", "tied"), "head_dim": 8},
    },
    "llama": {"plain": TWO, "biases": {"attention_bias": True, "mlp_bias": True}},
    "mistral": {"window": {**known("mistral", "window"), **TWO}},
    "mixtral": {"plain": {"num_local_experts": 5, "num_experts_per_tok": 2, **TWO}},
    "olmo2": {"plain": TWO, "biases_tied": known("olmo2", "biases_tied")},
    "olmo3": {
        "one_of_four": {"sliding_window": 9, "num_hidden_layers": 5, "attention_bias": True},
        "stretched": {
            "sliding_window": 9,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "num_hidden_layers": 4,
        },
    },
    "phi3": {
        "beyond_its_length": {**known("phi3", "beyond_its_length"), **TWO},
        "part_of_each_head": known("phi3", "part_of_each_head"),
    },
    "qwen2": {"yarn": {**known("qwen2", "yarn"), **TWO}, "tied": known("qwen2", "tied")},
    "qwen2_moe": {"shared": {**FEW, "shared_expert_intermediate_size": 28, **TWO}},
    "qwen3": {"biases": {**known("qwen3", "biases"), **TWO}},
    "qwen3_moe": {"normalized": {**FEW, "norm_topk_prob": True, **TWO}},
    "smollm3": {
        "one_of_four": {"num_hidden_layers": 5},
        "untied": {**TWO, "tie_word_embeddings": False},
    },
    "stablelm": {
        "normalised_heads": {**known("stablelm", "normalised_heads"), **TWO},
        "parallel": known("stablelm", "parallel"),
    },
    "starcoder2": {
        "biases": {"head_dim": 8, **TWO},
        "untied": {"head_dim": 8, **TWO, "tie_word_embeddings": False},
    },
}
SHOWN = [
    (model_type, name)
    for model_type, configs in GGUF_CONFIGS.items()
    for name in (configs if WHOLE else list(configs)[:1])
]


def sizes_of(model_type):
    """Of a family's tiny models."""
    without = ()
    if model_type != "llama":
        module = importlib.import_module(f"tests.interop.families.known.test_{model_type}")
        without = getattr(module, "WITHOUT", ())
    return {name: size for name, size in SIZES.items() if name not in without}


def saved(folder, model_type, **options):
    """A model of transformers, and its folder."""
    theirs = tiny(model_type, **{**sizes_of(model_type), **options})
    theirs.save_pretrained(folder)
    return theirs, folder


def converted(path, folder, theirs):
    """A file of a model's folder, as the converter makes it."""
    extra = {}
    if theirs.config.model_type == "gemma3_text":
        windowed = [kind == WINDOW for kind in theirs.config.layer_types]
        extra = {"attention.sliding_window_pattern": windowed}
    return write_gguf(path, folder, **extra)


def read(path):
    """Ours of a folder or a file, on one device: for eight a program takes longer to compile."""
    return DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)


def test_every_family_has_a_gguf_form_that_is_tested():
    assert sorted(GGUF_CONFIGS) == registry.known_families()
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert all(get_family(name).gguf.architecture in names for name in GGUF_CONFIGS)


BY_LOGITS = ("phi3",)
"""Their files say the number that a formula gives in a folder's config: logits are compared."""


def computed(config):
    """What a config says of the numbers that are computed, as far as float32 tells them apart."""
    fields = dataclasses.asdict(config)
    for name in ("hf_extra", "tokenizer_files"):
        del fields[name]
    if config.model_type == "falcon":  # whose folders say nothing of a length
        del fields["max_position_embeddings"]
    said = json.dumps(fields, default=repr)
    return json.loads(said, parse_float=lambda number: f"{float(number):.6g}")


@pytest.mark.parametrize(("model_type", "name"), SHOWN)
def test_a_file_is_read_as_the_model_that_it_was_made_of(model_type, name, tmp_path):
    """A folder is read as transformers reads it: each family's own test. Logits: the long run."""
    theirs, folder = saved(tmp_path / "theirs", model_type, **GGUF_CONFIGS[model_type][name])
    of_file, of_folder = read(converted(tmp_path / "x.gguf", folder, theirs)), read(folder)
    assert of_file.config.model_type == model_type
    assert of_file.config.hf_extra["eos_token_id"] == 2
    if model_type not in BY_LOGITS:
        assert computed(of_file.config) == computed(of_folder.config)
    expected = {named.path: named.leaf for named in named_leaves(nnx.state(of_folder))}
    for named in named_leaves(nnx.state(of_file)):
        np.testing.assert_allclose(
            named.leaf, expected.pop(named.path), atol=1e-6, rtol=0, err_msg=named.path
        )
    assert expected == {}
    if WHOLE or model_type in BY_LOGITS:
        ids, mask = padded()
        found = logits_of(of_file, ids, attention_mask=mask)
        assert_close(found, torch_logits(theirs, ids, mask), mask)


# What their reader takes for granted where it does not read the metadata.
TAKEN = {
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024},
    "phi3": {},
    "qwen2": {"head_dim": 8},
    "qwen3": {"head_dim": 128, "attention_bias": False},
    "stablelm": {},
}


@pytest.mark.parametrize("model_type", TAKEN)
def test_tensors_are_those_that_transformers_reads_of_the_file(model_type, tmp_path):
    options = list(GGUF_CONFIGS[model_type].values())[-1]
    _, folder = saved(tmp_path / "theirs", model_type, **{**options, **TAKEN[model_type]})
    path = write_gguf(tmp_path / "x.gguf", folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    found = read(path).to_torch()
    assert found.keys() == again.state_dict().keys()
    for name, tensor in again.state_dict().items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.numpy(), err_msg=name)


def test_q8_0_stays_within_the_error_of_its_blocks(tmp_path):
    options = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, **TWO}
    _, folder = saved(tmp_path / "theirs", "qwen3", **options)
    # Half a step, and a 2,048th of 127 of them: the step itself is kept in 16 bits.
    exact = read(folder).to_torch()
    kinds = {f"{name}.weight": Types.Q8_0 for name in ("attn_q", "attn_output", "ffn_up", "embd")}
    path = write_gguf(tmp_path / "x.gguf", folder, quantization=kinds)
    found = read(path).to_torch()
    for name, tensor in exact.items():
        quantized = name.endswith(("q_proj.weight", "o_proj.weight", "up_proj.weight"))
        quantized |= "embed" in name
        error = np.abs(found[name].numpy() - tensor.numpy()).max()
        step = np.abs(tensor.numpy()).max() / 127
        assert (0 < error <= 0.57 * step) if quantized else error == 0, name


def test_experts_of_gpt_oss_are_read_from_mxfp4(tmp_path):
    options = {**known("gpt_oss", "windows"), "intermediate_size": 64, **TWO}
    theirs, folder = saved(tmp_path / "theirs", "gpt_oss", **options)
    kinds = {f"ffn_{name}_exps.weight": Types.MXFP4 for name in ("gate", "up", "down")}
    path = write_gguf(tmp_path / "x.gguf", folder, quantization=kinds)
    ours = read(path)
    down = theirs.state_dict()["model.layers.1.mlp.experts.down_proj"].swapaxes(1, 2).numpy()
    packed = gguf.quants.quantize(np.ascontiguousarray(down), Types.MXFP4)
    expected = gguf.quants.dequantize(packed, Types.MXFP4).swapaxes(1, 2)
    found = ours.to_torch()["model.layers.1.mlp.experts.down_proj"].numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family that is asked for."""
    made = {}

    def folder(model_type):
        if model_type not in made:
            options = next(iter(GGUF_CONFIGS[model_type].values()))
            made[model_type] = saved(tmp_path_factory.mktemp(model_type), model_type, **options)[1]
        return made[model_type]

    return folder


REFUSED = [
    ("qwen2", {"attention.sliding_window": 9}, r"attention\.sliding_window=9 \(nothing reads it\)"),
    ("qwen2", {"expert_count": 4}, r"expert_count=4 \(only 0 is read\)"),
    ("qwen2", {"attention.causal": False}, r"attention\.causal=False \(only True is read\)"),
    ("qwen2", {"attention.key_length_swa": 4}, r"attention\.key_length_swa=4"),
    ("qwen2", {"attention.head_count_kv": [2, 1]}, r"attention\.head_count_kv=\[2, 1\]"),
    ("qwen2", {"attention.head_count": 0}, r"attention\.head_count=0"),
    ("qwen2", {"rope.freq_base": "large"}, r"rope\.freq_base='large'"),
    ("stablelm", {"rope.dimension_count": 0}, r"rope\.dimension_count=0"),
    ("phi3", {"rope.scaling.original_context_length": 0}, r"original_context_length=0"),
    ("qwen2", {"attention.value_length": 4}, r"attention\.value_length=4"),
    ("qwen2", {"rope.dimension_count": 4}, r"rope\.dimension_count=4"),
    (
        "qwen2",
        {"rope.scaling.yarn_attn_factor": 0.5},
        r"yarn_attn_factor=0\.5 \(nothing",
    ),
    ("qwen2", {"rope.scaling.attn_factor": 0.5}, r"rope\.scaling\.attn_factor=0\.5"),
    ("qwen3_moe", {"expert_weights_norm": False}, r"expert_weights_norm=False \(only True"),
    ("qwen2_moe", {"expert_weights_scale": 2.5}, r"expert_weights_scale=2\.5 \(only"),
    ("mixtral", {"attention.sliding_window": 9}, r"attention\.sliding_window=9 \(only 0"),
    ("granite", {"rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned=False"),
    ("falcon", {"tensor_data_layout": "other"}, r"tensor_data_layout='other'"),
    ("gpt2", {"attention.head_count_kv": 2}, r"attention\.head_count_kv=2"),
    ("gpt2", {"rope.freq_base": 1e4}, r"rope\.freq_base=10000\.0 \(nothing reads it\)"),
    ("gpt_neox", {"attention.key_length": 8}, r"attention\.key_length=8"),
    ("deepseek_v3", {"attention.temperature_scale": 0.1}, r"attention\.temperature_scale"),
    ("deepseek_v3", {"rope.scaling.yarn_log_multiplier": None}, r"yarn_log_multiplier"),
    ("deepseek_v2", {"expert_weights_norm": True}, r"norm_topk_prob=True"),
    ("glm4_moe", {"expert_gating_func": 1}, r"expert_gating_func=1 \(only 2"),
    ("glm4_moe", {"nextn_predict_layers": 4}, r"num_hidden_layers"),
    ("gpt_oss", {"expert_gating_func": 1}, r"expert_gating_func=1 \(only 3"),
]


@pytest.mark.parametrize(("model_type", "metadata", "message"), REFUSED)
def test_metadata_that_would_change_numbers_is_refused_by_its_key(
    model_type, metadata, message, folders, tmp_path
):
    path = write_gguf(tmp_path / "x.gguf", folders(model_type), **metadata)
    with pytest.raises(ConfigError, match=message):
        opened(path).config()


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("qwen3", "block_count"),
        ("qwen2", "rope.scaling.factor"),
        ("gemma3_text", "rope.freq_base"),
        ("gpt2", "attention.layer_norm_epsilon"),
        ("granite", "attention.scale"),
        ("qwen3_moe", "expert_feed_forward_length"),
        ("deepseek_v2", "expert_group_count"),
        ("deepseek_v2", "attention.key_length_mla"),
        ("phi3", "rope.scaling.original_context_length"),
    ],
)
def test_a_missing_key_is_named(model_type, key, folders, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", folders(model_type), without=(key,))
    with pytest.raises(ConfigError, match=f"found no {key}"):
        opened(path).config()


def test_a_tensor_too_many_and_one_that_is_missing_are_named(folders, tmp_path):
    extra = {"blk.0.attn_q.scale": np.ones(1, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", folders("qwen3"), tensors=extra)
    with pytest.raises(ConversionError) as caught:
        DecoderForCausalLM.from_pretrained(path)
    assert caught.value.problems == ("unexpected tensor: blk.0.attn_q.scale (1,)",)
    fewer = write_gguf(tmp_path / "y.gguf", folders("qwen3"), block_count=3)
    with pytest.raises(ConversionError, match=r"blk\.2\.ffn_down\.weight"):
        DecoderForCausalLM.from_pretrained(fewer)


def test_factors_of_rotary_positions_are_no_tensors_of_a_family_without(folders, tmp_path):
    factors = {"rope_freqs.weight": np.full(6, 2.0, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", folders("gemma"), tensors=factors)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight \(not Llama 3's\)"):
        opened(path).config()


def test_one_part_of_a_split_file_is_refused(folders, tmp_path):
    path = tmp_path / "x-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"split\.count=2; merge"):
        opened(path).config()


def test_an_unknown_architecture_lists_those_that_are_read(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"one of .*deepseek2, .*stablelm.*; found 'mamba'"):
        opened(path).config()


def test_windows_follow_the_architecture_where_a_file_says_no_pattern(folders, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", folders("gemma3_text"), block_count=7)
    assert opened(path).config().layer_types == (WINDOW,) * 5 + (FULL, WINDOW)
    fewer = write_gguf(tmp_path / "y.gguf", folders("gpt_oss"), block_count=4)
    assert opened(fewer).config().layer_types == (WINDOW, FULL) * 2
    said = write_gguf(
        tmp_path / "z.gguf", folders("gpt_oss"), **{"attention.sliding_window_pattern": 0}
    )
    assert opened(said).config().layer_types == (WINDOW,) * 2


def test_queries_of_gemma_27b_are_scaled_as_its_layers_tell(folders, tmp_path):
    for model_type, layers in (("gemma2", 46), ("gemma3_text", 62)):
        path = write_gguf(tmp_path / f"{layers}.gguf", folders(model_type), block_count=layers)
        assert opened(path).config().attention_scale == 8**-0.5  # 32 wide, 4 heads
        path = write_gguf(tmp_path / f"{layers}-.gguf", folders(model_type), block_count=7)
        assert opened(path).config().attention_scale == 12**-0.5  # a head of 12


def test_layers_that_predict_further_tokens_are_left_out(folders, tmp_path):
    further = {f"blk.3.{name}.weight": np.ones(32, np.float32) for name in ("nextn.enorm", "x")}
    path = write_gguf(tmp_path / "x.gguf", folders("glm4_moe"), tensors=further)
    assert opened(path).metadata["glm4moe.block_count"] == 4
    assert read(path).config.num_hidden_layers == 3
    none = write_gguf(
        tmp_path / "y.gguf",
        folders("glm4_moe"),
        tensors=further,
        block_count=3,
        nextn_predict_layers=0,
    )
    with pytest.raises(ConversionError, match=r"unexpected tensor: blk\.3\.nextn\.enorm"):
        read(none)


def test_whole_heads_turn_where_a_file_says_so(folders, tmp_path):
    for model_type in ("glm4", "glm4_moe"):
        whole = {"rope.dimension_count": 12}
        path = write_gguf(tmp_path / f"{model_type}.gguf", folders(model_type), **whole)
        assert opened(path).config().rope.rotary_fraction == 1.0


def test_a_router_of_one_row_is_read_in_either_shape(folders, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", folders("qwen2_moe"))
    name = "blk.0.ffn_gate_inp_shexp.weight"
    row = opened(path).read(name)
    assert row.shape == (1, 32)
    flat = write_gguf(tmp_path / "y.gguf", folders("qwen2_moe"), tensors={name: row[0]})
    found = [read(one).to_torch() for one in (path, flat)]
    for name, tensor in found[0].items():
        np.testing.assert_array_equal(tensor.numpy(), found[1][name].numpy(), err_msg=name)


def test_the_table_says_each_familys_architecture():
    table = (ROOT / "docs/reference/state/families.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*[a-z] \| `([\w-]+)`[^|]*\|$", table, re.MULTILINE))
    assert rows == {name: get_family(name).gguf.architecture for name in GGUF_CONFIGS}
