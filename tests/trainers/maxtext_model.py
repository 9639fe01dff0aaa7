"""A tiny model of MaxText: initialised, saved by MaxText's own code, with its tokens and logits.

    python maxtext_model.py FOLDER FAMILY scanned|unscanned [ITEMS]

With ITEMS, the folder of a step's item, MaxText's own code restores the model from there, and
writes its logits of the same tokens to `restored.npz`. It runs where maxtext is installed (Python
3.12 or later), and imports nothing of ours.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

import jax.numpy as jnp
import numpy as np
import optax
import yaml
from flax import nnx
from maxtext.common import checkpointing, train_state_nnx
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

SIZES = {
    "base_emb_dim": 32,  # as wide as all heads are, so that no shape tells inputs from outputs
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 3,
    "base_num_kv_heads": 2,
    "base_num_query_heads": 4,
    "head_dim": 8,
    "vocab_size": 40,
    "normalization_layer_epsilon": 1e-5,
}
GEMMA = {
    "logits_via_embedding": True,
    "mlp_activations": ["gelu", "linear"],
    "normalization_layer_epsilon": 1e-6,
    "sliding_window_size": 8,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
}
FAMILIES = {
    "llama": {"decoder_block": "llama2", "logits_via_embedding": False},
    "llama3.1": {"decoder_block": "llama2", "rope_type": "llama3.1", "rope_max_timescale": 500000},
    "mistral": {"decoder_block": "mistral"},
    "qwen2": {"decoder_block": "qwen2", "attention_bias": True, "rope_max_timescale": 1000000},
    "qwen3": {
        "decoder_block": "qwen3",
        "use_qk_norm": True,
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
    },
    "gemma2": {
        "decoder_block": "gemma2",
        "base_num_decoder_layers": 2,
        "attn_logits_soft_cap": 50.0,
        "final_logits_soft_cap": 30.0,
        **GEMMA,
    },
    "gemma3": {
        "decoder_block": "gemma3",
        "model_name": "gemma3-4b",
        "override_model_config": True,
        "base_num_decoder_layers": 13,  # two turns of six, and one that remains
        "base_emb_dim": 16,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 1,
        "local_rope_max_timescale": 10000,
        "rope_max_timescale": 1000000,
        "rope_linear_scaling_factor": 8.0,
        **GEMMA,
    },
    "mixtral": {
        "decoder_block": "mixtral",
        "base_moe_mlp_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "sparse_matmul": False,
        "megablox": False,
    },
    "qwen3_moe": {
        "decoder_block": "qwen3_moe",
        "base_moe_mlp_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "sparse_matmul": False,
        "megablox": False,
    },
}


def main(folder: Path, family: str, layout: str) -> None:
    folder.mkdir(parents=True)
    config = configured(folder, family, layout)
    model = model_creation_utils.from_config(
        config, model_mode=MODEL_MODE_TRAIN, rngs=nnx.Rngs(params=3, dropout=4)
    )
    spread(model)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    np.savez(folder / "reference.npz", tokens=tokens, logits=logits_of(model, tokens))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    state = train_state_nnx.TrainStateNNX(model, optimizer)
    manager = checkpointing.create_orbax_checkpoint_manager(
        str(folder / "checkpoints"), True, False, 1
    )
    assert checkpointing.save_checkpoint(manager, 1, nnx.state(state), config)
    checkpointing.wait_until_finished(manager)
    raw = {key: getattr(value, "value", value) for key, value in config.get_keys().items()}
    raw = {key: value for key, value in raw.items() if plain(value)}
    (folder / "config.yml").write_text(yaml.dump(raw))


def restore(folder: Path, family: str, layout: str, items: str) -> None:
    config = configured(folder, family, layout, load_parameters_path=items)
    model, *_ = model_creation_utils.from_pretrained(config)
    tokens = np.load(folder / "reference.npz")["tokens"]
    np.savez(folder / "restored.npz", logits=logits_of(model, tokens))


def configured(folder: Path, family: str, layout: str, **more: str) -> Any:
    settings = {**SIZES, **FAMILIES[family], "scan_layers": layout == "scanned"}
    return pyconfig.initialize(
        ["", str(Path(pyconfig.__file__).parent / "base.yml")],
        run_name="tiny",
        base_output_directory=str(folder),
        enable_checkpointing=True,
        async_checkpointing=False,
        checkpoint_period=1,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        attention="dot_product",
        per_device_batch_size=2,
        max_target_length=24,
        max_prefill_predict_length=12,
        dataset_type="synthetic",
        hardware="cpu",
        skip_jax_distributed_system=True,
        log_config=False,
        float32_qk_product=True,
        float32_logits=True,
        enable_goodput_recording=False,
        **settings,
        **more,
    )


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = model(
        decoder_input_tokens=jnp.asarray(tokens, jnp.int32),
        decoder_positions=positions,
        decoder_segment_ids=jnp.ones_like(positions),
        enable_dropout=False,
    )
    return np.asarray(logits, np.float32)


def spread(model: nnx.Module) -> None:
    """Give norms and biases other values than ones and zeros, so that each of them counts.

    All numbers are those of bfloat16, which take half the room in a compressed file, but for the
    embedding, which a tied head reads in a dtype of its own.
    """
    numbers = np.random.default_rng(1)
    state = nnx.state(model, nnx.Param)
    for path, variable in state.flat_state():
        array = variable[...]
        if path[-1] in ("scale", "bias"):
            array = array + numbers.uniform(-0.3, 0.3, array.shape).astype(array.dtype)
        if path[-1] != "embedding":
            array = array.astype(jnp.bfloat16).astype(array.dtype)
        variable[...] = array
    nnx.update(model, state)


def plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | type(None))


if __name__ == "__main__":
    run = restore if len(sys.argv) > 4 else main
    run(Path(sys.argv[1]).resolve(), *sys.argv[2:])
