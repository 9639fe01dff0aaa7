"""Optimizers that take more than gradients: plateaus and line searches, saved and gone on with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

from cairn import ArgumentError, EasyDeLState, TrainState, TrainStep, TreeStructureError
from tests.faults.report import is_long
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model

PLATEAU = optax.chain(
    optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=2, accumulation_size=2)
)
BACKTRACKING = optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
)
LBFGS = optax.lbfgs(memory_size=3, linesearch=optax.scale_by_zoom_linesearch(4))
OPTIMIZERS = {"plateau": PLATEAU, "backtracking": BACKTRACKING, "lbfgs": LBFGS}
IDS = batch(4, 5)


class CountedState(TrainState):
    seen: int = 0
    name: str = struct.field(pytree_node=False, default="mine")


def numbers(tree):
    """The leaves on the host, keys by their data."""
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for leaf in jax.tree.leaves(tree)
    ]


def same(one, other):
    ones, others = numbers(one), numbers(other)
    assert len(ones) == len(others) > 0
    for a, b in zip(ones, others, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def model_loss(state, params, ids):
    return state.merge(params)(input_ids=ids, labels=ids).loss


def valley(state, params, batch):
    """A narrow curved valley, in which the steps of a line search differ in length."""
    x, y = params["x"], params["y"]
    return jnp.sum(jnp.square(1 - x) + 10 * jnp.square(y - jnp.square(x))) * batch


def in_the_valley(tx):
    params = {"x": jnp.array([-1.0, 0.5]), "y": jnp.array([0.3, -0.2])}
    return CountedState.create(params=params, tx=tx)


@jax.jit
def step_by_hand(state, ids):
    def value_fn(params):
        return model_loss(state, params, ids)

    loss, grads = jax.value_and_grad(value_fn)(state.graphstate)
    extra = {"value": loss}
    if state.tx is not PLATEAU:
        extra |= {"grad": grads, "value_fn": value_fn}
    return state.apply_gradients(grads=grads, **extra), loss


@pytest.mark.parametrize("kind", ["plateau", "lbfgs"] if is_long() else ["plateau"])
def test_a_model_goes_on_after_a_load_as_if_it_had_never_stopped(kind, tmp_path):
    tx = OPTIMIZERS[kind]
    state = EasyDeLState.create(model=my_model().shard_model(), tx=tx, init_opt_state=True)
    fresh = state.opt_state
    for _ in range(6):
        state, _ = step_by_hand(state, IDS)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(fresh), strict=True)
    )
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(
        tmp_path / "run", tx=tx, auto_shard_model=True, sharding_axis_dims=(2, 4, 1, 1)
    )
    same(loaded, state)
    for _ in range(4):
        state, loss = step_by_hand(state, IDS)
        loaded, again = step_by_hand(loaded, IDS)
        assert float(loss) == float(again)
    same(loaded, state)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_train_state_goes_on_after_a_load_as_if_it_had_never_stopped(kind, tmp_path):
    tx = OPTIMIZERS[kind]
    train_step = TrainStep(valley, donate=False)
    state = in_the_valley(tx)
    for _ in range(5):
        state, _ = train_step(state, 1.0)
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = CountedState.load_state(tmp_path / "run", jax.eval_shape(lambda: in_the_valley(tx)))
    same(loaded, state)
    for _ in range(5):
        state, metrics = train_step(state, 1.0)
        loaded, again = train_step(loaded, 1.0)
        assert float(metrics["loss"]) == float(again["loss"])
    same(loaded, state)
    assert train_step.traces == 1


def test_a_plateau_lowers_the_steps_and_still_does_after_a_load(tmp_path):
    tx = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    state, grads = in_the_valley(tx), {"x": jnp.ones(2), "y": jnp.ones(2)}

    def scales(state, values):
        for value in values:
            state = state.apply_gradients(grads=grads, value=jnp.float32(value), seen=1)
            yield float(state.opt_state[1].scale), state

    found = list(scales(state, [1.0, 2.0, 2.0, 2.0]))
    assert [scale for scale, _ in found] == [1.0, 1.0, 0.5, 0.5]
    last = found[-1][1]
    assert last.seen == 1
    last.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = CountedState.load_state(tmp_path / "run", last)
    assert [scale for scale, _ in scales(loaded, [2.0, 2.0])] == [0.25, 0.25]


@pytest.mark.parametrize("kind", ["plateau", "lbfgs"])
def test_a_train_step_gives_the_optimizer_what_it_takes(kind):
    tx = OPTIMIZERS[kind]
    train_step = TrainStep(model_loss, donate=False)
    state = EasyDeLState.create(model=my_model().shard_model(), tx=tx, init_opt_state=True)
    by_hand = state
    for _ in range(3):
        state, metrics = train_step(state, IDS)
        by_hand, loss = step_by_hand(by_hand, IDS)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for a, b in zip(numbers(state), numbers(by_hand), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert train_step.traces == 1


def test_a_line_search_draws_the_same_numbers_in_a_step_and_others_in_the_next():
    class Noisy(MyModel):
        def __init__(self, config, **settings):
            super().__init__(config, **settings)
            self.noise = nnx.Dropout(0.5, rngs=settings["rngs"])

    def noisy_loss(state, params, ids):
        model = state.merge(params)
        loss = model(input_ids=ids, labels=ids).loss
        return loss, {"graphother": nnx.split(model, nnx.Param, ...)[2]}

    model = Noisy(MyModelConfig(sharding_axis_dims=(1, 1, 1, 1)), rngs=nnx.Rngs(0))
    start = EasyDeLState.create(model=model, tx=LBFGS, init_opt_state=True)
    train_step = TrainStep(noisy_loss, donate=False)
    state, losses = start, []
    for _ in range(4):
        state, metrics = train_step(state, IDS)
        losses.append(float(metrics["loss"]))
        # The search's value of the loss where it stopped: of the mask of this very step.
        searched = float(state.opt_state[-1].value)
        again = start.replace(graphstate=state.graphstate, graphother=start.graphother)
        if len(losses) == 1:
            assert searched == pytest.approx(float(noisy_loss(again, again.graphstate, IDS)[0]))
    assert train_step.traces == 1
    (count,) = nnx.to_flat_state(nnx.filter_state(state.graphother, nnx.RngCount))
    (before,) = nnx.to_flat_state(nnx.filter_state(start.graphother, nnx.RngCount))
    assert int(count[1].get_value()) - int(before[1].get_value()) == 2 * 4


def test_gradients_may_be_a_nested_dict_for_a_line_search_too():
    state = EasyDeLState.create(model=my_model(), tx=BACKTRACKING, init_opt_state=True)

    def value_fn(params):
        return model_loss(state, params, IDS)

    value, grads = jax.value_and_grad(value_fn)(state.graphstate)
    pure = nnx.to_pure_dict(grads)
    one = state.apply_gradients(grads=grads, value=value, grad=grads, value_fn=value_fn)
    other = state.apply_gradients(grads=pure, value=value, grad=pure, value_fn=value_fn)
    same(one, other)
    with pytest.raises(TreeStructureError, match="grad: "):
        state.apply_gradients(grads=pure, value=value, grad={"no": value}, value_fn=value_fn)


def test_what_an_optimizer_uses_nowhere_is_refused_by_name():
    grads = {"x": jnp.ones(2), "y": jnp.ones(2)}
    for tx in (optax.adam(1e-2), optax.identity(), optax.MultiSteps(optax.sgd(0.1), 2)):
        transformation = getattr(tx, "gradient_transformation", lambda tx=tx: tx)()
        state = in_the_valley(transformation)
        with pytest.raises(ArgumentError, match=r"arguments that the optimizer uses; found value"):
            state.apply_gradients(grads=grads, value=jnp.float32(1))
    plain = EasyDeLState.create(model=my_model(), tx=optax.sgd(0.1), init_opt_state=True)
    with pytest.raises(ArgumentError, match=r"apply_gradients: .*; found value_fn"):
        plain.apply_gradients(grads=plain.graphstate, value_fn=lambda params: jnp.float32(0))
    plateau = in_the_valley(PLATEAU)
    with pytest.raises(ArgumentError, match=r"among name, seen.*found sen \(did you mean seen"):
        plateau.apply_gradients(grads=grads, value=jnp.float32(1), sen=2)
    with pytest.raises(ArgumentError, match="found grad, value_fn"):
        plateau.apply_gradients(
            grads=grads, value=jnp.float32(1), grad=grads, value_fn=lambda params: jnp.float32(0)
        )
    with pytest.raises(TypeError, match="'value'"):
        plateau.apply_gradients(grads=grads)


def test_accumulated_steps_hand_on_what_the_optimizer_inside_takes():
    accumulated = optax.MultiSteps(PLATEAU, 2).gradient_transformation()
    train_step = TrainStep(valley, donate=False)
    state, metrics = train_step(in_the_valley(accumulated), 1.0)
    state, metrics = train_step(state, 1.0)
    plateau = state.opt_state.inner_opt_state[1]
    np.testing.assert_allclose(plateau.avg_value, metrics["loss"], rtol=1e-6)


# -- arguments that are no arrays ----------------------------------------------------------------


def looking(update):
    """An optimizer that takes a step of zero or of one, as `update` says; chained, as most are."""

    def scaled(updates, state, params=None, **extra):
        return jax.tree.map(lambda leaf: leaf * update(**extra), updates), state

    made = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    return optax.chain(optax.identity(), made)


def x_after(tx, **extra):
    return float(stepped_x(tx, **extra))


def stepped_x(tx, **extra):
    state = CountedState.create(params={"x": jnp.ones(2)}, tx=tx)
    return state.apply_gradients(grads={"x": jnp.ones(2)}, **extra).params["x"][0]


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", {}, (), b"", {"n": 3}, object()])
def test_what_is_no_array_is_refused_where_no_part_looks_at_it(value):
    tx = optax.chain(optax.adam(1e-2))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"found nmae \(did you mean name\?\)"):
            x_after(tx, nmae=value)


@pytest.mark.parametrize(
    ("update", "value"),
    [
        (lambda mode=None, **_: 1.0 if mode == "full" else 0.0, "full"),
        (lambda mode=None, **_: 1.0 if isinstance(mode, str) else 0.0, "full"),
        (lambda mode=None, **_: float(f"{mode}.0"), "1"),
        (lambda mode=False, **_: 1.0 if mode else 0.0, True),
        (lambda mode=0, **_: jnp.float32(mode), 1),
        (lambda mode=0, **_: jax.jit(lambda one: one)(mode), 1.0),
        (lambda mode=0, **_: 1.0 if mode > 3 else 0.0, 4),
        (lambda mode=(), **_: sum(mode), (0.5, 0.5)),
        (lambda mode=None, **_: mode["scale"], {"scale": 1.0, "name": "n"}),
        (lambda mode=None, **_: np.asarray(mode, np.float32)[()], [1.0]),
    ],
)
def test_what_is_no_array_reaches_the_part_that_looks_at_it(update, value):
    tx = looking(update)
    assert x_after(tx, mode=value) == 2.0
    with pytest.raises(ArgumentError, match="; found other;"):
        x_after(tx, mode=value, other=value)
    assert float(jax.jit(lambda: stepped_x(tx, mode=value))()) == 2.0


def test_what_is_looked_at_in_a_way_that_does_not_show_reaches_the_optimizer_too():
    assert x_after(looking(lambda mode=None, **_: float("".join([mode]))), mode="1.0") == 2.0


def test_a_flag_may_lead_to_another_argument():
    tx = looking(lambda late=False, scale=0.0, **_: scale if late else 1.0)
    assert x_after(tx, late=True, scale=jnp.float32(3)) == 4.0
    with pytest.raises(ArgumentError, match="; found scale;"):
        x_after(looking(lambda late=False, **_: 1.0 if late else 0.0), late=True, scale=1.0)


def test_none_lets_no_array_pass_after_it():
    tx = looking(lambda value=None, **_: 0.0 if value is None else value)
    assert x_after(tx, value=None) == 1.0
    assert x_after(tx, value=jnp.float32(1)) == 2.0
    assert x_after(tx, value=1.0) == 2.0
    plain = optax.chain(optax.adam(1e-2))
    for value in (None, jnp.float32(1)):
        with pytest.raises(ArgumentError, match="; found value;"):
            x_after(plain, value=value)


@pytest.mark.parametrize("wrap", [jax.jit, jax.remat, lambda update: jax.jit(jax.jit(update))])
def test_a_compiled_update_uses_only_what_it_reads(wrap):
    def compiled(tx):
        return optax.GradientTransformationExtraArgs(tx.init, wrap(tx.update))

    with pytest.raises(ArgumentError, match="; found vlaue;"):
        x_after(compiled(optax.chain(optax.sgd(1.0))), vlaue=jnp.float32(1))
    scaled = compiled(looking(lambda value, **_: value))
    assert x_after(scaled, value=jnp.float32(2)) == 3.0


def test_an_argument_that_the_optimizer_misses_is_told_before_one_that_it_has_too_many():
    state = in_the_valley(PLATEAU)
    with pytest.raises(TypeError, match="'value'"):
        state.apply_gradients(grads=state.params, nmae="x")


def test_a_field_does_not_get_what_is_meant_for_the_optimizer():
    class Valued(TrainState):
        value: float = 0.0

    def update(updates, state, params=None, *, value=None, **extra):
        scale = 1.0 if value is None else value
        return jax.tree.map(lambda leaf: leaf * scale, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    state = Valued.create(params={"x": jnp.ones(2), "y": jnp.ones(2)}, tx=tx)
    refused = pytest.raises(ArgumentError, match=r"fields that are named unlike.*found value; ren")
    with refused:
        TrainStep(valley, donate=False)(state, 1.0)
    with refused:
        state.apply_gradients(grads=state.params, value=jnp.float32(1))
    plain = Valued.create(params=state.params, tx=optax.sgd(0.1))
    stepped, _ = TrainStep(valley, donate=False)(plain, 1.0)
    assert float(stepped.value) == 0.0
    assert plain.apply_gradients(grads=plain.params, value=2.0).value == 2.0


def test_a_line_search_moves_adapters_alone_and_goes_on_after_a_load(tmp_path):
    model = my_model().apply_lora_to_layers(2, 4.0, "layers").shard_model()
    state = EasyDeLState.create(model=model, tx=LBFGS, init_opt_state=True)
    train_step = TrainStep(model_loss, donate=False)
    frozen, losses = numbers(state.graphother), []
    for _ in range(3):
        state, metrics = train_step(state, IDS)
        losses.append(float(metrics["loss"]))
    assert sorted(losses, reverse=True) == losses
    for a, b in zip(numbers(state.graphother), frozen, strict=True):
        np.testing.assert_array_equal(a, b)
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(
        tmp_path / "run", tx=LBFGS, auto_shard_model=True, sharding_axis_dims=(2, 4, 1, 1)
    )
    same(loaded, state)
    for _ in range(2):
        state, metrics = train_step(state, IDS)
        loaded, again = train_step(loaded, IDS)
        assert float(metrics["loss"]) == float(again["loss"])
    same(loaded, state)
