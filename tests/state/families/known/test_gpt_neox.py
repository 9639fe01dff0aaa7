"""The family `gpt_neox`."""

from tests.state.families.matrix import FamilyTests

MODEL_TYPE = "gpt_neox"
WITHOUT = ("head_dim", "num_key_value_heads")
CONFIGS = {
    "parallel": {"hidden_size": 64},
    "one_after_the_other": {
        "hidden_size": 64,
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}


class TestGPTNeoX(FamilyTests):
    pass
