"""Granite 3: Llama with multipliers of embeddings, attention, residual stream and logits.

Source: transformers `GraniteConfig`, `GraniteForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.state.config import DecoderConfig
from cairn.state.families.config_form import ConfigForm, usual_options
from cairn.state.families.family import Family
from cairn.state.families.names import Names


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_out_bias": options["attention_bias"],
        "logit_scale": 1.0 / (data.get("logits_scaling") or 1.0),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    exact = 1.0 / config.logit_scale
    whole = float(round(exact))
    return {"logits_scaling": whole if whole and 1.0 / whole == config.logit_scale else exact}


FAMILY = Family(
    ConfigForm(
        "granite",
        "GraniteForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            attention_multiplier=("attention_scale", 1.0),
            embedding_multiplier=("embedding_scale", 1.0),
            mlp_bias=("mlp_bias", False),
            residual_multiplier=("residual_scale", 1.0),
        ),
        untold={"attention_dropout": (0, 0.0, None)},
        also_read=frozenset({"logits_scaling"}),
        read=_read,
        write=_write,
    ),
    Names(),
)
