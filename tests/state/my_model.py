"""A user's own model, as the documentation shows one: layers and forward pass, nothing else."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from cairn import EasyDeLBaseModule, EDPretrainedConfig


@dataclass(frozen=True, kw_only=True)
class MyModelConfig(EDPretrainedConfig):
    model_type: str = "my-model-of-the-tests"
    vocab_size: int = 256
    hidden_size: int = 64
    num_layers: int = 2


class MyModel(EasyDeLBaseModule):
    def __init__(
        self,
        config,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision=None,
        rngs=None,
    ):
        super().__init__(
            config=config, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        self.embed_tokens = nnx.Embed(
            num_embeddings=config.vocab_size,
            features=config.hidden_size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.layers = nnx.List(
            [
                nnx.Linear(
                    config.hidden_size,
                    config.hidden_size,
                    dtype=dtype,
                    param_dtype=param_dtype,
                    rngs=rngs,
                )
                for _ in range(config.num_layers)
            ]
        )
        self.noise = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + self.noise(jnp.tanh(layer(hidden)))
        return self.embed_tokens.attend(hidden)


def my_model(dims=(2, 4, 1, 1), seed=0, **settings):
    config = MyModelConfig(sharding_axis_dims=dims)
    return MyModel(config, rngs=nnx.Rngs(seed), **settings)


def batch(rows=8, tokens=6, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, tokens), 0, 256, dtype=jnp.int32)


def train_step(state, ids):
    def loss_of(params):
        return state.merge(params)(input_ids=ids, labels=ids).loss

    loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
    return state.apply_gradients(grads=grads), loss
