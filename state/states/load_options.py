"""Arguments of `load_state`, checked: an argument that can't take effect raises an error."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, get_args

import jax
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError, require_known, with_nearest
from cairn.interop.names import TaskType
from cairn.interop.partition_axis import MESH_AXES
from cairn.interop.weights.source_folder import refuse_hub_options
from cairn.state.adapters.quantization_request import DEFAULT_BLOCK_SIZE, QuantizationRequest
from cairn.state.model_classes import module_class
from cairn.state.sharding.mesh import make_mesh
from cairn.state.sharding.rules import check_rules
from cairn.state.states.load_placement import (
    as_partition_axis,
    check_mesh_dims,
    named_platform,
    platform_devices,
)
from cairn.state.states.stored_fields import FieldTargets
from cairn.storage.runs.damage import OnDamage

__all__ = ["LoadOptions"]

_DEFAULT_DIMS = (1, -1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Arguments of `EasyDeLState.load_state`.

    Attributes:
        device: the device for all leaves if nothing is sharded: a device, or a platform such as
            "cpu". None for this process's default device, or the first of `backend` or `platform`.
        dtype: dtype of the computation; None for the saved one (Hugging Face folders: float32).
        param_dtype: dtype to cast floating parameters to; the optimizer's leaves are cast to the
            dtypes that it uses for such parameters. None keeps the stored dtypes (Hugging Face
            folders: float32).
        precision: precision of matrix multiplications; None for the saved one.
        sharding_axis_dims: number of devices along each mesh axis; stored in the model's config.
        sharding_dcn_axis_dims: number of slices along each mesh axis, or of processes if devices
            have no slices; `sharding_axis_dims` are then devices of one slice. Stored in the
            model's config.
        sharding_axis_names: names of the mesh axes; stored in the model's config.
        partition_axis: mesh axes of each logical axis, as a PartitionAxis or its fields by name;
            stored in the model's config. None keeps the saved one.
        shard_attention_computation: False replicates heads and tokens in attention; stored in the
            model's config. True keeps the saved option.
        shard_fns: functions by the path of a leaf ("layers/0/kernel", or a tuple of keys), each of
            which gets the loaded array and returns it with another sharding; the optimizer's
            leaves follow. For these leaves they override `partition_rules`.
        backend: "cpu", "gpu" or "tpu": the devices to load onto, sharded or not.
        platform: the same, or "jax" for JAX's default devices; a kernel language is refused.
        config_kwargs: fields of the model's config to change.
        quantization_platform: platform that quantizes weights: None, "jax", or the platform in
            use.
        quantization_method: method by which weights are quantized while loading, as by
            `model.quantize`. A stored optimizer state of floating weights must then be skipped.
            None quantizes nothing.
        quantization_block_size: number of inputs that share a scale, -1 for all of them.
        quantization_pattern: regular expression, searched in the path of each layer; None for all.
        quantize_tensors: False says explicitly that nothing is quantized.
        model_task: AUTO_BIND, or the task that the model class must have.
        auto_shard_model: whether to shard over the mesh of `sharding_axis_dims`; False loads all
            leaves onto one `device`.
        partition_rules: pairs of a regular expression and a PartitionSpec; None for the config's
            rules, else those that follow from the model's axis names.
        verbose: whether to print progress to stderr.
        step: the step to load, if the reference names only a run; None for the latest.
        damaged: what to do if no step is named, and the latest has a record of damage: "refuse"
            raises, "skip" loads the newest undamaged step. This process's next save into the run
            then continues from that step, and supersedes the damaged ones above.
        tx: the optimizer; None to build it from `tx_init`, else from the stored description.
        tx_init: JSON that rebuilds `tx`, which the state keeps.
        optimizer: "require" loads the optimizer state if the checkpoint has one; "skip" does not
            load it.
        fields: targets of fields that a subclass of `EasyDeLState` adds, by name, or a function
            from the state without arrays to these; needed for fields with containers that JSON
            can't describe, such as Optax's. A target gives the structure, and shardings if its
            leaves have any; for a static field it is the value. "skip" loads none: the fields
            have the class's defaults.
        mesh: mesh to shard over, instead of `sharding_axis_dims`.
        model_class: class of the model; needed if several classes have the stored name, or none.
        iterators: iterators of training data, by name; each is set, in place, to its position at
            the time of the save, once all else is loaded; see `cairn.load`.
        revision: branch, tag or commit of a hub repository ("hf://owner/name").
        token: token for the hub.
        local_files_only: whether to read a hub repository from the local cache only.

    Raises:
        ArgumentError: an argument contradicts another or can't take effect; names it. Raised before
            anything is read.
    """

    device: Any = None
    dtype: Any = None
    param_dtype: Any = None
    precision: Any = None
    sharding_axis_dims: Sequence[int] = _DEFAULT_DIMS
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
    quantization_block_size: int = DEFAULT_BLOCK_SIZE
    quantization_pattern: str | None = None
    quantize_tensors: bool = True
    verbose: bool = True
    step: SupportsIndex | None = None
    damaged: OnDamage = "refuse"
    tx: optax.GradientTransformation | None = None
    tx_init: Mapping[str, Any] | None = None
    optimizer: Literal["require", "skip"] = "require"
    fields: FieldTargets = None
    mesh: Mesh | None = None
    model_class: type[Any] | None = None
    iterators: Mapping[str, Any] | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    local_files_only: bool = False

    def __post_init__(self) -> None:
        TaskType(self.model_task)
        if self.model_class is not None:
            object.__setattr__(self, "model_class", module_class(self.model_class))
        check_rules(self.partition_rules)
        require_known("optimizer", self.optimizer, ("require", "skip"))
        require_known("damaged", self.damaged, get_args(OnDamage))
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) is not None:
                floating_dtype(getattr(self, name), argument=name)
        self.quantization  # noqa: B018  (its checks)
        object.__setattr__(self, "partition_axis", as_partition_axis(self.partition_axis))
        named_platform(self.backend, self.platform, self.device)
        self._check_mesh()
        for name in ("partition_rules", "shard_fns"):
            if getattr(self, name) is not None and not self.sharded:
                raise ArgumentError(
                    path=name,
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
    def checked(cls, more: Mapping[str, Any], **named: Any) -> "LoadOptions":
        """Return the arguments of a call of `load_state`.

        Args:
            more: the arguments in its `**kwargs`.
            **named: its other arguments.

        Raises:
            ArgumentError: if arguments are unknown; names each, with a similar one that exists.
        """
        names = sorted(entry.name for entry in dataclasses.fields(cls))
        unknown = sorted(set(more) - set(names))
        if unknown:
            raise ArgumentError(
                path="load_state",
                expected=f"arguments among {', '.join(names)}",
                found=f"unknown: {', '.join(with_nearest(name, names) for name in unknown)}",
            )
        return cls(**named, **more)

    @property
    def quantization(self) -> QuantizationRequest:
        """The `quantization_*` arguments as one object.

        Raises:
            ArgumentError: if the method is unknown, or an argument contradicts another.
        """
        return QuantizationRequest(
            method=self.quantization_method,
            block_size=self.quantization_block_size,
            pattern=self.quantization_pattern,
            tensors=self.quantize_tensors,
            platform=self.quantization_platform,
        )

    def refuse_hub(self) -> None:
        """Check that no argument for the hub is given; for loads of a run's checkpoint.

        Raises:
            ArgumentError: if one is given; names it.
        """
        refuse_hub_options(
            "a Cairn run",
            revision=self.revision,
            token=self.token,
            local_files_only=self.local_files_only,
        )

    @property
    def sharded(self) -> bool:
        """True if the state is sharded over a mesh."""
        return self.auto_shard_model or self.mesh is not None

    def target_mesh(self) -> Mesh | None:
        """Return the mesh to load onto; None to load onto one device.

        Raises:
            ShardingError: if `sharding_axis_dims` do not fit the devices.
        """
        if self.mesh is not None or not self.sharded:
            return self.mesh
        platform = named_platform(self.backend, self.platform, self.device)
        return make_mesh(
            self.sharding_axis_dims,
            self.sharding_axis_names,
            self.sharding_dcn_axis_dims,
            devices=None if platform is None else platform_devices("backend", platform),
        )

    def target_device(self) -> SingleDeviceSharding:
        """Return the sharding of leaves that are loaded onto one device.

        Raises:
            ArgumentError: if `device` does not exist.
        """
        device = self.device
        if device is None:
            platform = named_platform(self.backend, self.platform, None)
            # JAX's flags have no type annotations.
            device = platform or jax.config.jax_default_device  # type: ignore[attr-defined]
        if isinstance(device, jax.Device):
            return SingleDeviceSharding(device)
        try:
            return SingleDeviceSharding(jax.local_devices(backend=device)[0])
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                path="device",
                expected="a jax.Device, or a platform such as 'cpu'",
                found=f"{device!r}: {error}",
            ) from error

    def _check_mesh(self) -> None:
        if self.mesh is None:
            return
        if self.sharding_dcn_axis_dims is not None:
            raise ArgumentError(
                path="sharding_dcn_axis_dims",
                expected="either these or mesh=",
                found=f"{tuple(self.sharding_dcn_axis_dims)} and a mesh",
            )
        if tuple(self.sharding_axis_dims) != _DEFAULT_DIMS:
            check_mesh_dims(self.mesh, self.sharding_axis_dims, self.sharding_axis_names)
        platform = named_platform(self.backend, self.platform, self.device)
        if platform is not None:
            others = set(self.mesh.devices.flat) - set(platform_devices("backend", platform))
            if others:
                raise ArgumentError(
                    path="mesh",
                    expected=f"devices of {platform!r}, as backend or platform says",
                    found=", ".join(sorted(map(str, others))),
                )

    def _mesh_of_config(self) -> dict[str, Any]:
        """Return the fields of the config that describe the model's sharding over a mesh."""
        dims, names = self.sharding_axis_dims, self.sharding_axis_names
        if self.mesh is not None:
            dims, names = tuple(self.mesh.shape.values()), self.mesh.axis_names
        slices = self.sharding_dcn_axis_dims
        laid_out: dict[str, Any] = {
            "sharding_axis_dims": tuple(dims),
            "sharding_axis_names": tuple(names),
            "sharding_dcn_axis_dims": None if slices is None else tuple(slices),
        }
        if self.partition_axis is not None:
            laid_out["partition_axis"] = self.partition_axis
        if not self.shard_attention_computation:
            laid_out["shard_attention_computation"] = False
        return laid_out

    def config_updates(self, config: Any) -> dict[str, Any]:
        """Return the fields of a model's config that these arguments change, with new values.

        Raises:
            ArgumentError: if the config has no such field, or the model type would change.
        """
        updates = {**self._mesh_of_config(), **dict(self.config_kwargs or {})}
        fields = {entry.name for entry in dataclasses.fields(config)}
        if not self.shard_attention_computation and "shard_attention_computation" not in fields:
            raise ArgumentError(
                path="shard_attention_computation",
                expected=f"a model whose config has this option (not {type(config).__name__})",
                found=False,
            )
        if updates.get("model_type", config.model_type) != config.model_type:
            raise ArgumentError(
                path="config_kwargs",
                expected=f"options of the {config.model_type!r} model that is stored",
                found=f"model_type={updates['model_type']!r}, another architecture",
            )
        unknown = sorted(set(updates) - fields)
        if unknown:
            raise ArgumentError(
                path="config_kwargs",
                expected=f"fields of {type(config).__name__}",
                found=", ".join(unknown),
            )
        return updates

    def settings(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings for the model's constructor: these arguments, else the stored ones."""
        settings = {
            name: None if value is None else floating_dtype(value, argument=name).name
            for name, value in (("dtype", self.dtype), ("param_dtype", self.param_dtype))
        }
        settings["precision"] = self.precision
        return {
            name: value if value is not None else stored.get(name)
            for name, value in settings.items()
        }

    def for_pretrained(self) -> dict[str, Any]:
        """Return these arguments as those of a model class's `from_pretrained`."""
        laid_out = {k: value for k, value in self._mesh_of_config().items() if value is not None}
        axes = {name: laid_out.pop(name) for name in ("sharding_axis_dims", "sharding_axis_names")}
        elsewhere = self.backend is not None or self.platform is not None
        optional = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
            "config_kwargs": {**laid_out, **(self.config_kwargs or {})} or None,
            "partition_rules": self.partition_rules,
            "mesh": self.target_mesh() if elsewhere else self.mesh,
            "quantization_platform": self.quantization_platform,
            "quantization_method": self.quantization_method,
            "quantization_pattern": self.quantization_pattern,
            "revision": self.revision,
            "token": self.token,
        }
        placed: dict[str, Any] = {
            "verbose": self.verbose,
            "quantization_block_size": self.quantization_block_size,
            "quantize_tensors": self.quantize_tensors,
            "auto_shard_model": self.sharded,
            "local_files_only": self.local_files_only,
            **axes,
        }
        if not self.sharded:
            (placed["device"],) = self.target_device().device_set
        return {**placed, **{name: value for name, value in optional.items() if value is not None}}
