from typing import Any

import equinox
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from cairn import (
    ArgumentError,
    NotInitializedError,
    OptimizerError,
    OptimizerNotFoundError,
    StepNotFoundError,
    TrainState,
    TrainStep,
    TreeMismatchError,
    TreeStructureError,
    make_mesh,
)
from tests.state.resnet import images, resnet_loss, resnet_state

TX = optax.adam(1e-1)


class MyState(TrainState):
    epoch: int = 0
    batch_stats: Any = None


class FullState(TrainState):
    """One field of each kind."""

    batch_stats: Any  # without default, as Flax's documentation writes it
    metrics: Any = None
    rng: Any = None
    done: bool = False
    rate: float = 0.0
    label: str = struct.field(pytree_node=False, default="none")


def params():
    return {"dense": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.zeros((3,))}}


def grads_like(tree):
    return jax.tree.map(jnp.ones_like, tree)


def assert_bit_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_create_and_one_step_are_optax_own():
    state = TrainState.create(params=params(), tx=TX, apply_fn=jnp.tanh)
    after = state.apply_gradients(grads=grads_like(params()))
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = TX.update(grads_like(params()), TX.init(params()), params())
    assert_bit_equal(after.params, optax.apply_updates(params(), updates))
    assert_bit_equal(after.opt_state, opt_state)
    assert (int(state.step), int(after.step)) == (0, 1)
    assert after.apply_fn is jnp.tanh


def linen_params():
    return linen.Dense(3).init(jax.random.key(0), jnp.ones((2, 4)))["params"]


def nnx_params():
    return nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.mark.parametrize("make", [params, linen_params, nnx_params, lambda: (jnp.ones(3), [])])
def test_any_tree_of_parameters_trains_under_jit_with_donation(make):
    state = TrainState.create(params=make(), tx=TX)
    step = jax.jit(lambda s: s.apply_gradients(grads=grads_like(s.params)), donate_argnums=0)
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
        state = step(state)
    assert int(state.step) == 2
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(new, old - 0.2, rtol=1e-4, atol=1e-4)


def test_added_fields_are_part_of_the_tree_and_change_only_when_passed():
    stats = {"mean": jnp.ones((3,))}
    state = MyState.create(params=params(), tx=TX, epoch=2, batch_stats=stats)
    assert any(leaf is stats["mean"] for leaf in jax.tree.leaves(state))
    after = state.apply_gradients(grads=grads_like(params()))
    assert after.epoch == 2
    assert after.batch_stats is stats
    moved = state.apply_gradients(grads=grads_like(params()), epoch=3, batch_stats={})
    assert (moved.epoch, moved.batch_stats) == (3, {})
    assert state.replace(epoch=9).epoch == 9


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="expected fields among batch_stats, epoch"):
        MyState.create(params=params(), tx=TX, colour="red")
    with pytest.raises(ArgumentError, match="expected tx with opt_state"):
        TrainState.create(params=params(), opt_state=())
    with pytest.raises(NotInitializedError, match="create the state with tx="):
        TrainState.create(params=params()).apply_gradients(grads=params())
    with pytest.raises(TreeStructureError, match="dense/bias: missing"):
        TrainState.create(params=params(), tx=TX).apply_gradients(
            grads={"dense": {"kernel": jnp.ones((4, 3))}}
        )


def test_a_state_is_saved_and_restored_with_its_added_fields(tmp_path):
    state = MyState.create(
        params=params(), tx=TX, epoch=2, batch_stats={"mean": jnp.full((3,), 0.1, jnp.bfloat16)}
    ).apply_gradients(grads=grads_like(params()))
    state.save_state(tmp_path / "r", extras={"position": 7}, verbose=False).wait()
    fresh = MyState.create(
        params=params(), tx=TX, epoch=0, batch_stats={"mean": jnp.zeros((3,), jnp.bfloat16)}
    )
    for target in (
        fresh,
        jax.eval_shape(lambda: fresh),
        jax.eval_shape(lambda state: state, fresh),
    ):
        loaded = MyState.load_state(tmp_path / "r", target)
        assert_bit_equal(loaded, state)
        assert loaded.epoch == 2
        assert type(loaded.epoch) is int
        assert loaded.extras == {"position": 7}


