"""What comes back of a dataclass config: everything, or the config is refused by its fields."""

import dataclasses
import enum
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from cairn import (
    AutoEasyDeLConfig,
    ConfigError,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    PartitionAxis,
)
from tests.tiny import TINY


class Act(enum.Enum):
    TANH = "tanh"
    RELU = "relu"


class Kind(enum.StrEnum):
    FULL = "full"


class Level(enum.IntEnum):
    ONE = 1


class Span(NamedTuple):
    first: int = 1
    last: int = 2


@dataclass(frozen=True)
class Scale:
    by: float = 2.0
    along: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class AnyConfig(EDPretrainedConfig):
    model_type: str = "any-of-the-tests"
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class DoublingConfig(EDPretrainedConfig):
    model_type: str = "doubling-of-the-tests"
    width: int = 3

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "width", 2 * self.width)


@dataclass(frozen=True, kw_only=True)
class InitOnlyConfig(EDPretrainedConfig):
    model_type: str = "init-only-of-the-tests"
    width: dataclasses.InitVar[int] = 3

    def __post_init__(self, width):
        super().__post_init__()
        object.__setattr__(self, "half", width // 2)


@dataclass(frozen=True, kw_only=True)
class RichConfig(EDPretrainedConfig):
    """With what JSON has no word for, made again, and a field that is computed."""

    model_type: str = "rich-of-the-tests"
    width: int = 4
    act: Act = Act.TANH
    level: Level = Level.ONE
    scale: Scale = Scale()
    inner: AnyConfig = AnyConfig()
    half: int = field(init=False, default=0)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "half", self.width // 2)

    @classmethod
    def _from_json(cls, name, value):
        if name == "scale":
            return Scale(value["by"], tuple(value["along"]))
        made = {"act": Act, "level": Level, "inner": AnyConfig.from_dict}.get(name)
        return super()._from_json(name, value) if made is None else made(value)


@dataclass(frozen=True, kw_only=True)
class NullableConfig(EDPretrainedConfig):
    model_type: str = "nullable-of-the-tests"
    width: int = 2
    scale: float | None = 1.5
    bias: float | None = None
    gain: float | None = 0.0
    dtype: str | None = "bfloat16"
    rope: Any = None


class Layer(EasyDeLBaseModule):
    def __init__(self, config, rngs=None, **settings):
        super().__init__(config=config, **settings)
        self.layer = nnx.Linear(2, 2, param_dtype=self.param_dtype, rngs=rngs)

    def __call__(self, inputs):
        return self.layer(inputs)


def layer_state(config):
    return EasyDeLState.create(model=Layer(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (AnyConfig(value=Scale()), r"value=Scale\(by=2.0, along=\(1, 2\)\) would come back as \{"),
        (AnyConfig(value=AnyConfig()), r"value=AnyConfig\(.*would come back as \{"),
        (AnyConfig(value=Act.TANH), "value=<Act.TANH: 'tanh'> would come back as 'tanh'"),
        (AnyConfig(value=Kind.FULL), "value=<Kind.FULL: 'full'> would come back as 'full'"),
        (AnyConfig(value=Level.ONE), "value=<Level.ONE: 1> would come back as 1"),
        (AnyConfig(value=(Span(),)), r"value=\(Span\(first=1, last=2\),\) would come back as \(\("),
        (AnyConfig(value={1: 2}), r"value=\{1: 2\} would come back as \{'1': 2\}"),
        (DoublingConfig(), "width=6 would come back as 12"),
        (InitOnlyConfig(width=5), "width, which is no field, would be lost"),
        (AnyConfig(value=jnp.bfloat16), "value=<class 'jax.numpy.bfloat16'>: Object of type"),
        (AnyConfig(value=frozenset({1})), r"value=frozenset\(\{1\}\): Object of type frozenset"),
        (AnyConfig(value=np.float32(0.1)), r"value=np.float32\(0.1\): Object of type float32"),
    ],
    ids=lambda given: getattr(given, "model_type", ""),
)
def test_what_would_come_back_as_something_else_is_refused_by_its_field(config, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        config.to_dict()
    state = layer_state(config)
    with pytest.raises(ConfigError, match=said):
        state.save_state(tmp_path / "run", step=1, verbose=False)
    with pytest.raises(ConfigError, match=said):
        state.model.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "run").exists()


def test_a_copy_of_a_config_that_changes_itself_is_refused():
    with pytest.raises(ConfigError, match="width=6 would come back as 12"):
        DoublingConfig().replace(sharding_axis_dims=(1, 8, 1, 1))


def test_what_from_json_makes_again_comes_back_with_what_is_computed(tmp_path):
    config = RichConfig(width=8, act=Act.RELU, scale=Scale(3.0), inner=AnyConfig(value=(1, 2)))
    layer_state(config).save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False).module_config
    for again in (loaded, AutoEasyDeLConfig.from_hf(json.loads(json.dumps(config.to_hf())))):
        assert again == config
        assert again.act is Act.RELU
        assert again.level is Level.ONE
        assert again.half == 4
    assert config.replace(width=6).half == 3


def test_a_copy_keeps_what_json_could_not_hold():
    array, nan = np.arange(3), float("nan")
    assert AnyConfig(value=array).replace(model_type="other").value is array
    assert np.isnan(AnyConfig(value=nan).replace(model_type="other").value)


def test_lists_in_lists_come_back_as_what_has_a_hash():
    config = AnyConfig(value=((1, (2, 3)), "x"))
    again = AnyConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert AnyConfig.from_dict(AnyConfig(value=[1, [2]]).to_dict()).value == (1, (2,))


@pytest.mark.parametrize(
    "config",
    [
        NullableConfig(scale=None, gain=None, dtype=None),
        NullableConfig(scale=0.0, bias=0.0),
        NullableConfig(dtype="float16", rope={"kind": None}),
        NullableConfig(partition_axis=PartitionAxis(hidden_state_axis=None)),
    ],
    ids=["nulls", "zeros", "a null in a mapping", "an axis that nothing splits"],
)
def test_an_export_has_every_field_back(config, tmp_path):
    layer_state(config).model.save_pretrained(tmp_path)
    assert Layer.from_pretrained(tmp_path, auto_shard_model=False).config == config


class RuledConfig(NullableConfig):
    """Has no `model_type` of its own."""

    def get_partition_rules(self):
        return ((".*", PartitionSpec()),)


def test_a_config_class_that_a_load_would_not_find_is_refused_at_the_first_save(tmp_path):
    layer_state(NullableConfig()).save_state(tmp_path / "one", wait=True, verbose=False)
    with pytest.raises(ConfigError, match=r"finds .*NullableConfig; found .*RuledConfig; give the"):
        layer_state(RuledConfig()).save_state(tmp_path / "two", step=1, verbose=False)


def test_a_familys_config_of_another_class_is_saved_with_a_warning(tmp_path, caplog):
    class RuledDecoderConfig(DecoderConfig):
        def get_partition_rules(self):
            return ((".*", PartitionSpec()),)

    fields = {entry.name: getattr(TINY, entry.name) for entry in dataclasses.fields(TINY)}
    model = DecoderForCausalLM(RuledDecoderConfig(**fields), rngs=nnx.Rngs(0))
    model.to_state().save_state(tmp_path / "run", wait=True, verbose=False)
    assert "load_state will make a cairn.interop.config.decoder.DecoderConfig of" in caplog.text
    assert "RuledDecoderConfig" in caplog.text
