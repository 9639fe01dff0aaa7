"""States under jax.jit, jax.grad, jax.eval_shape and donation.

`CAIRN_FAULTS=long` steps states of every kind.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import ArgumentError, DecoderForCausalLM, EasyDeLState, make_mesh
from cairn.state.sharding.mesh import mesh_of
from tests.faults.report import is_long
from tests.state.compilations import compilations
from tests.state.my_model import batch as my_batch
from tests.state.my_model import my_model, train_step
from tests.tiny import TINY, batch, leaves_of, make_state

STEPS = 10
CHAIN = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.MultiSteps(
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1e-2, 0.0, 50)), 2
    ).gradient_transformation(),
)


def tiny(dims=(2, 4, 1, 1)):
    config = TINY.replace(sharding_axis_dims=dims, num_hidden_layers=1)
    return DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()


def fresh_step():
    """A new function, so that no other test's compilations count."""
    return jax.jit(lambda state, ids: train_step(state, ids), donate_argnums=0)


def by_rules():
    rules = (("kernel", PartitionSpec(None, "tp")), (".*", PartitionSpec()))
    return tiny((1, 4, 2, 1)).shard_model(rules).to_state(CHAIN)


STATES = {
    "chain of MultiSteps and inject_hyperparams, fsdp x tp": lambda: tiny((1, 4, 2, 1)).to_state(
        CHAIN
    ),
    "adafactor, dp x fsdp x tp": lambda: tiny((2, 2, 2, 1)).to_state(
        optax.adafactor(1e-3, min_dim_size_to_factor=16)
    ),
    "masked and multi_transform, dp": lambda: tiny((8, 1, 1, 1)).to_state(
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
            lambda tree: jax.tree.map(lambda leaf: "a" if leaf.ndim > 1 else "b", tree),
        )
    ),
    "placed by rules of its own": by_rules,
    "fully sharded": lambda: tiny().fully_shard().to_state(CHAIN),
    "an optimizer placed by other rules": lambda: (
        tiny().to_state().init_tx(optax.adamw(1e-3), ((".*", PartitionSpec()),))
    ),
    "on one device": lambda: my_model((1, 1, 1, 1)).to_state(CHAIN),
}


TEN = "chain of MultiSteps and inject_hyperparams, fsdp x tp"
"""Ten steps of this one, which has one update for every two; three of the others."""
SOME = (TEN, "adafactor, dp x fsdp x tp", "an optimizer placed by other rules")
"""Of each way to be placed one: by the model, by the optimizer's shapes, and by rules."""


@pytest.mark.parametrize("name", STATES if is_long() else SOME)
def test_a_plain_donated_step_compiles_once_and_moves_nothing(name):
    state, step = STATES[name](), fresh_step()
    steps = STEPS if name == TEN else 3
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    ids = jnp.asarray(batch(0))
    with compilations() as compiled:
        for _ in range(steps):
            state, loss = step(state, ids)
        loss.block_until_ready()
    assert len(compiled) == 1
    assert step._cache_size() == 1
    assert int(state.step) == steps
    if name != "on one device":
        assert [leaf.sharding for leaf in jax.tree.leaves(state)] == places


def test_a_model_with_random_keys_compiles_once_too():
    state, step, ids = my_model().shard_model().to_state(CHAIN), fresh_step(), my_batch()
    with compilations() as compiled:
        for _ in range(5):
            state, _ = step(state, ids)
    assert len(compiled) == 1


def test_keys_that_the_model_made_on_one_device_join_the_mesh_before_the_first_step():
    model = my_model()
    nnx.update(model, tiny_params_on_mesh(model))
    state = model.to_state(optax.sgd(1e-2))
    assert mesh_of(state.graphother) == mesh_of(state.graphstate) is not None
    step, ids = fresh_step(), my_batch()
    with compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, ids)
    assert len(compiled) == 1


def tiny_params_on_mesh(model):
    params = nnx.state(model, nnx.Param)
    everywhere = jax.sharding.NamedSharding(make_mesh((2, 4, 1, 1)), PartitionSpec())
    return jax.device_put(params, everywhere)


def test_a_loaded_state_goes_on_without_moving(tmp_path):
    state = make_state()
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    step, ids = fresh_step(), jnp.asarray(batch(0))
    loaded = EasyDeLState.load_state(
        tmp_path / "run",
        sharding_axis_dims=(1, 4, 2, 1),
        partition_rules=(("proj/kernel", PartitionSpec(None, "tp")), (".*", PartitionSpec())),
        auto_shard_model=True,
        verbose=False,
    )
    assert loaded.placement is not None
    places = [leaf.sharding for leaf in jax.tree.leaves(loaded)]
    with compilations() as compiled:
        for _ in range(3):
            loaded, _ = step(loaded, ids)
    assert len(compiled) == 1
    assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == places


