"""The family `mixtral`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "mixtral"
CONFIGS = {
    "window": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9},
    "one_expert_each": {"num_local_experts": 3, "num_experts_per_tok": 1},
}


class TestMixtral(FamilyTests):
    pass
