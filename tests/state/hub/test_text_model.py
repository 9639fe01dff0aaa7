"""The text model of what sees too: loaded alone, as transformers computes it, or refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from cairn import AutoEasyDeLConfig, ConfigError, ConversionError, DecoderForCausalLM
from tests.interop.seams import text_config
from tests.state.forward import logits_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEEING = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLE = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 9, **SIZES},
        "vision_config": {"model_type": "siglip_vision_model", **SEEING},
        "mm_tokens_per_image": 1,
        "image_token_index": 98,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 12, "sliding_window": 9, **SIZES},
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **SEEING},
        "image_token_index": 98,
        "tie_word_embeddings": False,
    },
}
ALIKE = {
    "internvl": {
        "text_config": {"model_type": "qwen2", **SIZES},
        "vision_config": {
            **SEEING,
            "model_type": "internvl_vision",
            "image_size": [28, 28],
            "patch_size": [14, 14],
        },
        "image_token_id": 98,
    },
    "llava": {
        "text_config": {"model_type": "llama", "head_dim": 12, **SIZES},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 8, **SEEING},
        "image_token_index": 98,
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", "head_dim": 12, "sliding_window": 9, **SIZES},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 8, **SEEING},
        "image_token_index": 98,
    },
}
"""Others, of which no more is tested than what they compute."""
IDS = np.arange(40)[None] * 7 % 97


def made(folder, model_type, parts):
    """Has transformers write a folder; its logits of `IDS`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, attn_implementation="eager", **parts)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(IDS)).logits.numpy()


@pytest.fixture(scope="module", params=WHOLE)
def whole(request, tmp_path_factory):
    """A folder that transformers has written, and its logits of `IDS`."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, made(folder, request.param, WHOLE[request.param])


def renamed(source, target, name_of):
    """A copy of a folder whose tensors are named otherwise; those that get None are left out."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    named = {name_of(name): tensor for name, tensor in tensors.items()}
    named.pop(None, None)
    save_file(named, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def newer(name):
    """As releases of transformers after the fourth name tensors in memory."""
    name = name.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "model.language_model.")
    beside = name.startswith(("vision_tower", "multi_modal_projector"))
    return f"model.{name}" if beside else name


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name_of", [None, newer], ids=["as saved", "as in memory"])
def test_the_text_model_computes_what_the_whole_computes_of_text(whole, name_of, tmp_path):
    folder, expected = whole
    if name_of is not None:
        folder = renamed(folder, tmp_path / "renamed", name_of)
    model = DecoderForCausalLM.from_pretrained(folder, text_only=True, auto_shard_model=False)
    close(logits_of(model, IDS), expected)


@pytest.mark.parametrize("model_type", ALIKE)
def test_others_compute_the_same_too(model_type, tmp_path):
    expected = made(tmp_path, model_type, ALIKE[model_type])
    model = DecoderForCausalLM.from_pretrained(tmp_path, text_only=True, auto_shard_model=False)
    close(logits_of(model, IDS), expected)


def test_what_computes_of_text_something_else_is_refused(tmp_path):
    data = {"model_type": "aya_vision", "text_config": {"model_type": "cohere2", **SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"one of gemma3, .* found 'aya_vision'"):
        DecoderForCausalLM.from_pretrained(tmp_path, text_only=True, auto_shard_model=False)


def test_what_is_exported_of_it_is_a_model_of_text(whole, tmp_path):
    folder, expected = whole
    DecoderForCausalLM.from_pretrained(
        folder, text_only=True, auto_shard_model=False
    ).save_pretrained(tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    with torch.no_grad():
        close(again(torch.from_numpy(IDS)).logits.numpy(), expected)
    assert "vision_config" not in json.loads((tmp_path / "text" / "config.json").read_text())


def test_nothing_is_left_out_that_nobody_said_is_to_be(whole):
    folder, _ = whole
    with pytest.raises(ConfigError, match=r"a model of text alone.*pass text_only=True"):
        DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)


def test_a_tensor_of_the_text_model_that_is_missing_is_named(whole, tmp_path):
    folder, _ = whole
    lost = "language_model.model.layers.1.mlp.up_proj.weight"
    renamed(folder, tmp_path / "less", lambda name: None if name == lost else name)
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        DecoderForCausalLM.from_pretrained(
            tmp_path / "less", text_only=True, auto_shard_model=False
        )


@pytest.mark.parametrize(
    "name_of",
    [
        lambda name: f"other.{name}",
        lambda name: newer(name) if "layers.1." in name else name,
    ],
    ids=["nowhere", "in two places"],
)
def test_tensors_that_are_not_below_one_name_are_refused(whole, name_of, tmp_path):
    folder, _ = whole
    renamed(folder, tmp_path / "other", name_of)
    with pytest.raises(ConversionError, match="tensors of a text model below"):
        DecoderForCausalLM.from_pretrained(
            tmp_path / "other", text_only=True, auto_shard_model=False
        )


def test_a_text_model_of_an_unknown_family_is_refused(tmp_path):
    data = {"model_type": "llava", "text_config": {"model_type": "seer_text", **SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"text_config: expected model_type to be one of cohere"):
        DecoderForCausalLM.from_pretrained(tmp_path, text_only=True, auto_shard_model=False)


def test_a_model_of_text_is_its_own_text_model(whole, tmp_path):
    folder, _ = whole
    first = DecoderForCausalLM.from_pretrained(folder, text_only=True, auto_shard_model=False)
    first.save_pretrained(tmp_path / "text")
    again = DecoderForCausalLM.from_pretrained(
        tmp_path / "text", text_only=True, auto_shard_model=False
    )
    assert again.config.to_hf() == first.config.to_hf()


PUBLISHED = {
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    },
    "Mistral-Small-3.1-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "head_dim": 64},
        "vision_feature_layer": -1,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_as_transformers_reads_it(name):
    data = PUBLISHED[name]
    ours = AutoEasyDeLConfig.from_hf(text_config(data, "config.json")).to_hf()
    theirs = AutoConfig.for_model(**json.loads(json.dumps(data))).text_config.to_dict()
    same = (
        *("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
        *("head_dim", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"),
        "sliding_window",
    )
    assert {key: ours.get(key) for key in same} == {key: theirs[key] for key in same}
    written = AutoConfig.for_model(**{**ours, "model_type": data["text_config"]["model_type"]})
    assert written.to_dict()["rope_parameters"] == theirs["rope_parameters"]