def test_leaves_go_where_the_target_has_them(tmp_path):
    state = TrainState.create(params={"w": jnp.arange(64.0).reshape(8, 8)}, tx=TX)
    state.save_state(tmp_path / "r", step=1, verbose=False).wait()
    place = NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec("fsdp"))
    target = TrainState.create(params=jax.device_put({"w": jnp.zeros((8, 8))}, place), tx=TX)
    loaded = TrainState.load_state(tmp_path / "r", target)
    assert loaded.params["w"].sharding == place
    assert loaded.opt_state[0].mu["w"].sharding == place
    np.testing.assert_array_equal(loaded.params["w"], state.params["w"])
    assert int(loaded.step) == 1


def test_a_checkpoint_that_does_not_fit_lists_every_leaf(tmp_path):
    state = TrainState.create(params=params(), tx=TX)
    state.save_state(tmp_path / "r", step=1, save_optimizer=False, verbose=False).wait()
    with pytest.raises(OptimizerNotFoundError, match="optimizer='skip'"):
        TrainState.load_state(tmp_path / "r", state)
    assert TrainState.load_state(tmp_path / "r", state, optimizer="skip").opt_state is None
    other = MyState.create(
        params={"dense": {"kernel": jnp.zeros((4, 4))}, "new": jnp.zeros(2)},
        batch_stats=jnp.ones(1),
    )
    with pytest.raises(TreeMismatchError) as caught:
        MyState.load_state(tmp_path / "r", other)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {
        "model/dense/bias",
        "model/dense/kernel",
        "model/new",
        "fields/batch_stats",
        "fields/epoch",
    }
    with pytest.raises(StepNotFoundError):
        TrainState.load_state(tmp_path / "r", state, step=9)


def test_a_field_without_default_must_be_given_and_only_added_ones_change():
    with pytest.raises(ArgumentError, match="each field without default; found none for batch_st"):
        FullState.create(params=params())
    state = FullState.create(params=params(), tx=TX, batch_stats=None)
    for name in ("step", "params", "colour"):
        with pytest.raises(ArgumentError, match=f"batch_stats, done, .*found {name}"):
            state.apply_gradients(grads=params(), **({name: 1} if name == "colour" else {name: 0}))
    assert state.replace(metrics={"loss": 1.0}).metrics == {"loss": 1.0}


def full_state(count=2**40):
    return FullState.create(
        params={"w": jnp.ones((4,)), "scale": 0.1, "deep": [{"x": np.float16(3)}, (), None]},
        batch_stats={"a": {"b": jnp.arange(3), "c": None}},
        metrics={"count": count, "ratio": 1 / 3, "flags": (True, False), "complex": 1 - 2j},
        rng=jax.random.key(7, impl="rbg"),
        done=True,
        rate=-0.0,
        label="first",
        step=3,
    )


def test_every_kind_of_leaf_comes_back_exactly(tmp_path):
    state = full_state()
    state.save_state(tmp_path / "r", verbose=False).wait()
    blank = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else type(leaf)(0), state)
    for target in (blank.replace(label="target"), jax.eval_shape(lambda: full_state(0))):
        loaded = FullState.load_state(tmp_path / "r", target)
        assert jax.tree.structure(loaded.params) == jax.tree.structure(state.params)
        assert loaded.metrics == state.metrics
        kinds = jax.tree.map(type, loaded.metrics)
        assert kinds == jax.tree.map(type, state.metrics)
        assert loaded.done is True
        assert (type(loaded.rate), str(loaded.rate)) == (float, "-0.0")
        assert loaded.params["scale"] == 0.1
        assert loaded.params["deep"][0]["x"].dtype == np.float16
        assert loaded.batch_stats["a"]["b"].tolist() == [0, 1, 2]
        assert loaded.batch_stats["a"]["c"] is None
        assert jax.random.key_impl(loaded.rng) == jax.random.key_impl(state.rng)
        assert_bit_equal(jax.random.key_data(loaded.rng), jax.random.key_data(state.rng))
        assert loaded.label == target.label  # static: no part of what is saved
        assert int(loaded.step) == 3


