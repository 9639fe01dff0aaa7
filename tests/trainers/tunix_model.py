"""A tiny model of Tunix: initialised, saved by Tunix's own code, with its tokens and logits.

    python tunix_model.py FOLDER FAMILY

It runs where google-tunix is installed, and imports nothing of ours.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.sft.checkpoint_manager import CheckpointManager

SIZES = {
    "num_layers": 3,
    "embed_dim": 32,
    "hidden_dim": 24,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
}
PLAIN = {**SIZES, "vocab_size": 40, "rope_theta": 500000, "norm_eps": 1e-5}
TOLD = {"max_position_embeddings": 128, "rope_theta": 500000, "rms_norm_eps": 1e-5}
GEMMA = {
    "num_embed": 40,
    "num_layers": 7,
    "embed_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "sliding_window_size": 8,
    "local_base_frequency": 10000,
    "global_base_frequency": 1000000,
    "param_dtype": jnp.float32,
}
GEMMA_TOLD = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
}
FAMILIES = {
    "llama": (llama3.Llama3, llama3.ModelConfig, PLAIN, {"model_type": "llama", **TOLD}),
    "llama-tied": (
        llama3.Llama3,
        llama3.ModelConfig,
        {**PLAIN, "weight_tying": True},
        {"model_type": "llama", **TOLD},
    ),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig, PLAIN, {"model_type": "qwen2", **TOLD}),
    "qwen3": (
        qwen3.Qwen3,
        qwen3.ModelConfig,
        # Its rotary positions have this base whatever the config says.
        {**PLAIN, "use_tied_embedding": True, "rope_theta": 1000000},
        {"model_type": "qwen3", **TOLD, "rope_theta": 1000000},
    ),
    "gemma3": (gemma3.Gemma3, gemma3.ModelConfig, {**SIZES, **GEMMA}, GEMMA_TOLD),
    "gemma3-mha": (
        gemma3.Gemma3,
        gemma3.ModelConfig,
        {**SIZES, **GEMMA, "num_kv_heads": 2},
        GEMMA_TOLD,
    ),
}


def main(folder: Path, family: str) -> None:
    kind, config_kind, sizes, told = FAMILIES[family]
    folder.mkdir(parents=True)
    model = kind(config_kind(**sizes), rngs=nnx.Rngs(3))
    spread(model)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 24))
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((24, 24), bool)), (2, 24, 24))
    with jax.default_matmul_precision("highest"):
        logits, _ = model(jnp.asarray(tokens, jnp.int32), positions, None, mask)
    np.savez(folder / "reference.npz", tokens=tokens, logits=np.asarray(logits, np.float32))
    (folder / "config.json").write_text(json.dumps(told))
    manager = CheckpointManager(str(folder / "checkpoints"))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    assert manager.save(1, model, optimizer, force=True)
    manager.close()


def spread(model: nnx.Module) -> None:
    """Give what is all ones or zeros (norms, biases, Gemma's MLP) other values, so that it counts.

    All numbers are those of bfloat16, which take half the room in a compressed file.
    """
    numbers = np.random.default_rng(1)
    state = nnx.state(model, nnx.Param)
    for _, variable in state.flat_state():
        array = variable[...]
        if not np.ptp(np.asarray(array)):
            array = array + numbers.uniform(-0.3, 0.3, array.shape).astype(array.dtype)
        variable[...] = array.astype(jnp.bfloat16).astype(array.dtype)
    nnx.update(model, state)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
