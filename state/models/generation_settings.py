"""Settings of generation: those of generation_config.json, overridden by those of a call.

Each setting either takes effect, or can't change the result, or is refused. Names, meaning and
neutral values are those of transformers' `GenerationConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Final

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError, with_nearest
from cairn.interop.weights.files import GENERATION_FILE
from cairn.interop.weights.source_folder import parse_json
from cairn.state.models.generation_arguments import config_value

SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p")
"""Settings that take effect if tokens are drawn at random."""

SETTINGS: Final = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens"),
        *("do_sample", *SAMPLING),
        *("repetition_penalty", "no_repeat_ngram_size", "sequence_bias", "bad_words_ids"),
        *("suppress_tokens", "begin_suppress_tokens", "remove_invalid_values"),
        *("forced_bos_token_id", "forced_eos_token_id", "eos_token_id", "pad_token_id"),
    }
)
"""Settings that take effect."""

_ONLY_RANDOM: Final[Mapping[str, Any]] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "typical_p": 1.0,
}
"""Settings that are refused, unless they have this value or tokens are not drawn at random."""

_NEUTRAL: Final[Mapping[str, Any]] = {
    "assistant_ensemble_weight": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1,
    "is_assistant": False,
    "max_time": None,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
    **_ONLY_RANDOM,
}
"""Settings that are refused unless they have this value."""

_HARMLESS: Final = frozenset(
    {
        # used by beam search only
        *("early_stopping", "length_penalty"),
        # about speed and memory
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
        *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config"),
        *("disable_compile", "low_memory", "max_cache_len", "max_matching_ngram_size"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "prefill_chunk_size"),
        *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_cache"),
        "use_mtp",
        # about what else transformers returns; a normalization that changes no choice
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
        *("renormalize_logits", "return_dict_in_generate"),
        # about the file itself
        *("transformers_version", "trust_remote_code"),
    }
)
"""Settings in a file that are ignored, as they change no token."""

_LOSSY_CACHE: Final = ("cache_implementation", "quantized")
"""Name and value of the only cache setting that changes tokens."""

_USUAL_TOP_K: Final = 50
"""Default `top_k` of transformers, where settings leave it out."""


def merged_settings(
    config: Any, generation_config: Mapping[str, Any] | None, call: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that take effect, by name; those of the call override the model's.

    Args:
        config: configuration of the model, with its generation_config.json, or with settings of
            generation in its config.json.
        generation_config: settings that replace the model's; None to use the model's.
        call: settings of the call; None as a value means that it is not set.

    Raises:
        ConversionError: generation_config.json holds no JSON object.
        ArgumentError: settings are unknown or not supported; all are listed.
    """
    call = _said(call)
    own = _own(config) if generation_config is None else _given(config, generation_config)
    own = {name: value for name, value in own.items() if name not in call}
    random = bool(_sampling(own, call)["do_sample"])
    problems = [
        *_problems(call, "argument", SETTINGS.__contains__, frozenset()),
        *_problems(own, GENERATION_FILE, _is_harmless, {*(() if random else _ONLY_RANDOM)}),
    ]
    if problems:
        raise ArgumentError(
            count_text(len(problems), "setting") + " of generation can't act",
            path="generate",
            expected=f"settings among {', '.join(sorted(SETTINGS))}",
            next_step="leave them out; an argument of that name replaces what the model's file "
            "says, and generation_config={} all of it",
            problems=problems,
        )
    lengths = _lengths(own, call)
    merged = {**own, **call, **_sampling(own, call)}
    named = {name: value for name, value in merged.items() if name in SETTINGS}
    return _said({**named, **lengths})


def _own(config: Any) -> dict[str, Any]:
    """Return the model's settings: those of generation_config.json, else of its config.json.

    If there is a generation_config.json, the end and padding tokens in config.json do not count.
    """
    raw = getattr(config, "tokenizer_files", {}).get(GENERATION_FILE)
    if raw is not None:
        return {"top_k": _USUAL_TOP_K, **_said(parse_json(raw, GENERATION_FILE))}
    extra = getattr(config, "hf_extra", {})
    names = SETTINGS | _NEUTRAL.keys()
    return _of_config(config, {name: value for name, value in extra.items() if name in names})


def _given(config: Any, generation_config: Any) -> dict[str, Any]:
    if not isinstance(generation_config, Mapping):
        raise ArgumentError(
            path="generation_config",
            expected=f"settings by name, as in {GENERATION_FILE}",
            found=type(generation_config).__name__,
            next_step="pass a dict; of transformers' GenerationConfig, its to_dict()",
        )
    return _of_config(config, generation_config)


def _of_config(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with end and padding tokens of the config, if they have none."""
    said = _said(settings)
    usual = {"top_k": _USUAL_TOP_K} if said else {}
    tokens = {name: config_value(config, name) for name in ("eos_token_id", "pad_token_id")}
    return {**usual, **_said(tokens), **said}


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _lengths(own: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings about lengths.

    If the call sets a maximum, both maximums of the model's settings are ignored; the same for
    minimums. A number of new tokens overrides a length. `own_max_length` is True if the call sets
    no maximum.
    """
    chosen: dict[str, Any] = {}
    for names in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        source = call if any(name in call for name in names) else own
        first = next((name for name in names if name in source), None)
        chosen |= {name: source[name] if name == first else None for name in names}
    chosen["own_max_length"] = not any(name in call for name in ("max_new_tokens", "max_length"))
    return chosen


def _sampling(own: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of sampling.

    Those of the model's settings only count if the call, or `do_sample`, turns sampling on.
    """
    settings = {name: call.get(name) for name in SAMPLING}
    is_sampling = any(value is not None for value in settings.values())
    do_sample = call.get("do_sample", None if is_sampling else own.get("do_sample"))
    if not (do_sample or (is_sampling and do_sample is None)) or settings["temperature"] == 0:
        return {"do_sample": do_sample, **settings}
    filled = {name: own.get(name) if value is None else value for name, value in settings.items()}
    return {"do_sample": True if do_sample is None else do_sample, **filled}


def _problems(
    settings: Mapping[str, Any], source: str, passes: Callable[[str], bool], unused: Set[str]
) -> list[str]:
    problems = []
    for name, value in sorted(settings.items()):
        if (name, value) == _LOSSY_CACHE:
            problems.append(f"{source} {name}={value!r}: changes tokens, and can't be done")
            continue
        if passes(name) or name in unused or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        if name in _NEUTRAL:
            problems.append(f"{source} {name}={value!r}: only {_NEUTRAL[name]!r} can be done")
        elif name in _HARMLESS:
            problems.append(f"{source} {name}: changes nothing here")
        else:
            problems.append(f"{source} {with_nearest(name, SETTINGS)}: unknown")
    return problems


def _is_harmless(name: str) -> bool:
    is_setting = name in SETTINGS or name in _HARMLESS
    return is_setting or name.startswith("_") or name.endswith("_token_id")
