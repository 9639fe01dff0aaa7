"""The family `olmo2`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "olmo2"
CONFIGS = {"plain": {}, "biases_tied": {"attention_bias": True, "tie_word_embeddings": True}}


class TestOlmo2(FamilyTests):
    pass
