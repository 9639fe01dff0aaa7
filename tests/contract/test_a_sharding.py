"""EasyDeLState: shard, gather, and say where everything is."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cairn import EasyDeLState, ShardingError, TreeStructureError, make_mesh
from cairn.state.sharding.mesh import mesh_of
from tests.contract.subjects import RULES, TX, TX_INIT, assert_same_bits, make_state, specs
from tests.state.my_model import batch, my_model


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture(scope="module")
def on_one_device():
    return my_model().to_state(TX, tx_init=TX_INIT)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 2, 4, 1))


def in_host_memory(tree):
    return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))


def test_shard_model_uses_the_configs_mesh_by_default(on_one_device):
    sharded = on_one_device.shard_model()
    assert mesh_of(sharded.graphstate) == on_one_device.module_config.mesh
    assert_same_bits(sharded.graphstate, on_one_device.graphstate)
    assert mesh_of(on_one_device.graphstate) is None


def test_shard_model_follows_partition_rules(state):
    found = specs(state.shard_model(partition_rules=RULES).graphstate)
    assert found["embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert found["layers/0/kernel"] == PartitionSpec("fsdp")


def test_shard_model_follows_the_mesh(on_one_device, mesh):
    sharded = on_one_device.shard_model(RULES, mesh)
    assert mesh_of(sharded.graphstate) == mesh_of(sharded.graphother) == mesh
    embedding = sharded.graphstate["embed_tokens"]["embedding"].get_value()
    assert embedding.addressable_shards[0].data.shape == (256, 32)


def test_gather_model_brings_every_leaf_to_host_memory(state, mesh):
    for arguments in ({}, {"partition_rules": RULES}, {"mesh": mesh}):
        gathered = state.gather_model(**arguments)
        assert in_host_memory(gathered.graphstate)
        assert_same_bits(gathered.graphstate, state.graphstate)
        assert gathered.opt_state is state.opt_state


def test_shard_optimizer_state_follows_the_parameters(on_one_device):
    sharded = on_one_device.shard_model().shard_optimizer_state()
    assert specs(sharded.opt_state)["0/mu/embed_tokens/embedding"] == PartitionSpec("fsdp")
    assert_same_bits(sharded.opt_state, on_one_device.opt_state)


def test_shard_optimizer_state_takes_another_opt_state(state, on_one_device):
    moved = jax.tree.map(lambda leaf: leaf + np.ones_like(leaf), on_one_device.opt_state)
    sharded = state.shard_optimizer_state(opt_state=moved)
    assert_same_bits(sharded.opt_state, moved)
    assert specs(sharded.opt_state) == specs(state.opt_state)


def test_shard_optimizer_state_follows_partition_rules(state):
    found = specs(state.shard_optimizer_state(partition_rules=RULES).opt_state)
    assert found["0/nu/embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert found["0/nu/layers/0/kernel"] == PartitionSpec("fsdp")


def test_shard_optimizer_state_needs_one(state):
    with pytest.raises(ValueError, match="shard_optimizer_state: expected an optimizer state"):
        state.free_opt_state().shard_optimizer_state()


def test_gather_optimizer_state_brings_it_to_host_memory(state):
    gathered = state.gather_optimizer_state(partition_rules=RULES)
    assert in_host_memory(gathered.opt_state)
    assert_same_bits(gathered.opt_state, state.opt_state)
    assert gathered.graphstate is state.graphstate


def test_gather_optimizer_state_needs_one(state):
    with pytest.raises(AssertionError, match="gather_optimizer_state"):
        state.free_opt_state().gather_optimizer_state()
    assert state.free_opt_state().gather_state().opt_state is None


def test_shard_state_moves_model_and_optimizer(on_one_device):
    sharded = on_one_device.shard_state(partition_rules=RULES)
    assert specs(sharded.graphstate)["layers/0/kernel"] == PartitionSpec("fsdp")
    assert specs(sharded.opt_state)["0/mu/layers/0/kernel"] == PartitionSpec("fsdp")
    assert_same_bits(sharded, on_one_device)


def test_gather_state_gathers_model_and_optimizer_alike(state):
    gathered = state.gather_state()
    assert in_host_memory((gathered.graphstate, gathered.opt_state))
    assert_same_bits(gathered, state)
    np.testing.assert_array_equal(gathered.model(batch()), gathered.model(batch()))


@pytest.mark.parametrize("form", ["shardings", "ShapeDtypeStruct"])
def test_shard_with_shape_puts_a_state_where_the_shape_says(state, on_one_device, form):
    shape = state.shardings
    if form == "ShapeDtypeStruct":
        shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
    moved = on_one_device.shard_with_shape(shape)
    assert jax.tree.leaves(moved.shardings) == jax.tree.leaves(state.shardings)
    assert_same_bits(moved.opt_state, on_one_device.opt_state)
    with pytest.raises(TreeStructureError, match="shard_with_shape"):
        on_one_device.shard_with_shape(shape.free_opt_state())


def test_shardings_are_the_state_with_a_sharding_for_each_leaf(state):
    shardings = state.shardings
    assert isinstance(shardings, EasyDeLState)
    pairs = zip(jax.tree.leaves(shardings), jax.tree.leaves(state), strict=True)
    assert all(place == leaf.sharding for place, leaf in pairs)
    # Fit for jit: a step compiled with them keeps every leaf in its place.
    same = jax.jit(lambda whole: whole, out_shardings=shardings)(state)
    assert jax.tree.leaves(same.shardings) == jax.tree.leaves(shardings)
    assert jax.tree.leaves(state.gather_model().shardings.graphstate) == []


def test_explain_sharding_tells_rule_spec_and_bytes_and_strict_raises(state, mesh):
    report = state.explain_sharding(RULES)
    placed = {leaf.path: leaf for leaf in report.leaves}
    embedding = placed["embed_tokens/embedding"]
    assert (embedding.rule, embedding.spec) == ("embedding", PartitionSpec(None, "fsdp"))
    kernel = placed["layers/0/kernel"]
    assert kernel.bytes_per_device == 64 * 64 * 4 // 4
    assert "embed_tokens/embedding" in str(report)
    rules = ((".*kernel", PartitionSpec("fsdp")), ("embedding", PartitionSpec("sp", "dp")))
    bad = make_mesh((3, 1, 1, 1))
    assert any("dp" in problem for problem in state.explain_sharding(rules, bad).problems)
    with pytest.raises(ShardingError) as caught:
        state.explain_sharding(rules, bad, strict=True)
    assert len(caught.value.problems) >= 2
