"""EasyDeLState: what it holds, under its newer and older names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import cairn as package
from cairn import EasyDeLState, optimizer_from_description
from tests.contract.subjects import (
    TX,
    TX_INIT,
    assert_same_bits,
    make_decoder,
    make_state,
    ones_like,
)
from tests.state.my_model import MyModel, batch, my_model, train_step


@pytest.fixture(scope="module")
def state():
    return make_state(hyperparameters={"warmup": 10})


def leaf_ids(tree):
    return {id(leaf) for leaf in jax.tree.leaves(tree)}


def test_easydel_state_is_a_frozen_struct_that_the_package_exports(state):
    assert package.EasyDeLState is EasyDeLState
    assert isinstance(state, struct.PyTreeNode)
    leaves, structure = jax.tree.flatten(state)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is EasyDeLState
    assert_same_bits(again, state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3


def test_the_tree_is_the_nodes_and_nothing_static(state):
    nodes = (state.step, state.graphstate, state.graphother, state.opt_state)
    assert leaf_ids(state) == leaf_ids(nodes)


def test_jax_jit_donates_the_state_and_gives_a_state_back():
    jitted = jax.jit(train_step, donate_argnums=0)
    state = make_state()
    old = state.graphstate["layers"][0]["kernel"].get_value()
    state, _ = jitted(state, batch())
    assert isinstance(state, EasyDeLState)
    assert old.is_deleted()
    assert int(state.step) == 1
    assert state.tx is TX


def test_jax_grad_differentiates_through_a_state():
    state = my_model().to_state()

    def total(whole):
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(whole.graphstate))

    # jax.grad with respect to the whole state would want floats everywhere: take its parameters.
    grads = jax.grad(lambda params: total(state.replace(graphstate=params)))(state.graphstate)
    kernel = state.graphstate["layers"][0]["kernel"].get_value()
    np.testing.assert_allclose(grads["layers"][0]["kernel"].get_value(), 2 * kernel)


def test_jax_eval_shape_makes_an_abstract_state():
    abstract = jax.eval_shape(
        lambda: EasyDeLState.create(model=my_model(), tx=TX, init_opt_state=True)
    )
    assert isinstance(abstract, EasyDeLState)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    real = EasyDeLState.create(model=my_model(), tx=TX, init_opt_state=True)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)


def test_step_is_an_int32_leaf_that_counts_updates(state):
    assert (state.step.dtype, state.step.shape) == (jnp.int32, ())
    assert state.step.sharding.is_fully_replicated
    after = state.apply_gradients(grads=ones_like(state.graphstate))
    assert (int(state.step), int(after.step)) == (0, 1)


def test_graphdef_is_the_static_structure_that_rebuilds_the_model(state):
    hash(state.graphdef)
    assert state.graphdef == make_state().graphdef
    rebuilt = nnx.merge(state.graphdef, state.graphstate, state.graphother, copy=True)
    assert isinstance(rebuilt, MyModel)
    np.testing.assert_array_equal(rebuilt(batch()), state.model(batch()))


def test_graphstate_is_every_parameter_and_nothing_else(state):
    variables = jax.tree.leaves(
        state.graphstate, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    assert {type(variable) for variable in variables} == {nnx.Param}
    assert len(variables) == 5


def test_graphstate_is_loraparam_alone_when_adapters_are_on():
    model = make_decoder().apply_lora_to_layers(4, 8, "q_proj")
    state = EasyDeLState.create(model=model)
    is_variable = {"is_leaf": lambda node: isinstance(node, nnx.Variable)}
    trained = jax.tree.leaves(state.graphstate, **is_variable)
    assert trained
    assert {type(variable) for variable in trained} == {nnx.LoRAParam}
    others = {type(variable) for variable in jax.tree.leaves(state.graphother, **is_variable)}
    assert nnx.Param in others
    assert nnx.LoRAParam not in others


def test_graphother_holds_statistics_random_state_and_caches():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.cache = nnx.Cache(jnp.zeros((2, 4)))

    state = EasyDeLState.create(model=Layers(nnx.Rngs(0)))
    paths = {
        "/".join(map(str, path)): type(variable)
        for path, variable in nnx.to_flat_state(state.graphother)
    }
    assert paths["norm/mean"] is paths["norm/var"] is nnx.BatchStat
    assert paths["cache"] is nnx.Cache
    assert issubclass(paths["dropout/rngs/key"], nnx.RngState)
    assert {path for path, _ in nnx.to_flat_state(state.graphstate)} == {
        ("norm", "bias"),
        ("norm", "scale"),
    }


def test_tx_is_static_and_makes_the_updates(state):
    assert state.tx is TX
    without = state.replace(tx=None)
    assert jax.tree.structure(without) != jax.tree.structure(state)
    assert len(jax.tree.leaves(without)) == len(jax.tree.leaves(state))
    grads = ones_like(state.graphstate)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = TX.update(grads, state.opt_state, state.graphstate)
    after = state.apply_gradients(grads=grads)
    name = ("layers", 0, "bias")
    moved = host_at(after.graphstate, name) - host_at(state.graphstate, name)
    np.testing.assert_allclose(moved, host_at(updates, name), rtol=1e-5)


def host_at(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree.get_value())


def test_opt_state_is_a_node_that_updates_move(state):
    assert leaf_ids(state.opt_state) <= leaf_ids(state)
    after = state.apply_gradients(grads=ones_like(state.graphstate))
    assert jax.tree.structure(after.opt_state) == jax.tree.structure(state.opt_state)
    assert (int(state.opt_state[0].count), int(after.opt_state[0].count)) == (0, 1)


def double(x):
    return x * 2


def test_apply_fn_is_static_and_can_be_called_under_jit():
    state = EasyDeLState.create(model=my_model(), apply_fn=double)
    assert state.apply_fn is double
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(state.replace(apply_fn=None)))
    assert jax.jit(lambda whole: whole.apply_fn(whole.step + 3))(state) == 6


def test_params_is_the_pure_dict_of_graphstate(state):
    params = state.params
    assert type(params) is dict
    assert params["layers"][0]["bias"] is state.graphstate["layers"][0]["bias"].get_value()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(state.graphstate))


def test_module_is_the_model(state):
    assert state.module is state.model
    assert isinstance(state.module, MyModel)


def test_module_config_is_the_models_config(state):
    assert state.module_config == my_model().config
    assert EasyDeLState.create(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0))).module_config is None


def test_module_config_args_build_the_config_again(state):
    args = state.module_config_args
    assert type(state.module_config).from_dict(args) == state.module_config


def test_tx_init_rebuilds_the_optimizer(state):
    assert state.tx_init == TX_INIT
    rebuilt = optimizer_from_description(state.tx_init)
    again = state.init_tx(rebuilt)
    assert jax.tree.structure(again.opt_state) == jax.tree.structure(state.opt_state)
    grads = ones_like(state.graphstate)
    assert_same_bits(
        again.apply_gradients(grads=grads).graphstate, state.apply_gradients(grads=grads).graphstate
    )


def test_hyperparameters_are_json_and_static(state):
    assert state.hyperparameters == {"warmup": 10}
    changed = state.replace(hyperparameters={"warmup": 20})
    assert (state.hyperparameters["warmup"], changed.hyperparameters["warmup"]) == (10, 20)
    assert jax.jit(lambda whole: jnp.int32(whole.hyperparameters["warmup"]))(changed) == 20
    with pytest.raises(ValueError, match="hyperparameters"):
        state.replace(hyperparameters={"f": double})
