"""The family `glm4_moe`."""

import pytest

from cairn import ConfigError, DecoderConfig
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "glm4_moe"
EXPERTS = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "normalised_heads": {**EXPERTS, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "groups_biases": {
        **EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": True,
    },
    "not_normalised": {
        **EXPERTS,
        "norm_topk_prob": False,
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 1e6,
            "factor": 2.0,
            "partial_rotary_factor": 0.5,
        },
    },
}


class TestGlm4Moe(FamilyTests):
    pass


def read(**keys):
    return DecoderConfig.from_hf({**SIZES, **EXPERTS, "model_type": MODEL_TYPE, **keys})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' .nothing reads it"),
        ({"mlp_bias": True}, "mlp_bias=True .nothing reads it"),
        ({"n_group": 3}, "group"),
        ({"use_qk_norm": "yes"}, "use_qk_norm='yes'"),
    ],
)
def test_what_transformers_does_not_read_or_we_do_not_do_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)
