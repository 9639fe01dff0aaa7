from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, struct
from jax.sharding import NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    EasyDeLState,
    NotInitializedError,
    TrainState,
    TrainStep,
    TreeStructureError,
    make_mesh,
)
from tests.state.my_model import batch as token_batch
from tests.state.my_model import my_model

TARGET = np.linspace(-1, 1, 8, dtype=np.float32)


class FieldState(TrainState):
    batch_stats: Any = None
    epoch: int = 0
    name: str = struct.field(pytree_node=False, default="mine")


def fresh(tx=None, **fields):
    params = {"w": jnp.zeros((8,)), "b": jnp.zeros(())}
    return FieldState.create(params=params, tx=tx or optax.sgd(0.1), **fields)


def squares(state, params, batch):
    return jnp.mean(jnp.square(params["w"] + params["b"] - batch))


def test_a_step_is_value_and_grad_and_apply_gradients():
    state = fresh()
    loss, grads = jax.value_and_grad(lambda p: squares(state, p, TARGET))(state.params)
    expected = state.apply_gradients(grads=grads)
    stepped, metrics = TrainStep(squares, donate=False)(state, TARGET)
    assert set(metrics) == {"loss", "grad_norm"}
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    for one, other in zip(
        jax.tree.leaves(stepped.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert int(stepped.step) == 1
    assert np.asarray(state.params["w"]).tolist() == [0.0] * 8  # not donated: still there


def test_the_state_is_donated_unless_told_otherwise():
    state = fresh()
    TrainStep(squares)(state, TARGET)
    assert state.params["w"].is_deleted()


def test_one_buffer_in_two_places_can_be_donated():
    state = fresh()
    state = state.replace(batch_stats=state.params)  # as an average of the parameters starts
    stepped, _ = TrainStep(squares)(state, TARGET)
    assert not np.array_equal(stepped.params["w"], stepped.batch_stats["w"])


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dense(1)(linen.relu(x))


def test_batch_statistics_change_through_the_dict_and_the_step_compiles_once():
    model, batch = Normed(), jax.random.normal(jax.random.key(0), (16, 4))
    variables = model.init(jax.random.key(1), batch, train=False)
    state = FieldState.create(tx=optax.adam(0.05), apply_fn=model.apply, **variables)

    def loss_fn(state, params, batch):
        outputs, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch,
            train=True,
            mutable=["batch_stats"],
        )
        errors = jnp.abs(outputs - batch.sum(axis=1, keepdims=True))
        return jnp.square(errors).mean(), {**changed, "accuracy": (errors < 0.5).mean()}

    step = TrainStep(loss_fn)
    before = jax.tree.map(np.array, state.batch_stats)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] * 0.5
    assert set(metrics) == {"loss", "grad_norm", "accuracy"}
    assert step.traces == 1
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.batch_stats), strict=True):
        assert not np.array_equal(old, new)


def test_a_sharded_state_stays_where_it_is_and_compiles_once():
    place = NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec("fsdp"))
    params = {"w": jax.device_put(jnp.zeros((8,)), place), "b": jnp.zeros(())}
    state = FieldState.create(params=params, tx=optax.adam(0.1), batch_stats={"n": jnp.int32(0)})

    def loss_fn(state, params, batch, key):
        noise = jax.random.normal(key, (8,)) * 1e-3
        count = state.batch_stats["n"] + 1
        return squares(state, params, batch + noise), {"batch_stats": {"n": count}}

    step = TrainStep(loss_fn)
    for number in range(50):
        state, metrics = step(state, TARGET, key=jax.random.key(number))
        if number == 25:
            state = state.replace(epoch=state.epoch + 1)
        assert state.params["w"].sharding == place
        assert state.opt_state[0].mu["w"].sharding == place
    assert step.traces == 1
    assert (int(state.step), int(state.epoch), int(state.batch_stats["n"])) == (50, 1, 50)
    assert float(metrics["loss"]) < 0.05


def test_an_easydel_state_trains_with_its_random_counters():
    model = my_model()
    model.noise.rate = 0.5
    model.shard_model()
    state = EasyDeLState.create(model=model, tx=optax.adam(1e-2), init_opt_state=True)
    shardings = state.shardings

    def loss_fn(state, params, batch):
        model = state.merge(params)
        loss = model(input_ids=batch, labels=batch).loss
        return loss, {"graphother": nnx.split(model, nnx.Param, ...)[2]}

    step = TrainStep(loss_fn)
    counts, losses = [], []
    for _ in range(5):
        state, metrics = step(state, token_batch())
        counts.append(int(state.graphother["noise"]["rngs"]["count"][...]))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert len(set(counts)) == 5
    assert step.traces == 1
    assert jax.tree.leaves(state.shardings) == jax.tree.leaves(shardings)


def test_a_step_inside_of_a_compiled_function_is_update():
    step = TrainStep(squares)
    batches = jnp.stack([TARGET] * 5)

    @jax.jit
    def epoch(state, batches):
        return jax.lax.scan(step.update, state, batches)

    state, metrics = epoch(fresh(epoch=jnp.int32(0)), batches)
    assert int(state.step) == 5
    assert metrics["loss"].shape == (5,)
    assert float(metrics["loss"][4]) < float(metrics["loss"][0])


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda s, p, b: p["w"], r"float32 of shape \(8,\)"),
        (lambda s, p, b: jnp.int32(3), r"int32 of shape \(\)"),
        (lambda s, p, b: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_refused_and_the_state_stays(loss, found):
    state = fresh()
    with pytest.raises(ArgumentError, match=f"expected a floating scalar.*found {found}"):
        TrainStep(loss)(state, TARGET)
    assert np.asarray(state.params["w"]).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ["params", "opt_state", "loss", "grad_norm", "name"])
def test_the_dict_changes_only_added_fields_and_own_metrics(name):
    step = TrainStep(lambda s, p, b: (squares(s, p, b), {name: jnp.float32(0)}))
    with pytest.raises(ArgumentError, match=f"fields among batch_stats, epoch.*found {name}"):
        step(fresh(), TARGET)


def test_a_field_keeps_its_leaves_and_dtypes():
    def step_to(value):
        return TrainStep(lambda s, p, b: (squares(s, p, b), {"batch_stats": value}))

    state = fresh(batch_stats={"mean": jnp.zeros(3)})
    with pytest.raises(TreeStructureError, match="mean: expected shape") as caught:
        step_to({"mean": jnp.zeros(4), "variance": jnp.zeros(3)})(state, TARGET)
    assert len(caught.value.problems) == 2
    with pytest.raises(TreeStructureError, match="mean: expected float32, found bfloat16"):
        step_to({"mean": jnp.zeros(3, jnp.bfloat16)})(state, TARGET)


def test_what_can_not_be_trained_is_refused():
    with pytest.raises(NotInitializedError, match="found tx=None, opt_state=None"):
        TrainStep(squares)(FieldState.create(params={"w": jnp.zeros(8)}), TARGET)
    with pytest.raises(NotInitializedError, match="init_opt_state=True"):
        TrainStep(squares)(EasyDeLState.create(model=my_model(), tx=optax.sgd(0.1)), TARGET)
    with pytest.raises(ArgumentError, match="a TrainState or an EasyDeLState; found dict"):
        TrainStep(squares)({}, TARGET)
    with pytest.raises(ArgumentError, match="expected a function; found str"):
        TrainStep("loss")
    with pytest.raises(ArgumentError, match="a dict of fields and metrics; found list"):
        TrainStep(lambda s, p, b: (squares(s, p, b), []))(fresh(), TARGET)
