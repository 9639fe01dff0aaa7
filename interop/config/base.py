"""EDPretrainedConfig: the base of every model's configuration."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

from cairn.installation import missing_extra
from cairn.interop.config.hf_keys import unread_keys
from cairn.interop.config.written_init import (
    Sealed,
    adopt_init,
    has_written_init,
    json_text,
    refuse_changed,
    written_parent,
)
from cairn.interop.errors import ConfigError
from cairn.interop.partition_axis import MESH_AXES, PartitionAxis

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

PartitionRules = Sequence[tuple[str, "PartitionSpec"]]

_CLASSES: dict[str, type[EDPretrainedConfig]] = {}
"""Config class of each `model_type` that this process has defined."""


@dataclass(frozen=True, kw_only=True)
class EDPretrainedConfig(Sealed):
    """Base of every model config: the model's shape, and its layout over devices.

    A subclass is a frozen dataclass that sets `model_type` and adds its own fields; it is then
    known to `AutoEasyDeLConfig` under that name. Instances are hashable, so that they can be static
    under `jax.jit`.

    A subclass may also write its own `__init__`, without being a dataclass. Its parameters are then
    the fields:

        class MyConfig(EDPretrainedConfig):
            model_type = "mine"

            def __init__(self, act="tanh", widths=(8, 8), **kwargs):
                super().__init__(**kwargs)
                self.act = act
                self.widths = widths

    `__init__` must keep each parameter in an attribute of the same name. Lists become tuples, and
    dicts immutable mappings. Other attributes that `__init__` sets are computed again when a config
    is loaded. Attributes can't be assigned later: `replace` returns a changed copy.

    Attributes:
        model_type: the name that Hugging Face's config.json carries, such as "llama".
        sharding_axis_dims: devices along each mesh axis; at most one may be -1 ("the rest").
        sharding_axis_names: names of the mesh axes.
        sharding_dcn_axis_dims: number of slices along each mesh axis (of processes, where the
            hardware has no slices); `sharding_axis_dims` then counts the devices of one slice.
            None: slices are not distinguished.
        partition_axis: which mesh axes carry which logical axis. None: the usual mesh axes for
            parameters; the compiler places activations.
        tokenizer_files: file name -> bytes; an export writes them beside the weights. They take no
            part in equality, hash and JSON.
    """

    JSON_EXCLUDED: ClassVar[frozenset[str]] = frozenset({"tokenizer_files"})

    model_type: str = ""
    sharding_axis_dims: tuple[int, ...] = (1, -1, 1, 1)
    sharding_axis_names: tuple[str, ...] = MESH_AXES
    sharding_dcn_axis_dims: tuple[int, ...] | None = None
    partition_axis: PartitionAxis | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("model_type")
        if isinstance(name, str):
            # A bare `model_type = "mine"` becomes the field's default, as its author means it.
            cls.__annotations__ = {**inspect.get_annotations(cls), "model_type": "str"}
        if "__init__" in cls.__dict__:
            adopt_init(cls, EDPretrainedConfig)
        if isinstance(name, str) and name:
            _CLASSES[name] = cls

    def __post_init__(self) -> None:
        for name in ("sharding_axis_dims", "sharding_axis_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.sharding_dcn_axis_dims is not None:
            object.__setattr__(self, "sharding_dcn_axis_dims", tuple(self.sharding_dcn_axis_dims))
        axis: Any = self.partition_axis
        if isinstance(axis, Mapping):
            object.__setattr__(self, "partition_axis", PartitionAxis.from_dict(axis))
        parent = written_parent(type(self))
        if parent is not None:
            # The generated `__init__` has set the fields; run the parent's written one for the
            # other attributes that it sets.
            fields = dataclasses.fields(parent)
            written = parent(**{entry.name: getattr(self, entry.name) for entry in fields})
            for name, value in vars(written).items():
                object.__setattr__(self, name, value)
        if not has_written_init(type(self)):
            self.raise_for_problems()

    def raise_for_problems(self) -> None:
        """Raise ConfigError if some of the fields' values are wrong.

        Raises:
            ConfigError: some values are wrong, or contradict each other; all problems are named.
        """
        problems = list(self.problems())
        if problems:
            raise ConfigError(
                path=f"{type(self).__name__}({self.model_type!r})",
                expected="a consistent configuration",
                found="; ".join(problems),
                next_step="correct these fields",
            )

    def problems(self) -> list[str]:
        """Return everything wrong with the fields' values; a subclass adds to its parent's list."""
        problems = []
        dims, slices = self.sharding_axis_dims, self.sharding_dcn_axis_dims
        names: tuple[Any, ...] = self.sharding_axis_names
        if not all(isinstance(name, str) for name in names):
            problems.append(f"sharding_axis_names {names} must be text")
        if len(set(names)) != len(names):
            problems.append(f"sharding_axis_names {names} repeat a name")
        for name, sizes in (("sharding_axis_dims", dims), ("sharding_dcn_axis_dims", slices)):
            if sizes is None:
                continue
            if len(sizes) != len(names):
                problems.append(f"{name} {sizes} and sharding_axis_names {names} differ in length")
            if not all(is_integer(size) for size in sizes):
                problems.append(f"{name} {sizes} must be integers")
            elif any(size != -1 and size < 1 for size in sizes) or sizes.count(-1) > 1:
                problems.append(f"{name} {sizes} must be positive, with at most one -1")
        axis: Any = self.partition_axis
        if isinstance(axis, PartitionAxis):
            unknown = axis.unknown_axes(names)
            problems += [f"partition_axis: {text}, the mesh has {names}" for text in unknown]
        elif axis is not None:
            problems.append(f"partition_axis {axis!r} is no PartitionAxis")
        return problems

    @property
    def mesh(self) -> Mesh:
        """Device mesh with `sharding_axis_dims`; a -1 becomes the number of devices that are left.

        Raises:
            ShardingError: the dims don't fit the number of devices.
            InstallationError: JAX is not installed; the message names the extra to install.
        """
        # Imported by name: `interop` must not import `state`.
        try:
            sharding = importlib.import_module("cairn.state.sharding.mesh")
        except ModuleNotFoundError as exc:
            missing = missing_extra(exc, used=f"{type(self).__name__}.mesh", room="state")
            if missing is None:
                raise
            raise missing from None
        mesh: Mesh = sharding.make_mesh(
            self.sharding_axis_dims,
            self.sharding_axis_names,
            dcn_dims=self.sharding_dcn_axis_dims,
        )
        return mesh

    def get_partition_rules(self) -> PartitionRules | None:
        """Return pairs (regex, PartitionSpec) for the model's leaves, or None.

        A leaf gets the spec of the first regex that matches its "/"-joined path. None: parameters
        are placed by the axis names that the model's layers give them.
        """
        return None

    def replace(self, **updates: Any) -> Self:
        """Return a copy with some fields changed; the copy's values are checked.

        Raises:
            ConfigError: the new values contradict each other, or the class's `__init__` changed a
                field that it was given.
        """
        refuse_changed(self, lambda: dataclasses.replace(self))
        return dataclasses.replace(self, **updates)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, without the tokenizer's files and computed attributes.

        Raises:
            ConfigError: JSON can't hold some fields, or `from_dict` would return other values for
                them.
        """
        data = {
            entry.name: jsonable(getattr(self, entry.name))
            for entry in dataclasses.fields(self)
            if entry.init and entry.name not in self.JSON_EXCLUDED
        }
        text = json_text(self, data)
        refuse_changed(self, lambda: self.from_dict(json.loads(text)), self.JSON_EXCLUDED)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the config whose `to_dict` returned `data`, without the tokenizer's files.

        Raises:
            ConfigError: some fields are unknown, or values contradict each other.
        """
        fields = [entry for entry in dataclasses.fields(cls) if entry.init]
        names = [entry.name for entry in fields if entry.name not in cls.JSON_EXCLUDED]
        unknown = sorted(set(data) - set(names))
        if unknown:
            raise ConfigError(
                path=f"{cls.__name__}.from_dict",
                expected=f"the fields {', '.join(names)}",
                found=f"unknown field(s) {', '.join(unknown)}",
                next_step="load it with the version of Cairn that wrote it, or drop the fields",
            )
        return cls(**{name: cls._from_json(name, value) for name, value in data.items()})

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a Hugging Face config.json.

        This base class writes every field under its own name. A field that is None is written as
        null only if its default is not None.
        """
        empty = {entry.name for entry in dataclasses.fields(self) if entry.default is None}
        data = self.to_dict()
        return {name: data[name] for name in data if data[name] is not None or name not in empty}

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Return the config of a config.json that `to_hf` wrote.

        Raises:
            ConfigError: some keys are no fields and may change the model, or values contradict each
                other.
        """
        names = {f.name for f in dataclasses.fields(cls)} - cls.JSON_EXCLUDED
        # `architectures` and `auto_map` only name the model's class.
        if unread := unread_keys(data, names | {"architectures", "auto_map"}):
            raise ConfigError(
                path=f"{cls.__name__}.from_hf",
                expected=f"the fields {', '.join(sorted(names))}, and keys without a meaning for "
                "the model",
                found=", ".join(f"{key}={value!r}" for key, value in sorted(unread.items())),
                next_step="add them as fields, or set them to null: config_kwargs={key: None}",
            )
        return cls.from_dict({name: value for name, value in data.items() if name in names})

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        """Return the field `name` from its JSON value; subclasses extend it for their types."""
        return tuples(value)


def defined_configs() -> Mapping[str, type[EDPretrainedConfig]]:
    """Return the config classes that this process has defined, by their `model_type`."""
    return _CLASSES


def jsonable(value: Any) -> Any:
    """Return a value as JSON: dataclasses and mappings become dicts, tuples lists, enums values."""
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, EDPretrainedConfig):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(v) for v in value]
    return value


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def tuples(value: Any) -> Any:
    """Return a JSON value with its lists as tuples, which are hashable; mappings stay."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
