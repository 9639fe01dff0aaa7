"""The Llama family against transformers: logits, and tensors there and back."""

import itertools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cairn import ConfigError, ConversionError, DecoderForCausalLM, EasyDeLState
from tests.interop.families.matrix import WHOLE
from tests.state.forward import logits_of
from tests.state.hf_models import LLAMA3_ROPE, save, tiny_llama, tokens, torch_logits

VARIANTS = {
    "grouped_heads": {},
    "one_head_each": {"num_key_value_heads": 4, "head_dim": 8},
    "multi_query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "rope_llama3": {"rope_parameters": LLAMA3_ROPE},
    "rope_linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    },
}

SOME = ("multi_query", "mlp_bias", "rope_llama3")
"""Those of `make test`; tied heads and biases of attention are in `known/` and in GGUF files."""


def state_dict_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return dict(itertools.chain.from_iterable(load_file(file).items() for file in files))


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS if WHOLE else SOME)
def test_logits_and_tensors_equal_transformers(variant, tmp_path):
    theirs = tiny_llama(**VARIANTS[variant])
    model = DecoderForCausalLM.from_pretrained(
        save(theirs, tmp_path / "theirs"), auto_shard_model=False
    )
    ids = tokens(2, 48)
    mask = np.ones_like(ids)
    mask[1, :9] = 0
    expected = torch_logits(theirs, ids, mask)
    found = logits_of(model, ids, attention_mask=mask)
    limit = 1e-4 * np.abs(expected).max()
    # Rows that attend to nothing (padding) hold no meaning in either.
    assert np.abs(found - expected)[mask.astype(bool)].max() <= limit

    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    assert_same_tensors(state_dict_of(tmp_path / "ours"), state_dict_of(tmp_path / "theirs"))
    again = DecoderForCausalLM.from_pretrained(tmp_path / "ours", auto_shard_model=False)
    assert again.config == model.config


def test_export_loads_in_transformers_with_the_same_logits(tmp_path):
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE, attention_bias=True)
    model = DecoderForCausalLM.from_pretrained(
        save(theirs, tmp_path / "theirs"), auto_shard_model=False
    )
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    data = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert None not in data.values()
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert again.config.rope_parameters == theirs.config.rope_parameters
    ids = tokens(2, 40)
    np.testing.assert_array_equal(torch_logits(again.eval(), ids), torch_logits(theirs, ids))


@pytest.mark.parametrize("tied", [False, True])
def test_to_torch_fills_transformers_strictly_and_keeps_bfloat16(tied, tmp_path):
    theirs = tiny_llama(tie_word_embeddings=tied).to(torch.bfloat16)
    folder = save(theirs, tmp_path)
    model = DecoderForCausalLM.from_pretrained(folder, param_dtype=None, auto_shard_model=False)
    tensors = model.to_torch()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_same_tensors(tensors, dict(theirs.state_dict()))
    other = tiny_llama(seed=1, tie_word_embeddings=tied).to(torch.bfloat16)
    other.load_state_dict(tensors, strict=True)
    back = model.to_pytorch()
    assert back.dtype == torch.bfloat16
    # Read again: `theirs.to(bfloat16)` has rounded its rotary buffers as well.
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = tokens(1, 12)
    np.testing.assert_array_equal(torch_logits(back, ids), torch_logits(reference, ids))


def test_dtypes_are_honoured(tmp_path):
    folder = save(tiny_llama(), tmp_path)
    model = DecoderForCausalLM.from_pretrained(
        folder, dtype=jnp.bfloat16, param_dtype=ml_dtypes.bfloat16, auto_shard_model=False
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    assert logits_of(model, tokens(1, 4)).dtype == jnp.bfloat16
    wide = DecoderForCausalLM.from_pretrained(folder, dtype="bfloat16", auto_shard_model=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.params)} == {jnp.dtype(jnp.float32)}
    assert logits_of(wide, tokens(1, 4)).dtype == jnp.bfloat16


def test_an_old_file_with_a_tied_copy_and_buffers_loads(tmp_path):
    theirs = tiny_llama(tie_word_embeddings=True)
    folder = save(theirs, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    ids = tokens(1, 8)
    expected = torch_logits(theirs, ids)
    found = logits_of(model, ids)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def with_another_head(folder, change):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_loaded_untied(tmp_path, monkeypatch):
    monkeypatch.setattr("cairn.interop.weights.weight_source._COMPARED_ELEMENTS", 100)
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path)

    def last_changed(weight):
        weight[-1, -1] += 1e-3
        return weight

    with_another_head(folder, last_changed)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from model\.embed_tokens"):
        model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    assert not model.config.tie_word_embeddings
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    ids = tokens(1, 8)
    expected, found = torch_logits(theirs, ids), logits_of(model, ids)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    with pytest.warns(UserWarning, match="loaded as two weights"):
        state = EasyDeLState.load_state(folder, verbose=False)
    assert state.model.config.to_hf()["tie_word_embeddings"] is False
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=True.*lm_head\.weight differs"):
        DecoderForCausalLM.from_pretrained(
            folder, config_kwargs={"tie_word_embeddings": True}, auto_shard_model=False
        )
    untied = DecoderForCausalLM.from_pretrained(
        folder, config_kwargs={"tie_word_embeddings": False}, auto_shard_model=False
    )
    np.testing.assert_array_equal(logits_of(untied, ids), found)


def test_a_tied_copy_in_a_wider_dtype_is_the_same(tmp_path):
    folder = save(tiny_llama(tie_word_embeddings=True).to(torch.bfloat16), tmp_path)
    with_another_head(folder, lambda weight: weight.float())
    assert DecoderForCausalLM.from_pretrained(
        folder, auto_shard_model=False
    ).config.tie_word_embeddings


def test_a_tied_head_of_another_shape_is_named(tmp_path):
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path)
    with_another_head(folder, lambda weight: weight[:-1].contiguous())
    differs = pytest.warns(UserWarning, match="lm_head")
    with differs, pytest.raises(ConversionError, match="lm_head"):
        DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)


def test_missing_unexpected_and_misshaped_tensors_are_all_named(tmp_path):
    folder = save(tiny_llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError) as caught:
        DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    text = "\n".join(caught.value.problems)
    assert "missing tensor: model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected tensor: model.layers.0.extra.weight (2,)" in text
    assert "shape of model.norm.weight: expected (32,)" in text
    assert len(caught.value.problems) == 3
