"""Adapters of a checkpoint, merged into an export or kept for PEFT."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers
from flax import nnx

from cairn import parse_uri
from tests.service.jobs import artifact_of, done, serving
from tests.state.states.test_adapted_checkpoints import state_of, tiny

CONVERT = "/v1/roots/default/runs/qlora/checkpoints/1:convert"


def test_adapters_are_kept_as_a_folder_that_peft_loads_beside_its_base(tmp_path):
    state = state_of(tiny("qlora"))
    state = state.replace(graphstate=jax.tree.map(lambda leaf: leaf + 0.1, state.graphstate))
    state.save_state(tmp_path / "store/qlora", step=1, wait=True, verbose=False)
    with serving(tmp_path / "store", tmp_path / "data") as http:
        merged, kept = (
            artifact_of(http, done(http, CONVERT, body)) for body in ({}, {"lora": "keep"})
        )
    assert [file["name"] for file in kept["files"]] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = state.merge(state.graphstate)
    model.dequantize()
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam)))
    model.unwrap_lora_to_layers().save_pretrained(tmp_path / "base")
    tuned = parse_uri(kept["uri"]).local_path
    load = transformers.AutoModelForCausalLM.from_pretrained
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        theirs = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tuned).eval()
    one = load(parse_uri(merged["uri"]).local_path).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        np.testing.assert_allclose(
            theirs(ids).logits.numpy(), one(ids).logits.numpy(), atol=2e-5, rtol=0
        )
        assert not np.allclose(one(ids).logits, load(tmp_path / "base")(ids).logits, atol=1e-2)
