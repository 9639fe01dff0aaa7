"""Quantized models: what each method does to weights and logits, and that they still work."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    DecoderForCausalLM,
    EasyDeLQuantizationMethods,
    ExpertsConfig,
    OptimizerError,
    QuantizationSettings,
    make_mesh,
)
from cairn.state.adapters.layers import adaptable_layers, dequantize_layers, quantize_layers
from cairn.state.adapters.quantized_weight import PackedParam, QuantizedWeight
from cairn.state.paths import named_leaves
from tests.faults.report import is_long
from tests.state.forward import logits_of, output_of
from tests.state.my_model import MyModel, batch, my_model
from tests.state.seams import (
    METHODS,
    adapted,
    dequantize,
    pack_kernel,
    product_of,
    quantizer,
    rounded_activations,
    sharded_weight,
)
from tests.tiny import TINY

METHOD_NAMES = [str(method) for method in EasyDeLQuantizationMethods]
SOME = METHOD_NAMES if is_long() else ["nf4", "a4q", "aqt"]
"""By a table, by integers with inputs, and in eight floating bits."""

# Largest error of one element, as a part of its group's largest one: half of the widest step.
NF4_STEP = 1.0 - 0.6961928
WEIGHT_BOUND = {
    "nf4": NF4_STEP / 2,
    "8bit": 0.5 / 127.5,
    "a8bit": 0.5 / 127.5,
    "a8q": 0.5 / 127.5,
    "a4q": 0.5 / 7.5,
    "aqt": 2.0**-4,
}
# Error of the logits of the tiny models: |quantized - float| / |float|, 2-norms.
LOGITS_BOUND = {"nf4": 0.1, "8bit": 0.01, "a8bit": 0.01, "a8q": 0.01, "a4q": 0.15, "aqt": 0.05}


def decoder(**options):
    """Of one layer, unless `num_hidden_layers` says otherwise: each takes as long to compile."""
    config = dataclasses.replace(TINY, **({"num_hidden_layers": 1} | options))
    return DecoderForCausalLM(config, rngs=nnx.Rngs(0))


def ids():
    return batch(rows=2) % TINY.vocab_size


def logits(model):
    return logits_of(model, ids()).astype(np.float64)


def description(model):
    return [
        (n.path, n.leaf.shape, str(n.leaf.dtype), n.axes) for n in named_leaves(nnx.state(model))
    ]


def leaves(model):
    return {named.path: named.leaf for named in named_leaves(nnx.state(model))}


def assert_unchanged(model, graphdef, before):
    assert model.graphdef == graphdef
    after = leaves(model)
    assert after.keys() == before.keys()
    assert all(after[path] is before[path] for path in before)


def test_no_two_methods_are_the_same():
    assert set(METHODS) == set(EasyDeLQuantizationMethods)
    assert len(set(METHODS.values())) == len(METHODS) == 6


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_weight_is_off_by_at_most_half_a_step(method):
    weight = jax.random.normal(jax.random.key(0), (128, 24))
    settings = QuantizationSettings(method, 32)
    packed = QuantizedWeight.pack(nnx.Param(weight), (0,), settings)
    assert packed.array.scale.shape == (4, 24)
    groups = np.abs(np.asarray(weight)).reshape(4, 32, 24)
    largest = np.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape).reshape(128, 24)
    error = np.abs(np.float64(packed[...]) - np.float64(weight)) / largest
    # Scale, quotient and product each round once in float32, at numbers up to the largest one.
    assert error.max() <= WEIGHT_BOUND[method] + 2 * np.finfo(np.float32).eps
    assert error.max() > WEIGHT_BOUND[method] / 4
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(packed[...], qwix.dequantize(packed.arrays()))


@pytest.mark.parametrize("method", SOME)
def test_logits_stay_near_those_of_the_float_model(method):
    model = my_model()
    exact = logits(model)
    assert model.quantize(method, 16) is model
    assert model.is_quantized
    assert model.quantization == QuantizationSettings(method, 16, ".*")
    error = np.linalg.norm(logits(model) - exact) / np.linalg.norm(exact)
    assert 0 < error < LOGITS_BOUND[method], error


@pytest.mark.parametrize("method", SOME)
def test_activations_are_rounded_by_the_methods_that_say_so(method):
    model = my_model().quantize(method, 16)
    rounded = model(ids())
    difference = np.abs(rounded - model.dequantize()(ids())).max()
    assert (difference > 0) == (METHODS[EasyDeLQuantizationMethods(method)].activation is not None)


def activations(method):
    """Inputs of a layer, and a function that says which codes they are rounded to."""
    layer = adapted(nnx.Linear(256, 8, rngs=nnx.Rngs(0)))
    settings = QuantizationSettings(method, 64)
    pack_kernel(layer, settings)
    inputs = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
    rounded = jax.jit(
        lambda x: rounded_activations(
            product_of(layer, 2), METHODS[settings.method], x, layer.kernel.arrays()
        )
    )
    return inputs, rounded


@pytest.mark.parametrize(("method", "sign"), [("a8bit", 1), ("a8q", -1), ("a4q", 1), ("aqt", -1)])
def test_noise_of_a_sum_changes_next_to_no_code(method, sign):
    inputs, rounded = activations(method)
    inputs = inputs * np.float32(sign)
    noise = np.random.default_rng(1).standard_normal(inputs.shape)
    noisy = (inputs * (1 + 1e-7 * noise)).astype(np.float32)
    codes, other = (np.asarray(rounded(x).qvalue).astype(np.float32) for x in (inputs, noisy))
    assert np.mean(codes != other) < 1e-4


@pytest.mark.parametrize("method", ["a8q", "a4q"])
def test_activations_are_off_by_at_most_half_a_step_on_both_sides(method):
    inputs, rounded = activations(method)
    made = rounded(inputs)
    codes, steps = np.asarray(made.qvalue).astype(np.int32), np.asarray(made.scale)
    assert codes.min() == -codes.max()
    steps = np.repeat(steps, codes.shape[1] // steps.shape[1], axis=1)
    error = np.abs(np.float64(codes) * steps - inputs) / steps
    assert error.max() <= 0.5 + 1e-4
    mirrored = rounded(-inputs)
    np.testing.assert_array_equal(np.asarray(mirrored.qvalue).astype(np.int32), -codes)


@pytest.mark.parametrize(
    ("method", "group_size"),
    [*itertools.product(("a8bit", "a8q", "a4q", "aqt"), (-1, 16))]
    if is_long()
    else [("a8q", -1), ("a4q", 16)],
)
def test_a_mesh_computes_what_one_device_does(method, group_size):
    rows = jnp.asarray(np.random.default_rng(0).integers(0, TINY.vocab_size, (8, 32)), jnp.int32)
    found = []
    for dims in ((1, 1, 1, 1), (1, 4, 2, 1)):
        model = decoder(sharding_axis_dims=dims)
        if dims != (1, 1, 1, 1):
            model.shard_model()
        found.append(logits_of(model.quantize(method, group_size), rows))
    differences = np.abs(found[0] - found[1]).max(axis=-1) / np.abs(found[0]).max()
    # A code that happens to lie within the noise of a boundary changes its token's logits.
    assert np.mean(differences > 1e-3) < 0.02


@pytest.mark.parametrize("method", ["a8bit", "a8q", "a4q", "aqt"])
def test_gradients_pass_rounded_activations_as_if_they_were_not(method):
    layer = adapted(nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    pack_kernel(layer, QuantizationSettings(method, 16))
    inputs = jax.random.normal(jax.random.key(1), (3, 32))
    weights = jax.random.normal(jax.random.key(2), (3, 8))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(layer(x) * weights)))(inputs)
    np.testing.assert_allclose(gradient, weights @ layer.kernel[...].T, rtol=1e-5, atol=1e-6)


def test_experts_stay_floating_and_that_is_told():
    experts = ExpertsConfig(count=4, per_token=2, intermediate_size=32)
    model = decoder(experts=experts)
    with pytest.warns(UserWarning, match="experts stay floating: .*mlp/experts/down_proj"):
        model.quantize("8bit", -1)
    kernels = [named for named in named_leaves(model) if "experts" in named.path]
    assert {named.leaf.dtype for named in kernels} == {jnp.dtype(jnp.float32)}
    decoder(experts=experts).quantize("8bit", -1, "self_attn")  # nothing is told of others


def test_only_kernels_are_packed_and_they_keep_their_place():
    model = decoder(tie_word_embeddings=False).quantize("nf4", 16)
    packed = leaves_of(model, PackedParam)
    layer = "model/layers/0/self_attn/q_proj/kernel/array"
    assert packed[f"{layer}/qvalue"].dtype == jnp.uint4
    assert packed[f"{layer}/qvalue"].shape == (32, 64)
    assert packed[f"{layer}/scale"].shape == (2, 64)
    assert {path.split("/kernel/")[0].split("/")[-1] for path in packed} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"
    }  # fmt: skip
    floating = leaves(model).keys() - packed.keys()
    assert "model/embed_tokens/embedding" in floating
    assert "model/norm/scale" in floating


def leaves_of(model, kind):
    return {named.path: named.leaf for named in named_leaves(nnx.state(model, kind))}


def test_a_pattern_chooses_layers():
    model = decoder(num_hidden_layers=2).quantize("8bit", 16, r"layers/1/.*(q|v)_proj")
    assert {path.split("/kernel/")[0] for path in leaves_of(model, PackedParam)} == {
        "model/layers/1/self_attn/q_proj",
        "model/layers/1/self_attn/v_proj",
    }


def test_a_narrow_layer_is_one_group_and_minus_one_takes_all_inputs():
    assert my_model().quantize("8bit", 512).layers[0].kernel.array.scale.shape == (1, 64)
    assert my_model().quantize("8bit", -1).layers[0].kernel.array.scale.shape == (1, 64)
    assert my_model().quantize("8bit").layers[0].kernel.array.scale.shape == (1, 64)


@pytest.mark.parametrize("method", ["nf4", "aqt"])
def test_changes_of_dtype_leave_packed_weights_alone(method):
    model = my_model().quantize(method, 16)
    before = leaves_of(model, PackedParam)
    model.half()
    after = leaves_of(model, PackedParam)
    assert all(after[path] is before[path] for path in before)
    assert model.module_dtype == model.embed_tokens.embedding.dtype == jnp.float16
    assert model.float().module_dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"method": "nf5"}, "quantization_method: expected one of 'nf4', '8bit', 'a8bit', 'a8q'"),
        ({"group_size": 0}, "group_size: expected 1 or more, or -1"),
        ({"group_size": 2.0}, "group_size: expected 1 or more, or -1"),
        ({"group_size": 24}, r"(?s)group_size: .*found 24.*  - layers/0: 64 inputs\n  - layers/1"),
        ({"quantization_pattern": "q_proj"}, r"(?s)matches none of 2;.*  - layers/0\.\.1$"),
        ({"quantization_pattern": "embed_tokens"}, "matches none of 2"),
        ({"quantization_pattern": "("}, "quantization_pattern: expected a regular expression"),
    ],
)
def test_an_argument_that_cannot_act_is_an_error_and_changes_nothing(arguments, expected):
    model = my_model()
    graphdef, before = model.graphdef, leaves(model)
    with pytest.raises(ArgumentError, match=expected):
        model.quantize(**arguments)
    assert_unchanged(model, graphdef, before)


def test_quantizing_twice_is_an_error_and_changes_nothing():
    model = my_model().quantize("nf4")
    graphdef, before = model.graphdef, leaves(model)
    with pytest.raises(ArgumentError, match=r"not quantized; .*nf4.* call dequantize\(\) first"):
        model.quantize("8bit")
    assert_unchanged(model, graphdef, before)


@pytest.mark.parametrize("method", ["nf4", "aqt"])
def test_packed_weights_cannot_be_given_to_an_optimizer(method):
    model = my_model().quantize(method)
    with pytest.raises(OptimizerError, match=r"quantized weights, .*call apply_lora_to_layers\(\)"):
        model.to_state(optax.adamw(1e-3))
    assert model.to_state().opt_state is None


def test_dequantizing_gives_the_rounded_weights_as_floats_in_the_old_structure():
    model = decoder()
    graphdef, before = model.graphdef, description(model)
    model.quantize("nf4", 16)
    kernel = model.model.layers[0].mlp.up_proj.kernel[...]
    assert model.dequantize() is model
    assert model.graphdef == graphdef
    assert description(model) == before
    np.testing.assert_array_equal(model.model.layers[0].mlp.up_proj.kernel[...], kernel)
    with pytest.raises(ArgumentError, match="expected a quantized model"):
        model.dequantize()


@pytest.mark.parametrize("make", [my_model, decoder])
def test_an_abstract_model_is_quantized_like_a_concrete_one(make):
    model = make().quantize("nf4", 16)
    inside = nnx.eval_shape(lambda: make().quantize("nf4", 16))
    outside = nnx.eval_shape(make).quantize("nf4", 16)
    for abstract in (inside, outside):
        assert abstract.graphdef == model.graphdef
        assert hash(abstract.graphdef) == hash(model.graphdef)
        assert description(abstract) == description(model)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves(abstract).values())


def test_a_jitted_step_takes_a_rebuilt_model_without_compiling_again():
    @nnx.jit
    def forward(model, ids):
        return model(ids)

    step = jax.jit(lambda graphdef, state, ids: nnx.merge(graphdef, state)(ids), static_argnums=0)
    first, second = (my_model(seed=seed).quantize("a8q", 16) for seed in (0, 1))
    for model in (first, second):
        step(*model.split_module(), ids())
    assert step._cache_size() == 1
    np.testing.assert_allclose(forward(first, ids()), first(ids()), rtol=1e-5, atol=1e-5)


def test_scanned_and_rematerialised_layers_compute_the_same():
    two = {"num_hidden_layers": 2}
    unrolled = logits(decoder(**two).quantize("nf4", 16))
    scanned = logits(decoder(**two, scan_layers=True, remat=True).quantize("nf4", 16))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-6)


def test_a_scan_takes_layers_that_are_quantized_differently():
    pattern, two = "layers/1/", {"num_hidden_layers": 2}
    unrolled = logits(decoder(**two).quantize("8bit", 16, pattern))
    scanned = logits(decoder(**two, scan_layers=True).quantize("8bit", 16, pattern))
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "spec", "inputs"),
    [
        ("nf4", PartitionSpec("fsdp"), 512),
        ("8bit", PartitionSpec("fsdp", "tp"), 512),
        ("nf4", PartitionSpec("fsdp"), 576),  # 9 groups of 64 over 4 devices
    ],
)
def test_a_sharded_weight_is_packed_where_it_is_and_never_whole_on_a_device(method, spec, inputs):
    dims = (1, 4, 2, 1) if "tp" in spec else (2, 4, 1, 1)
    place = NamedSharding(make_mesh(dims), spec)
    weight = jax.random.normal(jax.random.key(0), (inputs, 192))
    settings = QuantizationSettings(method, 64)
    whole = QuantizedWeight.pack(nnx.Param(weight), (0,), settings)
    parts = QuantizedWeight.pack(nnx.Param(jax.device_put(weight, place)), (0,), settings)
    for a, b in zip(jax.tree.leaves(whole.arrays()), jax.tree.leaves(parts.arrays()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert parts.array.qvalue.sharding == place
    assert not whole_weights_in(packing_program(place, weight, settings), weight.shape)


def packing_program(place, weight, settings):
    run = quantizer((0,), weight.shape, settings.method, settings.group_size)
    packed = sharded_weight(run, place, weight.shape, weight.dtype, (0,))
    given = jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=place)
    return packed.lower(given).compile().as_text()


def whole_weights_in(program, shape):
    """Results of collectives that hold all of the weight."""
    elements = int(np.prod(shape))
    found = []
    for line in program.splitlines():
        if " all-gather(" in line or " all-to-all(" in line:
            sizes = line.split("=", 1)[1].split("[", 1)[1].split("]", 1)[0]
            if sizes and int(np.prod([int(size) for size in sizes.split(",")])) >= elements:
                found.append(line)
    return found


@pytest.mark.parametrize("dims", [(1, 4, 2, 1), (2, 4, 1, 1)] if is_long() else [(1, 4, 2, 1)])
def test_sharding_before_and_after_quantizing_place_every_leaf_alike(dims):
    options = {"sharding_axis_dims": dims, "hidden_size": 64, "tie_word_embeddings": False}
    before = decoder(**options).shard_model().quantize("nf4", 8)
    after = decoder(**options).quantize("nf4", 8).shard_model()
    places = {path: leaf.sharding for path, leaf in leaves(after).items()}
    assert places == {path: leaf.sharding for path, leaf in leaves(before).items()}
    query = "model/layers/0/self_attn/q_proj/kernel/array"
    tp = "tp" if dims[2] > 1 else None
    expected = PartitionSpec("fsdp", tp) if tp else PartitionSpec("fsdp")
    assert places[f"{query}/qvalue"].spec == places[f"{query}/scale"].spec == expected
    if tp:
        exact = logits(decoder(**options).quantize("nf4", 8))
        np.testing.assert_allclose(logits(before), exact, rtol=1e-4, atol=1e-5)


def test_groups_that_a_mesh_does_not_divide_stay_whole_while_the_weight_is_split():
    model = decoder().shard_model().quantize("nf4", 16).shard_model()  # 2 groups, fsdp=4
    kernel = model.model.layers[0].self_attn.q_proj.kernel.array
    assert kernel.qvalue.sharding.spec == PartitionSpec("fsdp")
    assert kernel.scale.sharding.spec == PartitionSpec()
    report = model.explain_sharding(strict=True)
    rules = {leaf.path: leaf.rule for leaf in report.leaves}
    assert rules["model/layers/0/self_attn/q_proj/kernel/array/scale"] == "axes (embed?, heads)"


@pytest.mark.parametrize("method", ["nf4", "a8q"])  # by a table, and by a scale, inputs too
def test_layers_with_several_axes_are_quantized_too(method):
    rngs = nnx.Rngs(0)
    inputs = jax.random.normal(jax.random.key(3), (2, 3, 4, 16))
    layers = [
        nnx.LinearGeneral((4, 16), (5, 8), axis=(-2, -1), rngs=rngs),
        nnx.LinearGeneral(16, 8, batch_axis={0: 2}, rngs=rngs),
        nnx.Einsum("bthd,hdk->bthk", (4, 16, 8), (4, 8), rngs=rngs),
        nnx.Einsum("...d,dk->...k", (16, 8), (8,), rngs=rngs),
    ]
    for layer in layers:
        layer.bias[...] = jax.random.normal(jax.random.key(4), layer.bias.shape)
        exact = output_of(layer, inputs)
        layer = adapted(layer)
        pack_kernel(layer, QuantizationSettings(method, 16))
        got = output_of(layer, inputs)
        assert got.shape == exact.shape
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 0 < error < LOGITS_BOUND[method] * 1.2, (type(layer).__name__, error)


def test_layers_that_are_not_flax_own_products_are_left_alone():
    class Twice(nnx.Linear):
        def __call__(self, inputs):
            return 2.0 * super().__call__(inputs)

    class Named(nnx.Linear):
        pass

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.plain, self.named, self.twice = (
                kind(4, 4, rngs=rngs) for kind in (nnx.Linear, Named, Twice)
            )
            self.own = nnx.Linear(4, 4, dot_general=lambda *a, **k: a[0], rngs=rngs)
            self.tied, self.tied_too = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
            self.tied_too.kernel = self.tied.kernel
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.conv = nnx.Conv(4, 4, 3, rngs=rngs)

    model = Model()
    found = dict(adaptable_layers(model))
    assert set(found) == {
        "plain",
        "named",
        *(f"attention/{n}" for n in ("query", "key", "value", "out")),
    }
    quantize_layers(model, QuantizationSettings("nf4", pattern="named"))
    assert isinstance(model.named, Named)
    dequantize_layers(model)
    assert type(model.named) is Named


def test_a_quantized_model_keeps_its_own_class():
    model = my_model().quantize("nf4")
    assert type(model) is MyModel
    assert isinstance(model.layers[0], nnx.Linear)


def test_settings_are_json_both_ways():
    settings = QuantizationSettings("a4q", 32, "mlp")
    assert QuantizationSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert hash(settings) == hash(QuantizationSettings("a4q", 32, "mlp"))
    with pytest.raises(ArgumentError, match="method, group_size, pattern"):
        QuantizationSettings.from_dict({"method": "nf4", "bits": 4})


def test_an_abstract_weight_can_be_read_in_a_trace():
    weight = QuantizedWeight.pack(nnx.Param(jnp.ones((8, 4))), (0,), QuantizationSettings("nf4"))
    assert (weight.shape, weight.ndim, weight.dtype) == ((8, 4), 2, jnp.float32)
    np.testing.assert_allclose(jax.jit(dequantize)(weight.arrays()), np.ones((8, 4)), rtol=1e-6)
