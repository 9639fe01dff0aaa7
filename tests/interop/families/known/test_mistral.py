"""The family `mistral`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "mistral"
CONFIGS = {
    "window": {"sliding_window": 9},
    "no_window_tied": {"sliding_window": None, "tie_word_embeddings": True},
}


class TestMistral(FamilyTests):
    pass
