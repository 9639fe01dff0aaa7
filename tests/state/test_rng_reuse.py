"""A step that drops the counters of random streams repeats its masks, and says so once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cairn import EasyDeLState, TrainStep
from tests.state.my_model import batch, my_model
from tests.state.seams import rng_reuse

TX = optax.sgd(1e-1)
IDS = batch()


class Model(nnx.Module):
    """Any module; `how` its dropout is called."""

    def __init__(self, rate=0.5, how="plain", rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.how = how
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.noise = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, **options):
        def layer(model, x):
            return model.noise(model.linear(x), **options)

        how = {"plain": lambda fn: fn, "remat": nnx.remat, "jit": nnx.jit}[self.how]
        return how(layer)(self, x)


X = jnp.ones((4, 8))


def state_of(model=None):
    return EasyDeLState.create(model=model or Model(), tx=TX, init_opt_state=True)


def loss_and_grads(state, call=lambda model: model(X)):
    def loss_of(params):
        model = state.merge(params)
        loss = call(model).mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]

    return jax.value_and_grad(loss_of, has_aux=True)(state.graphstate)


def natural(state, **options):
    (loss, _), grads = loss_and_grads(state, **options)
    return state.apply_gradients(grads=grads), loss


def compiled(step):
    """For this test alone: JAX keeps what it has compiled of a function."""
    return jax.jit(lambda state: step(state))


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(rng_reuse, "_warned", set())


def said(step, state, times=4):
    """The warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            state, _ = step(state)
    return [one for one in caught if "draws the same random numbers" in str(one.message)]


@pytest.mark.parametrize("how", ["plain", "remat", "jit"])
def test_a_jitted_step_that_repeats_its_mask_says_so_once_at_the_call(how):
    (warning,) = said(compiled(natural), state_of(Model(how=how)))
    assert "the same random numbers from noise/rngs, such as" in str(warning.message)
    assert warning.filename == __file__


def test_so_does_one_that_donates_one_in_the_base_module_and_one_for_several_batches():
    def state_with_dropout():
        model = my_model()
        model.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        return model.shard_model().to_state(TX)

    traced = []

    def train_step(state, ids):
        traced.append(ids.shape)

        def loss_of(params):
            return state.merge(params)(input_ids=ids, labels=ids).loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    step = jax.jit(train_step, donate_argnums=0)
    assert len(said(lambda state: step(state, IDS), state_with_dropout())) == 1
    assert said(lambda state: step(state, IDS[:4]), state_with_dropout()) == []  # told already
    assert traced == [IDS.shape, IDS[:4].shape]


def test_an_eager_step_says_so():
    assert len(said(natural, state_of())) == 1


def test_a_train_step_says_so_unless_its_loss_function_carries_graphother():
    def loss_fn(state, params, batch):
        model = state.merge(params)
        return model(batch).mean(), {"graphother": nnx.split(model, nnx.Param, ...)[2]}

    def dropping(state, params, batch):
        return loss_fn(state, params, batch)[0]

    for fn, times in ((loss_fn, 0), (dropping, 1)):
        step = TrainStep(fn)
        assert len(said(lambda state, step=step: step(state, X), state_of())) == times
        assert step.traces == 1


def test_the_mask_it_tells_of_does_repeat():
    """The loss is that of the mask alone: the parameters stay."""
    frozen = EasyDeLState.create(model=Model(), tx=optax.set_to_zero(), init_opt_state=True)

    def losses(step, state):
        found = []
        for _ in range(4):
            state, loss = step(state)
            found.append(float(loss))
        return found

    with pytest.warns(UserWarning, match="draws the same random numbers"):
        assert len(set(losses(compiled(natural), frozen))) == 1
    assert len(set(losses(compiled(carried_after), frozen))) == 4


def carried_after(state):
    (loss, other), grads = loss_and_grads(state)
    return state.apply_gradients(grads=grads).replace(graphother=other), loss


def carried_before(state):
    (loss, other), grads = loss_and_grads(state)
    return state.replace(graphother=other).apply_gradients(grads=grads), loss


def carried_in_a_new_state(state):
    (loss, other), grads = loss_and_grads(state)
    stepped = state.apply_gradients(grads=grads)
    parts = (state.graphdef, stepped.graphstate, other)
    return EasyDeLState(stepped.step, *parts, tx=TX, opt_state=stepped.opt_state), loss


def reseeded(state):
    def call(model):
        nnx.reseed(model, default=jax.random.fold_in(jax.random.key(7), state.step))
        return model(X)

    return natural(state, call=call)


def with_a_stream_of_its_own(state):
    def call(model):
        rngs = nnx.Rngs(dropout=jax.random.fold_in(jax.random.key(7), state.step))
        return model(X, rngs=rngs)

    return natural(state, call=call)


def without_randomness(state):
    return natural(state, call=lambda model: model(X, deterministic=True))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    "step",
    [
        carried_after,
        carried_before,
        carried_in_a_new_state,
        reseeded,
        with_a_stream_of_its_own,
        without_randomness,
    ],
)
def test_a_step_that_draws_anew_or_nothing_says_nothing(step, jitted):
    assert said(compiled(step) if jitted else step, state_of()) == []


@pytest.mark.parametrize("how", ["plain", "remat", "jit"])
def test_a_dropout_of_rate_0_draws_nothing(how):
    assert said(compiled(natural), state_of(Model(rate=0.0, how=how))) == []


def test_a_caller_that_carries_graphother_himself_is_told_nothing():
    @jax.jit
    def step(state):
        (loss, other), grads = loss_and_grads(state)
        return state.apply_gradients(grads=grads), other, loss

    def outside(state):
        state, other, loss = step(state)
        return state.replace(graphother=other), loss

    assert said(outside, state_of()) == []


def test_the_same_step_taken_twice_is_no_repetition():
    state, step = state_of(), compiled(natural)

    def again(_):
        return step(state)

    assert said(again, state) == []


def test_a_state_whose_memory_went_to_another_step_can_be_handled_still():
    step = jax.jit(lambda state: natural(state), donate_argnums=0)
    first, _ = step(state_of())
    with pytest.warns(UserWarning, match="draws the same random numbers"):
        second, _ = step(first)
    assert first.replace(opt_state=None).step.is_deleted()
    assert int(second.step) == 2


def test_steps_inside_of_one_compiled_loop_are_not_refused():
    def many(state):
        return jax.lax.scan(lambda state, _: natural(state), state, length=3)

    state, losses = jax.jit(many)(state_of())
    assert np.shape(losses) == (3,)
    assert int(state.step) == 3


def test_what_is_looked_at_leaks_no_tracer_and_compiles_nothing_anew():
    traced = []

    def step(state):
        traced.append(state)
        return natural(state)

    step = jax.jit(step)
    said(step, state_of())
    assert len(traced) == 1
    traced.clear()
    with jax.checking_leaks():
        said(jax.jit(natural), state_of(Model(how="remat")))
