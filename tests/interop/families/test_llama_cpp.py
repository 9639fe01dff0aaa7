"""GGUF files in llama.cpp: the logits that its library computes of ours, beside its converter's.

`make proofs` builds llama.cpp and runs this. Every family in every form that its config can take
(head, biases, windows, rotary positions) is a cell. Our file has the model's logits, and each key
and tensor as llama.cpp's own converter writes it of the same folder, but for `DIFFERENCES`; or none
is written, and then the converter writes none that has the logits.
"""

import json
import math
import os
import random
import re
import shutil
import time
from importlib.metadata import version
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from transformers import AutoConfig

from cairn import ConfigError, DecoderForCausalLM
from cairn.interop.families.family import get_family
from tests.interop.families.its_gelu import LIMIT_OF_ITS_GELU, with_its_gelu
from tests.interop.families.llama_cpp_engine import (
    SOURCE,
    Converter,
    EngineError,
    logits_of_file,
)
from tests.interop.families.matrix import LENGTH, SIZES, VOCABULARY
from tests.interop.families.test_gguf import GGUF_CONFIGS, V3_YARN, saved, sizes_of
from tests.interop.families.test_gguf_export import UNCUT, loadable, write
from tests.interop.families.test_known import checked_rows
from tests.state.hf_models import tokens, torch_logits

LIMIT = 1e-4
"""Of the largest logit."""
HEAD = SIZES["hidden_size"] // SIZES["num_attention_heads"]
FLAGS = (
    *("attention_bias", "bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias"),
    *("qk_layernorm", "use_parallel_residual", "use_qk_norm"),
)
ORIGINAL = 16
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn with bounds": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.25,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn with a factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
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


def turning_of(model_type, options):
    """Dimensions of a head that turn."""
    config = AutoConfig.for_model(model_type, **{**sizes_of(model_type), **options})
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * config.rope_parameters.get("partial_rotary_factor", 1.0))


def plain(model_type):
    """A family's first config that has what llama.cpp's architecture may have."""
    form, engine = get_family(model_type).form, get_family(model_type).gguf.engine
    options = loadable(model_type)
    if model_type == "gemma3_text":
        options["num_hidden_layers"] = 6  # the first without a window, whose positions are scaled
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
    for key in [one for one in FLAGS if one in has]:
        for value in (True, False):
            cells[f"{key}={value}"] = {**base, key: value}
    if "sliding_window" in has:
        asked = {"use_sliding_window": True, "max_window_layers": 0}
        asked = {key: value for key, value in asked.items() if key in has}
        for window in (9, 64, None):
            cells[f"sliding_window={window}"] = {**base, **asked, "sliding_window": window}
    if model_type.startswith("deepseek"):
        cells["two mscales"] = {**base, "rope_parameters": V3_YARN}
        cells["q_lora_rank=None"] = {**base, "q_lora_rank": None}
        cells["rms_norm_eps=0.1"] = {**base, "rms_norm_eps": 0.1}
    if has.get("rope_parameters") is None:
        return cells
    turning = turning_of(model_type, base)
    if model_type == "phi3":
        for name, more in (("longrope", {}), ("longrope with a factor", {"attention_factor": 1.3})):
            cells[name] = {
                **base,
                "original_max_position_embeddings": ORIGINAL,
                "rope_scaling": longrope(turning, **more),
            }
        return cells
    more = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    scalings = {
        **SCALINGS,
        "longrope": longrope(turning, **more),
        "longrope with a factor": longrope(turning, **more, attention_factor=1.3),
    }
    if model_type == "gpt_oss":
        cells["truncate=False"] = {**base, **UNCUT}
    return cells | {name: {**base, "rope_scaling": dict(one)} for name, one in scalings.items()}


CELLS = [(family, name) for family in GGUF_CONFIGS for name in cells_of(family)]


class Difference(NamedTuple):
    """What is not in our file as the converter writes it of the same folder.

    Attributes:
        families: where it is so.
        name: a pattern, of a tensor or a key without its architecture.
        who: has it: "ours", "theirs" or "both".
        why: it is so.
    """

    families: tuple[str, ...]
    name: str
    who: str
    why: str


