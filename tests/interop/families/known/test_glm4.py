"""The family `glm4`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "glm4"
CONFIGS = {"biases": {}, "tied": {"attention_bias": False, "tie_word_embeddings": True}}


class TestGlm4(FamilyTests):
    pass
