"""DeepSeek V2: latent attention; experts chosen by softmax, perhaps in groups.

Source: transformers `DeepseekV2Config`, `DeepseekV2ForCausalLM`; arXiv 2405.04434.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.deepseek import (
    LATENT_KEYS,
    deepseek_names,
    read_experts,
    read_latent,
    write_latent,
)
from cairn.interop.families.deepseek_gguf import deepseek_gguf
from cairn.interop.families.experts import experts_of
from cairn.interop.families.family import Family


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    latent = read_latent(data, options)
    usual = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 1}
    usual |= {"moe_intermediate_size": 1407, "n_group": 1, "topk_group": 1}
    grouped = data.get("topk_method", "greedy") == "group_limited_greedy"
    return latent | read_experts(
        data if grouped else {**data, "n_group": 1, "topk_group": 1},
        options,
        usual,
        normalize=False,
        scale=float(data.get("routed_scaling_factor", 1.0)),
        first_dense=data.get("first_k_dense_replace", 0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    grouped = experts_of(config).groups > 1
    data = write_latent(config)
    del data["norm_topk_prob"]
    return data | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


FAMILY = Family(
    ConfigForm(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            head_dim=None,
            mlp_bias=("mlp_bias", False),
        ),
        refused={
            "moe_layer_freq": Refused((1, None), "every layer after the first ones has experts"),
            "norm_topk_prob": Refused((False, None), "transformers does not normalise"),
            "pretraining_tp": Refused((1, None), "only changes the order of sums; set it to 1"),
            "scoring_func": Refused(("softmax", None), "no other was trained"),
            "topk_method": Refused(
                ("greedy", "group_limited_greedy", None), "transformers chooses experts so alone"
            ),
        },
        also_read=LATENT_KEYS,
        carried=frozenset({"aux_loss_alpha", "ep_size", "output_router_logits", "seq_aux"}),
        read=_read,
        write=_write,
        nulls=frozenset({"q_lora_rank"}),
    ),
    deepseek_names,
    deepseek_gguf(2),
)