_WITH_LONG_FACTORS = ("granite", "llama", "mistral", "mixtral")
_NO_SCALING = "the converter says no scaling: its file has other logits than the model"
_SAME = "it is what llama.cpp takes where no key says it"
DIFFERENCES = (
    Difference(tuple(GGUF_CONFIGS), r"general\.(name|size_label)", "theirs", "texts for people"),
    Difference(("gpt_neox",), r"general\.file_type", "ours", "the converter forgets it"),
    Difference(tuple(GGUF_CONFIGS), r"rope\.dimension_count", "ours", _SAME),
    Difference(
        ("falcon", "gemma", "gemma2", "gpt_neox", "stablelm"), r"rope\.freq_base", "ours", _SAME
    ),
    Difference(
        ("falcon", "gpt2", "gpt_neox", "granite", "phi3", "stablelm"),
        r"attention\.(head_count_kv|key_length|value_length)",
        "ours",
        _SAME,
    ),
    Difference(
        ("gemma3_text", "gpt_oss"),
        r"attention\.sliding_window_pattern",
        "ours",
        "models have other patterns than the one that llama.cpp takes where no key says it",
    ),
    Difference(("cohere", "cohere2"), r"rope\.scaling\.type", "theirs", "none, which is no key"),
    Difference(("cohere", "cohere2"), r"rope\.scaling\.type", "both", _NO_SCALING),
    Difference(
        ("falcon", "gemma", "gemma2", "gpt_neox", "stablelm"),
        r"rope\.scaling\.(type|factor|original_context_length|yarn_beta_fast|yarn_beta_slow)",
        "ours",
        _NO_SCALING,
    ),
    Difference(
        _WITH_LONG_FACTORS,
        r"rope_factors_(long|short)\.weight|rope\.scaling\.(attn_factor|original_context_length)",
        "ours",
        "the converter writes long factors of Phi-3 alone, elsewhere other logits",
    ),
    Difference(("falcon",), "context_length", "both", "2048 for the converter, whatever is said"),
    Difference(("granite",), r"rope\.dimension_count", "both", "the converter reads no head_dim"),
    Difference(
        ("gpt_neox", "gpt_oss", "olmo2", "olmo3", "qwen2_moe", "stablelm"),
        r"output\.weight",
        "ours",
        "of a tied head the converter writes none, and llama.cpp does not load the file",
    ),
    Difference(
        ("glm4_moe",),
        "block_count",
        "both",
        "the converter counts layers that predict further tokens, which folders of ours lack",
    ),
    Difference(("glm4_moe",), "nextn_predict_layers", "theirs", "and says how many they are"),
    Difference(
        ("gpt_oss",),
        r"rope\.scaling\.yarn_truncate",
        "ours",
        "for our reader: llama.cpp cuts the bounds of YaRN always, published models never do",
    ),
    Difference(
        ("phi3",),
        r"rope\.scaling\.type",
        "ours",
        "llama.cpp loads long factors of the other architectures by it",
    ),
    Difference(
        ("phi3",),
        r"rope\.scaling\.attn_factor",
        "both",
        "the converter reckons it, whatever attention_factor says",
    ),
    Difference(
        ("phi3",),
        r"rope\.scaling\.original_context_length",
        "both",
        "without a scaling it changes nothing",
    ),
    Difference(
        ("phi3",),
        r"attention\.sliding_window",
        "both",
        "llama.cpp has no windows there: one that no text exceeds is none",
    ),
)


