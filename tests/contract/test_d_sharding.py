"""EasyDeLBaseModule: the sharding methods change the module in place and return it."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cairn import ShardingError, make_mesh
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of
from tests.contract.subjects import RULES, assert_same_bits, host, specs
from tests.state.my_model import MyModel, MyModelConfig, my_model


@pytest.fixture
def model():
    return my_model()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 2, 4, 1))


def by_path(tree):
    return {named.path: named.leaf for named in named_leaves(tree)}


def test_shard_model_takes_rules_and_mesh_or_the_configs(model, mesh):
    before = host(nnx.state(model))
    assert model.shard_model() is model
    assert mesh_of(nnx.state(model)) == model.config.mesh
    model.shard_model(partition_rules=RULES, mesh=mesh)
    found = specs(model.split_params())
    assert found["embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert found["layers/0/kernel"] == PartitionSpec("fsdp")
    assert model.mesh == mesh
    for path, leaf in host(nnx.state(model)).items():
        assert leaf.tobytes() == before[path].tobytes()


def test_shard_model_uses_the_configs_rules(mesh):
    class Ruled(MyModelConfig):
        model_type = "ruled"

        def get_partition_rules(self):
            return RULES

    model = MyModel(Ruled(), rngs=nnx.Rngs(0))
    assert model._get_partition_rules() == RULES
    model.shard_model(mesh=mesh)
    assert specs(model.split_params())["embed_tokens/embedding"] == PartitionSpec(None, "fsdp")


def test_gather_model_brings_every_leaf_to_host_memory(model):
    before = host(model.params)
    model.shard_model()
    assert model.gather_model() is model
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(model.params))
    for path, leaf in host(model.params).items():
        assert leaf.tobytes() == before[path].tobytes()


def test_fully_shard_cuts_every_parameter_over_all_devices(model, mesh):
    assert model.fully_shard(mesh=mesh) is model
    for path, leaf in by_path(model.split_params()).items():
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size, path


def test_fully_gather_undoes_fully_shard(model, mesh):
    before = host(model.params)
    assert model.fully_shard(mesh).fully_gather(mesh=mesh) is model
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(model.params))
    for path, leaf in host(model.params).items():
        assert leaf.tobytes() == before[path].tobytes()


def test_get_partition_rules_is_the_argument_or_the_configs(model):
    assert model._get_partition_rules(RULES) == RULES
    assert model._get_partition_rules() is None
    assert model.config.get_partition_rules() is None


def test_specs_sharding_has_a_spec_for_each_leaf(model):
    found = by_path(model._specs_sharding(RULES))
    assert set(found) == set(by_path(nnx.state(model)))
    assert found["embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert found["layers/1/bias"] == PartitionSpec()


def test_named_shardings_are_the_specs_on_the_mesh(model, mesh):
    found = by_path(model._named_shardings(RULES, mesh))
    assert found["layers/0/kernel"] == NamedSharding(mesh, PartitionSpec("fsdp"))
    assert {place.mesh for place in found.values()} == {mesh}


def test_apply_sharding_fns_shards_a_tree_or_gathers_it(model, mesh):
    tree = nnx.state(model)
    sharded = model._apply_sharding_fns(tree=tree, partition_rules=RULES, mesh=mesh)
    assert specs(sharded)["layers/0/kernel"] == PartitionSpec("fsdp")
    assert mesh_of(sharded) == mesh
    gathered = model._apply_sharding_fns(sharded, RULES, mesh, is_gather=True)
    assert_same_bits(gathered, tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in by_path(gathered["layers"]).values())
    assert mesh_of(nnx.state(model)) is None


def test_shard_fns_put_one_leaf_each(model, mesh):
    fns = model._shard_fns(RULES, mesh)
    leaves = by_path(nnx.state(model))
    assert set(fns) == set(leaves)
    placed = fns["embed_tokens/embedding"](leaves["embed_tokens/embedding"])
    assert placed.sharding == NamedSharding(mesh, PartitionSpec(None, "fsdp"))


def test_gather_fns_bring_one_leaf_each_to_the_host(model, mesh):
    model.shard_model(RULES, mesh)
    fns = model._gather_fns(RULES, mesh)
    leaves = by_path(nnx.state(model))
    assert set(fns) == set(leaves)
    gathered = fns["layers/0/kernel"](leaves["layers/0/kernel"])
    assert isinstance(gathered, np.ndarray)
    np.testing.assert_array_equal(gathered, leaves["layers/0/kernel"])


def test_what_does_not_fit_is_listed_and_nothing_moves(model, mesh):
    rules = (("embedding", PartitionSpec("rows")), ("kernel", PartitionSpec(None, None, "tp")))
    with pytest.raises(ShardingError) as caught:
        model.shard_model(rules, mesh)
    assert len(caught.value.problems) >= 5
    assert mesh_of(nnx.state(model)) is None
