"""The family `stablelm`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "stablelm"
WITHOUT = ("head_dim",)
CONFIGS = {
    "normalised_heads": {"qk_layernorm": True, "use_qkv_bias": True},
    "parallel": {"use_parallel_residual": True, "tie_word_embeddings": True},
}


class TestStableLm(FamilyTests):
    pass
