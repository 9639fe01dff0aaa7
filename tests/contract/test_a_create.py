"""EasyDeLState.create: each argument, and the four documented errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import EasyDeLState
from cairn.state.sharding.mesh import mesh_of
from tests.contract.subjects import TX, assert_same_bits, specs
from tests.state.my_model import batch, my_model


@pytest.fixture(scope="module")
def model():
    return my_model()


@pytest.fixture(scope="module")
def parts(model):
    return dict(
        zip(
            ("graphdef", "graphstate", "graphother"),
            nnx.split(model, nnx.Param, ...),
            strict=True,
        )
    )


def test_step_is_zero_or_what_is_given(model):
    assert int(EasyDeLState.create(model=model).step) == 0
    for step in (7, jnp.int32(7)):
        state = EasyDeLState.create(model=model, step=step)
        assert (int(state.step), state.step.dtype) == (7, jnp.int32)


def test_graphdef_graphstate_and_graphother_are_taken_as_they_are(model, parts):
    state = EasyDeLState.create(**parts)
    assert state.graphdef is parts["graphdef"]
    assert_same_bits(state.graphstate, parts["graphstate"])
    assert_same_bits(state.graphother, parts["graphother"])
    np.testing.assert_array_equal(state.model(batch()), model(batch()))


@pytest.mark.parametrize("left_out", ["graphdef", "graphstate", "graphother"])
def test_each_part_is_needed(parts, left_out):
    given = {name: part for name, part in parts.items() if name != left_out}
    with pytest.raises(ValueError, match="all of graphdef, graphstate and graphother") as caught:
        EasyDeLState.create(**given)
    assert all(name in str(caught.value) for name in given)
    with pytest.raises(ValueError, match="found only none of them"):
        EasyDeLState.create()


@pytest.mark.parametrize("part", ["graphdef", "graphstate", "graphother"])
def test_a_model_excludes_each_part(model, parts, part):
    with pytest.raises(ValueError, match=f"found model and {part}"):
        EasyDeLState.create(model=model, **{part: parts[part]})


def test_model_is_split_and_stays_its_callers_own():
    model = my_model()
    state = EasyDeLState.create(model=model)
    before = np.asarray(state.params["layers"][0]["bias"])
    model.layers[0].bias.set_value(jnp.ones((64,)))
    np.testing.assert_array_equal(state.params["layers"][0]["bias"], before)
    assert set(state.params) == {"embed_tokens", "layers"}


def test_tx_alone_makes_no_optimizer_state(model):
    state = EasyDeLState.create(model=model, tx=TX)
    assert state.tx is TX
    assert state.opt_state is None


def test_opt_state_is_taken_as_it_is(model):
    made = EasyDeLState.create(model=model, tx=TX, init_opt_state=True).opt_state
    moved = jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), made)
    state = EasyDeLState.create(model=model, tx=TX, opt_state=moved)
    assert_same_bits(state.opt_state, moved)


def test_init_opt_state_is_what_optax_makes_and_where_the_parameters_are():
    model = my_model().shard_model()
    state = EasyDeLState.create(model=model, tx=TX, init_opt_state=True)
    assert_same_bits(state.opt_state, TX.init(state.graphstate))
    assert mesh_of(state.opt_state) == mesh_of(state.graphstate)
    assert specs(state.opt_state)["0/mu/embed_tokens/embedding"] == PartitionSpec("fsdp")


def test_init_opt_state_excludes_opt_state(model):
    with pytest.raises(ValueError, match="opt_state or init_opt_state=True; found both"):
        EasyDeLState.create(model=model, tx=TX, opt_state=(), init_opt_state=True)


def test_init_opt_state_needs_tx(model):
    with pytest.raises(ValueError, match="expected tx with init_opt_state=True"):
        EasyDeLState.create(model=model, init_opt_state=True)
