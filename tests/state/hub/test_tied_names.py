"""Files that hold one of two tied weights, by whichever name."""

import pytest
from safetensors.torch import load_file, save_model

from cairn import ConversionError, DecoderForCausalLM
from tests.interop.families.matrix import SIZES, assert_close, tiny
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits

OPTIONS = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 99}
    | {"bos_token_id": 1, "eos_token_id": 2}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "llama": {**SIZES, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("model_type", OPTIONS)
def test_the_head_alone_is_the_embedding_too_if_the_config_ties_them(model_type, tmp_path):
    theirs = tiny(model_type, tie_word_embeddings=True, **OPTIONS[model_type])
    theirs.save_pretrained(tmp_path)
    save_model(theirs, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in stored
    assert not [name for name in stored if "embed_tokens" in name or "wte" in name]
    ours = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    ids = tokens(2, 9)
    assert_close(logits_of(ours, ids), torch_logits(theirs, ids))
    with pytest.raises(ConversionError, match=r"missing tensor: .*(embed_tokens|wte)"):
        DecoderForCausalLM.from_pretrained(
            tmp_path, auto_shard_model=False, config_kwargs={"tie_word_embeddings": False}
        )