def content(path):
    """Metadata as type and value, tensors as shape, type and values, by name."""
    reader = gguf.GGUFReader(path)
    metadata = {
        key: ([kind.name for kind in field.types[:2]], field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = {
        tensor.name: (tuple(tensor.shape), tensor.tensor_type.name, tensor.data)
        for tensor in reader.tensors
    }
    return metadata, tensors


def alike(ours, theirs):
    if not isinstance(ours[-1], np.ndarray):
        return ours == theirs
    return ours[:-1] == theirs[:-1] and np.allclose(ours[-1], theirs[-1], rtol=1e-6, atol=1e-6)


def differences(ours, theirs):
    """Names of what only one file has, or both in two ways, and who has it."""
    for mine, other in zip(content(ours), content(theirs), strict=True):
        for name in sorted(mine.keys() | other.keys()):
            if name not in other:
                yield name, "ours"
            elif name not in mine:
                yield name, "theirs"
            elif not alike(mine[name], other[name]):
                yield name, "both"


@pytest.fixture(scope="module")
def converter():
    """llama.cpp's, if it is built: without it nothing here is proved."""
    assert version("llama_cpp_python")
    assert SOURCE.is_dir(), f"{SOURCE} is missing; `make proofs` builds llama.cpp"
    one = Converter()
    yield one
    one.close()


class Outcomes(NamedTuple):
    """What cells came to.

    Attributes:
        cells: cell -> "no model", "refused", "written", or "compared" with the converter's file.
        reasons: rows of `DIFFERENCES` that were met.
    """

    cells: dict[tuple[str, str], str]
    reasons: set[Difference]


@pytest.fixture(scope="module")
def outcomes():
    """After all cells the table of differences has none left over, and the page says the same."""
    those = Outcomes({}, set())
    yield those
    if those.cells.keys() == set(CELLS):
        assert those.reasons == set(DIFFERENCES)
        assert checked_rows() == {
            model_type: row(those.cells, model_type) for model_type in GGUF_CONFIGS
        }


def row(cells, model_type):
    """A family's row in the page's table: how many cells, and which of some have no file."""
    of_family = {name: state for (family, name), state in cells.items() if family == model_type}
    states = list(of_family.values())
    compared = states.count("compared")
    written = compared + states.count("written")
    refused = [name for name, state in of_family.items() if written and state == "refused"]
    return (
        len(states) - states.count("no model"),
        written,
        compared,
        sorted({*refused} - GGUF_CONFIGS[model_type].keys()),
    )


def as_published(folder, model_type):
    """The folder with what published ones have and transformers writes no more."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if model_type == "gpt2":
        config["n_ctx"] = config["n_positions"]
    if model_type.startswith("deepseek"):
        config["scoring_func"] = "sigmoid" if model_type == "deepseek_v3" else "softmax"
    if model_type in ("cohere2", "gpt_neox"):
        config["rotary_pct"] = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    path.write_text(json.dumps(config))
    if model_type == "gemma3_text":  # of which its converter counts the tokens
        vocabulary = {f"{number}": number for number in range(VOCABULARY)}
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def relative_error(logits, expected):
    """Largest difference, as a part of the largest logit."""
    return np.abs(logits - expected).max() / np.abs(expected).max()


def error_of(path, ids, expected):
    return relative_error(logits_of_file(path, ids[0]), expected)


@pytest.mark.parametrize(("model_type", "name"), CELLS)
def test_our_file_is_the_model_and_as_the_converter_writes_it_or_nobody_has_one(
    model_type, name, converter, outcomes, tmp_path
):
    outcomes.cells[model_type, name] = "no model"
    options, ids = cells_of(model_type)[name], tokens(1, LENGTH, VOCABULARY)
    try:
        theirs, folder = saved(tmp_path / "theirs", model_type, **options)
        expected = torch_logits(with_its_gelu(theirs), ids, np.ones_like(ids))[0]
    except Exception as exc:  # transformers' own, of many types
        pytest.xfail(f"no such model: {type(exc).__name__}: {exc}")
    try:
        model = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    except ConfigError as exc:
        pytest.xfail(f"no such model: {exc}")
    outcomes.cells[model_type, name] = "refused"
    limit = LIMIT_OF_ITS_GELU if "gelu" in model.config.hidden_act else LIMIT

    try:
        path, _ = write(tmp_path, model)
    except ConfigError as exc:
        path, refusal = None, str(exc)
    try:
        others = converter.convert(as_published(folder, model_type), tmp_path / "theirs.gguf")
    except EngineError:
        others = None
    if path is None:
        try:
            distance = np.inf if others is None else error_of(others, ids, expected)
        except EngineError:
            distance = np.inf
        assert distance > limit, f"llama.cpp's converter writes it: {refusal}"
        return
    assert error_of(path, ids, expected) <= limit
    outcomes.cells[model_type, name] = "written" if others is None else "compared"
    architecture = get_family(model_type).gguf.architecture
    unexplained = []
    for found, who in [] if others is None else differences(path, others):
        short = found.removeprefix(f"{architecture}.")
        rows = [
            one
            for one in DIFFERENCES
            if model_type in one.families and who == one.who and re.fullmatch(one.name, short)
        ]
        outcomes.reasons.update(rows)
        if not rows:
            both = [part.get(found) for part in (*content(path), *content(others))]
            unexplained.append((found, who, both))
    assert not unexplained


FUZZ_SECONDS = float(os.environ.get("CAIRN_FUZZ_SECONDS", "60"))
SIZES_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
KEPT = re.compile(
    # llama.cpp takes longrope's long factors by the size of its context, not by the text's length.
    r".*_token_id|vocab_size|(original_)?max_position_embeddings|n_positions|transformers_version"
)


def random_options(draws, model_type):
    """Options of a cell, of which some are replaced."""
    options = dict(draws.choice(list(cells_of(model_type).values())))
    values = {**AutoConfig.for_model(model_type).to_dict(), **options}
    keys = sorted(key for key in values if not KEPT.fullmatch(key))
    for key in draws.sample(keys, draws.randint(1, 4)):
        match values[key]:
            case bool():
                options[key] = not values[key]
            case int() if "layer" in key:  # errors of its gelu table add up from layer to layer
                options[key] = draws.choice(SIZES_TRIED[:5])
            case int():
                options[key] = draws.choice(SIZES_TRIED)
            case float():
                options[key] = values[key] * math.exp(draws.uniform(-2, 2)) or draws.random()
            case str() if "act" in key:
                options[key] = draws.choice(ACTIVATIONS)
            case dict() if "rope_type" in values[key]:
                scaled = dict(values[key])
                scaled |= draws.choice(list(SCALINGS.values())) if draws.random() < 0.5 else {}
                if "rope_theta" in scaled:
                    scaled["rope_theta"] = 10 ** draws.uniform(1, 7)
                options[key] = scaled
    return options


@pytest.mark.timeout(FUZZ_SECONDS + 300)
def test_a_random_model_is_written_as_it_is_or_refused(converter, tmp_path):
    seed, ids = random.randrange(1 << 30), tokens(1, LENGTH, VOCABULARY)
    draws, end = random.Random(seed), time.monotonic() + FUZZ_SECONDS
    wrong, outcomes = [], {"no model": 0, "refused": 0, "written": 0}
    for number in range(1 << 30):
        if time.monotonic() > end:
            break
        model_type = draws.choice(list(GGUF_CONFIGS))
        options, folder = random_options(draws, model_type), tmp_path / f"{number}"
        try:
            theirs, saved_at = saved(folder, model_type, **options)
            rounded = torch_logits(with_its_gelu(theirs), ids, np.ones_like(ids))[0]
            theirs.set_experts_implementation("eager")  # no other computes in float64
            expected = torch_logits(theirs.double(), ids, np.ones_like(ids))[0]
            model = DecoderForCausalLM.from_pretrained(saved_at, auto_shard_model=False)
        except Exception:  # of many types: transformers', torch's, and our refusals
            outcomes["no model"] += 1
            continue
        try:
            path, _ = write(folder, model)
        except ConfigError:
            outcomes["refused"] += 1
            continue
        outcomes["written"] += 1
        limit = LIMIT_OF_ITS_GELU if "gelu" in model.config.hidden_act else LIMIT
        try:
            error = error_of(path, ids, expected)
        except EngineError as exc:
            wrong.append((model_type, options, f"llama.cpp does not load it: {exc}"))
            continue
        # Some random models are so ill-conditioned that float32 itself is far from float64.
        limit = max(limit, 16 * relative_error(rounded, expected))
        if not error <= limit:
            wrong.append((model_type, options, f"{error:.2g} of the largest logit"))
        shutil.rmtree(folder)
    print(f"seed {seed}: {outcomes}, {len(wrong)} wrong")
    assert outcomes["written"]
    assert not wrong
