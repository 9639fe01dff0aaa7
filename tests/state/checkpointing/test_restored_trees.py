"""Any tree comes back as it was: containers, Python types, dtypes, bits, and where its leaves lie.

`CAIRN_FAULTS=long` draws hundreds.
"""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import struct
from flax.core import FrozenDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn import Checkpointer, load
from tests.faults.report import is_long, trials
from tests.storage.states import abstract, assert_alike, mesh, put, raws


class Pair(NamedTuple):
    left: Any
    right: Any


@struct.dataclass
class Block:
    weight: Any
    rest: Any
    name: str = struct.field(pytree_node=False, default="block")


@jax.tree_util.register_dataclass
@dataclass
class Plain:
    one: Any
    other: Any


DTYPES = [
    *("bool", "int4", "uint4", "int8", "uint8", "int32", "uint32", "complex64"),
    *("bfloat16", "float16", "float32", "float8_e4m3fn"),
]
SHAPES = st.sampled_from([(), (3,), (2, 4), (8, 8), (0,), (8, 0, 2), (1, 8)])
SPECS = [None, (), ("dp",), ("fsdp",), (("dp", "fsdp"),), ("dp", "fsdp"), (None, "fsdp")]


def values(dtype, shape, seed):
    """Any bits that the dtype has: of floats also NaN with its payload, infinities and -0."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(seed)
    if dtype.kind == "b" or dtype.name in ("int4", "uint4"):
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def fits(shape, spec):
    sizes = {"dp": 2, "fsdp": 4, None: 1, ("dp", "fsdp"): 8}
    pairs = zip(shape, spec, strict=False)
    return len(spec) <= len(shape) and not any(size % sizes[axis] for size, axis in pairs)


@st.composite
def arrays(draw):
    """On a mesh, bound to one device or to none."""
    shape = draw(SHAPES)
    value = values(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 99)))
    spec = draw(st.sampled_from([spec for spec in SPECS if spec is None or fits(shape, spec)]))
    if spec is not None:
        return put(value, *spec)
    array = jnp.asarray(value)
    return jax.device_put(array, jax.devices()[3]) if draw(st.booleans()) else array


def keys(seed, impl, count):
    key = jax.random.key(seed, impl=impl)
    return jax.random.split(key, count) if count else key


LEAVES = st.one_of(
    arrays(),
    st.builds(keys, st.integers(0, 9), st.sampled_from(["threefry2x32", "rbg"]), st.integers(0, 3)),
    st.builds(values, st.sampled_from([*DTYPES, "int64", "float64", "uint64"]), SHAPES, st.just(1)),
    st.builds(jax.random.PRNGKey, st.integers(0, 9)),
    st.sampled_from([np.float64(0.1), np.int64(-3), np.bool_(True), np.float16(2)]),
    st.builds(jnp.asarray, st.one_of(st.booleans(), st.integers(0, 9), st.floats(width=32))),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.just(1 - 2j),
)
NAMES = st.sampled_from(["a", "b", "layers", "0", "kernel/x", "größe"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3),
        st.dictionaries(st.sampled_from([1, 2, 10]), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, st.none(), inner),
        st.builds(Pair, inner, inner),
        st.builds(Block, inner, inner),
        st.builds(Plain, inner, st.just(())),
        st.dictionaries(NAMES, inner, max_size=2).map(OrderedDict),
        st.dictionaries(NAMES, inner, max_size=2).map(lambda one: defaultdict(list, one)),
        st.dictionaries(NAMES, inner, max_size=2).map(FrozenDict),
        inner.map(lambda one: (optax.EmptyState(), optax.MaskedNode(), optax.MaskedState(one))),
    ),
    max_leaves=8,
)


def elsewhere(tree):
    """What to restore a tree into on another mesh: of four devices, axes the other way around."""
    return abstract(tree, on=mesh(4, dp=2))


@settings(
    deadline=None,
    max_examples=trials(short=10, long=2000),
    database=None,
    derandomize=not is_long(),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.dictionaries(st.sampled_from(["model", "optimizer", "loop"]), TREES, min_size=1))
def test_any_tree_comes_back_as_it_was_and_on_another_mesh(tmp_path_factory, tree):
    tree = {"items": tree}
    run = tmp_path_factory.mktemp("run") / "r"
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, tree).wait()
        assert_alike(checkpointer.restore(tree), tree)
    assert raws(load(run, abstract(tree))) == raws(tree)
    moved = load(run, elsewhere(tree))
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    assert raws(moved) == raws(tree)
