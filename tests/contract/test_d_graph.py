"""EasyDeLBaseModule: splitting and merging, dtypes, state, calls under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cairn import EasyDeLState, TreeStructureError
from tests.contract.subjects import assert_same_bits, host, make_decoder
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model


@pytest.fixture
def model():
    return my_model()


@pytest.fixture(scope="module")
def other():
    return my_model(seed=1)


def paths(state):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


PARAMETERS = {"embed_tokens/embedding"} | {
    f"layers/{index}/{name}" for index in (0, 1) for name in ("kernel", "bias")
}
OTHERS = {"noise/rngs/key", "noise/rngs/count"}


def test_split_module_gives_graphdef_and_the_whole_state(model):
    graphdef, state = model.split_module()
    assert graphdef == model.graphdef
    assert paths(state) == PARAMETERS | OTHERS


def test_merge_module_makes_a_module_of_graphdef_and_state(model, other):
    graphdef, _ = model.split_module()
    _, state = other.split_module()
    merged = model.merge_module(graphdef=graphdef, state=state)
    assert isinstance(merged, MyModel)
    assert merged is not model
    np.testing.assert_array_equal(merged(batch()), other(batch()))


def test_graphdef_is_the_structure_without_values(model, other):
    assert model.graphdef == other.graphdef
    assert not jax.tree.leaves(model.graphdef)
    hash(model.graphdef)


def test_graphstate_is_the_parameters_that_training_changes(model):
    assert paths(model.graphstate) == PARAMETERS


def test_graphother_is_everything_else(model):
    assert paths(model.graphother) == OTHERS
    merged = nnx.merge(model.graphdef, model.graphstate, model.graphother)
    np.testing.assert_array_equal(merged(batch()), model(batch()))


def test_split_params_dict_is_a_plain_dict(model):
    params = model.split_params_dict()
    assert type(params) is dict
    assert_same_bits(params, model.split_params())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_split_params_is_a_state(model):
    params = model.split_params()
    assert isinstance(params, nnx.State)
    assert paths(params) == PARAMETERS


def test_merge_params_dict_puts_a_dict_in(model, other):
    assert model.merge_params_dict(other.split_params_dict()) is model
    np.testing.assert_array_equal(model(batch()), other(batch()))
    with pytest.raises(TreeStructureError, match="embed_tokens/embedding: missing"):
        model.merge_params_dict({})


def test_merge_params_puts_a_state_in(model, other):
    assert model.merge_params(other.split_params()) is model
    np.testing.assert_array_equal(model(batch()), other(batch()))


@pytest.mark.parametrize("method", ["to_dtype", "half", "float"])
def test_dtype_methods_cast_floating_leaves_only(model, method):
    """to_dtype, half and float change the module in place and return it."""
    before = host(nnx.state(model))
    wanted = {"to_dtype": jnp.bfloat16, "half": jnp.float16, "float": jnp.float32}[method]
    if method == "float":
        model.half()
        before = host(nnx.state(model))
    arguments = (wanted,) if method == "to_dtype" else ()
    assert getattr(model, method)(*arguments) is model
    assert model.module_dtype == wanted
    for path, leaf in host(nnx.state(model)).items():
        if path in PARAMETERS:
            np.testing.assert_array_equal(leaf, before[path].astype(wanted))
        else:
            assert leaf.tobytes() == before[path].tobytes()


@pytest.mark.parametrize("method", ["to_dtype", "half", "float"])
def test_dtype_methods_leave_packed_quantized_leaves(method):
    """to_dtype, half and float: the integers of a quantized model stay as they are."""
    model = make_decoder().quantize(method="8bit")
    integers = {
        path: leaf for path, leaf in host(nnx.state(model)).items() if leaf.dtype.kind in "iu"
    }
    assert integers
    getattr(model, method)(*((jnp.bfloat16,) if method == "to_dtype" else ()))
    after = host(nnx.state(model))
    for path, leaf in integers.items():
        assert (after[path].dtype, after[path].tobytes()) == (leaf.dtype, leaf.tobytes()), path


def test_to_state_with_an_optimizer_is_ready_to_train(model):
    tx = optax.adamw(learning_rate=1e-4)
    state = model.to_state(optimizer=tx)
    assert isinstance(state, EasyDeLState)
    assert (int(state.step), state.tx) == (0, tx)
    assert_same_bits(state.graphstate, model.graphstate)
    assert_same_bits(state.opt_state, tx.init(state.graphstate))
    assert model.to_state().opt_state is None


class Switched(MyModel):
    """A forward pass with an argument that decides what is computed."""

    def __call__(self, input_ids, negate: bool = False):
        logits = super().__call__(input_ids)
        return -logits if negate else logits


def test_get_static_arguments_name_what_jit_must_not_trace():
    model = Switched(MyModelConfig(), rngs=nnx.Rngs(0))
    static = model.get_static_arguments()
    assert "negate" in static
    assert "input_ids" not in static

    def call(input_ids, negate=False, labels=None, loss_config=None):
        return model(input_ids, negate=negate)

    ids = batch(2, 4)
    found = jax.jit(call, static_argnames=static)(ids, negate=True)
    np.testing.assert_allclose(found, -model(ids), rtol=1e-5, atol=1e-6)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(call)(ids, negate=True)


def test_prepare_inputs_for_call_drops_what_is_none(model):
    inputs = {"input_ids": batch(), "attention_mask": None, "labels": batch()}
    prepared = model.prepare_inputs_for_call(**inputs)
    assert set(prepared) == {"input_ids", "labels"}
    assert model(**prepared).loss == model(batch(), labels=batch()).loss


def test_pure_transform_fn_takes_params_and_inputs_and_has_no_side_effects(model, other):
    fn = model.pure_transform_fn()
    inputs = {"input_ids": batch(), "labels": batch()}
    before = host(nnx.state(model))
    loss, grads = jax.jit(jax.value_and_grad(lambda params: fn(params, inputs).loss))(other.params)
    np.testing.assert_allclose(loss, other(**inputs).loss, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)
    for path, leaf in host(nnx.state(model)).items():
        assert leaf.tobytes() == before[path].tobytes()
    np.testing.assert_array_equal(fn(params=model.params, inputs=inputs).logits, model(batch()))