def test_a_save_right_after_a_donated_step_stores_that_step(tmp_path):
    state, step, ids = make_state(), fresh_step(), jnp.asarray(batch(0))
    for _ in range(2):
        state, _ = step(state, ids)
    wanted = leaves_of(state)
    handle = state.save_state(tmp_path / "run", verbose=False)
    for _ in range(3):  # the state that is being saved is donated at once
        state, _ = step(state, ids)
    handle.wait()
    loaded = EasyDeLState.load_state(tmp_path / "run", auto_shard_model=True, verbose=False)
    assert int(loaded.step) == 2
    found = leaves_of(loaded)
    for item, leaves in wanted.items():
        assert found[item].keys() == leaves.keys()
        for path, leaf in leaves.items():
            assert found[item][path].tobytes() == leaf.tobytes(), path


def test_create_under_eval_shape_gives_an_abstract_state_to_restore_into(tmp_path):
    tx = optax.adamw(1e-3)

    def create():
        model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0))
        return EasyDeLState.create(model=model, tx=tx, init_opt_state=True)

    abstract = jax.eval_shape(create)
    assert isinstance(abstract, EasyDeLState)
    leaves = jax.tree.leaves(abstract)
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    real = create()
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(real)
    ]
    real.save_state(tmp_path / "run", wait=True, verbose=False)
    from cairn.state.checkpointing.restore import restore_item
    from cairn.storage.runs.run import Run

    run = Run.open(tmp_path / "run")
    place = jax.sharding.NamedSharding(make_mesh((2, 4, 1, 1)), PartitionSpec())
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract.opt_state,
    )
    restored = restore_item(run.step_uri(run.latest()), "optimizer", target)
    for ours, theirs in zip(
        jax.tree.leaves(restored), jax.tree.leaves(real.opt_state), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_an_abstract_state_says_where_it_will_be():
    abstract = jax.eval_shape(lambda: DecoderForCausalLM(TINY, rngs=nnx.Rngs(0)).to_state())
    report = abstract.explain_sharding(mesh=make_mesh((1, 8, 1, 1)))
    assert report.nbytes == abstract.size
    assert report.bytes_per_device < report.nbytes / 7


def test_grad_through_a_state_is_grad_of_its_parameters():
    state = my_model().to_state(optax.sgd(0.5))

    def loss_of(graphstate):
        return state.merge(graphstate)(my_batch(), labels=my_batch()).loss

    grads = jax.grad(loss_of)(state.graphstate)
    whole = jax.grad(lambda s: s.model(my_batch(), labels=my_batch()).loss, allow_int=True)(
        state.replace(graphother=jax.tree.map(lambda leaf: leaf, state.graphother))
    )
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(whole.graphstate), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_gradients_flow_through_an_optimizer_step_on_a_mesh():
    state = my_model().shard_model().to_state(optax.sgd(0.5))
    grads = jax.tree.map(jnp.ones_like, state.graphstate)

    def after(scale):
        scaled = jax.tree.map(lambda leaf: leaf * scale, grads)
        moved = state.apply_gradients(grads=scaled)
        return sum(leaf.sum() for leaf in jax.tree.leaves(moved.graphstate))

    count = sum(leaf.size for leaf in jax.tree.leaves(grads))
    for derivative in (jax.grad(after), jax.jit(jax.grad(after))):
        np.testing.assert_allclose(derivative(1.0), -0.5 * count, rtol=1e-5)


def test_a_step_may_be_scanned_and_vmapped():
    state, ids = my_model().shard_model().to_state(optax.sgd(1e-2)), my_batch()
    scanned, losses = jax.jit(lambda s: jax.lax.scan(lambda c, _: train_step(c, ids), s, length=3))(
        state
    )
    assert int(scanned.step) == 3
    assert losses[2] < losses[0]
    single = my_model().to_state(optax.sgd(1e-2))
    rates = jnp.asarray([0.0, 1.0])

    def moved(rate):
        grads = jax.tree.map(lambda leaf: jnp.ones_like(leaf) * rate, single.graphstate)
        return single.apply_gradients(grads=grads).graphstate["layers"][0]["bias"].get_value()

    both = jax.vmap(moved)(rates)
    np.testing.assert_allclose(both[0] - both[1], jnp.full((64,), 1e-2), rtol=1e-4)


def test_replace_drops_the_merged_model_and_keeps_placement():
    state = my_model().shard_model().to_state(optax.sgd(1e-2))
    model = state.model
    assert state.replace(step=state.step).model is not model
    doubled = state.replace(graphstate=jax.tree.map(lambda leaf: leaf * 2, state.graphstate))
    np.testing.assert_array_equal(
        doubled.model.layers[0].kernel, model.layers[0].kernel.get_value() * 2
    )
    assert state.model is model
    assert doubled.placement is None
    everywhere = jax.sharding.NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec())
    moved = state.replace(graphstate=jax.device_put(state.graphstate, everywhere))
    assert moved.replace(graphother=jax.device_put(state.graphother, everywhere)).placement


