"""The family `granite`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "granite"
SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
}
CONFIGS = {"scaled": SCALES, "tied": {**SCALES, "tie_word_embeddings": True, "mlp_bias": True}}


class TestGranite(FamilyTests):
    pass
