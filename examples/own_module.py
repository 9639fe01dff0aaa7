"""Your own model: trained, saved, loaded and sharded without more code than its layers.

First a subclass of `EasyDeLBaseModule`, which a checkpoint can rebuild by itself; then a plain
`nnx.Module`, which has no configuration and is loaded into the form of a fresh one.
"""

import os
import tempfile
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("PJRT_NPROC", "32")  # threads: with too few, collectives wait for each other

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    TrainState,
    make_mesh,
    make_optimizer,
)
from examples.checks import check, say


@dataclass(frozen=True, kw_only=True)
class MyModelConfig(EDPretrainedConfig):
    """Sizes of `MyModel`."""

    model_type: str = "my-model"
    vocab_size: int = 64
    hidden_size: int = 128
    num_layers: int = 2


class MyModel(EasyDeLBaseModule):
    """A language model that sees one token at a time; `labels=` and the loss are the base's."""

    def __init__(
        self,
        config: MyModelConfig,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        super().__init__(
            config=config, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        size = config.hidden_size
        self.embed_tokens = nnx.Embed(config.vocab_size, size, **kinds)
        self.layers = nnx.List([nnx.Linear(size, size, **kinds) for _ in range(config.num_layers)])

    def __call__(self, input_ids: jax.Array, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Returns logits (batch, tokens, vocabulary)."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + jnp.tanh(layer(hidden))
        return self.embed_tokens.attend(hidden)


class PlainModel(nnx.Module):
    """Any NNX module: here a regression."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, 256, rngs=rngs)
        self.outer = nnx.Linear(256, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one number per row."""
        return self.outer(jnp.tanh(self.inner(x)))[:, 0]


def arrays(tree: Any) -> list[np.ndarray]:
    """Returns host copies of a tree's leaves."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def bit_equal(one: Any, other: Any) -> bool:
    """Says whether two trees hold the same bits."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def my_model(folder: str) -> None:
    """A subclass of ours."""
    rules = [
        ("embed_tokens/embedding", PartitionSpec(None, "fsdp")),
        ("kernel", PartitionSpec("fsdp", None)),
        (".*", PartitionSpec()),
    ]
    config = MyModelConfig(sharding_axis_dims=(1, 8, 1, 1))
    model = MyModel(config, rngs=nnx.Rngs(0)).shard_model(rules)
    tx, tx_init = make_optimizer("adam", learning_rate=1e-2)
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    report = state.explain_sharding(rules, strict=True)
    print(report)
    check(
        "eight devices share the bytes",
        report.bytes_per_device < report.nbytes / 6,
        f"{report.bytes_per_device:,} of {report.nbytes:,} on each",
    )

    @jax.jit
    def train_step(state: EasyDeLState, ids: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            loss: jax.Array = state.merge(params)(input_ids=ids, labels=ids).loss
            return loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    # Each token says which one comes next, so that there is something to learn.
    ids = (jnp.arange(16)[:, None] * 5 + jnp.arange(12)[None, :] * 3) % config.vocab_size
    losses = []
    for _ in range(30):
        state, loss = train_step(state, ids)
        losses.append(float(loss))
    check("MyModel learns", losses[-1] < 0.5 * losses[0], f"{losses[0]:.3f}, {losses[-1]:.3f}")

    run = f"{folder}/my-model"
    state.save_state(run, verbose=False).wait()
    again = EasyDeLState.load_state(run, verbose=False)  # the run knows class, config, optimizer
    check("loaded onto one device, bit for bit", bit_equal(again.params, state.params), run)
    four = EasyDeLState.load_state(
        run,
        auto_shard_model=True,
        sharding_axis_dims=(1, 4, 1, 1),
        partition_rules=rules,
        verbose=False,
    )
    check("loaded onto four devices, bit for bit", bit_equal(four, state), four.model.mesh.shape)


def plain_model(folder: str) -> None:
    """A module that knows nothing of us."""
    tx = optax.adam(1e-2)
    rules = [
        ("inner/kernel", PartitionSpec(None, "fsdp")),
        ("outer/kernel", PartitionSpec("fsdp", None)),
        (".*", PartitionSpec()),
    ]
    mesh = make_mesh((1, 8, 1, 1))

    def create(seed: int) -> EasyDeLState:
        state = EasyDeLState.create(model=PlainModel(nnx.Rngs(seed)))
        return state.shard_model(rules, mesh).init_tx(tx)

    @jax.jit
    def train_step(
        state: EasyDeLState, x: jax.Array, y: jax.Array
    ) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((state.merge(params)(x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    state = create(0)
    x = jax.random.normal(jax.random.key(1), (64, 8))
    y = x[:, 0] * x[:, 1]
    losses = []
    for _ in range(60):
        state, loss = train_step(state, x, y)
        losses.append(float(loss))
    check(
        "a plain module learns", losses[-1] < 0.5 * losses[0], f"{losses[0]:.3f}, {losses[-1]:.3f}"
    )

    run = f"{folder}/plain"
    state.save_state(run, verbose=False).wait()
    fresh = create(2)
    form = TrainState.create(params=fresh.graphstate, tx=tx, opt_state=fresh.opt_state)
    loaded = TrainState.load_state(run, form)
    again = fresh.replace(step=loaded.step, graphstate=loaded.params, opt_state=loaded.opt_state)
    check("loaded into a fresh one, bit for bit", bit_equal(again, state), f"step {again.step}")
    split = again.graphstate["inner"]["kernel"][...].sharding.spec
    check("and placed as that one was", split == PartitionSpec(None, "fsdp"), split)


def main() -> None:
    """Runs both."""
    with tempfile.TemporaryDirectory() as folder:
        say("a subclass of EasyDeLBaseModule")
        my_model(folder)
        say("a plain nnx.Module")
        plain_model(folder)


if __name__ == "__main__":
    main()
