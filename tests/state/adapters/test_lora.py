"""Low-rank adapters: what they add, that only they are trained, and how they come and go."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import ArgumentError, DecoderForCausalLM, EasyDeLState, LoraSettings, TreeStructureError
from cairn.state.paths import has_variables, named_leaves
from tests.state.forward import logits_of, output_of
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model, train_step
from tests.state.seams import adapted_layers
from tests.tiny import TINY

QV = ".*q_proj.*|.*v_proj.*"


def decoder(**options):
    """Of one layer, or two in a scan: each takes as long to compile."""
    layers = 2 if options.get("scan_layers") else 1
    config = dataclasses.replace(TINY, num_hidden_layers=layers, **options)
    return DecoderForCausalLM(config, rngs=nnx.Rngs(0))


def ids():
    return batch(rows=2) % TINY.vocab_size


def logits(model):
    return logits_of(model, ids())


def adapters(model):
    return {named.path: named for named in named_leaves(nnx.state(model, nnx.LoRAParam))}


def leaves(model):
    return {named.path: named.leaf for named in named_leaves(nnx.state(model))}


def description(model):
    named = named_leaves(nnx.state(model))
    return [(leaf.path, leaf.leaf.shape, str(leaf.leaf.dtype), leaf.axes) for leaf in named]


def trained(model, seed=1):
    """The model with random adapters, as if it had been trained."""
    own = nnx.state(model, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(own))))
    return model.merge_lora_params(
        jax.tree.map(lambda leaf: 0.1 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), own)
    )


def adapted(model, rank=4, alpha=8, pattern=".*", **options):
    return trained(model.apply_lora_to_layers(rank, alpha, pattern, **options))


def gradients(model):
    graphdef, own, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(own):
        return nnx.merge(graphdef, own, rest)(input_ids=ids(), labels=ids()).loss

    return jax.jit(jax.grad(loss))(own)


def test_rngs_decide_the_first_values_of_adapters():
    first, same, other = (
        adapters(my_model().apply_lora_to_layers(4, rngs=nnx.Rngs(seed))) for seed in (1, 1, 2)
    )
    drawn = [path for path in first if path.endswith("_a")]
    assert drawn
    for path in drawn:
        np.testing.assert_array_equal(first[path].leaf, same[path].leaf)
        assert not np.array_equal(first[path].leaf, other[path].leaf)


def test_new_adapters_change_nothing_but_what_is_trained():
    model = my_model()
    exact = logits(model)
    assert model.apply_lora_to_layers(4, 8) is model
    assert model.lora_is_enabled
    assert model.lora == LoraSettings(4, 8.0, ".*", "float32")
    np.testing.assert_array_equal(logits(model), exact)
    assert {named.path for named in named_leaves(model.graphstate)} == set(adapters(model))
    assert not set(adapters(model)) & {named.path for named in named_leaves(model.graphother)}


def test_a_pattern_chooses_layers_and_the_pair_has_the_documented_names_and_shapes():
    found = adapters(decoder().apply_lora_to_layers(lora_rank=8, lora_alpha=16, lora_pattern=QV))
    assert {path.split("/kernel_")[0].split("/")[-1] for path in found} == {"q_proj", "v_proj"}
    layer = "model/layers/0/self_attn/v_proj"
    assert found[f"{layer}/kernel_lora_a"].leaf.shape == (32, 8)
    assert found[f"{layer}/kernel_lora_b"].leaf.shape == (8, 32)
    assert found[f"{layer}/kernel_lora_a"].axes == ("embed", None)
    assert found[f"{layer}/kernel_lora_b"].axes == (None, "kv_heads")


def test_the_output_gets_alpha_by_rank_times_x_a_b():
    model = adapted(my_model(), rank=4, alpha=10)
    layer = model.layers[0]
    x = jax.random.normal(jax.random.key(5), (3, 64))
    a, b = np.float64(layer.kernel_lora_a[...]), np.float64(layer.kernel_lora_b[...])
    base = np.float64(x) @ np.float64(layer.kernel[...]) + np.float64(layer.bias[...])
    np.testing.assert_allclose(
        layer(x), base + 10 / 4 * (np.float64(x) @ a @ b), rtol=1e-5, atol=1e-5
    )
    assert my_model().apply_lora_to_layers(4).lora.scale == 1.0


def test_the_source_of_randomness_decides_a_and_b_is_zero():
    def first(**given):
        return my_model().apply_lora_to_layers(4, **given).layers[0]

    assert not first().kernel_lora_b[...].any()
    np.testing.assert_array_equal(first().kernel_lora_a[...], first().kernel_lora_a[...])
    other = first(rngs=nnx.Rngs(7)).kernel_lora_a[...]
    assert (other != first().kernel_lora_a[...]).all()
    model = my_model().apply_lora_to_layers(4)
    assert (model.layers[0].kernel_lora_a[...] != model.layers[1].kernel_lora_a[...]).all()
    assert abs(float(other.std()) - np.sqrt(2 / 64)) < 0.02


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lora_rank": 0}, "lora_rank: expected an integer, 1 or more; found 0"),
        ({"lora_rank": 2.0}, "lora_rank: expected an integer"),
        ({"lora_rank": 4, "lora_alpha": 0}, "lora_alpha: expected a finite number above 0"),
        ({"lora_rank": 4, "lora_alpha": float("nan")}, "lora_alpha: expected a finite number"),
        ({"lora_rank": 4, "lora_pattern": "*"}, "lora_pattern: expected a regular expression"),
        ({"lora_rank": 4, "lora_pattern": QV}, r"(?s)lora_pattern: .*none of 2;.*layers/0\.\.1$"),
    ],
)
def test_an_argument_that_cannot_act_is_an_error_and_changes_nothing(arguments, expected):
    model = my_model()
    graphdef, before = model.graphdef, leaves(model)
    with pytest.raises(ArgumentError, match=expected):
        model.apply_lora_to_layers(**arguments)
    assert model.graphdef == graphdef
    assert all(leaf is before[path] for path, leaf in leaves(model).items())


def test_adapting_twice_is_an_error_and_changes_nothing():
    model = my_model().apply_lora_to_layers(4)
    graphdef, before = model.graphdef, leaves(model)
    with pytest.raises(ArgumentError, match=r"call unwrap_lora_to_layers\(\) first"):
        model.apply_lora_to_layers(4)
    assert model.graphdef == graphdef
    assert all(leaf is before[path] for path, leaf in leaves(model).items())


@pytest.mark.parametrize(
    "method", ["split_lora_params", "merge_lora_params", "unwrap_lora_to_layers"]
)
def test_without_adapters_there_is_nothing_to_split_or_merge(method):
    with pytest.raises(ArgumentError, match=rf"{method}: .*call apply_lora_to_layers\(\) first"):
        getattr(my_model(), method)()


def test_split_and_merge_of_a_tree_undo_each_other():
    model = adapted(my_model())
    wanted = logits(model)
    base, lora = model.split_lora_params()
    assert {named.path for named in named_leaves(lora)} == set(adapters(model))
    assert {named.path for named in named_leaves(base)} == {
        "embed_tokens/embedding",
        *(f"layers/{number}/{name}" for number in (0, 1) for name in ("bias", "kernel")),
    }
    other = my_model().apply_lora_to_layers(4, 8)
    assert other.merge_lora_params(nnx.to_pure_dict(lora)) is other
    np.testing.assert_array_equal(logits(other), wanted)


def test_what_was_split_off_stays_as_it_is_when_the_model_changes():
    model = adapted(decoder())
    _, whole = model.split_module()
    parts = *model.split_lora_params(), model.split_params(), model.graphstate, whole
    before = [jax.tree.map(np.asarray, nnx.to_pure_dict(part)) for part in parts]
    wanted = logits(model)
    model.merge_lora_params()
    for part, values in zip(parts, before, strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(part), values)
    np.testing.assert_array_equal(logits(model.merge_params(parts[2])), wanted)


@pytest.mark.parametrize("method", [None, "nf4"])
def test_adapters_of_a_gathered_model_are_merged(method):
    model = decoder().shard_model()
    model = adapted(model if method is None else model.quantize(method, 16))
    wanted = logits(model)
    model.gather_model()
    if method is None:
        model.merge_lora_params()
        np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    model.unwrap_lora_to_layers()
    assert not model.lora_is_enabled
    np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_adapters_that_do_not_fit_are_all_listed_and_none_is_taken():
    model = adapted(my_model())
    wanted = logits(model)
    lora = nnx.to_pure_dict(model.split_lora_params()[1])
    lora["layers"][0]["kernel_lora_a"] = jnp.zeros((64, 5))
    del lora["layers"][1]["kernel_lora_b"]
    with pytest.raises(TreeStructureError) as caught:
        model.merge_lora_params(lora)
    assert caught.value.problems == (
        "layers/0/kernel_lora_a: expected shape (64, 4), found (64, 5)",
        "layers/1/kernel_lora_b: missing, expected shape (4, 64)",
    )
    np.testing.assert_array_equal(logits(model), wanted)


def test_merging_puts_the_effect_into_the_weights_and_adapters_start_again():
    model = adapted(decoder())
    wanted, kernel = (
        logits(model),
        next(v for p, v in leaves(model).items() if p.endswith("kernel")),
    )
    before = np.asarray(kernel)
    assert model.merge_lora_params() is model
    np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    assert model.lora_is_enabled
    after = next(v for p, v in leaves(model).items() if p.endswith("kernel"))
    assert np.abs(before - np.asarray(after)).max() > 1e-3
    assert all(not n.leaf.any() for path, n in adapters(model).items() if path.endswith("_b"))


@pytest.mark.parametrize("make", [my_model, lambda: decoder(scan_layers=True, remat=True)])
def test_unwrapping_equals_the_adapters_output_and_leaves_a_plain_model(make):
    model = make()
    graphdef, before = model.graphdef, description(model)
    wanted = logits(adapted(model))
    assert model.unwrap_lora_to_layers() is model
    np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)
    assert not model.lora_is_enabled
    assert model.lora is None
    assert model.graphdef == graphdef
    assert description(model) == before
    model.apply_lora_to_layers(2)


@pytest.mark.parametrize("method", ["merge_lora_params", "unwrap_lora_to_layers"])
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_beside_a_kernel_that_was_shared_since_are_named_and_nothing_is_merged(
    method, quantized
):
    model = my_model()
    if quantized and method == "unwrap_lora_to_layers":
        model.quantize("nf4", 16, "layers/1")
    model = adapted(model, pattern="layers/0")
    model.again = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    model.again.kernel = model.layers[0].kernel
    before, wanted = description(model), logits(model)
    with pytest.raises(ArgumentError, match="1 beside a kernel that other layers have") as caught:
        getattr(model, method)()
    assert caught.value.problems == ("layers/0",)
    assert description(model) == before
    assert model.lora is not None
    np.testing.assert_array_equal(logits(model), wanted)


def test_layers_made_as_one_for_a_scan_are_left_alone():
    class Stacked(MyModel):
        def __init__(self, config, **settings):
            super().__init__(config, **settings)
            size = config.hidden_size
            made = nnx.vmap(lambda rngs: nnx.Linear(size, size, rngs=rngs))
            self.stack = nnx.split_rngs(splits=2)(made)(settings["rngs"])

        def __call__(self, input_ids, attention_mask=None, **kwargs):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def through(hidden, layer):
                return hidden + jnp.tanh(layer(hidden))

            hidden = through(self.embed_tokens(input_ids), self.stack)
            return self.embed_tokens.attend(self.layers[0](hidden))

    config = MyModelConfig(sharding_axis_dims=(1, 1, 1, 1))
    model = Stacked(config, rngs=nnx.Rngs(0))
    ids = jnp.arange(8)[None]
    exact = model(ids)
    for change in (
        lambda: model.quantize("8bit", 16, "stack"),
        lambda: model.apply_lora_to_layers(4, 8.0, "stack"),
    ):
        with pytest.raises(ArgumentError, match="'stack', which matches none of 2"):
            change()
    np.testing.assert_array_equal(model(ids), exact)
    model.apply_lora_to_layers(4, 8.0)
    assert {path.split("/")[0] for path in adapters(model)} == {"layers"}
    np.testing.assert_array_equal(model(ids), exact)
    model.quantize("8bit", 16)
    assert {path.split("/")[0] for path in leaves(model) if "qvalue" in path} == {"layers"}


def test_layers_with_several_axes_have_adapters_too():
    rngs = nnx.Rngs(0)
    inputs = jax.random.normal(jax.random.key(3), (2, 3, 4, 16))
    for layer in (
        nnx.LinearGeneral((4, 16), (5, 8), axis=(-2, -1), rngs=rngs),
        nnx.LinearGeneral(16, 8, batch_axis={0: 2}, rngs=rngs),
        nnx.Einsum("bthd,hdk->bthk", (4, 16, 8), (4, 8), rngs=rngs),
        nnx.Einsum("...d,dk->...k", (16, 8), (8,), rngs=rngs),
    ):
        exact = output_of(layer, inputs)
        layer = adapted_layers.adapted(layer)
        adapted_layers.add_adapters(layer, LoraSettings(3, 1.5, ".*"), jax.random.key(1))
        np.testing.assert_array_equal(output_of(layer, inputs), exact)
        layer.kernel_lora_b[...] = jax.random.normal(jax.random.key(2), layer.kernel_lora_b.shape)
        wanted = output_of(layer, inputs)
        assert jnp.abs(wanted - exact).max() > 0.1
        adapted_layers.merge_adapters(layer)
        np.testing.assert_allclose(output_of(layer, inputs), wanted, rtol=1e-4, atol=1e-5)


def in_bfloat16(method=None, **options):
    model = my_model(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16).to_dtype(jnp.bfloat16)
    return adapted(model if method is None else model.quantize(method, 16), **options)


def dtypes_of(model):
    return {named.leaf.dtype.name for named in adapters(model).values()}


@pytest.mark.parametrize("method", [None, "a8q"])
def test_a_model_in_bfloat16_has_adapters_in_float32_and_outputs_in_bfloat16(method):
    model = in_bfloat16(method)
    assert dtypes_of(model) == {"float32"}
    assert model.lora.dtype == "float32"
    assert model(ids()).dtype == jnp.bfloat16
    text = str(jax.make_jaxpr(lambda i: model(i))(ids()))
    assert not re.search(r"f32\[[\d,]+\] = dot_general", text)


def test_other_dtypes_are_chosen_by_argument():
    assert dtypes_of(in_bfloat16(lora_dtype=None)) == {"bfloat16"}
    assert dtypes_of(in_bfloat16(lora_dtype="float16")) == {"float16"}
    assert dtypes_of(in_bfloat16().to_dtype(jnp.bfloat16)) == {"bfloat16"}
    with pytest.raises(ArgumentError, match=r"lora_dtype.*int8"):
        in_bfloat16(lora_dtype=jnp.int8)


@pytest.mark.parametrize(("lora_dtype", "share"), [(jnp.float32, (0.99, 1)), (None, (0, 0.3))])
def test_a_small_step_of_adamw_moves_adapters_of_a_bfloat16_base(lora_dtype, share):
    tx = optax.adamw(1e-4)
    state = in_bfloat16(lora_dtype=lora_dtype).to_state(tx)
    step = jax.jit(train_step)
    for _ in range(2):  # B is zero at first, and A has no gradient
        before = adapters(state.model)
        state, _ = step(state, ids())
    after = adapters(state.model)
    moved = [
        np.asarray(after[path].leaf) != np.asarray(before[path].leaf)
        for path in after
        if path.endswith("_lora_a")
    ]
    found = np.mean(np.concatenate([one.ravel() for one in moved]))
    assert share[0] <= found <= share[1]


def test_wide_adapters_are_merged_into_narrow_weights_at_once():
    model = in_bfloat16()
    nnx.update(model, jax.tree.map(lambda a: a + 0.05, nnx.state(model, nnx.LoRAParam)))
    wanted = model(ids())
    model.unwrap_lora_to_layers()
    kernels = {n.leaf.dtype.name for n in named_leaves(nnx.state(model, nnx.Param))}
    assert kernels == {"bfloat16"}
    found = np.asarray(model(ids())).astype(np.float32)
    np.testing.assert_allclose(found, np.asarray(wanted).astype(np.float32), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("lora_dtype", [jnp.float32, None])
def test_a_checkpoint_keeps_the_dtype_of_adapters(lora_dtype, tmp_path):
    model = in_bfloat16(lora_dtype=lora_dtype)
    state = model.to_state(optax.sgd(1e-2))
    state.save_state(tmp_path / "run", wait=True, verbose=False, mismatch_allowed=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", tx=optax.sgd(1e-2), verbose=False)
    assert loaded.model.lora == model.lora
    assert dtypes_of(loaded.model) == dtypes_of(model)


# -- QLoRA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [my_model, lambda: decoder(scan_layers=True, remat=True)])
def test_gradients_through_a_quantized_base_are_those_of_the_dequantized_one(make):
    model = adapted(make().quantize("nf4", 16))
    through = gradients(model)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(through))
    plain = gradients(model.dequantize())
    for ours, theirs in zip(jax.tree.leaves(through), jax.tree.leaves(plain), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_only_the_adapters_of_a_quantized_model_are_trained():
    model = my_model().shard_model().quantize("nf4", 16).apply_lora_to_layers(4, 8)
    before = {path: np.asarray(leaf) for path, leaf in leaves(model).items() if "rngs" not in path}
    state = model.to_state(optax.adam(1e-2))
    assert {path.split("kernel_lora_")[-1] for path in adapters(model)} == {"a", "b"}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(adapters(model))
    step, losses = jax.jit(train_step), []
    for _ in range(5):
        state, loss = step(state, batch())
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    after = leaves(state.model)
    changed = {path for path in before if (before[path] != np.asarray(after[path])).any()}
    assert changed == set(adapters(model))


def test_quantizing_an_adapted_model_gives_what_adapting_a_quantized_one_gives():
    first = adapted(decoder().quantize("8bit", 16))
    second = adapted(decoder()).quantize("8bit", 16)
    assert first.graphdef == second.graphdef
    assert description(first) == description(second)
    np.testing.assert_array_equal(logits(first), logits(second))


def test_merging_into_quantized_weights_is_an_error_that_names_the_way():
    model = adapted(my_model().quantize("nf4"))
    wanted = logits(model)
    with pytest.raises(ArgumentError, match=r"call dequantize\(\) first, or unwrap_lora_to_layers"):
        model.merge_lora_params()
    np.testing.assert_array_equal(logits(model), wanted)


def test_unwrapping_a_quantized_model_gives_a_floating_one_of_the_same_outputs():
    plain = decoder()
    model = adapted(decoder().quantize("nf4", 16))
    wanted = logits(model)
    model.unwrap_lora_to_layers()
    assert not model.is_quantized
    assert model.quantization is None
    assert model.graphdef == plain.graphdef
    np.testing.assert_allclose(logits(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [None, "nf4"])
def test_an_abstract_model_is_adapted_like_a_concrete_one(method):
    def make():
        model = decoder() if method is None else decoder().quantize(method, 16)
        return model.apply_lora_to_layers(4, 8, QV)

    model, abstract = make(), nnx.eval_shape(make)
    assert abstract.graphdef == model.graphdef
    assert hash(abstract.graphdef) == hash(model.graphdef)
    assert description(abstract) == description(model)
    outside = nnx.eval_shape(decoder)
    if method is not None:
        outside.quantize(method, 16)
    assert outside.apply_lora_to_layers(4, 8, QV).graphdef == model.graphdef
    assert description(outside) == description(model)


def test_adapters_are_made_where_sharding_would_place_them():
    before = decoder().shard_model().apply_lora_to_layers(4)
    after = decoder().apply_lora_to_layers(4).shard_model()
    places = {path: leaf.sharding for path, leaf in leaves(after).items()}
    assert places == {path: leaf.sharding for path, leaf in leaves(before).items()}
    layer = "model/layers/0/mlp/up_proj"
    assert places[f"{layer}/kernel_lora_a"].spec == PartitionSpec("fsdp")
    np.testing.assert_array_equal(
        leaves(before)[f"{layer}/kernel_lora_a"], leaves(after)[f"{layer}/kernel_lora_a"]
    )


def test_settings_are_json_both_ways():
    settings = LoraSettings(8, 16, QV, "bfloat16")
    assert LoraSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert hash(settings) == hash(LoraSettings(8, 16.0, QV, "bfloat16"))
    # As earlier releases saved them.
    assert LoraSettings.from_dict({"rank": 8, "alpha": 16.0, "pattern": QV}).dtype is None
    with pytest.raises(ArgumentError, match="rank, alpha, pattern"):
        LoraSettings.from_dict({"rank": 8})


class Opaque(nnx.Module, pytree=False):
    """No tree to JAX."""

    def __init__(self, held):
        self.held = held


def holders(variable):
    """Modules that hold a Variable in each way there is."""
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    linear.extra = variable
    return {
        "module": linear,
        "list": nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), linear),
        "dict": nnx.Dict(a=nnx.List([linear])),
        "opaque": Opaque(linear),
        "in_opaque": nnx.Sequential(Opaque(variable)),
    }


@pytest.mark.parametrize("way", holders(nnx.Param(jnp.ones(2))))
def test_adapters_are_seen_wherever_a_module_holds_them(way):
    for variable, expected in (
        (nnx.LoRAParam(jnp.ones(2)), True),
        (nnx.Param(jnp.ones(2)), False),
    ):
        assert has_variables(holders(variable)[way], nnx.LoRAParam) is expected
