import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    CausalLMOutput,
    EasyBridgeMixin,
    EasyDeLBaseModule,
    EasyGenerationMixin,
    OperationCacheMixin,
    ShardingError,
    TaskType,
    TreeStructureError,
    UnknownModelError,
    make_mesh,
)
from cairn.state.model_classes import find
from cairn.state.models.loss import causal_lm_loss
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model


@pytest.fixture
def model():
    return my_model()


def leaves_by_path(tree):
    return {named.path: named.leaf for named in named_leaves(tree)}


def test_the_hierarchy_is_the_documented_one():
    for parent in (nnx.Module, EasyGenerationMixin, EasyBridgeMixin, OperationCacheMixin):
        assert issubclass(EasyDeLBaseModule, parent)


def test_a_model_tells_what_it_is(model):
    assert model.config == MyModelConfig(sharding_axis_dims=(2, 4, 1, 1))
    assert model.model_type == "my-model-of-the-tests"
    assert model.model_task is TaskType.CAUSAL_LM
    assert dict(model.mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert model.num_parameters == 256 * 64 + 2 * (64 * 64 + 64)
    assert model.module_dtype == jnp.float32
    assert not model.is_quantized
    assert not model.lora_is_enabled
    shapes = model.graphtree_params_shape
    assert shapes["layers"][1]["kernel"] == jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert model.params["embed_tokens"]["embedding"].shape == (256, 64)


def test_parameters_and_other_state_are_apart(model):
    assert set(leaves_by_path(model.graphother)) == {"noise/rngs/count", "noise/rngs/key"}
    assert "embed_tokens/embedding" in leaves_by_path(model.graphstate)
    merged = nnx.merge(model.graphdef, model.graphstate, model.graphother)
    np.testing.assert_array_equal(merged(batch()), model(batch()))


def test_split_and_merge_undo_each_other(model):
    graphdef, state = model.split_module()
    again = model.merge_module(graphdef, state)
    assert isinstance(again, MyModel)
    np.testing.assert_array_equal(again(batch()), model(batch()))


def test_parameters_go_out_and_in_as_dict_or_state(model):
    other = my_model(seed=1)
    wanted = other(batch())
    assert model.merge_params_dict(other.split_params_dict()) is model
    np.testing.assert_array_equal(model(batch()), wanted)
    third = my_model(seed=2)
    third.merge_params(other.split_params())
    np.testing.assert_array_equal(third(batch()), wanted)


def test_parameters_that_do_not_fit_are_all_listed_and_none_is_taken(model):
    before = model(batch())
    params = model.split_params_dict()
    del params["layers"][0]["bias"]
    params["layers"][1]["kernel"] = jnp.zeros((64, 32))
    params["extra"] = jnp.zeros((3,))
    with pytest.raises(TreeStructureError) as caught:
        model.merge_params_dict(params)
    assert caught.value.problems == (
        "extra: unexpected, has shape (3,)",
        "layers/0/bias: missing, expected shape (64,)",
        "layers/1/kernel: expected shape (64, 64), found (64, 32)",
    )
    np.testing.assert_array_equal(model(batch()), before)


def test_labels_in_the_call_add_the_loss(model):
    ids = batch()
    outputs = model(input_ids=ids, labels=ids)
    assert isinstance(outputs, CausalLMOutput)
    np.testing.assert_array_equal(outputs.logits, model(ids))
    expected, _ = causal_lm_loss(outputs.logits, ids)
    assert outputs.loss == expected
    loss, metrics = model.compute_loss(labels=ids, logits=outputs.logits)
    assert loss == expected == metrics["cross_entropy"]


@pytest.mark.parametrize("kind", ["mapping", "dataclass"])
def test_the_loss_joins_whatever_the_forward_pass_returns(kind):
    class Speaker(MyModel):
        def __call__(self, input_ids, **kwargs):
            logits = super().__call__(input_ids)
            return {"logits": logits} if kind == "mapping" else CausalLMOutput(logits=logits)

    model = Speaker(MyModelConfig(), rngs=nnx.Rngs(0))
    outputs = model(batch(), labels=batch())
    loss = outputs["loss"] if kind == "mapping" else outputs.loss
    assert loss == my_model()(batch(), labels=batch()).loss


def test_dtype_changes_floating_leaves_only(model):
    key = jax.random.key_data(model.noise.rngs.key.get_value())
    assert model.half() is model
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.float16)}
    assert model.module_dtype == model.param_dtype == jnp.float16
    assert model.noise.rngs.count.get_value().dtype == jnp.uint32
    np.testing.assert_array_equal(jax.random.key_data(model.noise.rngs.key.get_value()), key)
    assert model.float().module_dtype == jnp.float32
    assert model.to_dtype(jnp.bfloat16).module_dtype == jnp.bfloat16


