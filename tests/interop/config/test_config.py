"""Configurations: JSON in and out, families, what is refused."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from cairn import (
    AutoEasyDeLConfig,
    ConfigError,
    DecoderConfig,
    EDPretrainedConfig,
    ExpertsConfig,
    RopeConfig,
)
from cairn.interop import registry

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_HF = {**TINY, "model_type": "llama", "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

configs = st.builds(
    DecoderConfig,
    vocab_size=st.integers(1, 100),
    hidden_size=st.sampled_from([8, 16, 24]),
    intermediate_size=st.integers(1, 64),
    num_hidden_layers=st.integers(1, 4),
    num_attention_heads=st.sampled_from([2, 4]),
    num_key_value_heads=st.sampled_from([None, 1, 2]),
    head_dim=st.sampled_from([None, 6, 10]),
    hidden_act=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]),
    rms_norm_eps=st.sampled_from([1e-5, 1e-6]),
    rope=st.sampled_from(
        [
            RopeConfig(),
            RopeConfig(theta=5e5, scaling="linear", factor=4.0),
            RopeConfig(
                scaling="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=128,
            ),
        ]
    ),
    mlp_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
    scan_layers=st.booleans(),
    hf_extra=st.sampled_from([{}, {"eos_token_id": [2, 3], "bos_token_id": 1}]),
)


@given(configs)
def test_our_json_gives_the_same_config_back(config):
    again = AutoEasyDeLConfig.from_dict(config.to_dict())
    assert again == config
    assert dict(again.hf_extra) == dict(config.hf_extra)


@given(configs)
def test_config_json_gives_the_same_model_back(config):
    data = config.to_hf()
    assert None not in data.values()
    again = AutoEasyDeLConfig.from_hf(data)
    assert again == config.replace(scan_layers=False)
    assert dict(again.hf_extra) == dict(config.hf_extra)


def test_configs_are_hashable_so_that_they_can_be_static():
    one = DecoderConfig(**TINY, hf_extra={"id2label": {0: "a"}}, tokenizer_files={"a": b"b"})
    assert hash(one) == hash(DecoderConfig(**TINY))
    assert one == DecoderConfig(**TINY)


def test_head_sizes_default_as_in_transformers():
    config = DecoderConfig(**TINY)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("data", "rope"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 1e5}, RopeConfig(theta=1e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, RopeConfig(theta=1e5)),
        ({"rope_theta": 1e4, "rope_scaling": None}, RopeConfig(theta=1e4)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=1e4, scaling="linear", factor=2.0),
        ),
        (
            {"rope_parameters": LLAMA3},
            RopeConfig(
                theta=5e5,
                scaling="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_keys(data, rope):
    assert AutoEasyDeLConfig.from_hf({**TINY_HF, **data}).rope == rope


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2}}, "'proportional'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "snake"}, "'snake'"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        AutoEasyDeLConfig.from_hf({**TINY_HF, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["MistralForCausalLM"]}, r"architectures=\['MistralForCausalLM'\]"),
        ({"architectures": "MistralForCausalLM"}, "architectures='MistralForCausalLM'"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "auto_map=.*code of the model's own"),
        (
            {"logit_scale": 0.5},
            r"logit_scale=0\.5 \(nothing reads it, and it changes the scale of the logits\)",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 16, "use_qk_norm": True}, "sliding_window=16.*use_qk_norm=True"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "attention_factor": 2}}, "attention_f"),
        ({"auto_map": {"A": "b.C"}, "pretraining_tp": 2}, "pretraining_tp.*auto_map"),
    ],
)
def test_keys_that_nothing_reads_are_refused_by_name(changes, said):
    with pytest.raises(ConfigError, match=said):
        AutoEasyDeLConfig.from_hf({**TINY_HF, **changes})


def test_harmless_keys_are_carried_along():
    extra = {
        "id2label": {"0": "a"},
        "eos_token_id": [1, 2],
        "max_length": 20,
        "rope_interleaved": False,
        "use_cache": True,
        "_attn_implementation_autoset": True,
        "transformers.js_config": {"dtype": "q4"},
        "pretraining_tp": 1,
    }
    dropped = {"sliding_window": None, "architectures": ["LLaMAForCausalLM"], "auto_map": None}
    config = AutoEasyDeLConfig.from_hf({**TINY_HF, **extra, **dropped})
    assert config.to_hf().items() >= extra.items()
    assert config.to_hf()["architectures"] == ["LlamaForCausalLM"]


def test_every_key_that_transformers_writes_is_read():
    data = LlamaConfig().to_dict()
    AutoEasyDeLConfig.from_hf({**data, "architectures": ["LlamaForCausalLM"]})


def test_a_stored_config_with_a_key_of_no_meaning_known_is_still_written():
    config = DecoderConfig(**TINY, hf_extra={"odd": 1})
    assert config.to_hf()["odd"] == 1


def test_a_users_own_config_refuses_keys_that_are_no_fields():
    @dataclass(frozen=True, kw_only=True)
    class StrictConfig(EDPretrainedConfig):
        model_type = "strict-of-test-config"
        width: int = 3

    data = {**StrictConfig(width=5).to_hf(), "architectures": ["Own"], "dtype": "float32"}
    assert AutoEasyDeLConfig.from_hf(data).width == 5
    with pytest.raises(ConfigError, match="logit_scale=2"):
        AutoEasyDeLConfig.from_hf({**data, "logit_scale": 2})


def test_all_problems_of_a_config_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**TINY, num_key_value_heads=3, sharding_axis_dims=(1, -1, -1, 1))
    assert "not a multiple" in str(caught.value)
    assert "at most one -1" in str(caught.value)


def test_options_that_a_family_has_no_key_for_are_refused_not_dropped():
    config = DecoderConfig(**TINY, attention_out_bias=True)
    with pytest.raises(ConfigError, match="attention_out_bias=True would come back as False"):
        config.to_hf()


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"one of .*llama.*found 'unheard-of'"):
        AutoEasyDeLConfig.from_hf({"model_type": "unheard-of"})


def test_unknown_field_is_named():
    with pytest.raises(ConfigError, match=r"unknown field\(s\) wings"):
        DecoderConfig.from_dict({**TINY, "wings": 2})


def test_a_users_own_config_is_known_by_its_model_type():
    @dataclass(frozen=True, kw_only=True)
    class OwnConfig(EDPretrainedConfig):
        model_type = "own-of-test-config"
        width: int = 3

    config = OwnConfig(width=5, sharding_axis_dims=(2, 4, 1, 1))
    assert config.model_type == "own-of-test-config"
    assert AutoEasyDeLConfig.from_dict(config.to_dict()) == config
    assert AutoEasyDeLConfig.from_hf({**config.to_hf(), "architectures": ["Own"]}) == config
    assert "own-of-test-config" in AutoEasyDeLConfig.known_model_types()


def test_mesh_follows_the_dims():
    assert dict(DecoderConfig(**TINY, sharding_axis_dims=(2, -1, 1, 1)).mesh.shape) == {
        "dp": 2,
        "fsdp": 4,
        "tp": 1,
        "sp": 1,
    }


INTEROP = Path(registry.__file__).parent
ROOMS = ("config", "conversion", "families", "placement", "weights")
MODULES = [
    *("dtypes", "errors", "names", "partition_axis", "registry"),
    *ROOMS,
    *(
        f"{room}.{file.stem}"
        for room in ROOMS
        for file in sorted((INTEROP / room).glob("[!_]*.py"))
    ),
]


def test_reading_configs_and_rules_needs_no_jax():
    code = (
        "import importlib, sys\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'torch', 'transformers'}\n"
        f"for module in {MODULES!r}:\n"
        "    importlib.import_module(f'cairn.interop.{module}')\n"
        "    assert not heavy & set(sys.modules), (module, heavy & set(sys.modules))\n"
        "from cairn import AutoEasyDeLConfig\n"
        f"AutoEasyDeLConfig.from_hf({TINY_HF!r}).to_hf()\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tie_word_embeddings": "false"}, r"must be True or False: \{'tie_word_embeddings': 'fal"),
        ({"mlp_bias": "no", "remat": 1}, r"\{'mlp_bias': 'no', 'remat': 1\}"),
        ({"attention_bias": None}, r"\{'attention_bias': None\}"),
        ({"rms_norm_eps": "1e-5"}, r"must be numbers, 0 or more: \{'rms_norm_eps': '1e-5'\}"),
        ({"rms_norm_eps": -1e-5}, r"\{'rms_norm_eps': -1e-05\}"),
        ({"initializer_range": float("nan")}, r"\{'initializer_range': nan\}"),
        ({"rope": RopeConfig(theta="10000")}, "rope theta '10000' and factor 1.0 must be positive"),
        ({"rope": RopeConfig(factor=True)}, "factor True must be positive"),
        ({"rope": {"theta": 1e4}}, r"rope \{'theta': 10000.0\} is no RopeConfig"),
        ({"sharding_axis_dims": (1.0, -1, 1, 1)}, r"sharding_axis_dims \(1.0, -1, 1, 1\) must be"),
        ({"sharding_axis_dims": "1,-1,1,1"}, "sharding_axis_dims .* must be integers"),
        ({"sharding_axis_dims": (True, -1, 1, 1)}, r"\(True, -1, 1, 1\) must be integers"),
        ({"sharding_axis_names": (1, 2, 3, 4)}, r"sharding_axis_names \(1, 2, 3, 4\) must be text"),
        ({"sharding_dcn_axis_dims": (1.5, 1, 1, 1)}, "sharding_dcn_axis_dims .* must be integers"),
    ],
)
def test_values_of_another_type_are_refused_by_their_names(fields, said):
    with pytest.raises(ConfigError, match=said):
        DecoderConfig(**TINY, **fields)


@pytest.mark.parametrize("value", ["false", 1, "no"])
def test_a_files_text_for_a_flag_is_no_flag(value):
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=.* .true or false belongs there"):
        AutoEasyDeLConfig.from_hf({**TINY_HF, "tie_word_embeddings": value})


def test_a_llamas_json_has_no_option_that_earlier_versions_do_not_know():
    data = DecoderConfig().to_dict()
    assert not {"experts", "latent", "block", "qk_norm", "window_rope"} & data.keys()
    lengths = ["high_freq_factor", "low_freq_factor", "original_max_position_embeddings"]
    assert sorted(data["rope"]) == ["factor", *lengths, "scaling", "theta"]
    experts = ExpertsConfig(count=4, per_token=2, intermediate_size=8, dense_layers=(0,))
    rope = RopeConfig(
        scaling="longrope",
        short_factor=(1.0,) * 64,
        long_factor=(2.0,) * 64,
        original_max_position_embeddings=32,
    )
    other = DecoderConfig(experts=experts, rope=rope)
    assert DecoderConfig.from_dict(json.loads(json.dumps(other.to_dict()))) == other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("sliding_attention",) * 32}, "need a sliding_window"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"norm": "rmss"}, "norm 'rmss' is none of rms, rms_offset, layer"),
        ({"norm_bias": True}, "norm_bias is for norm 'layer'"),
        ({"shared_norm": True}, "shared_norm is for block 'parallel'"),
        ({"qk_norm": "heads"}, "qk_norm 'heads'"),
        ({"hidden_act": "clamped_silu"}, "go together"),
        ({"attention_soft_cap": 0}, "attention_soft_cap"),
        ({"rope": RopeConfig(scaling="yarn")}, "needs original_max_position_embeddings"),
        ({"rope": RopeConfig(rotary_fraction=0.01)}, "an even number"),
        ({"experts": ExpertsConfig(count=4, per_token=5, intermediate_size=8)}, "is above"),
        ({"experts": {"count": 4}}, "is no ExpertsConfig"),
        (
            {"experts": ExpertsConfig(count=4, per_token=3, intermediate_size=8, groups=4)},
            "groups_per_token groups have",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        DecoderConfig(**options)


@pytest.mark.parametrize("method", ["from_dict", "from_hf"])
def test_values_of_any_type_are_a_config_or_a_config_error(method):
    whole = DecoderConfig(**TINY, rope=RopeConfig(scaling="linear", factor=4.0))
    data = whole.to_dict() if method == "from_dict" else TINY_HF | {"rope_parameters": LLAMA3}
    places = [(name,) for name in data]
    places += [
        (name, inner) for name, part in data.items() if isinstance(part, dict) for inner in part
    ]
    refused = 0
    for place in places:
        for value in ([], {}, [{}], "text", -1, 0, 1e300, float("nan"), True, None, 2**70):
            odd = json.loads(json.dumps(data))
            target = odd if len(place) == 1 else odd[place[0]]
            target[place[-1]] = value
            try:
                found = getattr(AutoEasyDeLConfig, method)(odd)
            except ConfigError:
                refused += 1
                continue
            assert isinstance(found, EDPretrainedConfig)
    assert refused > len(places)
