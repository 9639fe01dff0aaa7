import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from state.optimizer_sharding import init_optimizer
from state.paths import named_leaves
from state.sharding import make_mesh

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
