"""generation_config.json of an export: the stored one, or the one that config.json implies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cairn.interop.errors import ConversionError
from cairn.interop.weights.files import GENERATION_FILE
from cairn.interop.weights.source_folder import parse_json

MAX_BYTES: Final = 1 << 20
"""Largest generation_config.json that is exported; real ones have less than a thousandth of it."""

OUTPUT_FLAGS: Final = (
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
)
"""Settings of which each, if true, makes `generate` of transformers return a dict."""

SETTINGS: Final = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
        *("early_stopping", "stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p"),
        *("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "num_beams", "length_penalty"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("exponential_decay_length_penalty", "guidance_scale", "watermarking_config"),
        *("remove_invalid_values", "renormalize_logits", "token_healing", "num_return_sequences"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
        *("compile_config", "disable_compile", "prefill_chunk_size"),
        *(*OUTPUT_FLAGS, "return_dict_in_generate"),
        *("penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups"),
        *("constraints", "force_words_ids", "is_assistant", "use_mtp", "speculation_type"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_early_exit"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        "continuous_batching_config",
    }
)
"""Keys of config.json that transformers takes as settings of generation."""


def generation_file(config: Mapping[str, Any], stored: bytes | None) -> bytes | None:
    """Return the generation_config.json of an export; None for none.

    The stored file is exported unchanged. Without one, the settings are those that config.json has,
    as `GenerationConfig.from_model_config` of transformers finds them. A config.json that names no
    end token gives no file: transformers then takes the defaults of the model's class, which a file
    would replace.

    Args:
        config: content of the export's config.json.
        stored: the generation_config.json that was saved with the model, or None.

    Raises:
        ConversionError: the stored file is no JSON object, or too large.
    """
    if stored is not None:
        if len(stored) > MAX_BYTES:
            raise ConversionError(
                path=GENERATION_FILE,
                expected=f"at most {MAX_BYTES} bytes",
                found=f"{len(stored)}",
                next_step="save the model again with a smaller one among its assets, or with none",
            )
        parse_json(stored, GENERATION_FILE)
        return stored
    settings = {name: config[name] for name in SETTINGS & config.keys() if config[name] is not None}
    if "eos_token_id" not in settings:
        return None
    if any(settings.get(name) is True for name in OUTPUT_FLAGS):
        settings["return_dict_in_generate"] = True
    # transformers marks files that it derives in the same way.
    content = {"_from_model_config": True, **settings}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
