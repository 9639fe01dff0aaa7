"""Checks of `load_state`'s arguments about placement: devices, mesh, and functions for leaves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError
from cairn.interop.names import EasyDeLBackends, EasyDeLPlatforms
from cairn.interop.partition_axis import PartitionAxis
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_text
from cairn.storage.arrays.leaf_paths import path_of

__all__ = [
    "apply_shard_fns",
    "as_partition_axis",
    "check_mesh_dims",
    "check_shard_fns",
    "named_platform",
    "platform_devices",
]

ShardFns = Mapping[Any, Callable[[Any], Any]]


def named_platform(backend: Any, platform: Any, device: Any) -> str | None:
    """Return the JAX platform that `backend` and `platform` name; None if neither names one.

    Raises:
        ArgumentError: if one is unknown or a kernel language, if they differ, if this machine has
            no such platform, or if `device` is on another one.
    """
    platforms: dict[str, str] = {}
    if backend is not None and EasyDeLBackends(backend) is not EasyDeLBackends.JAX:
        platforms["backend"] = str(EasyDeLBackends(backend))
    if platform is not None:
        name = EasyDeLPlatforms(platform)
        if name in (EasyDeLPlatforms.TRITON, EasyDeLPlatforms.PALLAS):
            raise ArgumentError(
                path="platform",
                expected="'jax', or a kind of device: 'cpu', 'gpu' or 'tpu'",
                found=f"{str(name)!r}, a kernel language; the models here are plain JAX",
            )
        if name is not EasyDeLPlatforms.JAX:
            platforms["platform"] = str(name)
    if not platforms:
        return None
    argument, platform_name = next(iter(platforms.items()))
    if len(set(platforms.values())) > 1:
        raise ArgumentError(
            path="platform",
            expected=f"{platforms['backend']!r}, as backend says",
            found=repr(platforms["platform"]),
        )
    devices = platform_devices(argument, platform_name)
    other = device not in devices if isinstance(device, jax.Device) else device != platform_name
    if other and device is not None:
        raise ArgumentError(
            path="device", expected=f"one of {argument}={platform_name!r}", found=repr(device)
        )
    return platform_name


def platform_devices(argument: str, platform: str) -> Sequence[jax.Device]:
    """Return the devices of a JAX platform.

    Raises:
        ArgumentError: if there are none; names the argument, and the platforms with devices.
    """
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        here = sorted({device.platform for device in (*jax.devices(), *jax.devices("cpu"))})
        raise ArgumentError(
            path=argument,
            expected=f"a platform with devices here: {', '.join(map(repr, here))}",
            found=repr(platform),
            next_step="install the JAX plugin of that platform, or leave the argument out",
        ) from error


def check_mesh_dims(mesh: Mesh, dims: Sequence[int], names: Sequence[str]) -> None:
    """Check that a mesh has these axis sizes and names; -1 matches any size.

    Raises:
        ArgumentError: if sizes or names differ.
    """
    sizes = tuple(mesh.shape.values())
    fits = len(dims) == len(sizes) and all(
        dim in (-1, size) for dim, size in zip(dims, sizes, strict=True)
    )
    if not fits or tuple(names) != mesh.axis_names:
        raise ArgumentError(
            path="mesh",
            expected=f"sharding_axis_dims {tuple(dims)} over {tuple(names)}, which are given too",
            found=mesh_text(mesh),
            next_step="give the mesh alone",
        )


def as_partition_axis(value: Any) -> PartitionAxis | None:
    """Return the argument `partition_axis`, a PartitionAxis or its JSON, as one; None for None.

    Raises:
        ArgumentError: if it is neither, or has unknown fields.
    """
    if value is None or isinstance(value, PartitionAxis):
        return value
    if isinstance(value, Mapping):
        return PartitionAxis.from_dict(value)
    raise ArgumentError(
        path="partition_axis", expected="a PartitionAxis, or its fields by name", found=repr(value)
    )


def check_shard_fns(shard_fns: ShardFns | None, tree: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the functions by path, after a check; empty for None.

    Args:
        shard_fns: functions by path of a leaf, which is a tuple of keys or their text joined by
            "/".
        tree: the model's state.

    Raises:
        ArgumentError: if no leaf has a path, or a value is no function; lists all of these.
    """
    if shard_fns is None:
        return {}
    if not isinstance(shard_fns, Mapping):
        raise ArgumentError(
            path="shard_fns", expected="functions by the path of a leaf", found=repr(shard_fns)
        )
    paths = {named.path for named in named_leaves(tree)}
    functions: dict[str, Any] = {
        key if isinstance(key, str) else path_of(map(str, key)): function
        for key, function in shard_fns.items()
    }
    problems = [f"{path}: no such leaf" for path in functions if path not in paths]
    problems += [
        f"{path}: no function" for path, function in functions.items() if not callable(function)
    ]
    if problems:
        raise ArgumentError(
            f"{len(problems)} entries that can't act",
            path="shard_fns",
            expected=f"functions for leaves among {', '.join(sorted(paths))}",
            problems=sorted(problems),
        )
    return functions


def apply_shard_fns(model: Any, shard_fns: ShardFns | None) -> Any:
    """Apply the caller's functions to leaves of a model, and return the model.

    Args:
        model: the model, changed in place.
        shard_fns: see `check_shard_fns`.

    Raises:
        ArgumentError: if no leaf has a path, or a function does not return an array of its leaf's
            shape and dtype; lists all of these.
    """
    tree = nnx.state(model)
    functions = check_shard_fns(shard_fns, tree)
    if not functions:
        return model
    problems, placed = [], []
    for named in named_leaves(tree):
        leaf = named.leaf
        if named.path in functions:
            sharded = functions[named.path](leaf)
            kept = (getattr(sharded, "shape", None), getattr(sharded, "dtype", None))
            if not isinstance(sharded, jax.Array) or kept != (leaf.shape, leaf.dtype):
                problems.append(
                    f"{named.path}: expected an array {leaf.dtype}{list(leaf.shape)}, "
                    f"found {type(sharded).__name__} {kept[1]} {kept[0]}"
                )
            leaf = sharded
        placed.append(leaf)
    if problems:
        raise ArgumentError(
            f"{count_text(len(problems), 'function')} did not return their leaf",
            path="shard_fns",
            next_step="return the array itself, placed (jax.device_put)",
            problems=problems,
        )
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(tree), placed))
    return model
