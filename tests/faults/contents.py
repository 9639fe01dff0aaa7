"""States that follow from a key: whoever knows the key knows every bit that must come back."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cairn import CheckpointReader, Run, StepInfo, StorageError
from cairn.state.checkpointing.restore import restore_item
from cairn.state.checkpointing.trees import flatten

KEY = "key"
"""Where a step's meta tells the key of its content."""


class Keyed:
    """An iterator whose position is a key."""

    def __init__(self, key: Sequence[int]) -> None:
        self.key = list(key)

    def get_state(self) -> list[int]:
        return self.key

    def set_state(self, state: list[int]) -> None:
        self.key = state


def contents(key: Sequence[int]) -> dict[str, Any]:
    """The items of the step with this key: sharded both ways, replicated, and a scalar."""
    draw = np.random.default_rng(list(key))
    halves = draw.standard_normal((32, 64), dtype=np.float32).astype(ml_dtypes.bfloat16)
    kernel = draw.standard_normal((64, 32), dtype=np.float32)
    return {
        "model": {
            "layers": {"0": {"kernel": kernel}, "1": {"kernel": halves}},
            "norm": {"scale": draw.standard_normal(32, dtype=np.float32)},
        },
        "optimizer": {
            "moments": {"kernel": -kernel},
            "count": np.asarray(draw.integers(1 << 30), np.int32),
            "mask": draw.integers(0, 256, (16, 5), dtype=np.uint8),
        },
    }


def placed(tree: Any) -> Any:
    """The tree on all devices: matrices cut along their longer axis, the rest on each of them."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))

    def place(leaf: np.ndarray) -> jax.Array:
        spec = [None] * leaf.ndim
        if leaf.ndim == 2:
            spec[int(np.argmax(leaf.shape))] = "fsdp"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, tree)


def key_of(run: Run, info: StepInfo) -> list[int]:
    """The key that a step says its content follows from; [] if it says none."""
    meta = CheckpointReader.open(run.step_uri(info), run.manifest(info)).meta()
    found = meta.get(KEY)
    return found if isinstance(found, list) else []


def position_of(run: Run, info: StepInfo) -> list[Any]:
    """What a step says of the position of its only iterator, by process."""
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    (name,) = reader.iterators
    return [json.loads(state) for state in reader.iterator_states(name)]


def damage(run: Run, info: StepInfo) -> list[str]:
    """What of a step does not load, or not with the bits that its key asks for; [] if all does."""
    name = f"step {info.step} of attempt {info.attempt}"
    try:
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        wrong = []
        for item, tree in contents(reader.meta()[KEY]).items():
            target = jax.tree.map(_abstract, placed(tree))
            restored = flatten(restore_item(run.step_uri(info), item, target))
            expected = flatten(tree)
            if set(reader.leaves(item)) != set(expected):
                wrong.append(f"{name}: leaves of {item}: {sorted(reader.leaves(item))}")
                continue
            for path, leaf in expected.items():
                for how, found in (
                    ("read", reader.read(item, path)),
                    ("restored", restored[path]),
                ):
                    if not _same(found, leaf):
                        wrong.append(f"{name}: {item}/{path} has other bits when {how}")
    except (StorageError, KeyError) as exc:
        return [f"{name}: {type(exc).__name__}: {exc}"]
    return wrong


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _same(found: Any, expected: np.ndarray) -> bool:
    array = np.asarray(found)
    same_form = (array.dtype, array.shape) == (expected.dtype, expected.shape)
    return same_form and array.tobytes() == expected.tobytes()
