"""The decoder by itself: scanning, recomputing, caching, dtypes, placement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import ArgumentError, DecoderConfig, DecoderForCausalLM, ExpertsConfig, RopeConfig
from cairn.interop.config.decoder import FULL, WINDOW
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.state.paths import named_leaves
from tests.faults.report import is_long
from tests.state.forward import logits_of, outputs_of
from tests.state.hf_models import tokens
from tests.state.seams import KVCache, grouped_attention

CONFIG = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,
    attention_bias=True,
    attention_out_bias=True,
)


def make(**options):
    return DecoderForCausalLM(CONFIG.replace(**options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "biases", [(False, False, False), (True, False, True), (False, True, True)]
)
def test_the_config_alone_tells_every_leaf_and_its_shape(tied, biases):
    names = ("attention_bias", "attention_out_bias", "mlp_bias")
    config = CONFIG.replace(tie_word_embeddings=tied, **dict(zip(names, biases, strict=True)))
    model = nnx.eval_shape(lambda: DecoderForCausalLM(config, rngs=nnx.Rngs(0)))
    leaves = {named.path: tuple(named.leaf.shape) for named in named_leaves(nnx.state(model))}
    assert leaf_shapes(config) == leaves


def loss_and_grads(model, ids):
    graphdef, params = nnx.split(model)

    def loss(params):
        return nnx.merge(graphdef, params)(ids, labels=ids).loss

    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def plain_loss_and_grads(batch):
    """Of the unrolled model on one device."""
    return jax.device_get(loss_and_grads(make(), jnp.asarray(tokens(batch, 16))))


def assert_close(found, expected, tolerance=1e-5):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(two).max()))
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize(
    "options", [*([{"remat": True}] if is_long() else []), {"scan_layers": True, "remat": True}]
)
def test_scanned_and_recomputed_layers_give_the_same_loss_and_gradients(options):
    ids = jnp.asarray(tokens(2, 16))
    assert_close(loss_and_grads(make(**options), ids), plain_loss_and_grads(2))


def test_scanning_traces_one_block_however_many_layers():
    def equations(layers):
        model = make(scan_layers=True, num_hidden_layers=layers)
        graphdef, params = nnx.split(model)
        call = jax.make_jaxpr(lambda p, ids: nnx.merge(graphdef, p)(ids).logits)
        text = str(call(params, jnp.asarray(tokens(1, 4))))
        return text.count("dot_general")

    assert equations(2) == equations(5)


def test_layers_that_alternate_are_one_block_and_turns_of_kinds_one_turn():
    experts = ExpertsConfig(count=3, per_token=1, intermediate_size=8, dense_layers=(0, 2, 4, 6, 8))

    def products(layers, **options):
        model = make(scan_layers=True, num_hidden_layers=layers, **options)
        graphdef, params = nnx.split(model)
        call = jax.make_jaxpr(lambda p, ids: nnx.merge(graphdef, p)(ids).logits)
        return str(call(params, jnp.asarray(tokens(1, 4)))).count("dot_general")

    def windows(layers):
        types = tuple(FULL if layer % 3 == 2 else WINDOW for layer in range(layers))
        local = RopeConfig(theta=100.0)
        return {"layer_types": types, "sliding_window": 2, "window_rope": local}

    one = products(1, **windows(1))
    assert [products(n, **windows(n)) for n in (3, 6, 8)] == [one] * 3
    turn = products(2, experts=experts)
    assert products(8, experts=experts) == turn > one


def test_scanned_model_keeps_one_leaf_per_layer():
    paths = [n.path for n in named_leaves(nnx.state(make(scan_layers=True)))]
    assert "model/layers/1/self_attn/q_proj/kernel" in paths
    assert paths == [n.path for n in named_leaves(nnx.state(make()))]


def test_every_parameter_names_its_axes():
    for named in named_leaves(nnx.state(make())):
        assert named.axes is not None, named.path
        assert len(named.axes) == named.leaf.ndim, named.path


@pytest.mark.parametrize("scan_layers", [False, True])
def test_tokens_fed_two_by_two_through_the_cache_give_the_same_logits(scan_layers):
    model = make(scan_layers=scan_layers)
    ids = tokens(2, 10)
    pads = np.array([0, 3])
    mask = (np.arange(10)[None, :] >= pads[:, None]).astype(np.int32)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    expected = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    cache = model.init_operations_cache(2, 12, starts=jnp.asarray(pads))
    graphdef, params = nnx.split(model)
    step = jax.jit(lambda p, ids, cache: nnx.merge(graphdef, p)(ids, cache=cache))
    rows = []
    for at in range(0, 10, 2):
        made = step(params, jnp.asarray(ids[:, at : at + 2]), cache)
        rows.append(made.logits)
        cache = made.cache
    assert int(cache.length) == 10
    found = np.concatenate([np.asarray(row) for row in rows], axis=1)
    keep = mask.astype(bool)
    assert_close(found[keep], expected[keep])


def test_cache_takes_an_attention_mask_instead_of_starts():
    model = make()
    ids, mask = tokens(2, 6), np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32)
    graphdef, params = nnx.split(model)
    call = jax.jit(lambda p, ids, cache, **kw: nnx.merge(graphdef, p)(ids, cache=cache, **kw))
    starts = jnp.asarray([0, 2])
    by_starts = call(params, ids, model.init_operations_cache(2, 8, starts=starts))
    by_mask = call(
        params,
        ids,
        model.init_operations_cache(2, 8),
        attention_mask=mask,
        position_ids=positions,
    )
    keep = mask.astype(bool)
    np.testing.assert_array_equal(
        np.asarray(by_starts.logits)[keep], np.asarray(by_mask.logits)[keep]
    )


def test_a_token_that_may_attend_to_nothing_is_no_nan():
    shape = (1, 2, 2, 4)
    ones = jnp.ones(shape, jnp.float32)
    found = grouped_attention(ones, ones, ones, jnp.zeros((1, 2, 2), jnp.bool_))
    np.testing.assert_array_equal(np.asarray(found), np.ones(shape))


def test_bfloat16_compute_keeps_float32_parameters():
    model = DecoderForCausalLM(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float32)}
    outputs = outputs_of(model, tokens(1, 8), labels=tokens(1, 8))
    assert outputs.logits.dtype == jnp.bfloat16
    assert outputs.loss.dtype == jnp.float32
    full = logits_of(make(), tokens(1, 8))
    difference = np.asarray(outputs.logits).astype(np.float32) - full
    assert np.abs(difference).max() < 0.1 * np.abs(full).max()


@pytest.mark.parametrize(
    ("dims", "scan_layers"),
    [((2, 4, 1, 1), False), ((1, 2, 2, 2), True)] if is_long() else [((1, 2, 2, 2), True)],
)
def test_sharded_loss_equals_the_loss_on_one_device(dims, scan_layers):
    ids = jnp.asarray(tokens(8, 16))
    expected = plain_loss_and_grads(8)
    model = make(scan_layers=scan_layers, sharding_axis_dims=dims).shard_model()
    kernel = model.model.layers[0].mlp.gate_proj.kernel.get_value()
    assert kernel.sharding.mesh.size == 8
    assert not kernel.is_fully_replicated
    loss, grads = loss_and_grads(model, ids)
    assert_close(loss, expected[0])
    assert_close(jax.device_get(grads), expected[1], tolerance=1e-4)


def test_wrong_shapes_are_named():
    model = make()
    with pytest.raises(ArgumentError, match="input_ids"):
        model(jnp.zeros((3,), jnp.int32))
    with pytest.raises(ArgumentError, match="attention_mask"):
        model(jnp.zeros((1, 3), jnp.int32), attention_mask=jnp.ones((1, 4), jnp.int32))


def test_cache_is_a_pytree_of_fixed_shapes():
    cache = KVCache.empty(
        layers=2, batch_size=1, max_length=4, kv_heads=1, head_dim=2, dtype=jnp.float32
    )
    new = jnp.ones((1, 2, 1, 2), jnp.float32)
    written, keys, _ = cache.write(1, new, new * 2)
    assert [x.shape for x in jax.tree.leaves(written)] == [x.shape for x in jax.tree.leaves(cache)]
    assert np.asarray(keys)[0, :, 0, 0].tolist() == [1, 1, 0, 0]
    assert int(written.length) == 0
    assert np.asarray(cache.advance(2).visible(1))[0, 0].tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_token_ids_that_are_no_integers_are_refused(dtype):
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match="input_ids: expected integers; found"):
        model(np.zeros((1, 3), dtype))
