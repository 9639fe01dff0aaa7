"""GGUF files in llama.cpp: the logits that its library computes of ours, beside its converter's.

`make proofs` builds llama.cpp and runs this. Every family in every form that its config can take
(head, biases, windows, rotary positions) is a cell. Our file has the model's logits; or none is
written, and then llama.cpp's own converter writes none that has them.
"""

import numpy as np
import pytest
from transformers import AutoConfig

from cairn.state.decoder.decoder import DecoderForCausalLM
from cairn.state.errors import ConfigError
from cairn.state.families import get_family
from tests.state.families.llama_cpp_engine import EngineError, converted, logits_of_file
from tests.state.families.matrix import LENGTH, SIZES, VOCABULARY
from tests.state.families.test_gguf import GGUF_CONFIGS, saved
from tests.state.families.test_gguf_export import write
from tests.state.hf_models import tokens, torch_logits

LIMIT, LIMIT_OF_ITS_GELU = 1e-4, 1e-3
"""Of the largest logit. llama.cpp looks gelu up in a table of 16-bit numbers."""
HEAD = SIZES["hidden_size"] // SIZES["num_attention_heads"]
BIASES = ("attention_bias", "bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias")
ORIGINAL = 16
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def longrope(turning, **more):
    return {
        "rope_type": "longrope",
        "long_factor": [1.0 + 0.3 * number for number in range(turning // 2)],
        "short_factor": [1.0 + 0.1 * number for number in range(turning // 2)],
        **more,
    }


def plain(model_type):
    """A family's first config that has what llama.cpp's architecture may have."""
    form, engine = get_family(model_type).form, get_family(model_type).gguf.engine
    options = dict(next(iter(GGUF_CONFIGS[model_type].values())))
    if not engine.wide_heads and "head_dim" in form.options:
        options["head_dim"] = HEAD
    if not engine.windows and "sliding_window" in options:
        options["sliding_window"] = None
    return options


def cells_of(model_type):
    """Names of cells -> options of transformers' config."""
    has, base = AutoConfig.for_model(model_type).to_dict(), plain(model_type)
    cells = dict(GGUF_CONFIGS[model_type])
    if "head_dim" in base:
        cells["wide heads"] = {**base, "head_dim": 12}
    for tied in (True, False):
        cells["tied head" if tied else "own head"] = {**base, "tie_word_embeddings": tied}
    for key in [one for one in BIASES if one in has]:
        for value in (True, False):
            cells[f"{key}={value}"] = {**base, key: value}
    if "sliding_window" in has:
        asked = {"use_sliding_window": True, "max_window_layers": 0}
        asked = {key: value for key, value in asked.items() if key in has}
        for window in (9, 64, None):
            cells[f"sliding_window={window}"] = {**base, **asked, "sliding_window": window}
    if has.get("rope_parameters") is None:
        return cells
    if model_type == "phi3":
        turning = SIZES["hidden_size"] // SIZES["num_attention_heads"]
        for name, more in (("longrope", {}), ("longrope with a factor", {"attention_factor": 1.3})):
            cells[name] = {
                **base,
                "original_max_position_embeddings": ORIGINAL,
                "rope_scaling": longrope(turning, **more),
            }
        return cells
    more = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    turning = base.get("head_dim", SIZES["head_dim"])
    scalings = {
        **SCALINGS,
        "longrope": longrope(turning, **more),
        "longrope with a factor": longrope(turning, **more, attention_factor=1.3),
    }
    return cells | {name: {**base, "rope_scaling": dict(one)} for name, one in scalings.items()}


STILL_REFUSED = {
    ("gpt_oss", "yarn"): "its files are read as YaRN whose bounds are not cut to whole dimensions",
    ("smollm3", "sliding_window=64"): "all layers without windows are written as no layer_types",
}
"""What the converter writes, and we could."""

CELLS = [(family, name) for family in GGUF_CONFIGS for name in cells_of(family)]


@pytest.mark.parametrize(("model_type", "name"), CELLS)
def test_our_file_has_the_models_logits_or_nobodys_has(model_type, name, tmp_path):
    options, ids = cells_of(model_type)[name], tokens(1, LENGTH, VOCABULARY)
    try:
        theirs, folder = saved(tmp_path / "theirs", model_type, **options)
        expected = torch_logits(theirs, ids, np.ones_like(ids))[0]
    except Exception as exc:  # transformers' own, of many types
        pytest.xfail(f"no such model: {type(exc).__name__}: {exc}")
    try:
        model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    except ConfigError as exc:
        pytest.xfail(f"no such model: {exc}")
    limit = LIMIT_OF_ITS_GELU if "gelu" in model.config.hidden_act else LIMIT

    def error(path):
        found = logits_of_file(path, ids[0])
        return np.abs(found - expected).max() / np.abs(expected).max()

    try:
        path, _ = write(tmp_path, model)
    except ConfigError as exc:
        path, refusal = None, str(exc)
    if path is not None:
        assert error(path) <= limit
        return
    try:
        others = error(converted(folder, tmp_path / "theirs.gguf"))
    except EngineError:
        others = np.inf
    if (model_type, name) in STILL_REFUSED:
        assert others <= limit
        pytest.xfail(STILL_REFUSED[model_type, name])
    assert others > limit, f"llama.cpp's converter writes it: {refusal}"
