"""The code of the documentation that the names come from, run as it stands on small models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import DecoderForCausalLM, EasyDeLBaseModule, EasyDeLState, LossConfig
from tests.contract.subjects import DECODER, make_decoder
from tests.state.forward import logits_of
from tests.state.my_model import MyModel, MyModelConfig, batch

config = MyModelConfig(sharding_axis_dims=(2, 4, 1, 1))


@pytest.fixture
def model():
    return MyModel(config, rngs=nnx.Rngs(0))


def test_model_information(model):
    assert model.config is config
    assert model.model_type == "my-model-of-the-tests"
    assert model.model_task == "causal-lm"
    assert model.mesh.size == 8


def test_parameter_access(model):
    params = model.params
    shapes = model.graphtree_params_shape
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    graphdef, state = model.split_module()
    before = model(batch())
    model = model.merge_module(graphdef, state)
    np.testing.assert_array_equal(model(batch()), before)


def test_graph_operations(model):
    graphdef = model.graphdef
    graphstate = model.graphstate
    graphother = model.graphother
    before = model(batch())
    params_dict = model.split_params_dict()
    params_state = model.split_params()
    model.merge_params_dict(params_dict)
    model.merge_params(params_state)
    np.testing.assert_array_equal(model(batch()), before)
    np.testing.assert_array_equal(nnx.merge(graphdef, graphstate, graphother)(batch()), before)


def test_sharding_and_distribution(model):
    model.shard_model(
        partition_rules=None,
        mesh=None,
    )
    assert not model.embed_tokens.embedding.get_value().sharding.is_fully_replicated
    model.gather_model()
    assert isinstance(model.embed_tokens.embedding.get_value(), np.ndarray)


def test_manual_sharding_control(model):
    rules = model._get_partition_rules()
    specs = model._specs_sharding(rules)
    mesh = model.mesh
    named_shardings = model._named_shardings(rules, mesh)
    tree = nnx.state(model)
    partition_rules = ((".*", PartitionSpec()),)
    sharded = model._apply_sharding_fns(
        tree,
        partition_rules,
        mesh,
        is_gather=False,
    )
    assert jax.tree.structure(sharded) == jax.tree.structure(named_shardings)
    assert jax.tree.leaves(specs) == [place.spec for place in jax.tree.leaves(named_shardings)]
    model.fully_shard(mesh=None)
    model.fully_gather(mesh=None)
    shard_fns = model._shard_fns(rules, mesh)
    gather_fns = model._gather_fns(rules, mesh)
    assert shard_fns.keys() == gather_fns.keys()


def test_dtype_management(model):
    model.to_dtype(jnp.bfloat16)
    assert model.module_dtype == jnp.bfloat16
    model.half()
    assert model.module_dtype == jnp.float16
    model.float()
    current_dtype = model.module_dtype
    assert current_dtype == jnp.float32


def test_applying_quantization(model):
    model.quantize(
        method="nf4",
        group_size=64,
        quantization_pattern=".*",
    )
    is_quant = model.is_quantized
    assert is_quant is True


def test_applying_lora():
    model = make_decoder()
    before = logits_of(model, batch(2, 4))
    model.apply_lora_to_layers(
        lora_rank=8,
        lora_alpha=16,
        lora_pattern=".*q_proj.*|.*v_proj.*",
    )
    has_lora = model.lora_is_enabled
    assert has_lora is True
    base_params, lora_params = model.split_lora_params()
    assert len(jax.tree.leaves(lora_params)) > 0
    assert len(jax.tree.leaves(base_params)) > 0
    model.merge_lora_params()
    model.unwrap_lora_to_layers()
    assert model.lora_is_enabled is False
    np.testing.assert_allclose(logits_of(model, batch(2, 4)), before, rtol=1e-5, atol=1e-6)


def test_loss_computation(model):
    input_ids = labels = batch()
    attention_mask = jnp.ones_like(input_ids)
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=labels,
    )
    loss_config = LossConfig(
        loss_type="cross_entropy",
        label_smoothing=0.0,
        z_loss_coefficient=0.0,
        auxiliary_loss_coefficient=0.001,
    )
    loss, _metrics = model.compute_loss(
        labels=labels,
        logits=outputs.logits,
        config=loss_config,
    )
    assert loss == outputs.loss


def test_state_conversion(model):
    state = model.to_state(
        optimizer=optax.adamw(learning_rate=1e-4),
    )
    assert isinstance(state, EasyDeLState)
    assert state.opt_state is not None
    assert int(state.step) == 0


def test_converting_to_pytorch():
    torch_params = make_decoder().to_torch()
    make_decoder().to_pytorch().load_state_dict(torch_params)


def test_generation():
    model = make_decoder()
    input_ids = batch(1, 5)
    outputs = model.generate(
        input_ids=input_ids,
        attention_mask=jnp.ones_like(input_ids),
        max_new_tokens=10,
        temperature=0.7,
        top_p=0.9,
    )
    assert outputs.sequences.shape == (1, 15)
    cache = model.init_operations_cache(
        batch_size=1,
        max_length=32,
        starts=jnp.array([0]),
    )
    cached = logits_of(model, input_ids, cache=cache)
    np.testing.assert_allclose(cached, logits_of(model, input_ids), rtol=1e-4, atol=1e-5)


def test_saving_loading_and_the_practices(tmp_path):
    model = DecoderForCausalLM(
        config=DECODER,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    model.shard_model()
    state = model.to_state(optax.adamw(1e-4))
    model = state.model
    model.gather_model()
    model.save_pretrained(
        f"{tmp_path}/my-model",
        max_shard_size="5GB",
    )
    model = EasyDeLBaseModule.from_pretrained(
        f"{tmp_path}/my-model",
        dtype=jnp.bfloat16,
        auto_shard_model=True,
    )
    assert (model.dtype, model.module_dtype) == (jnp.bfloat16, jnp.float32)
    model.shard_model()
    state = model.to_state(optax.adamw(1e-4))
    assert state.size == 3 * model.num_parameters * 4 + 4


def test_static_arguments(model):
    static_args = model.get_static_arguments()
    inputs = {"input_ids": batch(), "labels": None}
    prepared_inputs = model.prepare_inputs_for_call(**inputs)
    assert set(prepared_inputs) == {"input_ids"}
    assert not set(prepared_inputs) & set(static_args)


def test_flop_calculation():
    model = make_decoder()
    flops = model.flops_per_token(
        batch_size=1,
        sequence_length=32,
    )
    assert model._flop(model.config, 1, 32) == 32 * flops


def test_transform_functions(model):
    transform_fn = model.pure_transform_fn()

    @jax.jit
    def train_step(params, inputs):
        outputs = transform_fn(params, inputs)
        return outputs.loss

    inputs = {"input_ids": batch(), "labels": batch()}
    np.testing.assert_allclose(train_step(model.params, inputs), model(**inputs).loss, rtol=1e-5)