def test_shard_and_gather_move_every_leaf_and_change_no_value(model):
    before = jax.tree.map(np.asarray, model.params)
    assert model.shard_model() is model
    embedding = model.embed_tokens.embedding.get_value()
    assert embedding.sharding.spec == PartitionSpec("fsdp")
    assert embedding.addressable_shards[0].data.shape == (64, 64)
    assert model.mesh == mesh_of(nnx.state(model))
    assert model.gather_model() is model
    for leaf, old in zip(jax.tree.leaves(model.params), jax.tree.leaves(before), strict=True):
        assert isinstance(leaf, np.ndarray)
        np.testing.assert_array_equal(leaf, old)


def test_rules_and_mesh_may_be_given(model):
    rules = ((r"layers/\d+/kernel", PartitionSpec(None, "tp")), (".*", PartitionSpec()))
    model.shard_model(rules, make_mesh((1, 4, 2, 1)))
    params = model.split_params()
    assert params["layers"][0]["kernel"].get_value().sharding.spec == PartitionSpec(None, "tp")
    assert params["embed_tokens"]["embedding"].get_value().sharding.spec == PartitionSpec()
    assert dict(model.mesh.shape)["tp"] == 2


def test_rules_that_do_not_fit_move_nothing(model):
    rules = ((".*", PartitionSpec(None, None, "fsdp")),)
    with pytest.raises(ShardingError, match="embed_tokens/embedding: rule"):
        model.shard_model(rules)
    assert mesh_of(nnx.state(model)) is None
    report = model.explain_sharding(rules)
    assert len(report.problems) == 5
    with pytest.raises(ShardingError):
        model.explain_sharding(rules, strict=True)


def test_manual_sharding_control(model):
    mesh = make_mesh((1, 8, 1, 1))
    rules = (("embedding", PartitionSpec("fsdp")), (".*", PartitionSpec()))
    assert model._get_partition_rules() is None
    assert model._get_partition_rules(rules) == rules
    specs = leaves_by_path(model._specs_sharding(rules, mesh))
    assert specs["embed_tokens/embedding"] == PartitionSpec("fsdp")
    named = leaves_by_path(model._named_shardings(rules, mesh))
    shard, gather = model._shard_fns(rules, mesh), model._gather_fns(rules, mesh)
    tree = nnx.state(model)
    sharded = model._apply_sharding_fns(tree, rules, mesh)
    for path, leaf in leaves_by_path(sharded).items():
        assert leaf.sharding == named[path] == shard[path](leaves_by_path(tree)[path]).sharding
    gathered = model._apply_sharding_fns(sharded, rules, mesh, is_gather=True)
    for path, leaf in leaves_by_path(gathered).items():
        if "key" not in path:
            np.testing.assert_array_equal(leaf, gather[path](leaves_by_path(sharded)[path]))


def test_fully_shard_cuts_over_all_devices_and_fully_gather_undoes_it(model):
    before = np.asarray(model.embed_tokens.embedding.get_value())
    model.fully_shard(make_mesh((2, 4, 1, 1)))
    embedding = model.embed_tokens.embedding.get_value()
    assert embedding.addressable_shards[0].data.shape == (32, 64)
    assert model.layers[0].bias.get_value().addressable_shards[0].data.shape == (8,)
    model.fully_gather()
    np.testing.assert_array_equal(model.embed_tokens.embedding.get_value(), before)


def test_the_pure_function_runs_and_differentiates_under_jit(model):
    transform = model.pure_transform_fn()
    ids = batch()

    @jax.jit
    def loss_of(params, inputs):
        return transform(params, inputs).loss

    inputs = {"input_ids": ids, "labels": ids, "attention_mask": None}
    expected = model(ids, labels=ids).loss
    np.testing.assert_allclose(loss_of(model.params, inputs), expected, rtol=1e-6)
    assert model.prepare_inputs_for_call(**inputs).keys() == {"input_ids", "labels"}
    grads = jax.grad(loss_of)(model.params, inputs)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)


def test_classes_are_found_by_name_and_only_if_defined():
    assert find("MyModel", MyModel.__module__, path="run") is MyModel
    with pytest.raises(UnknownModelError, match="pass model_class="):
        find("NoSuchModel", "somewhere", path="run")


def test_two_classes_of_one_name_are_told_apart_by_module():
    class Twin(MyModel):
        pass

    class Other(MyModel):
        __module__ = "another.module"

    Other.__name__ = "Twin"
    from cairn.state.model_classes import register

    register(Other)
    assert find("Twin", "another.module", path="run") is Other
    assert find("Twin", Twin.__module__, path="run") is Twin
    with pytest.raises(UnknownModelError, match="found 2 among"):
        find("Twin", "a.third.module", path="run")
