"""The family `llama`."""

import numpy as np
import pytest
import torch

from cairn import DecoderForCausalLM
from tests.interop.families.matrix import SIZES, VOCABULARY, WHOLE, FamilyTests, assert_close, tiny
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


MODEL_TYPE = "llama"
CONFIGS = {
    "llama3": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "linear": rope("linear", factor=3.0),
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
}


class TestLlama(FamilyTests):
    pass


@pytest.mark.parametrize("length", [16, 24, 25, 40] if WHOLE else [24, 25])
def test_dynamic_angles_follow_the_length_of_the_sequence(tmp_path, length):
    """Not of the matrix: theirs keep the angles of the longest sequence that they have seen."""
    options = rope("dynamic", factor=2.0) | {"max_position_embeddings": 24}
    theirs = tiny("llama", **{**SIZES, **options})
    theirs.save_pretrained(tmp_path)
    ids = tokens(2, length, VOCABULARY)
    expected = torch_logits(theirs, ids, np.ones_like(ids))
    assert_close(
        logits_of(DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False), ids),
        expected,
    )


def test_dynamic_positions_generate_beyond_their_length_as_theirs_do(tmp_path):
    """With each new token the angles are others; keys that are kept stay as they were turned."""
    options = rope("dynamic", factor=2.0) | {"max_position_embeddings": 24}
    theirs = tiny("llama", **{**SIZES, **options, "eos_token_id": None})
    theirs.save_pretrained(tmp_path)
    ours = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    ids = tokens(2, 20, VOCABULARY)
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    given = {"max_new_tokens": 30, "do_sample": False}
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long(), **given
        )
    assert expected.shape == (2, 50)
    np.testing.assert_array_equal(ours.generate(ids, mask, **given).sequences, expected.numpy())
