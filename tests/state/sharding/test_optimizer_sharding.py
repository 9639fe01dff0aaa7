import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import optimizer_sharding as optimizer_bytes
from cairn import EasyDeLState, ShardingError, make_mesh
from cairn.state.paths import named_leaves
from cairn.state.sharding.optimizers import optimizer_shardings
from cairn.state.sharding.report import ShardingReport
from tests.state.seams import explain_optimizer, init_optimizer, init_program, optax_numerics

P = PartitionSpec
SPECS = {
    "wide": P(None, "fsdp"),
    "square": P("fsdp", "tp"),
    "bias": P("fsdp"),
    "stack": P(None, "fsdp", "tp"),
}
SHAPES = {"wide": (32, 64), "square": (64, 64), "bias": (64,), "stack": (4, 32, 48)}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((1, 4, 2, 1))


@pytest.fixture(scope="module")
def params(mesh):
    """Abstract parameters: an NNX State two levels deep, each leaf with its placement."""

    def leaf(name):
        place = NamedSharding(mesh, SPECS[name])
        return nnx.Param(jax.ShapeDtypeStruct(SHAPES[name], jnp.float32, sharding=place))

    layer = {name: leaf(name) for name in ("wide", "square", "bias")}
    return nnx.State({"layers": {0: layer, 1: dict(layer)}, "stack": leaf("stack")})


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(1e-3, momentum=0.9),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "masked": optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
    ),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_follow_the_parameter_they_mirror_and_the_rest_is_replicated(name, params, mesh):
    leaves = named_leaves(init_optimizer(OPTIMIZERS[name], params))
    mirrored = 0
    for named in leaves:
        assert named.leaf.sharding.mesh == mesh
        last = named.path.rsplit("/", 1)[-1]
        if named.leaf.shape == SHAPES.get(last):
            assert named.leaf.sharding.spec == SPECS[last], named.path
            mirrored += 1
        else:
            assert named.leaf.shape == ()
            assert named.leaf.sharding.spec == P(), named.path
    assert mirrored >= 7


def test_factored_leaves_keep_the_axes_that_are_left(params):
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    by_kind = {}
    for named in named_leaves(init_optimizer(tx, params)):
        keys = named.path.split("/")
        for kind in {"v_row", "v_col", "v"} & set(keys):
            by_kind[kind, keys[-1]] = (named.leaf.shape, named.leaf.sharding.spec)
    # The two longest dimensions are factored: rows lose the longest, columns the one before it.
    assert by_kind["v_row", "wide"] == ((32,), P())
    assert by_kind["v_col", "wide"] == ((64,), P("fsdp"))
    assert by_kind["v_row", "square"] == ((64,), P("fsdp"))
    assert by_kind["v_col", "square"] == ((64,), P("tp"))
    assert by_kind["v_row", "stack"] == ((4, 32), P(None, "fsdp"))
    assert by_kind["v_col", "stack"] == ((4, 48), P(None, "tp"))
    assert by_kind["v", "bias"] == ((64,), P("fsdp"))
    assert by_kind["v", "square"] == ((1,), P())


def test_real_state_is_made_in_place_and_equal_to_optax_own(params):
    arrays = jax.tree.map(
        lambda leaf: jax.device_put(jnp.full(leaf.shape, 0.5, leaf.dtype), leaf.sharding), params
    )
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=16, momentum=0.9)
    made = init_optimizer(tx, arrays)
    expected = init_optimizer(tx, params)
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for ours, planned in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert ours.sharding == planned.sharding
    with jax.numpy_dtype_promotion("standard"):
        plain = tx.init(arrays)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_parameters_on_one_device_keep_the_optimizer_there():
    params = {"w": jax.device_put(jnp.ones((4, 4)), jax.devices()[3])}
    made = init_optimizer(optax.adam(1e-3), params)
    assert {leaf.device for leaf in jax.tree.leaves(made)} == {jax.devices()[3]}


@pytest.fixture(scope="module")
def realistic():
    return optimizer_bytes.sharded_state()


@pytest.mark.parametrize("name", optimizer_bytes.optimizers())
def test_devices_hold_what_is_ideal_within_five_percent(name, realistic):
    result = optimizer_bytes.measure(name, realistic)
    assert result["large_replicated_leaves"] == []
    assert result["held_bytes_per_device"] <= 1.05 * result["ideal_bytes_per_device"]
    # Adafactor's rows and columns have one of the parameter's two mesh axes each, moments both.
    parts = 2 if name == "adafactor" else 7
    assert result["held_bytes_per_device"] * parts < optimizer_bytes_in_all(name, realistic)


def optimizer_bytes_in_all(name, state):
    tx = optimizer_bytes.optimizers()[name]
    with optax_numerics():
        shapes = jax.eval_shape(tx.init, state.graphstate)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", ["adamw", "adafactor + momentum", "MultiSteps"])
