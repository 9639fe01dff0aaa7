"""EDPretrainedConfig: the base of every model's configuration."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

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
from cairn.interop.partition_axis import PartitionAxis

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

PartitionRules = Sequence[tuple[str, "PartitionSpec"]]

_CLASSES: dict[str, type[EDPretrainedConfig]] = {}
"""model_type -> the class that was defined for it."""


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

    Each is kept under its own name; lists become tuples, dicts immutable mappings. Other attributes
    that `__init__` sets are computed again when a config is loaded. Nothing is assigned later:
    `replace` makes another config.

    Attributes:
        model_type: the name that Hugging Face's config.json carries, such as "llama".
        sharding_axis_dims: devices along each mesh axis; at most one may be -1 ("the rest").
        sharding_axis_names: names of the mesh axes.
        sharding_dcn_axis_dims: slices (or processes, where there are none) along each mesh axis;
            `sharding_axis_dims` then count the devices of one of them.
        partition_axis: which mesh axes carry which logical axis; None means the usual ones for
            parameters, and leaves activations to the compiler.
        tokenizer_files: file name -> bytes, carried along so that an export can be used as it is;
            no part of equality, of the hash or of the JSON.
    """

    JSON_EXCLUDED: ClassVar[frozenset[str]] = frozenset({"tokenizer_files"})

    model_type: str = ""
    sharding_axis_dims: tuple[int, ...] = (1, -1, 1, 1)
    sharding_axis_names: tuple[str, ...] = ("dp", "fsdp", "tp", "sp")
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
            # A dataclass's own `__init__` set the fields, and nothing that its parent's does.
            fields = dataclasses.fields(parent)
            written = parent(**{entry.name: getattr(self, entry.name) for entry in fields})
            for name, value in vars(written).items():
                object.__setattr__(self, name, value)
        if not has_written_init(type(self)):
            self.raise_for_problems()

    def raise_for_problems(self) -> None:
        """Check the fields' values.

        Raises:
            ConfigError: some are wrong, or don't go together; all problems are named.
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
            if not all(_is_integer(size) for size in sizes):
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
        """The device mesh of `sharding_axis_dims`; a -1 takes the devices that are left.

        Raises:
            ShardingError: the dims don't fit the number of devices.
            InstallationError: JAX is not installed; says which extra brings it.
        """
        # By name: `interop` stands below `state`, and reads configurations where there is no JAX.
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
        """Return ordered pairs (regex, PartitionSpec) over "/"-joined paths; the first match wins.

        None means: place parameters by the axis names that the model's layers give them.
        """
        return None

    def replace(self, **updates: Any) -> Self:
        """Return a copy with these fields changed; the copy is checked again.

        Raises:
            ConfigError: values that don't go together; or a config that is made of this one's
                fields has others.
        """
        refuse_changed(self, lambda: dataclasses.replace(self))
        return dataclasses.replace(self, **updates)

    def to_dict(self) -> dict[str, Any]:
        """Return our JSON form: every field but the tokenizer's files, and computed ones.

        Raises:
            ConfigError: fields that JSON can't hold, or of which `from_dict` would make others.
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
        """Return the config that `to_dict` described.

        Raises:
            ConfigError: unknown fields, or values that don't go together.
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

        A config of no known family writes its own fields, under its own `model_type`; nulls only
        where the field's default is another value.
        """
        empty = {entry.name for entry in dataclasses.fields(self) if entry.default is None}
        data = self.to_dict()
        return {name: data[name] for name in data if data[name] is not None or name not in empty}

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Return the config that `to_hf` wrote.

        Raises:
            ConfigError: keys that are no fields, and not harmless; or values that don't go
                together.
        """
        names = {f.name for f in dataclasses.fields(cls)} - cls.JSON_EXCLUDED
        # Whose class it is knows what the architecture's name and code stand for.
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
        """Return one field's value from JSON; subclasses with enums or dataclasses extend this."""
        return tuples(value)


def defined_configs() -> Mapping[str, type[EDPretrainedConfig]]:
    """Return the config classes that this process has defined, by their `model_type`."""
    return _CLASSES


def jsonable(value: Any) -> Any:
    """Return a value as JSON: dataclasses and mappings as dicts, tuples as lists, enums' values."""
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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def tuples(value: Any) -> Any:
    """List of JSON as tuples, which a hash can be made of; mappings as they are."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
