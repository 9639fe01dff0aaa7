"""Fields that a subclass adds to EasyDeLState: saved, restored, placed, refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    EasyDeLState,
    TrainStep,
    TreeMismatchError,
    make_mesh,
    make_optimizer,
)
from tests.state.compilations import compilations
from tests.state.my_model import batch, my_model, train_step

TX, TX_INIT = make_optimizer("adamw", learning_rate=1e-2)


class EmaState(EasyDeLState):
    ema: Any = None
    rng: Any = None
    tag: str = struct.field(pytree_node=False, default="none")


class FullState(EmaState):
    seen: int = 0
    needed: Any


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def new_state(state_class=EmaState, **fields):
    model = my_model().shard_model()
    return state_class.create(model=model, tx=TX, tx_init=TX_INIT, init_opt_state=True, **fields)


def saved(state, folder, **arguments):
    state.save_state(folder, wait=True, verbose=False, **arguments)
    return folder


def load(folder, state_class=EmaState, **arguments):
    return state_class.load_state(folder, verbose=False, **arguments)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(a, jax.Array):
            assert a.weak_type == b.weak_type
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


FORMS = {
    "nnx_state": lambda state: copied(state.graphstate),
    "other_variables": lambda state: copied(state.graphother),
    "optimizer_state_tree": lambda state: copied(state.opt_state),
    "plain_dict": lambda state: copied(state.params),
    "array": lambda state: jnp.arange(3.0),
    "bfloat16": lambda state: jnp.arange(3.0).astype(jnp.bfloat16),
    "numpy": lambda state: np.arange(3, dtype=np.int16),
    "typed_key": lambda state: jax.random.key(3),
    "other_typed_keys": lambda state: {"rngs": [jax.random.key(3, impl="rbg"), None]},
    "several_keys": lambda state: jax.random.split(jax.random.key(3), 4),
    "numbers": lambda state: {"n": 3, "x": 2.5, "on": True, "z": 1 + 2j},
    "weak": lambda state: jnp.asarray(3),
    "nested": lambda state: ({"ema": copied(state.graphstate), "n": 1}, [None, (jnp.ones(2),)], []),
    "none": lambda state: None,
}


EveryForm = type(
    "EveryForm",
    (EmaState,),
    {"__annotations__": dict.fromkeys(FORMS, Any), "__module__": __name__, **dict.fromkeys(FORMS)},
)
"""A state with a field of each form."""


def test_an_added_field_comes_back_as_it_was(tmp_path):
    state = new_state(EveryForm)
    fields = {form: made(state) for form, made in FORMS.items()}
    state = state.replace(**fields, rng=jax.random.key(1))
    loaded = load(saved(state, tmp_path / "run"), EveryForm)
    assert type(loaded) is EveryForm
    for form, field in fields.items():
        assert_same(getattr(loaded, form), field)
    assert_same(loaded.rng, state.rng)
    assert loaded.tag == "none"


def test_containers_that_json_cannot_name_need_a_target(tmp_path):
    state = new_state()
    state = state.replace(ema={"average": optax.ema(0.9).init(state.graphstate)})
    folder = saved(state, tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"fields=.*ema: .*EmaState.*fields='skip'"):
        load(folder)

    def targets(abstract):
        made = jax.eval_shape(optax.ema(0.9).init, abstract.graphstate)
        return {"ema": {"average": made}}

    loaded = load(folder, fields=targets, auto_shard_model=True, sharding_axis_dims=(1, 4, 2, 1))
    assert_same(loaded.ema, state.ema)
    kernels = loaded.ema["average"].ema["layers"][0]["kernel"], loaded.graphstate["layers"][0]
    assert kernels[0][...].sharding == kernels[1]["kernel"][...].sharding
    again = load(folder, fields={"ema": state.ema})
    assert_same(again.ema, state.ema)
    assert load(folder, fields="skip").ema is None
    with pytest.raises(ArgumentError, match="found emma"):
        load(folder, fields={"emma": None})
    with pytest.raises(ArgumentError, match="'skip'"):
        load(folder, fields="drop")


def test_a_field_goes_where_its_parameters_go(tmp_path):
    state = new_state()
    state = state.replace(ema=copied(state.graphstate), rng=jax.random.key(0))
    folder = saved(state, tmp_path / "run")
    for arguments in (
        {"auto_shard_model": True, "sharding_axis_dims": (1, 2, 4, 1)},
        {"mesh": make_mesh((1, 8, 1, 1))},
        {},
        {"auto_shard_model": True, "shard_fns": {"embed_tokens/embedding": replicated}},
    ):
        loaded = load(folder, **arguments)
        places = jax.tree.map(lambda leaf: leaf.sharding, (loaded.ema, loaded.graphstate))
        assert places[0] == places[1]
        assert loaded.rng.sharding == loaded.step.sharding
        assert_same(loaded.ema, state.ema)
        stepped, _ = jax.jit(train_step)(loaded, batch())
        assert_same(stepped.ema, state.ema)


def replicated(leaf):
    return jax.device_put(leaf, NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec()))


def test_resharding_and_gathering_take_the_fields_along():
    state = new_state()
    state = state.replace(ema=copied(state.graphstate), rng=jax.random.key(0))
    moved = state.shard_state(mesh=make_mesh((1, 2, 4, 1)))
    places = jax.tree.map(lambda leaf: leaf.sharding, (moved.ema, moved.graphstate))
    assert places[0] == places[1]
    gathered = state.gather_state()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(gathered.ema))


@pytest.mark.parametrize("replicate", [False, True])
def test_a_step_that_changes_a_field_compiles_once_and_goes_on_after_a_load(replicate, tmp_path):
    state = new_state(rng=jax.random.key(0))
    ema = copied(state.graphstate)
    if replicate:
        whole = NamedSharding(state.model.mesh, PartitionSpec())
        ema = jax.device_put(ema, whole)
    state = state.replace(ema=ema)
    traces = []

    def step(state, ids):
        traces.append(1)
        state, loss = train_step(state, ids)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state.ema, state.graphstate)
        return state.replace(ema=ema, rng=jax.random.split(state.rng)[0]), loss

    compiled = jax.jit(step, donate_argnums=0)
    places = jax.tree.map(lambda leaf: leaf.sharding, state.ema)
    ids = batch()
    with compilations() as programs:
        for _ in range(3):
            state, _ = compiled(state, ids)
    assert len(traces) == len(programs) == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state.ema) == places
    folder = saved(state, tmp_path / "run")
    expected, loss = compiled(state, ids)
    mesh = expected.model.mesh
    loaded = load(folder, mesh=mesh, tx=TX)
    resumed, again = jax.jit(step)(loaded, ids)
    assert_same(resumed.ema, expected.ema)
    assert_same(resumed.rng, expected.rng)
    assert float(loss) == float(again)


def test_train_step_gives_fields_new_values():
    state = new_state()
    state = state.replace(ema=copied(state.graphstate))

    def loss_of(state, params, ids):
        ema = jax.tree.map(lambda a, b: (a + b) / 2, state.ema, state.graphstate)
        return state.merge(params)(input_ids=ids, labels=ids).loss, {"ema": ema}

    before = copied(state.ema)
    after, metrics = TrainStep(loss_of)(state, batch())
    assert "ema" not in metrics
    assert_same(after.ema, before)  # the mean of two equal trees


def test_saved_none_and_loaded_set_or_the_reverse_list_the_leaves(tmp_path):
    state = new_state()
    empty = saved(state, tmp_path / "empty")
    with pytest.raises(TreeMismatchError, match=r"fields/ema/x: missing from the checkpoint"):
        load(empty, fields={"ema": {"x": jnp.ones(2)}})
    full = saved(state.replace(ema={"x": jnp.ones(2)}), tmp_path / "full")
    with pytest.raises(TreeMismatchError, match=r"fields/ema/x: unexpected in the checkpoint"):
        load(full, fields={"ema": None})
    with pytest.raises(TreeMismatchError, match=r"fields/ema/x: expected float32\[3\]"):
        load(full, fields={"ema": {"x": jnp.ones(3)}})
    with pytest.raises(TreeMismatchError, match=r"fields/ema/x: expected bfloat16\[2\]"):
        load(full, fields={"ema": {"x": jnp.ones(2, jnp.bfloat16)}})
    assert load(empty).ema is None


def test_a_class_with_other_fields_is_refused_by_their_names(tmp_path):
    state = new_state()
    full = saved(state.replace(ema={"x": jnp.ones(2)}), tmp_path / "full")
    with pytest.raises(TreeMismatchError, match=r"fields/ema: stored, and EasyDeLState has no"):
        load(full, EasyDeLState)
    assert int(load(full, EasyDeLState, fields="skip").step) == 0
    with pytest.raises(
        TreeMismatchError, match=r"(?s)fields/needed: missing.*fields/seen: missing"
    ):
        load(full, FullState)


def test_states_of_earlier_releases_load_where_a_field_is_none_by_default(tmp_path):
    plain = EasyDeLState.create(model=my_model().shard_model())
    folder = saved(plain, tmp_path / "run")
    assert load(folder).ema is None
    with pytest.raises(TreeMismatchError, match="fields/seen: missing"):
        load(folder, FullState)


def test_fields_without_default_are_required_by_create_and_saved(tmp_path):
    with pytest.raises(ArgumentError, match="needed"):
        new_state(FullState)
    with pytest.raises(ArgumentError, match="unheard"):
        new_state(FullState, needed=1, unheard=2)
    state = new_state(FullState, needed={"a": jnp.ones(2)}, seen=7)
    loaded = load(saved(state, tmp_path / "run"), FullState)
    assert (loaded.seen, loaded.ema) == (7, None)
    assert_same(loaded.needed, state.needed)


class TaggedState(EasyDeLState):
    needed: Any
    kind: str = struct.field(pytree_node=False)
    tag: str = struct.field(pytree_node=False, default="none")


def test_static_fields_are_given_again_at_a_load(tmp_path):
    state = new_state(TaggedState, needed=jnp.ones(2), kind="a", tag="b")
    folder = saved(state, tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"TaggedState\.load_state.*none for kind"):
        load(folder, TaggedState)
    loaded = load(folder, TaggedState, fields={"kind": "a", "tag": "c"})
    assert (loaded.kind, loaded.tag) == ("a", "c")
    assert_same(loaded.needed, state.needed)
    with pytest.raises(ArgumentError, match="none for needed, kind"):
        load(folder, TaggedState, fields="skip")


def test_an_optimizer_left_out_names_the_field_that_is_formed_like_it(tmp_path):
    state = new_state()
    folder = saved(state.replace(ema=copied(state.opt_state)), tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"fields: ema.*leaves opt_state out"):
        load(folder, optimizer="skip")


def test_load_or_create_restores_the_fields(tmp_path):
    def create():
        state = new_state(rng=jax.random.key(5))
        return state.replace(ema=copied(state.graphstate))

    first = EmaState.load_or_create(tmp_path / "run", create)
    saved(first, tmp_path / "run")
    again = EmaState.load_or_create(tmp_path / "run", create, auto_shard_model=True, verbose=False)
    assert_same(again.ema, first.ema)
    assert_same(again.rng, first.rng)


def test_parameters_cast_at_load_or_save_leave_the_fields_alone(tmp_path):
    state = new_state()
    state = state.replace(ema=copied(state.graphstate))
    folder = saved(state, tmp_path / "run", float_dtype=jnp.bfloat16)
    loaded = load(folder, param_dtype=jnp.float16)
    assert_same(loaded.ema, state.ema)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.graphstate)} == {"float16"}
    assert isinstance(loaded.ema, nnx.State)