def test_a_number_and_the_array_that_jax_made_of_it_fit_each_other(tmp_path):
    fresh = MyState.create(params=params(), tx=TX, epoch=5)
    stepped = jax.jit(lambda s: s.apply_gradients(grads=params()))(fresh)
    assert isinstance(stepped.epoch, jax.Array)
    fresh.save_state(tmp_path / "number", verbose=False, step=1).wait()
    stepped.save_state(tmp_path / "array", verbose=False).wait()
    for run in ("number", "array"):
        loaded = MyState.load_state(tmp_path / run, stepped.replace(epoch=stepped.epoch * 0))
        assert (int(loaded.epoch), loaded.epoch.weak_type) == (5, True)
        back = MyState.load_state(tmp_path / run, fresh.replace(epoch=0))
        assert (back.epoch, type(back.epoch)) == (5, int)
    typed = fresh.replace(epoch=jnp.asarray(0, jnp.int32))
    with pytest.raises(TreeMismatchError, match=r"epoch: expected int32\[\], stored as int64"):
        MyState.load_state(tmp_path / "number", typed)
    with pytest.raises(TreeMismatchError, match="fields/epoch: expected float64"):
        MyState.load_state(tmp_path / "number", fresh.replace(epoch=0.0))


def test_what_only_one_side_has_is_refused(tmp_path):
    state = MyState.create(params=params(), tx=TX, batch_stats={"mean": jnp.ones(3)})
    state.save_state(tmp_path / "r", step=1, verbose=False).wait()
    with pytest.raises(TreeMismatchError) as caught:
        TrainState.load_state(tmp_path / "r", TrainState.create(params=params(), tx=TX))
    assert {problem.split(",")[0] for problem in caught.value.problems} == {
        "fields/epoch: unexpected in the checkpoint",
        "fields/batch_stats/mean: unexpected in the checkpoint",
    }
    bare = MyState.create(params=params(), batch_stats={"mean": jnp.ones(3)})
    with pytest.raises(OptimizerError, match="create the target with tx=, or pass optimizer='sk"):
        MyState.load_state(tmp_path / "r", bare)
    assert MyState.load_state(tmp_path / "r", bare, optimizer="skip").opt_state is None
    with pytest.raises(ArgumentError, match="expected 'require' or 'skip'; found 'maybe'"):
        MyState.load_state(tmp_path / "r", bare, optimizer="maybe")
    with pytest.raises(ArgumentError, match=r"expected a MyState, .*; found TrainState"):
        MyState.load_state(tmp_path / "r", TrainState.create(params=params()))


def test_an_optimizer_without_leaves_and_a_bare_array_are_saved_too(tmp_path):
    state = TrainState.create(params=jnp.arange(4.0), tx=optax.sgd(0.5))
    state = state.apply_gradients(grads=jnp.ones(4))
    state.save_state(tmp_path / "r", verbose=False).wait()
    loaded = TrainState.load_state(tmp_path / "r", jax.eval_shape(lambda: state))
    assert loaded.params.tolist() == [-0.5, 0.5, 1.5, 2.5]
    assert_bit_equal(loaded.opt_state, state.opt_state)


def test_params_that_are_no_arrays_are_listed():
    with pytest.raises(ArgumentError, match="2 leaves are no arrays") as caught:
        TrainState.create(params={"w": jnp.ones(2), "f": jnp.tanh, "name": "x"})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "params['f']",
        "params['name']",
    ]


# -- real models -----------------------------------------------------------------------------------


