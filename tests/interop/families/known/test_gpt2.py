"""The family `gpt2`."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cairn import ArgumentError, DecoderForCausalLM
from tests.interop.families.matrix import FamilyTests, assert_close, padded, tensors_of, tiny
from tests.state.forward import logits_of
from tests.state.hf_models import torch_logits

MODEL_TYPE = "gpt2"
WITHOUT = (
    *("head_dim", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
)
SIZES = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64}
NONE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "tied": {**SIZES, **NONE},
    "inner_untied": {**SIZES, **NONE, "n_inner": 52, "tie_word_embeddings": False},
    "unscaled": {**SIZES, **NONE, "scale_attn_weights": False},
}


class TestGPT2(FamilyTests):
    pass


def test_the_base_models_files_load_as_the_hub_has_them(tmp_path):
    theirs = tiny(MODEL_TYPE, **CONFIGS["tied"])
    theirs.save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    base = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    base["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(base, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    ids, _ = padded()
    assert_close(logits_of(ours, ids), torch_logits(theirs, ids))


def test_dropout_is_told_and_not_applied(tmp_path):
    tiny(MODEL_TYPE, **{**CONFIGS["tied"], "resid_pdrop": 0.1}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"resid_pdrop=0\.1: the decoder has none of it"):
        ours = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    with pytest.warns(UserWarning, match="resid_pdrop"):
        assert ours.config.to_hf()["resid_pdrop"] == 0.1


def test_more_tokens_than_learned_positions_are_refused(tmp_path):
    tiny(MODEL_TYPE, **CONFIGS["tied"]).save_pretrained(tmp_path)
    ours = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    with pytest.raises(ArgumentError, match="at most 64 tokens"):
        ours(np.zeros((1, 65), np.int32))
