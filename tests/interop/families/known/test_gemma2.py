"""The family `gemma2`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "gemma2"
CONFIGS = {
    "windows": {"sliding_window": 9, "query_pre_attn_scalar": 20},
    "no_caps": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "num_hidden_layers": 4,
    },
}


class TestGemma2(FamilyTests):
    pass
