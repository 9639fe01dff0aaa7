"""Configs whose class writes its own `__init__`, as Hugging Face's do."""

import copy
import json
from dataclasses import FrozenInstanceError, dataclass

import jax
import pytest
from flax import nnx

from cairn import (
    ArgumentError,
    AutoEasyDeLConfig,
    ConfigError,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
)


class ActConfig(EDPretrainedConfig):
    model_type = "act-of-the-tests"

    def __init__(self, act="tanh", width=4, widths=[8, 8], scaling={"kind": "none"}, **kwargs):  # noqa: B006
        self.act = act
        super().__init__(**kwargs)
        self.width = width
        self.widths = widths
        self.scaling = scaling
        self.half = width // 2


class DeepActConfig(ActConfig):
    model_type = "deep-act-of-the-tests"

    def __init__(self, depth=2, act="relu", **kwargs):
        super().__init__(act=act, **kwargs)
        self.depth = depth


@dataclass(frozen=True, kw_only=True)
class DataOfActConfig(ActConfig):
    model_type = "data-of-act-of-the-tests"
    depth: int = 3
    act: str = "gelu"


@dataclass(frozen=True, kw_only=True)
class DataConfig(EDPretrainedConfig):
    model_type = "data-of-the-tests"
    depth: int = 3


class ActOfDataConfig(DataConfig):
    model_type = "act-of-data-of-the-tests"

    def __init__(self, act="tanh", **kwargs):
        super().__init__(**kwargs)
        self.act = act


class ActOfDataOfActConfig(DataOfActConfig):
    model_type = "act-of-data-of-act-of-the-tests"

    def __init__(self, more=1, **kwargs):
        super().__init__(**kwargs)
        self.more = more


CLASSES = [ActConfig, DeepActConfig, DataOfActConfig, ActOfDataConfig, ActOfDataOfActConfig]


class ActModel(EasyDeLBaseModule):
    def __init__(self, config, rngs=None, **settings):
        super().__init__(config=config, **settings)
        self.layer = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, inputs):
        return getattr(jax.nn, self.config.act)(self.layer(inputs))


@pytest.mark.parametrize("config_class", CLASSES)
def test_json_gives_every_class_back(config_class):
    config = config_class(act="silu", sharding_axis_dims=(2, 4, 1, 1))
    data = json.loads(json.dumps(config.to_dict()))
    assert data["act"] == "silu"
    assert data["model_type"] == config_class.model_type
    again = AutoEasyDeLConfig.from_dict(data)
    assert type(again) is config_class
    assert again == config
    assert hash(again) == hash(config)
    assert vars(again) == vars(config)
    assert AutoEasyDeLConfig.from_hf(config.to_hf()) == config
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("config_class", CLASSES)
def test_unlike_configs_are_not_equal(config_class):
    config = config_class()
    other = config.replace(act="elu")
    assert other != config
    assert other.act == "elu"
    assert type(other) is config_class
    assert other.model_type == config.model_type
    assert other.replace(act=config.act) == config


def test_a_parents_own_init_runs_for_a_dataclass():
    assert DataOfActConfig(width=6).half == 3
    assert ActOfDataOfActConfig(width=6).half == 3
    assert ActOfDataOfActConfig(depth=7, act="relu", more=2).to_dict().items() >= {
        ("depth", 7),
        ("act", "relu"),
        ("more", 2),
    }


def test_positional_arguments_are_taken():
    assert ActConfig("relu", 6) == ActConfig(act="relu", width=6)


def test_mutable_defaults_are_shared_by_none():
    config = ActConfig()
    assert config.widths == (8, 8)
    with pytest.raises(TypeError):
        config.scaling["kind"] = "linear"
    mine = {"kind": "linear"}
    other = ActConfig(scaling=mine, widths=[1])
    mine["kind"] = "none"
    assert other.scaling["kind"] == "linear"
    assert ActConfig().scaling == {"kind": "none"}


def test_assignment_after_init_is_refused_with_the_mend():
    config = ActConfig()
    with pytest.raises(FrozenInstanceError, match=r"ActConfig\.act.*replace\(act="):
        config.act = "relu"
    with pytest.raises(FrozenInstanceError, match=r"'late' a field"):
        config.late = 1
    with pytest.raises(FrozenInstanceError):
        del config.act
    with pytest.raises(FrozenInstanceError):
        DataOfActConfig().late = 1

    class Bare(DataConfig):
        pass

    with pytest.raises(FrozenInstanceError, match="'late' a field"):
        Bare().late = 1


