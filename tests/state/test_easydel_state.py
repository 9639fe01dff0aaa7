import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    ArgumentError,
    EasyDeLState,
    ShardingError,
    TreeStructureError,
    make_mesh,
    make_optimizer,
)
from cairn.state.sharding.mesh import mesh_of
from tests.state.my_model import MyModel, batch, my_model, train_step

TX, TX_INIT = make_optimizer("adamw", learning_rate=1e-2)


@pytest.fixture(scope="module")
def state():
    return my_model().shard_model().to_state(TX, tx_init=TX_INIT)


@pytest.fixture
def own(state):
    """A state that a test may donate, or change the model of."""
    return jax.tree.map(jnp.copy, state)


def parts(model=None):
    graphdef, graphstate, graphother = nnx.split(model or my_model(), nnx.Param, ...)
    return {"graphdef": graphdef, "graphstate": graphstate, "graphother": graphother}


def equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_apply_gradients_is_optax_own_step(state):
    grads = jax.tree.map(jnp.ones_like, state.graphstate)
    after = state.apply_gradients(grads=grads)
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = TX.update(grads, state.opt_state, state.graphstate)
        params = optax.apply_updates(state.graphstate, updates)
    equal(after.graphstate, params)
    equal(after.opt_state, opt_state)
    assert (int(after.step), int(state.step)) == (1, 0)
    as_dict = state.apply_gradients(grads=nnx.to_pure_dict(grads))
    equal(as_dict, after)


def test_gradients_that_do_not_fit_are_all_listed(state):
    grads = nnx.to_pure_dict(jax.tree.map(jnp.ones_like, state.graphstate))
    del grads["layers"][0]["bias"]
    grads["embed_tokens"]["embedding"] = jnp.ones((2, 2))
    with pytest.raises(TreeStructureError) as caught:
        state.apply_gradients(grads=grads)
    assert caught.value.problems == (
        "embed_tokens/embedding: expected shape (256, 64), found (2, 2)",
        "layers/0/bias: missing, expected shape (64,)",
    )


def test_a_donated_step_compiles_once_and_keeps_every_placement(own, caplog):
    state = own

    def donated_step(state, ids):
        return train_step(state, ids)

    shardings = state.shardings
    jitted = jax.jit(donated_step, donate_argnums=0, out_shardings=(shardings, None))
    losses = []
    with jax.log_compiles():
        for _ in range(4):
            state, loss = jitted(state, batch())
            losses.append(float(loss))
    compiled = [text for text in caplog.messages if "XLA compilation of jit(donated_step)" in text]
    assert len(compiled) == 1
    assert losses == sorted(losses, reverse=True)
    assert int(state.step) == 4
    assert jax.tree.leaves(state.shardings) == jax.tree.leaves(shardings)


def test_a_state_goes_through_eval_shape_and_grad(state):
    shapes = jax.eval_shape(lambda s: s.apply_gradients(grads=s.graphstate), state)
    assert isinstance(shapes, EasyDeLState)
    assert shapes.graphstate["layers"][0]["kernel"].get_value().shape == (64, 64)
    gradient = jax.jit(jax.grad(lambda p: state.merge(p)(batch(), labels=batch()).loss))
    grads = gradient(state.graphstate)
    assert jax.tree.structure(grads) == jax.tree.structure(state.graphstate)


def test_the_model_is_merged_once_and_changing_it_changes_no_state(own):
    before = np.asarray(own.graphstate["layers"][0]["bias"].get_value())
    assert own.model is own.model is own.module
    assert isinstance(own.model, MyModel)
    own.model.layers[0].bias.set_value(jnp.ones((64,)))
    np.testing.assert_array_equal(own.graphstate["layers"][0]["bias"].get_value(), before)
    assert own.replace(step=own.step).model is not own.model


def test_shard_and_gather_keep_every_value(state):
    gathered = state.gather_state()
    for leaf in jax.tree.leaves((gathered.graphstate, gathered.opt_state)):
        assert isinstance(leaf, np.ndarray)
    equal(gathered, state)
    mesh = make_mesh((1, 8, 1, 1))
    again = gathered.shard_state(mesh=mesh)
    equal(again, state)
    assert mesh_of(again.graphstate) == mesh_of(again.opt_state) == mesh_of(again.step) == mesh
    assert mesh_of(state.graphstate) != mesh


def test_rules_that_do_not_fit_list_the_leaves_and_move_nothing(state):
    with pytest.raises(ShardingError) as caught:
        state.shard_model((("^layers", PartitionSpec()),))
    assert caught.value.problems == (
        "embed_tokens/embedding: no partition rule matches (shape (256, 64))",
    )


