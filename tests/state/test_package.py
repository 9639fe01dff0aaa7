"""The public names of `cairn.state`, and what importing it loads."""

import subprocess
import sys

import pytest

import cairn
from cairn import state

PUBLIC = [
    "ArgumentError", "AutoEasyDeLConfig", "CausalLMOutput", "ConfigError", "ConversionError",
    "DecoderConfig", "DecoderForCausalLM", "EDPretrainedConfig", "EDPretrainedModel",
    "EasyBridgeMixin", "EasyDeLBackends", "EasyDeLBaseModule", "EasyDeLPlatforms",
    "EasyDeLQuantizationMethods", "EasyDeLState", "EasyGenerationMixin", "ExpertsConfig",
    "GenerationOutput", "LatentAttentionConfig", "LinenDecoderForCausalLM", "LoraSettings",
    "LossConfig", "NotInitializedError", "OperationCacheMixin", "OptimizerError",
    "OptimizerNotFoundError", "PartitionAxis", "QuantizationSettings", "RopeConfig", "RunSaver",
    "ShardingError", "StateError", "TaskType", "TrainState", "TrainStep", "TreeStructureError",
    "UnknownModelError", "load_balancing_loss", "make_mesh", "make_optimizer",
    "optimizer_from_description",
]  # fmt: skip


def test_the_public_names_are_these():
    assert sorted(state.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_documented_and_in_the_package(name):
    assert getattr(state, name).__doc__
    assert getattr(cairn, name) is getattr(state, name)


def test_importing_the_package_loads_none_of_its_parts():
    script = (
        "import sys\n"
        "from cairn import state\n"
        "assert state.ConfigError\n"
        "loaded = {name for name in sys.modules if name.startswith('cairn.state.')}\n"
        "assert loaded == {'cairn.state.errors'}, loaded\n"
        "assert state.DecoderConfig\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
