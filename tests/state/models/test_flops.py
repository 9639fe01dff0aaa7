"""Floating point operations: closed form, count from the jaxpr, XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    ArgumentError,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertsConfig,
    LatentAttentionConfig,
    make_mesh,
)
from tests.state.my_model import MyModel, MyModelConfig, my_model
from tests.state.seams import decoder_flops, matmul_flops

SHAPES = {
    "plain": ({}, 1, 128),
    "grouped heads": ({"num_key_value_heads": 2}, 2, 256),
    "one kv head, narrow heads": ({"head_dim": 32, "num_key_value_heads": 1}, 2, 128),
    "wide heads": ({"head_dim": 128}, 3, 64),
    "tied head": ({"tie_word_embeddings": True, "vocab_size": 2048}, 4, 64),
    "long rows": ({"num_key_value_heads": 2, "attention_bias": True}, 1, 1024),
}


def config_of(options):
    return DecoderConfig(
        **{
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **options,
        }
    )


def forward_of(config, batch, length):
    """The forward pass and its arguments, without arrays."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DecoderForCausalLM(config)))
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return lambda state, ids: nnx.merge(graphdef, state)(ids).logits, state, ids


@pytest.mark.parametrize("name", SHAPES)
def test_the_closed_form_is_within_5_percent_of_xla(name):
    options, batch, length = SHAPES[name]
    config = config_of(options)
    forward, state, ids = forward_of(config, batch, length)
    analysis = jax.jit(forward).lower(state, ids).compile().cost_analysis()
    ratio = decoder_flops(config, batch, length) / analysis["flops"]
    print(f"{name}: closed form / XLA {ratio:.4f}")
    assert 0.95 <= ratio <= 1.05


@pytest.mark.parametrize("scan", [False, True])
def test_the_closed_form_equals_the_products_in_the_jaxpr(scan):
    for options, batch, length in SHAPES.values():
        config = config_of({**options, "scan_layers": scan, "remat": scan})
        counted = matmul_flops(*forward_of(config, batch, length))
        assert counted == decoder_flops(config, batch, length)


OTHERS = {
    "experts": {
        "experts": ExpertsConfig(
            count=6, per_token=2, intermediate_size=64, shared_size=32, dense_layers=(0,)
        )
    },
    "latent": {
        "latent": LatentAttentionConfig(
            query_rank=32, key_value_rank=16, content_dim=24, rotary_dim=8, value_dim=40
        )
    },
    "no_gate": {"gated_mlp": False, "block": "parallel", "shared_norm": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_closed_form_equals_the_products_of_other_decoders(name):
    config = config_of(OTHERS[name])
    counted = matmul_flops(*forward_of(config, 3, 100))
    # Beside them the router's loss sums over tokens.
    assert 0 <= counted - decoder_flops(config, 3, 100) <= (7212 if name == "experts" else 0)


def test_a_model_tells_its_flops():
    config = config_of({"num_key_value_heads": 2})
    model = nnx.eval_shape(lambda: DecoderForCausalLM(config))
    each_layer = 2 * 256 * 256 + 2 * 256 * 128 + 2 * 100 * 256 + 3 * 256 * 704
    assert model.flops_per_token(3, 100) == 2 * (2 * each_layer + 256 * 1024)
    assert model._flop(config, 3, 100) == 300 * model.flops_per_token(3, 100)
    deeper = config.replace(num_hidden_layers=4)
    assert model._flop(deeper, 1, 100) == 200 * (4 * each_layer + 256 * 1024)


def test_a_users_own_model_is_counted():
    model = my_model()
    per_token = 2 * (2 * 64 * 64 + 64 * 256)
    assert model.flops_per_token(4, 8) == model.flops_per_token(1, 2) == per_token
    bigger = MyModelConfig(hidden_size=128, num_layers=3)
    assert model._flop(bigger, 2, 8) == 16 * 2 * (3 * 128 * 128 + 128 * 256)
    assert int(model.noise.rngs.count[...]) == 0
    adapted = model.apply_lora_to_layers(lora_rank=4, lora_pattern="layers/0")
    assert adapted.flops_per_token(1, 8) == per_token + 2 * (64 * 4 + 4 * 64)


def test_loops_branches_and_convolutions_are_counted():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    once = 2 * 8 * 8 * 8

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)[0]

    assert matmul_flops(scanned, x) == 5 * once

    def branched(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert matmul_flops(branched, x) == 2 * once

    def convolved(image, kernel):
        return jax.lax.conv(image, kernel, (1, 1), "VALID")

    image = jax.ShapeDtypeStruct((2, 3, 10, 10), jnp.float32)
    kernel = jax.ShapeDtypeStruct((4, 3, 3, 3), jnp.float32)
    assert matmul_flops(convolved, image, kernel) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)

    groups = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert matmul_flops(jax.lax.ragged_dot, x, groups, sizes) == once

    rows = PartitionSpec("dp")
    mapped = jax.shard_map(
        lambda x, y: x @ y,
        mesh=make_mesh((8, 1, 1, 1)),
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
    )
    assert matmul_flops(mapped, x, x) == once


def test_a_loop_of_unknown_length_is_refused():
    class Looping(MyModel):
        def __call__(self, input_ids, **kwargs):
            x = super().__call__(input_ids)
            return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ jnp.ones((256, 256)), x)

    model = Looping(MyModelConfig(), rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=r"found a while equation; override _flop"):
        model.flops_per_token(1, 4)

    class Told(Looping):
        def _flop(self, config, batch_size, sequence_length):
            return 7 * batch_size * sequence_length

    assert Told(MyModelConfig(), rngs=nnx.Rngs(0)).flops_per_token(3, 5) == 7.0


def test_sizes_and_forward_passes_that_mean_nothing_are_refused():
    with pytest.raises(ArgumentError, match="expected 1 or more; found 0 and 4"):
        my_model().flops_per_token(0, 4)

    class Sees(MyModel):
        def __call__(self, pixels):
            return pixels

    with pytest.raises(ArgumentError, match=r"Sees\._flop: .*takes input_ids.*override _flop"):
        Sees(MyModelConfig(), rngs=nnx.Rngs(0)).flops_per_token(1, 4)