def test_a_resnet_with_batch_statistics_goes_on_as_if_it_had_not_been_saved(tmp_path):
    step, state = TrainStep(resnet_loss), resnet_state()
    state, first = step(state, images(0))
    for _ in range(2):
        state, _ = step(state, images(0))
    state = state.replace(epoch=1)
    handle = state.save_state(tmp_path / "r", verbose=False)  # the next step donates its arrays
    expected = []
    for _ in range(3):
        state, metrics = step(state, images(0))
        expected.append({name: np.asarray(value) for name, value in metrics.items()})
    handle.wait()
    target = jax.eval_shape(lambda: resnet_state(seed=1))
    loaded = type(state).load_state(tmp_path / "r", target)
    assert (int(loaded.step), loaded.epoch) == (3, 1)
    for wanted in expected:
        loaded, metrics = step(loaded, images(0))
        assert {n: v.item() for n, v in metrics.items()} == {n: v.item() for n, v in wanted.items()}
    assert_bit_equal(loaded.batch_stats, state.batch_stats)
    assert_bit_equal(loaded.params, state.params)
    assert step.traces == 1  # a restored state needs no compilation of its own
    assert metrics["loss"] < first["loss"]
    # Inference uses the statistics: without them the network answers otherwise.
    infer = jax.jit(lambda variables, x: loaded.apply_fn(variables, x, train=False))
    answers = [
        infer({"params": loaded.params, "batch_stats": stats}, images()["image"])
        for stats in (loaded.batch_stats, resnet_state().batch_stats)
    ]
    assert np.abs(answers[0] - answers[1]).max() > 0.1


def test_a_resnet_is_restored_onto_another_mesh(tmp_path):
    state = resnet_state()
    state = jax.jit(lambda state: state.apply_gradients(grads=state.params))(state)
    state.save_state(tmp_path / "r", verbose=False).wait()
    mesh = make_mesh((1, 4, 1, 1))

    def place(leaf):
        spec = PartitionSpec()
        if getattr(leaf, "ndim", 0) == 4:
            spec = PartitionSpec(None, None, None, "fsdp")  # the filters of a convolution
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec), weak_type=leaf.weak_type
        )

    target = jax.tree.map(place, jax.eval_shape(resnet_state))
    loaded = type(state).load_state(tmp_path / "r", target)
    kernel = loaded.params["ResidualBlock_0"]["Conv_0"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, None, None, "fsdp")
    assert loaded.step.sharding.mesh == mesh
    assert_bit_equal(loaded.params, state.params)
    assert_bit_equal(loaded.opt_state, state.opt_state)
    assert_bit_equal(loaded.batch_stats, state.batch_stats)


def equinox_state(seed=0):
    model = equinox.nn.MLP(4, 3, 8, 2, key=jax.random.key(seed))
    return TrainState.create(
        params=model, tx=TX, apply_fn=lambda model, x: jax.vmap(model)(x)
    ), model


def equinox_loss(state, params, batch):
    return jnp.mean(jnp.square(state.apply_fn(params, batch) - 1.0))


def test_an_equinox_module_trains_is_saved_and_restored_as_it_is(tmp_path):
    state, model = equinox_state()
    inputs = jax.random.normal(jax.random.key(1), (8, 4))
    assert isinstance(state.params, equinox.nn.MLP)
    assert state.params.activation is None
    np.testing.assert_array_equal(state.apply_fn(state.params, inputs), jax.vmap(model)(inputs))
    step = TrainStep(equinox_loss, donate=False)
    losses = []
    for _ in range(4):
        state, metrics = step(state, inputs)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert step.traces == 1
    state.save_state(tmp_path / "r", verbose=False).wait()
    target = equinox_state(seed=5)[0].replace(apply_fn=state.apply_fn)
    loaded = TrainState.load_state(tmp_path / "r", target)
    assert_bit_equal(loaded.params, state.params)
    _, expected = step(state, inputs)
    _, metrics = step(loaded, inputs)
    assert metrics["loss"].item() == expected["loss"].item()
    whole = loaded.apply_fn.merge(loaded.params)
    assert whole.activation is model.activation
    np.testing.assert_array_equal(jax.vmap(whole)(inputs), state.apply_fn(state.params, inputs))


def test_equal_equinox_modules_share_one_compiled_step():
    model = equinox.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    step = TrainStep(lambda s, p, x: jnp.mean(jax.vmap(lambda row: s.apply_fn(p, row))(x)))
    for _ in range(2):
        copied = jax.tree.map(lambda leaf: leaf + 0 if equinox.is_array(leaf) else leaf, model)
        step(TrainState.create(params=copied, tx=TX), jnp.ones((2, 4)))
    assert step.traces == 1