def test_saved_state_has_the_config_back(tmp_path):
    config = ActConfig(act="relu", widths=[3], scaling={"kind": "linear", "by": [1.5, 2.0]})
    model = ActModel(config, rngs=nnx.Rngs(0))
    state = EasyDeLState.create(model=model)
    state.save_state(tmp_path / "run", wait=True, verbose=False, mismatch_allowed=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    assert loaded.module_config == config
    assert loaded.module_config.act == "relu"
    changed = EasyDeLState.load_state(
        tmp_path / "run", verbose=False, config_kwargs={"act": "gelu"}
    )
    assert changed.module_config == config.replace(act="gelu")
    assert jax.jit(lambda c: 0, static_argnums=0)(config) == 0


def test_classes_that_cannot_be_made_again_are_refused_when_they_are_defined():
    with pytest.raises(ConfigError, match=r"Closed\.__init__.*no \*\*kwargs"):

        class Closed(EDPretrainedConfig):
            model_type = "closed-of-the-tests"

            def __init__(self, act="tanh"):
                super().__init__()
                self.act = act

    assert "closed-of-the-tests" not in AutoEasyDeLConfig.known_model_types()
    with pytest.raises(ConfigError, match="'rest' can't be given by name"):

        class Positional(EDPretrainedConfig):
            def __init__(self, *rest, **kwargs):
                super().__init__(**kwargs)

    with pytest.raises(ConfigError, match="'mesh' is a method or property"):

        class Hides(EDPretrainedConfig):
            def __init__(self, mesh=None, **kwargs):
                super().__init__(**kwargs)


def test_parameters_that_init_does_not_keep_are_named():
    class Forgets(EDPretrainedConfig):
        def __init__(self, act="tanh", **kwargs):
            super().__init__(**kwargs)
            self.activation = act

    with pytest.raises(ConfigError, match="no attribute 'act'"):
        Forgets()


def test_keywords_that_init_drops_or_pops_are_named():
    class Drops(EDPretrainedConfig):
        def __init__(self, act="tanh", **kwargs):
            super().__init__()
            self.act = act

    class Pops(EDPretrainedConfig):
        def __init__(self, **kwargs):
            self.act = kwargs.pop("act", "tanh")
            super().__init__(**kwargs)

    assert Drops().act == "tanh"
    with pytest.raises(ConfigError, match=r"sharding_axis_dims=\(2, 4, 1, 1\).*came to nothing"):
        Drops(sharding_axis_dims=(2, 4, 1, 1))
    with pytest.raises(ConfigError, match=r"act='relu'.*came to nothing"):
        Pops(act="relu")
    with pytest.raises(TypeError, match="wings"):
        ActConfig(wings=2)


def test_init_that_changes_its_arguments_each_time_is_refused_before_anything_is_lost():
    class Doubles(EDPretrainedConfig):
        def __init__(self, width=3, **kwargs):
            super().__init__(**kwargs)
            self.width = 2 * width

    with pytest.raises(ConfigError, match="width=6 would come back as 12"):
        Doubles().to_dict()
    with pytest.raises(ConfigError, match="width=6 would come back as 12"):
        Doubles().replace(model_type="x")


def test_what_init_gives_its_parent_by_name_is_no_parameter_and_refused():
    class Fixed(EDPretrainedConfig):
        def __init__(self, act="tanh", **kwargs):
            super().__init__(model_type="fixed", **kwargs)
            self.act = act

    with pytest.raises(ConfigError, match=r"multiple values.*model_type.*a parameter of its own"):
        Fixed().to_dict()
    with pytest.raises(ConfigError, match="a parameter of its own"):
        Fixed().replace(act="relu")


def test_tokenizer_files_go_along():
    config = ActConfig(act="relu").replace(tokenizer_files={"tokenizer.json": b"{}"})
    assert config.tokenizer_files == {"tokenizer.json": b"{}"}
    assert config == ActConfig(act="relu")
    assert "tokenizer_files" not in config.to_dict()
    assert config.replace(act="elu").tokenizer_files == config.tokenizer_files


def test_values_that_json_cannot_hold_are_refused():
    with pytest.raises(ArgumentError, match=r"ActConfig\.scaling"):
        ActConfig(scaling={"kind": object()})


def test_problems_are_found_once_all_fields_are_there():
    class Checked(ActConfig):
        def problems(self):
            return [*super().problems(), *(["width is odd"] if self.width % 2 else [])]

    assert Checked(width=4).width == 4
    with pytest.raises(ConfigError, match="width is odd"):
        Checked(width=3)
