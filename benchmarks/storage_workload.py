"""The state that the storage benchmark saves and restores: a decoder in f32 with Adam's moments.

Six layers of twelve parameters, as real decoders have them: kernels cut in eight along their first
axis ("fsdp"), norms and biases replicated. With both moments that is 216 leaves and a counter. The
width follows from the size asked for, the number of leaves does not change with it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

DEVICES = 8
LAYERS = 6
LORA_RANK = 16
MANY_LEAVES = 50_000
KERNELS = {
    **{f"{name}_kernel": (1, 1) for name in ("query", "key", "value", "out")},
    **{f"{name}_kernel": (1, 3) for name in ("gate", "up")},
    "down_kernel": (3, 1),
}
"""Rows and columns of each kernel, in hidden sizes."""
VECTORS = ("query_bias", "key_bias", "value_bias", "attention_norm", "mlp_norm")

_WIDTH_SQUARES = sum(rows * columns for rows, columns in KERNELS.values())  # of a layer
_POOL_ELEMENTS = 1 << 24

Tree = Any  # nested dicts of leaves
Shape = tuple[int, ...]


def parameter_shapes(megabytes: float, layers: int) -> dict[str, dict[str, Shape]]:
    """Layer -> parameter -> shape, so that parameters and two moments take `megabytes` (10^6)."""
    squares = layers * _WIDTH_SQUARES
    width = max(DEVICES, DEVICES * round(math.sqrt(megabytes * 1e6 / 12 / squares) / 8))
    layer: dict[str, Shape] = {
        name: (rows * width, columns * width) for name, (rows, columns) in KERNELS.items()
    }
    layer |= dict.fromkeys(VECTORS, (width,))
    return {f"layer_{number}": dict(layer) for number in range(layers)}


def state_shapes(megabytes: float, layers: int = LAYERS) -> Tree:
    """The shapes of the whole state, by item."""
    model = parameter_shapes(megabytes, layers)
    return {"model": model, "optimizer": {"mu": model, "nu": model, "count": ()}}


def lora_shapes(megabytes: float, layers: int = LAYERS) -> Tree:
    """The shapes of a state whose base is frozen: a pair of adapters beside every kernel."""
    base = parameter_shapes(megabytes, layers)
    adapters: Tree = {
        layer: {
            f"{name}_lora_{side}": shape
            for name, (rows, columns) in ((k, v) for k, v in leaves.items() if len(v) == 2)
            for side, shape in (("a", (rows, LORA_RANK)), ("b", (LORA_RANK, columns)))
        }
        for layer, leaves in base.items()
    }
    return {
        "model": {"base": base, "lora": adapters},
        "optimizer": {"mu": adapters, "nu": adapters, "count": ()},
    }


def small_leaves(megabytes: float, layers: int) -> list[dict[str, Any]]:
    """Many small leaves on one device, by layer: 50,000 in the benchmark of the usual size."""
    import jax

    numbers = np.random.default_rng(0)
    count = min(MANY_LEAVES, math.ceil(megabytes * MANY_LEAVES / 2000))
    made = [
        jax.device_put(numbers.standard_normal(8 + 8 * (number % 8), dtype=np.float32))
        for number in range(count)
    ]
    return [
        {f"leaf_{number}": leaf for number, leaf in enumerate(made[first::layers])}
        for first in range(layers)
    ]


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The tree with `function(path, leaf)` in place of each leaf; paths are joined by dots."""
    if isinstance(tree, Mapping):
        return {
            name: map_leaves(function, below, f"{path}.{name}" if path else name)
            for name, below in tree.items()
        }
    return function(path, tree)


def flat(tree: Any) -> dict[str, Any]:
    """The leaves by path."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.__setitem__, tree)
    return leaves


def leaf_dtype(shape: Shape) -> np.dtype[Any]:
    """Counters are int32, all else is float32."""
    return np.dtype(np.float32 if shape else np.int32)


def nbytes(shapes: Any) -> int:
    """Bytes of a tree of shapes."""
    return sum(math.prod(shape) * leaf_dtype(shape).itemsize for shape in flat(shapes).values())


def host_leaves(shapes: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Path and value of every leaf: normal numbers that compress as weights do.

    They are cut from one pool at another place and scaled anew for each leaf: no two are alike.
    """
    numbers = np.random.default_rng(0)
    elements = max(math.prod(shape) for shape in flat(shapes).values())
    pool = numbers.standard_normal(min(elements + 4096, _POOL_ELEMENTS), dtype=np.float32)
    for path, shape in flat(shapes).items():
        if not shape:
            yield path, np.array(1, np.int32)
            continue
        start = int(numbers.integers(4096))
        values = np.resize(pool[start:], shape)
        values *= np.float32(numbers.uniform(0.01, 0.1))
        yield path, values