def test_a_partitioned_equinox_module_is_taken_as_it_is():
    model = equinox.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    arrays, static = equinox.partition(model, equinox.is_inexact_array)
    state = TrainState.create(
        params=arrays, tx=TX, apply_fn=lambda p, x: equinox.combine(p, static)(x)
    )
    assert_bit_equal(state.params, arrays)
    np.testing.assert_array_equal(state.apply_fn(state.params, jnp.ones(4)), model(jnp.ones(4)))


def test_an_equinox_module_with_batch_statistics_keeps_them_in_a_field(tmp_path):
    class Normed(equinox.Module):
        norm: equinox.nn.BatchNorm
        drop: equinox.nn.Dropout

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.drop(x, key=None), state

    class NormedState(TrainState):
        statistics: Any

    def fresh():
        norm, statistics = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
            4, axis_name="batch", mode="ema"
        )
        model = Normed(norm, equinox.nn.Dropout(0.5, inference=True))
        return NormedState.create(params=model, tx=TX, statistics=statistics)

    def loss_fn(state, params, batch):
        outputs, statistics = jax.vmap(
            lambda x, s: state.apply_fn(params, x, s),
            axis_name="batch",
            in_axes=(0, None),
            out_axes=(0, None),
        )(batch, state.statistics)
        return jnp.mean(jnp.square(outputs - 2.0)), {"statistics": statistics}

    state = fresh()
    before = [np.array(leaf) for leaf in jax.tree.leaves(state.statistics)]
    state, _ = TrainStep(loss_fn)(state, jax.random.normal(jax.random.key(0), (8, 4)))
    after = jax.tree.leaves(state.statistics)
    assert any(not np.array_equal(*pair) for pair in zip(before, after, strict=True))
    state.save_state(tmp_path / "r", verbose=False).wait()
    loaded = NormedState.load_state(tmp_path / "r", fresh())
    assert_bit_equal(jax.tree.leaves(loaded.statistics), after)


def test_an_equinox_module_with_arrays_that_are_not_floating_is_refused():
    class Counting(equinox.Module):
        weight: jax.Array
        count: jax.Array
        names: Any

    model = Counting(jnp.ones(3), jnp.arange(2), bytearray())
    with pytest.raises(ArgumentError, match=r"in a field of your own TrainState") as caught:
        TrainState.create(params=model)
    assert caught.value.problems == (
        ".count: an array of int32",
        ".names: bytearray has no hash",
    )


def test_an_nnx_state_is_saved_and_goes_back_into_its_module(tmp_path):
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    graphdef, own = nnx.split(module)

    def loss_fn(state, params, batch):
        return jnp.mean(jnp.square(nnx.merge(graphdef, params)(batch)))

    state, _ = TrainStep(loss_fn)(TrainState.create(params=own, tx=TX), jnp.ones((2, 4)))
    state.save_state(tmp_path / "r", verbose=False).wait()
    abstract = nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    loaded = TrainState.load_state(tmp_path / "r", TrainState.create(params=abstract, tx=TX))
    assert_bit_equal(loaded.params, state.params)
    assert_bit_equal(loaded.opt_state, state.opt_state)
    np.testing.assert_array_equal(
        nnx.merge(graphdef, loaded.params)(jnp.ones(4)),
        nnx.merge(graphdef, state.params)(jnp.ones(4)),
    )


