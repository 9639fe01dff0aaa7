"""The family `falcon`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "falcon"
WITHOUT = ("head_dim", "num_key_value_heads", "intermediate_size")
NONE = {"ffn_hidden_size": 52, "hidden_size": 48}
CONFIGS = {
    "newer": {**NONE, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "one_key": {**NONE},
    "one_after_the_other": {**NONE, "parallel_attn": False, "multi_query": False},
    "newer_one_norm": {
        **NONE,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
}


class TestFalcon(FamilyTests):
    pass
