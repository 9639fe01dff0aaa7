"""The family `gemma`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "gemma"
CONFIGS = {"tied": {}, "untied": {"tie_word_embeddings": False, "num_key_value_heads": 1}}


class TestGemma(FamilyTests):
    pass
