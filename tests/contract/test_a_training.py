"""EasyDeLState: updates, replacement, merging and the optimizer's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import EasyDeLState, NotInitializedError, TreeStructureError
from tests.contract.subjects import (
    RULES,
    SGD,
    SGD_INIT,
    TX,
    assert_same_bits,
    host,
    make_state,
    ones_like,
    specs,
)
from tests.state.my_model import MyModel, batch, my_model


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture(scope="module")
def sgd_state():
    return my_model().to_state(SGD, tx_init=SGD_INIT)


@pytest.mark.parametrize("form", ["state", "dict"])
def test_apply_gradients_steps_down_grads_and_leaves_the_old_state(sgd_state, form):
    before = host(sgd_state)
    grads = ones_like(sgd_state.graphstate)
    after = sgd_state.apply_gradients(grads=grads if form == "state" else nnx.to_pure_dict(grads))
    assert int(after.step) == 1
    old = host(sgd_state.graphstate)
    for path, leaf in host(after.graphstate).items():
        np.testing.assert_allclose(leaf, old[path] - np.float32(0.5), rtol=1e-6)
    for path, leaf in host(sgd_state).items():
        np.testing.assert_array_equal(leaf, before[path])


@pytest.mark.parametrize("missing", ["tx", "opt_state"])
def test_apply_gradients_needs_tx_and_opt_state(sgd_state, missing):
    bare = sgd_state.replace(**{missing: None})
    with pytest.raises(AssertionError, match=f"{missing}=None"):
        bare.apply_gradients(grads=bare.graphstate)


def test_replace_gives_a_new_state_with_these_updates(state):
    updates = {"step": jnp.int32(9), "opt_state": None}
    other = state.replace(**updates)
    assert (int(other.step), other.opt_state) == (9, None)
    assert (int(state.step), state.opt_state is None) == (0, False)
    assert other.graphstate is state.graphstate
    with pytest.raises(TypeError, match="no_such_field"):
        state.replace(no_such_field=1)


@pytest.mark.parametrize("form", ["state", "dict"])
def test_merge_puts_a_tree_of_parameters_into_the_model(state, form):
    tree = jax.tree.map(lambda leaf: leaf * 2, state.graphstate)
    merged = state.merge(tree if form == "state" else nnx.to_pure_dict(tree))
    assert isinstance(merged, MyModel)
    np.testing.assert_array_equal(
        merged.layers[0].kernel.get_value(), 2 * state.params["layers"][0]["kernel"]
    )
    with pytest.raises(TreeStructureError, match="layers/1/kernel: missing"):
        state.merge({"layers": {}})


def test_merge_to_state_replaces_graphstate_by_a_tree(state):
    tree = jax.tree.map(lambda leaf: leaf * 2, state.graphstate)
    other = state.merge_to_state(tree)
    assert isinstance(other, EasyDeLState)
    assert_same_bits(other.graphstate, tree)
    assert other.opt_state is state.opt_state
    assert_same_bits(state.merge_to_state(nnx.to_pure_dict(tree)).graphstate, tree)


def test_model_is_merged_once_per_state(state):
    assert state.model is state.model
    assert state.replace(step=state.step).model is not state.model
    np.testing.assert_array_equal(state.model(batch()), state.merge(state.graphstate)(batch()))


def test_init_tx_takes_the_tx_and_makes_its_state_where_parameters_are(state):
    after = state.free_opt_state().replace(tx=None).init_tx(TX)
    assert (after.tx, after.tx_init) == (TX, None)
    assert_same_bits(after.opt_state, state.opt_state)
    assert specs(after.opt_state) == specs(state.opt_state)


def test_init_tx_follows_partition_rules(state):
    after = state.init_tx(TX, RULES)
    found = specs(after.opt_state)
    assert found["0/mu/embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert found["0/nu/layers/1/kernel"] == PartitionSpec("fsdp")
    assert found["0/nu/layers/1/bias"] == PartitionSpec()
    by_name = state.init_tx(TX, partition_rules=RULES)
    assert specs(by_name.opt_state) == found


def test_init_opt_state_starts_the_optimizer_afresh(state):
    later = state.apply_gradients(grads=ones_like(state.graphstate))
    assert_same_bits(later.init_opt_state().opt_state, state.opt_state)
    assert int(later.init_opt_state().step) == 1
    with pytest.raises(NotInitializedError):
        later.replace(tx=None).init_opt_state()


def test_free_opt_state_drops_it_and_keeps_the_rest(state):
    freed = state.free_opt_state()
    assert freed.opt_state is None
    assert freed.tx is state.tx
    assert_same_bits(freed.graphstate, state.graphstate)
    assert freed.size == sum(leaf.nbytes for leaf in jax.tree.leaves(state.graphstate))


def test_size_is_the_bytes_of_graphstate_and_opt_state(state):
    held = jax.tree.leaves((state.graphstate, state.opt_state))
    assert state.size == sum(leaf.nbytes for leaf in held)
    half = my_model(param_dtype=jnp.bfloat16).to_state()
    assert half.size * 2 == my_model().to_state().size