def host_state(shapes: Any) -> Tree:
    """The state in host memory."""
    leaves = dict(host_leaves(shapes))
    return map_leaves(lambda path, _: leaves[path], shapes)


def sharding_of(shape: Shape, devices: int = DEVICES) -> Any:
    """Where a leaf of this shape lives: kernels cut along the first axis, all else everywhere."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if jax.device_count() < devices:
        raise RuntimeError(f"expected {devices} devices, found {jax.device_count()}")
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    cut = len(shape) == 2 and shape[0] % DEVICES == 0
    return NamedSharding(mesh, PartitionSpec("fsdp") if cut else PartitionSpec())


def device_state(shapes: Any) -> Tree:
    """The state on the devices, in buffers of their own that a step may donate."""
    import jax

    scale = jax.jit(lambda values, by: values * by)
    leaves = {}
    for path, values in host_leaves(shapes):
        placed = jax.device_put(values, sharding_of(values.shape))
        # Multiplied, for a placed NumPy array may share its memory, which can't be donated.
        leaves[path] = jax.block_until_ready(scale(placed, np.asarray(1, values.dtype)))
    return map_leaves(lambda path, _: leaves[path], shapes)


def abstract_state(shapes: Any, devices: int = DEVICES) -> Tree:
    """What to restore: shape, dtype and place of every leaf."""
    import jax

    return map_leaves(
        lambda _, shape: jax.ShapeDtypeStruct(
            shape, leaf_dtype(shape), sharding=sharding_of(shape, devices)
        ),
        shapes,
    )


def compiled_step() -> Callable[[Any], Any]:
    """A training step on {"params", "frozen", "mu", "nu", "count"} that donates it: Adam's update.

    What is frozen passes through, as the base of a state with adapters does.
    """
    import jax
    import jax.numpy as jnp

    def update(state: Any) -> Any:
        grads = jax.tree.map(lambda value: value * 1e-3, state["params"])
        mu = jax.tree.map(lambda old, grad: 0.9 * old + 0.1 * grad, state["mu"], grads)
        nu = jax.tree.map(lambda old, grad: 0.999 * old + 1e-3 * grad**2, state["nu"], grads)
        params = jax.tree.map(
            lambda value, m, n: value - 1e-4 * m / (jnp.sqrt(jnp.abs(n)) + 1e-3),
            state["params"],
            mu,
            nu,
        )
        return {**state, "params": params, "mu": mu, "nu": nu, "count": state["count"] + 1}

    return jax.jit(update, donate_argnums=0)


def train(step: Callable[[Any], Any], state: Tree, parameters: str | None = None) -> Tree:
    """The state after one step, once it is there.

    Args:
        step: from `compiled_step`.
        state: items "model" and "optimizer".
        parameters: which part of the model is trained; None trains all of it.
    """
    import jax

    model, optimizer = state["model"], state["optimizer"]
    trained = model if parameters is None else model[parameters]
    frozen = {} if parameters is None else {k: v for k, v in model.items() if k != parameters}
    after = jax.block_until_ready(step({"params": trained, "frozen": frozen, **optimizer}))
    params, frozen = after.pop("params"), after.pop("frozen")
    return {
        "model": params if parameters is None else {**frozen, parameters: params},
        "optimizer": after,
    }


def fingerprint(state: Tree) -> list[int]:
    """CRC-32 of a kernel, a replicated vector and the counter: is what came back what was saved."""
    layer = max(state["model"])
    leaves = (
        state["model"][layer]["down_kernel"],
        state["optimizer"]["nu"][layer]["mlp_norm"],
        state["optimizer"]["count"],
    )
    return [zlib.crc32(np.asarray(leaf).tobytes()) for leaf in leaves]