def test_the_program_that_makes_the_state_needs_no_more_than_it_leaves(name, realistic):
    tx = optimizer_bytes.optimizers()[name]
    params = realistic.graphstate
    shardings = optimizer_shardings(jax.eval_shape(tx.init, params), params)
    memory = init_program(tx, shardings).lower(params).compile().memory_analysis()
    per_device = memory.temp_size_in_bytes + memory.output_size_in_bytes
    ideal = optimizer_bytes.measure(name, realistic)["ideal_bytes_per_device"]
    # XLA rounds each buffer up, and keeps a table of pointers for the tuple that it returns.
    slack = 128 * len(jax.tree.leaves(shardings))
    assert per_device <= 1.05 * ideal + slack
    assert per_device < optimizer_bytes_in_all(name, realistic) / 4


def watched(tx, seen):
    """The optimizer, noting whether `init` is ever given real arrays."""

    def init(params):
        seen.extend(type(leaf) for leaf in jax.tree.leaves(params))
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


def live():
    gc.collect()
    return {id(array): array for array in jax.live_arrays()}


@pytest.mark.parametrize("how", ["init_tx", "init_opt_state", "create"])
def test_no_device_ever_holds_an_unsharded_optimizer_state(how, realistic):
    seen = []
    tx = watched(optax.adamw(1e-3), seen)
    before = live()
    if how == "init_tx":
        state = realistic.init_tx(tx)
    elif how == "init_opt_state":
        state = realistic.replace(tx=tx).init_opt_state()
    else:
        state = EasyDeLState.create(
            graphdef=realistic.graphdef,
            graphstate=realistic.graphstate,
            graphother=realistic.graphother,
            tx=tx,
            init_opt_state=True,
        )
    # Only shapes and tracers: outside of the sharded program nothing is computed.
    assert seen
    assert all(issubclass(kind, jax.ShapeDtypeStruct | jax.core.Tracer) for kind in seen)
    made = [array for key, array in live().items() if key not in before]
    assert len(made) >= len(jax.tree.leaves(state.opt_state))
    per_device = dict.fromkeys(jax.devices(), 0)
    for array in made:
        part = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
        for device in array.sharding.device_set:
            per_device[device] += part
    in_all = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert max(per_device.values()) <= 1.05 * in_all / 8


def test_rules_for_the_optimizer_alone_are_taken_and_kept(realistic):
    rules = (("mlp/.*kernel", P(None, ("fsdp", "tp"))), (".*", P()))
    state = realistic.init_tx(optax.adamw(1e-3), rules)
    places = {n.path: n.leaf.sharding.spec for n in named_leaves(state.opt_state)}
    assert places["0/mu/model/layers/0/mlp/up_proj/kernel"] == P(None, ("fsdp", "tp"))
    assert places["0/mu/model/embed_tokens/embedding"] == P()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state.opt_state))
    assert state.placement is not None
    back = state.shard_optimizer_state()
    assert back.placement is None
    assert {n.path: n.leaf.sharding.spec for n in named_leaves(back.opt_state)}[
        "0/mu/model/embed_tokens/embedding"
    ] == P("tp", "fsdp")


SHAPES_OF_OTHERS = {
    # path of a leaf, its shape, where it goes
    "one for each of some steps": ("memory/square", (10, 64, 64), P(None, "fsdp", "tp")),
    "sums along a dimension": ("sums/square/0", (64, 1), P("fsdp")),
    "sums along the other": ("sums/square/1", (1, 64), P(None, "tp")),
    "a choice that makes a difference": ("means/square", (64,), P()),
    "nothing that is known, small": ("scales", (8, 8), P()),
    "nothing that is known, large": ("table", (4096, 8), P("fsdp")),
}


@pytest.mark.parametrize("name", SHAPES_OF_OTHERS)
def test_leaves_of_other_optimizers_keep_the_axes_that_are_clear(name, params):
    path, shape, wanted = SHAPES_OF_OTHERS[name]
    square = {"square": params["layers"][0]["square"]}
    tree = jax.ShapeDtypeStruct(shape, jnp.float32)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    (place,) = jax.tree.leaves(optimizer_shardings(tree, square))
    assert place.spec == wanted


def test_strict_mode_finds_a_large_leaf_that_is_whole(mesh):
    place = NamedSharding(mesh, P("fsdp"))
    params = {"w": jax.ShapeDtypeStruct((128, 129), jnp.float32, sharding=place)}
    opt_state = {"odd": {"w": jax.ShapeDtypeStruct((129, 129), jnp.float32)}}
    (leaf,) = explain_optimizer(opt_state, params, mesh)
    assert leaf.unmatched == "large, and whole on every device of dp=1, fsdp=4, tp=2, sp=1 " + (
        "(shape (129, 129))"
    )
    with pytest.raises(ShardingError, match="optimizer/odd/w: large"):
        ShardingReport(mesh, (leaf,)).raise_for_problems(strict=True)
