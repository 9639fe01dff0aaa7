"""EDPretrainedConfig, the base of all model configs, and AutoEasyDeLConfig."""

import json
from dataclasses import dataclass

import pytest
from jax.sharding import PartitionSpec

import cairn as package
from cairn import AutoEasyDeLConfig, ConfigError, EDPretrainedConfig
from tests.contract.subjects import DECODER
from tests.state.my_model import MyModelConfig


@dataclass(frozen=True, kw_only=True)
class RuledConfig(EDPretrainedConfig):
    model_type: str = "ruled-config-of-the-contract"
    width: int = 8

    def get_partition_rules(self):
        return ((".*", PartitionSpec("fsdp")),)


def test_edpretrainedconfig_is_the_base_of_all_configs():
    assert package.EDPretrainedConfig is EDPretrainedConfig
    for config in (DECODER, MyModelConfig(), RuledConfig()):
        assert isinstance(config, EDPretrainedConfig)
        hash(config)
        with pytest.raises(AttributeError):
            config.model_type = "other"


def test_mesh_is_made_of_axis_dims_and_names():
    config = RuledConfig(sharding_axis_dims=(2, -1), sharding_axis_names=("a", "b"))
    assert dict(config.mesh.shape) == {"a": 2, "b": 4}
    with pytest.raises(ConfigError, match="differ in length"):
        RuledConfig(sharding_axis_dims=(2, -1))


def test_get_partition_rules_are_none_or_the_subclasss():
    assert EDPretrainedConfig().get_partition_rules() is None
    assert RuledConfig().get_partition_rules() == ((".*", PartitionSpec("fsdp")),)


@pytest.mark.parametrize("form", ["dict", "hf"])
@pytest.mark.parametrize("config", [DECODER, RuledConfig(width=9)], ids=["decoder", "own"])
def test_autoeasydelconfig_picks_the_class_by_model_type(config, form):
    assert package.AutoEasyDeLConfig is AutoEasyDeLConfig
    write, read = f"to_{form}", f"from_{form}"
    data = json.loads(json.dumps(getattr(config, write)()))
    found = getattr(AutoEasyDeLConfig, read)(data)
    assert type(found) is type(config)
    assert found.model_type == data["model_type"]
    assert getattr(found, write)() == data


def test_model_type_that_is_unknown_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        AutoEasyDeLConfig.from_dict({"model_type": "abacus"})
    for known in ("llama", "ruled-config-of-the-contract"):
        assert known in str(caught.value)
    assert "'abacus'" in str(caught.value)
