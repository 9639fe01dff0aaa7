"""The arguments of `load_state`, checked: each one acts, or raises an error that names it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from state.errors import ArgumentError, require_known
from state.mesh import MESH_AXES, make_mesh
from state.names import TaskType
from state.sharding import check_rules

__all__ = ["LoadArguments"]

_NOT_YET = {
    "sharding_dcn_axis_dims": "give the whole mesh with mesh=",
    "partition_axis": "give partition_rules=",
    "shard_fns": "give partition_rules=",
    "backend": "set JAX_PLATFORMS, or give device=",
    "platform": "set JAX_PLATFORMS, or give device=",
    "quantization_platform": "load the model as it is stored",
    "quantization_method": "load the model as it is stored",
    "quantization_pattern": "load the model as it is stored",
}


@dataclass(frozen=True, kw_only=True)
class LoadArguments:
    """The arguments of `EasyDeLState.load_state`, and what they are for.

    Attributes:
        device: where everything goes unless it is sharded: a device, or a platform such as "cpu".
        dtype: of the computation; None keeps the one it was saved with (Hugging Face: float32).
        param_dtype: None keeps the stored dtypes (Hugging Face: float32); a dtype casts floating
            parameters to it, and optimizer leaves to what the optimizer keeps for such parameters.
        precision: of matrix products; None keeps the one it was saved with.
        sharding_axis_dims: devices along each mesh axis; written into the model's config.
        sharding_axis_names: names of the mesh axes; written into the model's config.
        config_kwargs: fields of the model's config to change.
        model_task: AUTO_BIND, or the task that the model class must be for.
        auto_shard_model: shard over the mesh of `sharding_axis_dims`; else all on one `device`.
        partition_rules: where leaves go; by default the config's, else the model's axis names.
        verbose: say on stderr what is loaded.
        step: the step to load, where the reference names only a run.
        tx: the optimizer; by default rebuilt from the stored `tx_init`.
        tx_init: JSON that rebuilds `tx`, kept with the state.
        optimizer: "require" loads the optimizer state if the checkpoint holds one; "skip" leaves
            it out.
        mesh: a mesh to shard over, instead of `sharding_axis_dims`.
        model_class: class of the model, where several have the stored name, or none is imported.

    The rest of the documented arguments raise an ArgumentError unless they have their default.
    """

    device: Any = "cpu"
    dtype: Any = None
    param_dtype: Any = None
    precision: Any = None
    sharding_axis_dims: Sequence[int] = (1, -1, 1, 1)
    sharding_dcn_axis_dims: Sequence[int] | None = None
    sharding_axis_names: Sequence[str] = MESH_AXES
    partition_axis: Any = None
    shard_attention_computation: bool = True
    shard_fns: Mapping[Any, Callable[..., Any]] | None = None
    backend: Any = None
    platform: Any = None
    config_kwargs: Mapping[str, Any] | None = None
    model_task: TaskType | str = TaskType.AUTO_BIND
    auto_shard_model: bool = False
    partition_rules: Any = None
    quantization_platform: Any = None
    quantization_method: Any = None
    quantization_block_size: int = 128
    quantization_pattern: str | None = None
    quantize_tensors: bool = True
    verbose: bool = True
    step: int | None = None
    tx: optax.GradientTransformation | None = None
    tx_init: Mapping[str, Any] | None = None
    optimizer: Literal["require", "skip"] = "require"
    mesh: Mesh | None = None
    model_class: type[Any] | None = None

    def __post_init__(self) -> None:
        TaskType(self.model_task)
        check_rules(self.partition_rules)
        require_known("optimizer", self.optimizer, ("require", "skip"))
        for name, instead in _NOT_YET.items():
            if getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} has no effect in this version",
                    path="load_state",
                    expected=f"{name}=None",
                    found=repr(getattr(self, name)),
                    next_step=instead,
                )
        if self.quantization_block_size != 128:
            raise ArgumentError(
                "quantization_block_size has no effect in this version",
                path="load_state",
                expected="128",
                found=self.quantization_block_size,
            )
        if not self.shard_attention_computation:
            raise ArgumentError(
                "shard_attention_computation has no effect in this version",
                path="load_state",
                expected="True: the compiler shards attention like the arrays it reads",
                found=False,
            )
        if self.partition_rules is not None and not self.sharded:
            raise ArgumentError(
                path="partition_rules",
                expected="auto_shard_model=True or mesh=",
                found="neither, so that everything would go to one device",
            )
        if not self.sharded and jax.process_count() > 1:
            raise ArgumentError(
                path="auto_shard_model",
                expected=f"True, with {jax.process_count()} processes",
                found="False: one device belongs to one process",
            )

    @classmethod
    def checked(cls, more: Mapping[str, Any], **named: Any) -> "LoadArguments":
        """Makes the arguments of a call from its named ones and those in its `**kwargs`.

        Raises:
            ArgumentError: if an argument is unknown.
        """
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(more) - known)
        if unknown:
            raise ArgumentError(
                path="load_state",
                expected=f"arguments among {', '.join(sorted(known))}",
                found=f"unknown: {', '.join(unknown)}",
            )
        return cls(**named, **more)

    @property
    def sharded(self) -> bool:
        """Whether the state is sharded over a mesh."""
        return self.auto_shard_model or self.mesh is not None

    def target_mesh(self) -> Mesh | None:
        """Returns the mesh to load onto, or None for one device.

        Raises:
            ShardingError: if `sharding_axis_dims` do not fit the devices.
        """
        if self.mesh is not None or not self.sharded:
            return self.mesh
        return make_mesh(self.sharding_axis_dims, self.sharding_axis_names)

    def target_device(self) -> SingleDeviceSharding:
        """Returns the placement on `device`.

        Raises:
            ArgumentError: if there is no such device.
        """
        if isinstance(self.device, jax.Device):
            return SingleDeviceSharding(self.device)
        try:
            return SingleDeviceSharding(jax.local_devices(backend=self.device)[0])
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                path="device",
                expected="a jax.Device, or a platform such as 'cpu'",
                found=f"{self.device!r}: {error}",
            ) from error

    def config_updates(self, config: Any) -> dict[str, Any]:
        """Returns the fields of a model's config that these arguments change."""
        updates = {
            "sharding_axis_dims": tuple(self.sharding_axis_dims),
            "sharding_axis_names": tuple(self.sharding_axis_names),
            **dict(self.config_kwargs or {}),
        }
        unknown = sorted(set(updates) - {entry.name for entry in fields(config)})
        if unknown:
            raise ArgumentError(
                path="config_kwargs",
                expected=f"fields of {type(config).__name__}",
                found=", ".join(unknown),
            )
        return updates

    def settings(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of the module's constructor: the stored ones, or these arguments."""
        given = {
            "dtype": None if self.dtype is None else np.dtype(self.dtype).name,
            "param_dtype": None if self.param_dtype is None else np.dtype(self.param_dtype).name,
            "precision": self.precision,
        }
        return {
            name: value if value is not None else stored.get(name) for name, value in given.items()
        }

    def for_pretrained(self) -> dict[str, Any]:
        """Returns the arguments for `from_pretrained` of a model class."""
        given = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
            "config_kwargs": self.config_kwargs,
            "partition_rules": self.partition_rules,
            "mesh": self.mesh,
        }
        placed: dict[str, Any] = {
            "verbose": self.verbose,
            "auto_shard_model": self.sharded,
            "sharding_axis_dims": tuple(self.sharding_axis_dims),
            "sharding_axis_names": tuple(self.sharding_axis_names),
        }
        if not self.sharded:
            (placed["device"],) = self.target_device().device_set
        return {**placed, **{name: value for name, value in given.items() if value is not None}}