def test_calling_a_module_changes_no_state_that_was_made_of_its_variables():
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = TrainState.create(params=nnx.state(module, nnx.Param))
    before = np.array(jax.tree.leaves(state.params)[1])
    module.kernel.set_value(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(jax.tree.leaves(state.params)[1], before)


def test_load_or_create_serves_the_first_start_and_every_restart(tmp_path):
    made = []

    def create():
        made.append(TrainState.create(params=params(), tx=TX))
        return made[-1]

    first = TrainState.load_or_create(tmp_path / "run", create)
    assert first is made[0]
    first.apply_gradients(grads=grads_like(params())).save_state(tmp_path / "run", wait=True)
    target = jax.eval_shape(lambda: TrainState.create(params=params(), tx=TX))
    for more in ({}, {"target": target}):
        again = TrainState.load_or_create(tmp_path / "run", create, **more)
        assert int(again.step) == 1
        assert_bit_equal(again.params, first.apply_gradients(grads=grads_like(params())).params)
    assert len(made) == 2  # a target needs no other state


def test_load_or_create_never_begins_anew_where_another_s_checkpoints_are(tmp_path):
    ocp.save(tmp_path / "plain" / "3", {"w": np.ones(3)})
    with pytest.raises(ValueError, match="checkpoints that no run lists: 3"):
        TrainState.load_or_create(tmp_path / "plain", lambda: pytest.fail("was created"))


def test_what_jax_may_move_it_may_move_after_a_load(tmp_path):
    """Else the first step after it compiles again, and takes no batch that is on a mesh."""
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    fresh = MyState.create(params=params(), tx=TX, epoch=5)
    grads = grads_like(params())
    state = step(fresh, grads)
    state.save_state(tmp_path / "r", verbose=False).wait()
    expected, compiled = step(state, grads), step._cache_size()
    loaded = MyState.load_state(tmp_path / "r", state)
    assert not any(leaf.committed for leaf in jax.tree.leaves(loaded))
    assert_bit_equal(step(loaded, grads), expected)
    assert step._cache_size() == compiled
    on_mesh = NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec())
    assert_bit_equal(
        step(loaded, jax.device_put(grads, on_mesh)), step(state, jax.device_put(grads, on_mesh))
    )
    bound = jax.device_put(state, jax.devices()[1])
    for leaf in jax.tree.leaves(MyState.load_state(tmp_path / "r", bound)):
        assert leaf.committed
        assert leaf.devices() == {jax.devices()[1]}


def gives_way():
    """An optimizer whose state is made of Python numbers, until one of them is a float32."""

    def update(grads, state, params):
        updates = jax.tree.map(lambda leaf: -leaf * state["rate"] * state["scales"][0], grads)
        count, seen = state["count"] + 1, jnp.asarray(1.0, jnp.float32)
        return updates, {**state, "count": count, "seen": seen}

    start = {"rate": 0.5, "count": 0, "scales": jnp.full((2,), 0.5), "seen": 0.0}
    return optax.GradientTransformation(lambda params: start, update)


def test_numbers_that_give_way_to_bfloat16_do_so_after_a_load(tmp_path):
    """A float32 in their place would make the parameters float32, from the next step on."""
    tx = gives_way()
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    weights = {"w": jnp.ones((4,), jnp.bfloat16)}
    fresh = TrainState.create(params=weights, tx=tx)
    state = step(fresh, weights)
    state.save_state(tmp_path / "r", verbose=False).wait()
    for target in (fresh, state, jax.eval_shape(lambda: TrainState.create(params=weights, tx=tx))):
        loaded = TrainState.load_state(tmp_path / "r", target)
        kinds = {name: leaf.weak_type for name, leaf in loaded.opt_state.items()}
        assert kinds == {"rate": True, "count": True, "scales": True, "seen": False}
        assert_bit_equal(step(loaded, weights), step(state, weights))


def test_an_optimizer_whose_moments_became_float32_goes_on_from_a_fresh_target(tmp_path):
    """Optax makes moments like the parameters, and float32 in the step that a float32 decay is."""
    tx = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=1e-2)

    def create():
        return TrainState.create(params={"w": jnp.ones((4,), jnp.bfloat16)}, tx=tx)

    state = create()
    for _ in range(2):
        state = state.apply_gradients(grads=state.params)
    assert create().opt_state.inner_state[0].mu["w"].dtype == jnp.bfloat16
    assert state.opt_state.inner_state[0].mu["w"].dtype == jnp.float32
    state.save_state(tmp_path / "r", verbose=False).wait()
    loaded = TrainState.load_or_create(tmp_path / "r", create)
    assert_bit_equal(loaded, state)
    grads = loaded.params
    assert_bit_equal(loaded.apply_gradients(grads=grads), state.apply_gradients(grads=grads))
    with pytest.raises(TreeMismatchError, match=r"model/w: expected float32\[4\], stored as bfl"):
        TrainState.load_state(
            tmp_path / "r", TrainState.create(params={"w": jnp.ones((4,))}, tx=tx)
        )
