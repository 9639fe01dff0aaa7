"""DeepSeek V3 and R1: latent attention; experts chosen in groups by sigmoids and a correction.

The layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers
leaves them out. Source: transformers `DeepseekV3Config`, `DeepseekV3ForCausalLM`; arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.deepseek import (
    LATENT_KEYS,
    deepseek_names,
    read_experts,
    read_latent,
    write_latent,
)
from cairn.interop.families.deepseek_gguf import deepseek_gguf
from cairn.interop.families.family import Family


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    latent = read_latent(data, options)
    usual = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
    usual |= {"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
    return latent | read_experts(
        data,
        options,
        usual,
        score="sigmoid",
        correction=True,
        group_score="top2",
        normalize=bool(data.get("norm_topk_prob", True)),
        scale=float(data.get("routed_scaling_factor", 2.5)),
        first_dense=data.get("first_k_dense_replace", 3),
    )


FAMILY = Family(
    ConfigForm(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        options=usual_options(attention_bias=("attention_bias", False), head_dim=None),
        refused={
            "moe_layer_freq": Refused((1, None), "every layer after the first ones has experts"),
            "pretraining_tp": Refused((1, None), "only changes the order of sums; set it to 1"),
            "rope_interleave": Refused((True,), "neighbouring dimensions turn together"),
            "scoring_func": Refused(("sigmoid", None), "no other was trained"),
            "topk_method": Refused(("noaux_tc", None), "no other was trained"),
        },
        also_read=LATENT_KEYS | {"norm_topk_prob"},
        carried=frozenset(
            {
                *("aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"),
                *("output_router_logits", "seq_aux"),
            }
        ),
        read=_read,
        write=write_latent,
        nulls=frozenset({"norm_topk_prob", "q_lora_rank"}),
    ),
    deepseek_names,
    deepseek_gguf(3),
)
