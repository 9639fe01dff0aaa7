"""Small sharded states for storage tests, and what it means that two are the same."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cairn.state.checkpointing import trees


def mesh(count: int = 8, dp: int = 2) -> Mesh:
    devices = np.array(jax.devices()[:count])
    dp = min(dp, count)
    return Mesh(devices.reshape(dp, count // dp), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def put(array: np.ndarray, *spec: Any, on: Mesh | None = None) -> jax.Array:
    return jax.device_put(array, NamedSharding(on or mesh(), PartitionSpec(*spec)))


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def state(seed: int = 0, rows: int = 64) -> dict[str, Any]:
    """A model and an Adam-like optimizer: sharded by rows, by columns, and replicated."""
    params = {
        "layers": {
            "0": {"kernel": put(floats(rows, 32, seed=seed), "fsdp", None)},
            "1": {"kernel": put(floats(32, rows, seed=seed + 1), None, "fsdp")},
        },
        "norm": {"scale": put(floats(32, seed=seed + 2))},
    }
    moments = jax.tree.map(lambda leaf: leaf * 2, params)
    return {"model": params, "optimizer": (moments, {"count": put(np.int32(seed))}, None)}


def abstract(tree: Any, on: Mesh | None = None) -> Any:
    """What to restore `tree` into; `on` another mesh if given."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding
        if on is not None and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(on, sharding.spec)
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(describe, tree)


def raw(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes: equal only if bit-equal."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def raws(tree: Any) -> dict[str, Any]:
    return {path: raw(leaf) for path, leaf in trees.flatten(tree).items()}


def assert_same(found: Any, expected: Any) -> None:
    """Equal containers, paths, dtypes, shapes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert raws(found) == raws(expected)


def traits(leaf: Any) -> tuple[Any, ...]:
    """All that can be told of a leaf: its type, its bits, and what JAX knows of it."""
    if not isinstance(leaf, jax.Array):
        return (type(leaf), raw(leaf))
    weak = getattr(leaf, "weak_type", False)  # typed keys know nothing of it
    return (jax.Array, raw(leaf), str(leaf.dtype), weak, leaf.committed, leaf.sharding)


def assert_alike(found: Any, expected: Any) -> None:
    """Equal containers, and leaves that nothing tells apart."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    unlike = [
        f"{jax.tree_util.keystr(path)}: {traits(one)} instead of {traits(other)}"
        for (path, one), other in pairs
        if traits(one) != traits(other)
    ]
    assert not unlike, "\n".join(unlike)
