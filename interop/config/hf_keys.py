"""Keys of a Hugging Face config.json that don't change what a model computes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

__all__ = ["DROPOUTS", "HARMLESS_KEYS", "NEUTRAL_VALUES", "unread_keys"]

HARMLESS_KEYS = frozenset(
    {
        # about the file, and the tool that wrote it
        *("dtype", "torch_dtype", "transformers_version", "transformers.js_config"),
        *("is_llama_config", "model_max_length", "name_or_path", "tokenizer_class"),
        *("custom_pipelines", "unsloth_fixed", "unsloth_version"),
        # read by vLLM alone
        "dual_chunk_attention_config",
        # removed from newer releases of transformers
        *("eos_token_ids", "max_sequence_length", "n_special", "output_past"),
        *("predict_special_tokens", "xla_device"),
        # settings of text generation
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "prefix", "remove_invalid_values"),
        *("repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
        # labels and tasks of classification heads
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
        *("task_specific_params",),
        # how transformers runs the model, and what its calls return
        *("attn_implementation", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict"),
        *("return_dict_in_generate", "tf_legacy_loss", "torchscript", "use_bfloat16", "use_cache"),
        "is_decoder",
    }
)
"""Keys that are kept whatever their values are.

Names that begin with "_" or end in "_token_id" are kept too.
"""

DROPOUTS = frozenset(
    {
        *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop"),
        *("embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop"),
        "residual_dropout",
    }
)
"""Keys of dropout rates, which change no logits; the decoder has no dropout."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, str]] = {
    "add_cross_attention": (False, "attention to an encoder"),
    "alibi": (False, "the attention scores, by distance"),
    "is_causal": (True, "which tokens attend to which"),
    "is_encoder_decoder": (False, "attention to an encoder"),
    "logit_scale": (1.0, "the scale of the logits"),
    "partial_rotary_factor": (1.0, "how much of each head turns"),
    "pretraining_tp": (1, "the order of sums"),
    "pruned_heads": ({}, "the number of heads"),
    "qk_layernorm": (False, "the norm of queries and keys"),
    "qk_norm": (False, "the norm of queries and keys"),
    "quantization": (None, "the weights, which MLX has packed"),
    "rope_interleaved": (False, "which dimensions turn together"),
    "tie_encoder_decoder": (False, "the weights of an encoder"),
    "use_mrope": (False, "the positions that turn queries and keys"),
    "use_qk_norm": (False, "the norm of queries and keys"),
    "use_sliding_window": (False, "which tokens attend to which"),
}
"""Key -> its only supported value (besides null), and what another value would change."""


def unread_keys(data: Mapping[str, Any], read: Set[str]) -> dict[str, Any]:
    """Return the entries of a config.json that are not read and may change the model.

    Args:
        data: the file's content.
        read: keys that the caller reads.
    """
    return {
        key: value
        for key, value in data.items()
        if value is not None
        and key not in read
        and key not in HARMLESS_KEYS
        and not key.startswith("_")
        and not key.endswith("_token_id")
        and not (key in NEUTRAL_VALUES and value == NEUTRAL_VALUES[key][0])
    }
