"""The family `cohere`."""

import numpy as np
import pytest

from cairn import ConfigError, DecoderConfig
from cairn.interop.families.family import get_family
from cairn.interop.families.gguf_form import GGUFContent
from cairn.interop.families.gguf_writing import gguf_model
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "cohere"
EMBEDDING = {"token_embd.weight": (99, 32)}
CONFIGS = {
    "normalised_heads": {"use_qk_norm": True, "logit_scale": 0.8},
    "biases_untied": {"attention_bias": True, "tie_word_embeddings": False},
    "each_its_own_keys": {"num_key_value_heads": None, "layer_norm_eps": 1e-3},
    "sharpened": {
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    },
}


class TestCohere(FamilyTests):
    pass


def read(**keys):
    return DecoderConfig.from_hf({**SIZES, "head_dim": 8, "model_type": MODEL_TYPE, **keys})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"mlp_bias": True}, "mlp_bias=True .nothing reads it"),
        ({"sliding_window": 9}, "sliding_window=9 .nothing reads it"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "default with partial_rotary"),
        ({"logit_scale": -1.0}, "numbers, 0 or more"),
    ],
)
def test_what_transformers_does_not_read_or_we_do_not_do_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"use_qk_norm": True}, r"qk_norm='each_head' \(it would be None\)"),
        ({"num_hidden_layers": 64}, r"qk_norm=None \(it would be 'each_head'\)"),
        ({"attention_bias": True}, r"attention_bias=True \(it would be False\)"),
        ({"logit_scale": 0.0}, r"logit_scale=0\.0 \(it would be 1\.0\)"),
        ({"head_dim": 12}, r"head_dim=12 \(only heads"),
    ],
)
def test_a_gguf_file_of_what_llama_cpp_has_built_in_otherwise_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        gguf_model(read(**keys), EMBEDDING)


def test_a_gguf_file_has_no_head_of_its_own():
    untied = read(tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"found output\.weight"):
        gguf_model(untied, {**EMBEDDING, "output.weight": (99, 32)})


@pytest.mark.parametrize("scale", [{}, {"logit_scale": 0.0}])
def test_logits_of_a_gguf_file_without_a_scale_are_not_scaled(scale):
    said = gguf_model(read(), EMBEDDING).metadata
    said = {key.removeprefix("command-r."): value for key, value in said.items()}
    assert said.pop("logit_scale") == 0.0625
    content = GGUFContent({**said, **scale}, EMBEDDING, lambda name: np.zeros(0))
    assert get_family(MODEL_TYPE).gguf.config(content, MODEL_TYPE)["logit_scale"] == 1.0
