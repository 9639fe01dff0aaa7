"""Every key of every family's config.json, changed by itself, beside `transformers`.

A changed file is refused, or it means what it means to `transformers`: the model that it makes of
the file, and the one that it makes of what we write having read it, compute the same. That ours
computes what is written is what the family's own tests hold.

`make test` takes a seeded sample of the variants, `make families` all of them.
"""

import copy
import importlib
import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from cairn import ConfigError, DecoderConfig
from cairn.interop import registry
from cairn.interop.families.family import get_family
from tests.interop.families.matrix import LIMIT, SIZES, WHOLE, options_of, padded
from tests.interop.seams import HARMLESS_KEYS, KINDS

ABSENT = object()
SAMPLE = 10
ALWAYS = [None, "text", True, False, 0, 1, -1, 2, 0.5, [], {}]
ROPE_KEYS = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor"),
    *("long_factor", "low_freq_factor", "mscale", "mscale_all_dim"),
    *("original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type"),
    *("short_factor", "truncate", "type", "typo"),
)
ROPE_TYPES = ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"]
EVERYWHERE = (
    *("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "mlp_bias"),
    *("partial_rotary_factor", "query_pre_attn_scalar", "rope_scaling", "rope_theta"),
)
LARGE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_embd", "n_inner")


def other_values(value):
    """What stands in the place of a value: other ones of its kind, and of all others."""
    own = []
    match value:
        case bool():
            own = [not value, str(value).lower()]
        case int():
            own = [value + 1, 2 * value, value // 2, float(value), value + 0.5, str(value)]
        case float():
            own = [2 * value, -value, value / 2, int(value), str(value), math.nan]
        case str():
            own = ["gelu", "silu", "relu", "gelu_new", "quick_gelu", value.upper()]
        case list():
            own = [value[::-1], value[:-1], value + value[:1]]
    others = {(type(one), repr(one)): one for one in [ABSENT, *ALWAYS, *own]}
    return [one for kind, one in others.items() if kind != (type(value), repr(value))]


def changed(data, path, value):
    """A copy with one value changed; None if there is nothing to leave out."""
    copied = copy.deepcopy(data)
    place = copied
    for step in path[:-1]:
        place = place[step]
    if value is not ABSENT:
        place[path[-1]] = value
    elif place.pop(path[-1], ABSENT) is ABSENT:
        return None
    return copied


def variants(data):
    """Pairs of a path and a value, of everything that is tried on a file."""
    known = get_family(data["model_type"]).known_keys
    keys = {*data, *known, *EVERYWHERE} - HARMLESS_KEYS - {"architectures", "model_type"}
    for key in sorted(key for key in keys if not key.endswith("_token_id")):
        value = data.get(key, ABSENT)
        yield from (((key,), other) for other in other_values(value))
        if value is not None and value is not ABSENT:
            yield (f"{key}s",), value
        if key not in ("rope_parameters", "rope_scaling") or not isinstance(value, dict):
            continue
        nested = [name for name in value if isinstance(value[name], dict)]
        for path in [(key, name) for name in nested] or [(key,)]:
            inner = value if len(path) == 1 else value[path[1]]
            for name in ROPE_KEYS:
                others = other_values(inner.get(name, ABSENT))
                others += ROPE_TYPES if name in ("type", "rope_type") else []
                yield from (((*path, name), other) for other in others)


def as_transformers_4_wrote_it(data):
    """The same file with older keys, and without nulls."""
    older = {key: value for key, value in data.items() if value is not None}
    rope = older.pop("rope_parameters", None)
    if rope is None:
        return older
    if "full_attention" in rope:
        if "rope_local_base_freq" in get_family(data["model_type"]).known_keys:
            older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    older["rope_theta"] = rope["rope_theta"]
    fraction = get_family(data["model_type"]).form.rotary_fraction
    if fraction is not None:
        older[fraction[0]] = rope.get("partial_rotary_factor", 1.0)
    if rope["rope_type"] != "default":
        beside = ("rope_theta", "partial_rotary_factor")
        older["rope_scaling"] = {key: one for key, one in rope.items() if key not in beside}
    return older


class Theirs:
    """What `transformers` makes of files: a kind of outcome, and logits if there are some."""

    def __init__(self):
        self.ids, self.mask = padded()
        self.made = {}

    def config(self, data):
        known = {key: one for key, one in data.items() if key not in ("architectures", "auto_map")}
        known = copy.deepcopy(known)
        model_type = known.pop("model_type")
        return AutoConfig.for_model(model_type, attn_implementation="eager", **known)

    def outcome(self, data):
        try:
            config = self.config(data)
        except Exception:  # of many kinds, which say of the file that it is wrong
            return "refused", None
        text = config.to_json_string(use_diff=False)
        if text not in self.made:
            self.made[text] = self._computed(config, json.loads(text))
        return self.made[text]

    def _computed(self, config, written):
        sizes = (written.get(key) for key in LARGE)
        if any(isinstance(size, int) and size > 1000 for size in sizes):
            return "large", None
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config).eval()
            named = [one for name, one in model.named_buffers() if name.endswith("correction_bias")]
            torch.manual_seed(1)
            with torch.no_grad():
                for values in (*model.parameters(), *named):
                    values.copy_(torch.randn(values.shape) * 0.3)
                ids, mask = torch.tensor(self.ids).long(), torch.tensor(self.mask).long()
                logits = model(ids, attention_mask=mask, use_cache=False).logits.numpy()
        except Exception:  # likewise
            return "fails", None
        return "computes", logits * self.mask[..., None]


def is_same(one, two):
    if one[1] is None or two[1] is None:
        return one[0] == two[0]
    limit = LIMIT * np.nanmax(np.abs(one[1]), initial=1e-9)
    return one[1].shape == two[1].shape and np.allclose(one[1], two[1], 0, limit, equal_nan=True)


def means_more_here(theirs, data, path, value, ours):
    """Whether a file that `transformers` can't run has a meaning that nothing contradicts.

    No key, and a null, are what this family takes then; a whole number is the same with a point.
    """
    if value is None or value is ABSENT:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return False
    other = changed(data, path, float(value) if isinstance(value, int) else int(value))
    return theirs.outcome(other)[0] == "computes" and DecoderConfig.from_hf(other) == ours


def problem(theirs, data, path, value):
    """What is wrong with our reading of a variant, if anything is."""
    file = changed(data, path, value)
    if file is None:
        return None
    told = f"{'/'.join(path)}={'absent' if value is ABSENT else repr(value)}"
    try:
        ours = DecoderConfig.from_hf(file)
    except ConfigError as exc:
        # Numbers that don't go together are named as options; the rest by the key.
        follows = "a consistent configuration" in str(exc) or "the keys" in str(exc)
        return (
            None if path[-1] in str(exc) or follows else f"{told}: refused without its name: {exc}"
        )
    expected, found = theirs.outcome(file), theirs.outcome(ours.to_hf())
    if is_same(expected, found):
        return None
    if expected[0] != "computes" and means_more_here(theirs, file, path, value, ours):
        return None
    return f"{told}: it {expected[0]} in transformers, what we make of it {found[0]}"


def bases(name):
    """Files of a family: of each of its configs, in both forms."""
    architecture = get_family(name).architecture
    try:
        family = importlib.import_module(f"tests.interop.families.known.test_{name}")
        configs = [options_of(family, config) for config in family.CONFIGS]
    except AttributeError:
        configs = [SIZES]
    for options in configs:
        written = AutoConfig.for_model(name, **options).to_json_string(use_diff=False)
        file = {**json.loads(written), "model_type": name, "architectures": [architecture]}
        file = {key: one for key, one in file.items() if key not in ("dtype", "torch_dtype")}
        yield from (file, as_transformers_4_wrote_it(file))


@pytest.mark.filterwarnings("ignore:.*the decoder has none of it")
@pytest.mark.parametrize("name", registry.known_families())
def test_a_changed_key_is_refused_or_means_what_it_means_to_transformers(name):
    logging.set_verbosity_error()
    theirs, drawn = Theirs(), random.Random(name)
    problems = []
    for number, data in enumerate(bases(name)):
        ours = DecoderConfig.from_hf(data)
        assert is_same(theirs.outcome(data), theirs.outcome(ours.to_hf()))
        tried = list(variants(data))
        first = number < 2
        if not (WHOLE and first):
            tried = drawn.sample(tried, SAMPLE * (10 if WHOLE else 1) // (1 if first else 2))
        problems += [problem(theirs, data, path, value) for path, value in tried]
        if not WHOLE and not first:
            break
    assert not [one for one in problems if one]


@pytest.mark.parametrize("name", registry.known_families())
def test_every_key_that_is_read_has_a_kind(name):
    objects = {"quantization_config", "rope_parameters", "rope_scaling"}
    kinds = {*KINDS, *get_family(name).form.kinds}
    assert get_family(name).known_keys - kinds <= objects | {"architectures", "model_type"}