def test_other_variables_that_a_step_replaces_stay_where_they_are():
    model = my_model()
    model.seen = nnx.BatchStat(jnp.zeros((64, 8)))
    state, ids = model.shard_model().to_state(optax.sgd(1e-2)), my_batch()
    place = state.graphother["seen"].get_value().sharding

    @jax.jit
    def step(state, ids):
        model = state.merge(state.graphstate)
        model(ids)
        model.seen.set_value(model.seen.get_value() + model.layers[0].kernel[:, :8])
        return state.replace(graphother=nnx.split(model, nnx.Param, ...)[2])

    with compilations() as compiled:
        for _ in range(3):
            state = step(state, ids)
    assert len(compiled) == 1
    assert state.graphother["seen"].get_value().sharding == place


def test_parts_that_do_not_fit_each_other_are_found_by_merging_not_by_replacing():
    state = my_model().shard_model().to_state()
    torn = state.replace(graphother=nnx.State({}))
    with pytest.raises(ValueError, match="leaves"):
        torn.model  # noqa: B018


@pytest.mark.parametrize("step", [float("nan"), 1.5, 2.0, "3", True, np.zeros(2, np.int32)])
def test_a_step_that_is_no_whole_number_is_refused(step):
    with pytest.raises(ArgumentError, match="step: expected a whole number of steps"):
        EasyDeLState.create(model=my_model(), step=step)


def test_gradients_of_nan_can_be_skipped_with_optax_own_guard():
    state = my_model().shard_model().to_state(optax.apply_if_finite(optax.adam(1e-2), 3))
    bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.graphstate)
    after = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, bad)
    assert int(after.step) == 1
    assert int(after.opt_state.notfinite_count) == 1
    for one, other in zip(
        jax.tree.leaves(after.graphstate), jax.tree.leaves(state.graphstate), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_wrong_gradients_are_found_while_tracing_and_leave_the_state_as_it_was():
    state = my_model().shard_model().to_state(optax.sgd(1e-2))
    before = [np.array(leaf) for leaf in jax.tree.leaves(state.graphstate)]
    with pytest.raises(ValueError, match=r"layers/1/kernel: missing"):
        jax.jit(lambda s: s.apply_gradients(grads={"layers": {}}))(state)
    for leaf, was in zip(jax.tree.leaves(state.graphstate), before, strict=True):
        np.testing.assert_array_equal(leaf, was)


@pytest.mark.parametrize("adapted", [False, True], ids=["all", "adapters of 8bit weights"])
def test_a_state_on_one_device_compiles_its_step_once(adapted):
    """Its step, random keys and new adapters are bound to the device that its weights are on."""
    device = jax.devices()[3]
    model = my_model()
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), device))
    if adapted:
        model.quantize("8bit").apply_lora_to_layers(2)
    state = model.to_state(optax.adamw(1e-2))
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {device}
    ids = jax.device_put(my_batch(), device)
    step = fresh_step()
    with compilations() as count:
        for _ in range(3):
            state, _ = step(state, ids)
    assert len(count) == 1


@pytest.mark.parametrize("made", ["create", "replace"])
def test_an_optimizer_state_or_a_step_from_elsewhere_compiles_nothing_again(made):
    model, tx = my_model().shard_model(), optax.adam(1e-2)
    if made == "create":
        opt_state = tx.init(nnx.state(model, nnx.Param))
        state = EasyDeLState.create(model=model, tx=tx, opt_state=opt_state)
    else:
        state = model.to_state(tx).replace(step=3)
    step, ids = fresh_step(), my_batch()
    with compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, ids)
    assert len(compiled) == 1
    assert state.step.weak_type is False
