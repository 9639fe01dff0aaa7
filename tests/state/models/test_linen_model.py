"""Models for Linen: the base class, and the one decoder behind Flax's bridge."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from jax.sharding import NamedSharding, PartitionSpec
from transformers import AutoModelForCausalLM

from cairn import (
    ArgumentError,
    DecoderForCausalLM,
    EasyDeLState,
    EDPretrainedConfig,
    EDPretrainedModel,
    LinenDecoderForCausalLM,
    NotInitializedError,
    ShardingError,
    TrainState,
    TrainStep,
    TreeStructureError,
    make_mesh,
)
from tests.state.forward import outputs_of
from tests.state.hf_models import save, tiny_llama, tokens, torch_logits
from tests.state.my_model import my_model
from tests.tiny import TINY

IDS = jnp.asarray(tokens(2, 10))
UNTIED = TINY.replace(tie_word_embeddings=False, vocab_size=96, num_hidden_layers=1)


@dataclass(frozen=True, kw_only=True)
class BagConfig(EDPretrainedConfig):
    model_type: str = "bag-of-words-of-the-tests"
    vocab_size: int = 64
    rules: tuple[tuple[str, PartitionSpec], ...] | None = None

    def get_partition_rules(self):
        return self.rules


class Bag(linen.Module):
    """A user's own Linen module: one table with logical axes, one with the mesh's."""

    vocab: int

    @linen.compact
    def __call__(self, input_ids):
        normal = linen.initializers.normal()
        table = self.param(
            "table", linen.with_partitioning(normal, ("vocab", "embed")), (self.vocab, 16)
        )
        head = linen.Dense(
            self.vocab, kernel_init=linen.with_partitioning(normal, (None, "fsdp")), name="head"
        )
        return head(table[input_ids])


class BagModel(EDPretrainedModel):
    def __call__(self, input_ids, params=None):
        return self.module.apply({"params": self._fitting(params)}, input_ids)


def bag(**options):
    config = BagConfig(sharding_axis_dims=(1, 4, 2, 1))
    return BagModel(config, Bag(config.vocab_size), **options)


@pytest.fixture(scope="module")
def model():
    return LinenDecoderForCausalLM(UNTIED, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("linen"))


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), rtol=0)


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- the base class --------------------------------------------------------------------------------


def test_a_users_linen_module_gets_parameters_a_mesh_and_placements():
    model = bag(input_shape=(2, 5), seed=3)
    assert (model.input_shape, model.seed, model.dtype) == ((2, 5), 3, np.float32)
    assert model.config.vocab_size == 64
    assert dict(model.mesh.shape) == {"dp": 1, "fsdp": 4, "tp": 2, "sp": 1}
    named = model.get_named_sharding()
    assert named["table"].spec == PartitionSpec("tp", "fsdp")
    assert named["head"]["kernel"].spec == PartitionSpec(None, "fsdp")
    model.params = jax.device_put(model.params, named)
    assert model.params["table"].addressable_shards[0].data.shape == (32, 4)
    assert model(IDS % 64).shape == (2, 10, 64)
    assert_same(bag(seed=3).params, model.params)
    assert not np.array_equal(bag(seed=4).params["table"], model.params["table"])


def test_placement_goes_by_the_argument_then_the_config_then_the_axis_names():
    model = bag(_do_init=False)
    rules = (("table", PartitionSpec(None, "tp")), (".*", PartitionSpec()))
    config = model.config.replace(rules=rules)
    ruled = BagModel(config, Bag(64), _do_init=False)
    assert ruled.get_named_sharding()["table"].spec == PartitionSpec(None, "tp")
    given = ruled.get_named_sharding([(".*", PartitionSpec("fsdp"))])
    assert given["head"]["kernel"].spec == PartitionSpec("fsdp")
    mesh = make_mesh((1, 8, 1, 1))
    assert model.get_named_sharding(mesh=mesh)["table"] == NamedSharding(
        mesh, PartitionSpec(None, "fsdp")
    )
    with pytest.raises(ShardingError, match="head/bias"):
        model.get_named_sharding([("table|kernel", PartitionSpec())])


def test_without_init_the_model_is_abstract_and_takes_params():
    model, other = bag(_do_init=False), bag(seed=7)
    with pytest.raises(NotInitializedError, match="pass params= to the call"):
        model(IDS % 64)
    assert model.params_shape_tree["table"] == jax.ShapeDtypeStruct((64, 16), jnp.float32)
    assert "without params" in repr(model)
    assert_same(model(IDS % 64, params=other.params), other(IDS % 64))
    model.params = other.params
    assert_same(model(IDS % 64), other(IDS % 64))
    with pytest.raises(TreeStructureError, match="head/bias: missing") as caught:
        model.params = {"table": jnp.ones((3, 16)), "head": {"kernel": jnp.ones((16, 64))}}
    assert len(caught.value.problems) == 2
    assert model.params["table"].shape == (64, 16)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("to_nnx", ()),
        ("to_easydel_state", ()),
        ("to_pytorch", ()),
        ("to_8bit", ()),
        ("save_pretrained", ("folder",)),
    ],
)
def test_what_a_subclass_has_not_defined_says_so_and_names_the_class(name, arguments):
    with pytest.raises(NotImplementedError, match=r"BagModel does not define \w+"):
        getattr(bag(_do_init=False), name)(*arguments)


def test_the_bare_base_class_can_not_be_called_nor_generate():
    model = EDPretrainedModel(BagConfig(), Bag(64), _do_init=False)
    with pytest.raises(NotImplementedError, match="EDPretrainedModel does not define __call__"):
        model(IDS)
    assert not model.can_generate()


def test_texts_show_the_class_its_configuration_and_every_parameter():
    model = bag()
    elements = 64 * 16 + 16 * 64 + 64
    assert repr(model) == (
        f"BagModel(model_type='bag-of-words-of-the-tests', {elements:,} parameters, dtype=float32)"
    )
    assert str(model).startswith(repr(model))
    assert "vocab_size = 64" in str(model)
    page = model._md_info().splitlines()
    assert page[0] == "# BagModel (bag-of-words-of-the-tests)"
    assert f"{elements:,} parameters, {elements * 4:,} bytes." in page
    assert "| vocab_size | `64` |" in page
    assert "| `table` | 64 x 16 | float32 | 1 | 1,024 |" in page
    assert "| `head/bias` | 64 | float32 | 1 | 64 |" in page


# -- the decoder -----------------------------------------------------------------------------------


def test_the_bridge_computes_what_the_nnx_model_computes(model):
    ours = model(IDS, labels=IDS)
    mask = jnp.ones_like(IDS).at[0, :4].set(0)
    for inputs in ({"labels": IDS}, {"attention_mask": mask}):
        expected = outputs_of(model.to_nnx(), IDS, **inputs)
        outputs = model(IDS, **inputs)
        np.testing.assert_allclose(outputs.logits, expected.logits, atol=1e-5)
    np.testing.assert_allclose(
        ours.loss, outputs_of(model.to_nnx(), IDS, labels=IDS).loss, rtol=1e-5
    )
    back = LinenDecoderForCausalLM.from_nnx(model.to_nnx())
    assert back.params["lm_head"]["kernel"] is model.params["lm_head"]["kernel"]
    assert back.config == model.config


def test_the_module_is_an_ordinary_linen_module(model):
    variables = model.module.init(jax.random.key(5), IDS)
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(model.params)
    expected = model(IDS, params=variables["params"]).logits
    np.testing.assert_allclose(model.module.apply(variables, IDS).logits, expected, atol=1e-5)
    # Through Flax's own files numbers become text; the model takes both.
    read = serialization.msgpack_restore(serialization.to_bytes(model.params))
    np.testing.assert_allclose(model(IDS, params=read).logits, model(IDS).logits, atol=1e-6)


def test_it_trains_in_a_train_state_and_compiles_once():
    model = LinenDecoderForCausalLM(UNTIED.replace(sharding_axis_dims=(2, 4, 1, 1)))
    model.params = jax.device_put(model.params, model.get_named_sharding())
    kernel = model.params["model"]["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.sharding.spec[0] == "fsdp"
    tx = optax.adam(1e-2)
    state = TrainState.create(params=jax.tree.map(jnp.copy, model.params), tx=tx, apply_fn=model)
    step = TrainStep(lambda s, p, batch: s.apply_fn(batch, labels=batch, params=p).loss)
    losses = []
    for _ in range(6):
        state, metrics = step(state, IDS)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert step.traces == 1
    # The NNX model of the same arrays takes the same first step.
    nnx_state = model.to_easydel_state(tx=tx)
    assert isinstance(nnx_state, EasyDeLState)
    nnx_step = TrainStep(lambda s, p, batch: s.merge(p)(input_ids=batch, labels=batch).loss)
    _, nnx_metrics = nnx_step(nnx_state, IDS)
    np.testing.assert_allclose(losses[0], nnx_metrics["loss"], rtol=1e-5)


def test_its_easydel_state_is_saved_and_comes_back_as_a_linen_model(model, tmp_path):
    state = model.to_easydel_state(tx=optax.adam(1e-2), hyperparameters={"rate": 1e-2})
    assert jax.tree.leaves(state.opt_state)
    state.save_state(tmp_path / "run", verbose=False).wait()
    loaded = EasyDeLState.load_state(tmp_path / "run", tx=optax.adam(1e-2), verbose=False)
    assert loaded.hyperparameters == {"rate": 1e-2}
    back = LinenDecoderForCausalLM.from_nnx(loaded.model)
    assert_same(back.params, model.params)
    np.testing.assert_allclose(back(IDS).logits, model(IDS).logits, atol=1e-6)


def test_generated_tokens_are_those_of_the_nnx_model(model):
    mask = jnp.ones_like(IDS).at[0, :4].set(0)
    arguments = {"max_new_tokens": 8, "eos_token_id": ()}
    expected = model.to_nnx().generate(IDS, mask, **arguments).sequences
    np.testing.assert_array_equal(model.generate(IDS, mask, **arguments).sequences, expected)
    assert model.can_generate()
    with pytest.raises(ArgumentError, match="expected 10 or more, the prompt; found 9"):
        model.prepare_inputs_for_generation(IDS, 9)
    with pytest.raises(ArgumentError, match="batch_size and max_length of 1 or more"):
        model.init_cache(0, 4)
    assert model.init_cache(2, 5).keys.shape == (1, 2, 5, 2, 16)


def test_tied_embeddings_are_one_matrix():
    model = LinenDecoderForCausalLM(TINY)
    assert model.get_output_embeddings() is model.get_input_embeddings()
    model.set_output_embeddings(jnp.ones((128, 32)))
    np.testing.assert_array_equal(model.get_input_embeddings(), np.ones((128, 32)))


def test_8bit_takes_a_third_of_the_bytes_runs_and_is_near(model, tmp_path):
    packed = model.to_8bit(group_size=32)
    assert packed.size < 0.45 * model.size  # the embedding stays float32
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(packed.params)}
    assert dtypes == {"int8", "float32"}
    assert packed.to_nnx().is_quantized
    assert not model.to_nnx().is_quantized
    logits, exact = packed(IDS).logits, model(IDS).logits
    assert 0 < np.abs(logits - exact).max() < 0.03 * np.abs(exact).max()
    with pytest.raises(ArgumentError, match="expected a floating output head"):
        packed.get_output_embeddings()
    # Its state is saved and restored bit for bit.
    packed.to_easydel_state().save_state(tmp_path / "run", step=1, verbose=False).wait()
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    assert_same(LinenDecoderForCausalLM.from_nnx(loaded.model).params, packed.params)


def test_a_folder_of_transformers_is_loaded_saved_and_exported(folder, tmp_path):
    theirs = torch_logits(tiny_llama(), np.asarray(IDS))
    model = LinenDecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(1, 4, 2, 1))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(model.params)} == {8}
    assert_close(model(IDS).logits, theirs)
    assert_close(torch_logits(model.to_pytorch(), np.asarray(IDS)), theirs)
    written = model.save_pretrained(tmp_path / "out", max_shard_size="40KB")
    assert sum(name.endswith(".safetensors") for name in written) > 1
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(torch_logits(reloaded.eval(), np.asarray(IDS)), theirs)
    # Other parameters than the model's own are saved, and exported, when they are passed.
    double = {**model.params, "lm_head": {"kernel": 2 * model.params["lm_head"]["kernel"]}}
    assert_close(torch_logits(model.to_pytorch(double), np.asarray(IDS)), 2 * theirs)
    model.save_pretrained(tmp_path / "double", double)
    assert_same(LinenDecoderForCausalLM.from_pretrained(tmp_path / "double").params, double)


def test_dtypes_are_those_that_were_asked_for(folder):
    model = LinenDecoderForCausalLM.from_pretrained(
        folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    assert model.dtype == jnp.bfloat16
    assert model(IDS).logits.dtype == jnp.bfloat16
    half = LinenDecoderForCausalLM(UNTIED, dtype=jnp.bfloat16)
    assert half(IDS).logits.dtype == jnp.bfloat16
    assert half.get_input_embeddings().dtype == jnp.float32


def test_only_decoders_have_this_linen_form():
    with pytest.raises(ArgumentError, match="expected a DecoderForCausalLM; found MyModel"):
        LinenDecoderForCausalLM.from_nnx(my_model())
    nnx_model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0))
    assert_same(LinenDecoderForCausalLM.from_nnx(nnx_model).params, nnx_model.params)