def test_explain_sharding_covers_model_and_optimizer(state):
    report = state.explain_sharding(strict=True)
    by_path = {leaf.path: leaf for leaf in report.leaves}
    assert by_path["embed_tokens/embedding"].rule == "automatic"
    moment = by_path["optimizer/0/mu/embed_tokens/embedding"]
    assert (moment.rule, moment.bytes_per_device) == ("mirrors its parameter", 256 * 64)
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((state.graphstate, state.opt_state))
    )
    assert report.bytes_per_device == held + 12  # and the dropout's key and counter


def counts(state):
    return [int(leaf) for leaf in jax.tree.leaves(state.graphother) if leaf.dtype == jnp.uint32]


def with_dropout():
    model = my_model()
    model.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    return model


@pytest.mark.parametrize("how", ["create", "replace"])
def test_calling_a_module_changes_no_state_that_was_made_of_its_parts(how):
    model = with_dropout()
    if how == "create":
        state = EasyDeLState.create(**parts(model))
    else:
        state = EasyDeLState.create(model=model)
        state = state.replace(graphother=nnx.state(model, nnx.Not(nnx.Param)))
    before = np.array(state.params["layers"][0]["bias"])
    model(batch())
    model.layers[0].bias.set_value(jnp.ones((64,)))
    assert counts(state) == [0]
    np.testing.assert_array_equal(state.params["layers"][0]["bias"], before)


def test_what_is_done_to_the_merged_model_is_not_saved(own, tmp_path):
    own.model.quantize("8bit")
    own.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    assert not loaded.model.is_quantized
    equal(loaded.graphstate, own.graphstate)


def test_a_state_is_copied_and_pickled_whole(state):
    noted = state.replace(hyperparameters={"rates": [1, 2.5], "nested": {"a": None}})
    twin = copy.deepcopy(noted)
    assert jax.tree.structure(twin) == jax.tree.structure(noted)
    assert twin.hyperparameters == noted.hyperparameters
    equal(twin, noted)
    for one, other in zip(jax.tree.leaves(twin), jax.tree.leaves(noted), strict=True):
        assert one.sharding == other.sharding
        assert one is not other
    again = pickle.loads(pickle.dumps(noted.hyperparameters))
    assert again == noted.hyperparameters
    assert again["nested"] == {"a": None}


@pytest.mark.parametrize("step", [2**31, np.int64(2**31 + 5), np.array(-1)])
def test_a_step_that_does_not_fit_into_int32_is_refused(step):
    with pytest.raises(ArgumentError, match=r"step: expected a whole number.*at most 21474"):
        EasyDeLState.create(model=my_model(), step=step)


def test_a_replaced_step_is_an_int32_scalar_where_the_old_one_was(state):
    other = state.replace(step=5)
    assert (int(other.step), other.step.dtype, other.step.weak_type) == (5, jnp.int32, False)
    assert other.step.sharding == state.step.sharding
    for wrong in (1.5, -1):
        with pytest.raises(ArgumentError, match="step: expected a whole number of steps"):
            state.replace(step=wrong)


def test_several_states_in_one_can_not_be_saved_without_a_step(tmp_path):
    twins = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), my_model().to_state())
    with pytest.raises(ArgumentError, match=r"found an array of shape \(2,\).*pass step="):
        twins.save_state(tmp_path / "run", verbose=False)
    assert not (tmp_path / "run").exists()


def test_another_optimizer_drops_the_description_of_the_old_one(state, tmp_path):
    slower, described = make_optimizer("adamw", learning_rate=1e-5)
    assert state.replace(tx=state.tx).tx_init == TX_INIT
    assert state.replace(tx=slower, tx_init=described).tx_init == described
    other = state.replace(tx=slower)
    assert other.tx_init is None
    other.save_state(tmp_path / "run", wait=True, verbose=False)
    with pytest.raises(ValueError, match="tx"):
        EasyDeLState.load_state(tmp_path / "run", verbose=False)


def test_a_state_that_was_donated_is_not_saved_and_says_why(own, tmp_path):
    jax.jit(train_step, donate_argnums=0)(own, batch())
    with pytest.raises(ArgumentError, match=r"donation.*save the state that the step returned"):
        own.save_state(tmp_path / "run", verbose=False)
    assert not (tmp_path / "run").exists()


def test_what_is_no_mesh_is_refused(state):
    with pytest.raises(ArgumentError, match=r"mesh: expected a jax.sharding.Mesh; found \(2, 4\)"):
        state.shard_model(mesh=(2, 4))
