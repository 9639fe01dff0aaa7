"""What `load_state` would always refuse, the first save refuses, and a saver's first step."""

import logging
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cairn import (
    ConfigError,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    Run,
    RunSaver,
    SaveError,
    SavePolicy,
    TrainState,
)
from tests.state.my_model import MyModel, MyModelConfig, my_model
from tests.state.seams import loadable

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True, kw_only=True)
class NamelessConfig(EDPretrainedConfig):
    size: int = 4


class Nameless(EasyDeLBaseModule):
    def __init__(self, config, rngs, **settings):
        super().__init__(config=config, **settings)
        self.linear = nnx.Linear(config.size, config.size, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class FullerConfig(EDPretrainedConfig):
    model_type: str = "fuller-of-the-tests"


class Fuller(EasyDeLBaseModule):
    """Takes more than a load has."""

    def __init__(self, config, size, rngs, **settings):
        super().__init__(config=config, **settings)
        self.linear = nnx.Linear(size, size, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class MeshedConfig(EDPretrainedConfig):
    model_type: str = "meshed-of-the-tests"


class Meshed(EasyDeLBaseModule):
    """Can be built where a mesh is set, and nowhere else."""

    def __init__(self, config, rngs, **settings):
        super().__init__(config=config, **settings)
        spec = jax.sharding.PartitionSpec("tp")
        self.weight = nnx.Param(jax.lax.with_sharding_constraint(jnp.ones(2), spec))


@dataclass(frozen=True, kw_only=True)
class PickyConfig(EDPretrainedConfig):
    model_type: str = "picky-of-the-tests"


class Picky(EasyDeLBaseModule):
    """Can be built where something is so, and nowhere else."""

    is_so = staticmethod(lambda: True)

    def __init__(self, config, rngs, **settings):
        super().__init__(config=config, **settings)
        self.weight = nnx.Param(jnp.ones(2))
        if not self.is_so():
            raise RuntimeError("not so")


class Counting(MyModel):
    """Keeps numbers that are no arrays."""

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.count = nnx.Variable(0)
        self.seen = nnx.Variable(np.zeros(2))
        self.narrow = nnx.Variable(np.zeros(2, np.float32))


class Plain(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 2)))


def decoder(model_type):
    return DecoderForCausalLM(DecoderConfig(**SIZES, model_type=model_type), rngs=nnx.Rngs(0))


UNLOADABLE = {
    "unknown model_type": (lambda: decoder("mystral"), "found 'mystral'"),
    "no model_type": (lambda: decoder(""), "found ''"),
    "own config without one": (lambda: Nameless(NamelessConfig(), nnx.Rngs(0)), "found ''"),
    "own constructor": (lambda: Fuller(FullerConfig(), 4, nnx.Rngs(0)), "argument: 'size'"),
}


@pytest.fixture(params=UNLOADABLE)
def unloadable(request):
    make, found = UNLOADABLE[request.param]
    return EasyDeLState.create(model=make(), tx=optax.sgd(0.1)), found


@pytest.fixture(autouse=True)
def nothing_checked(monkeypatch):
    monkeypatch.setattr(loadable, "_CHECKED", type(loadable._CHECKED)())


def test_the_first_save_refuses_what_no_load_could_rebuild(unloadable, tmp_path):
    state, found = unloadable
    if "size" in found:  # only building the model tells
        with pytest.raises(SaveError):
            state.save_state(tmp_path / "other", step=1, wait=True, verbose=False)
    for _ in range(2):
        with pytest.raises(ConfigError, match="load_state could not load this") as caught:
            state.save_state(tmp_path / "run", step=1, verbose=False)
        assert found in str(caught.value)
        assert caught.value.next_step
    assert not (tmp_path / "run").exists()


def test_what_only_building_the_model_tells_fails_the_first_save_and_refuses_the_next(tmp_path):
    """It takes a second to build one: nobody waits for that, and nothing is listed before."""
    state = EasyDeLState.create(model=Fuller(FullerConfig(), 4, nnx.Rngs(0)))
    with pytest.raises(SaveError, match="load_state could not load this") as failed:
        state.save_state(tmp_path / "run", verbose=False).wait()
    assert isinstance(failed.value.__cause__, ConfigError)
    for run in ("run", "other"):
        with pytest.raises(ConfigError, match="argument: 'size'"):
            state.save_state(tmp_path / run, verbose=False)
    assert not (tmp_path / "other").exists()
    run = Run.open(tmp_path / "run")
    assert run.steps() == []
    assert not [*(tmp_path / "run").rglob("manifest.ocdbt")]  # nor is what was written kept


@pytest.mark.filterwarnings("ignore:.with mesh.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("setting", [jax.set_mesh, lambda mesh: mesh])
def test_a_model_is_built_where_the_caller_has_set_a_mesh(tmp_path, setting):
    """A mesh is its thread's: another thread could not build a model that needs one."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=auto, devices=jax.devices()[:1])
    with setting(mesh):
        state = EasyDeLState.create(model=Meshed(MeshedConfig(), nnx.Rngs(0)))
        state.save_state(tmp_path / "run", wait=True, verbose=False)
        assert EasyDeLState.load_state(tmp_path / "run", verbose=False).model.weight.shape == (2,)


@contextmanager
def own_variable():
    token = OWN.set(True)
    yield
    OWN.reset(token)


OWN = ContextVar("own", default=False)


@pytest.mark.parametrize(
    ("setting", "is_so"),
    [
        (lambda: jax.enable_x64(True), lambda: jax.config.jax_enable_x64),
        (lambda: jax.default_device(jax.devices()[1]), lambda: jax.config.jax_default_device),
        (own_variable, OWN.get),
    ],
    ids=["x64", "default_device", "ContextVar"],
)
def test_a_model_is_built_as_the_caller_would_build_it(tmp_path, monkeypatch, setting, is_so):
    monkeypatch.setattr(Picky, "is_so", staticmethod(is_so))
    with setting():
        state = EasyDeLState.create(model=Picky(PickyConfig(), nnx.Rngs(0)))
        state.save_state(tmp_path / "run", wait=True, verbose=False)


def test_a_model_that_could_not_be_built_is_tried_again(tmp_path, monkeypatch):
    """It may have failed for lack of memory, or for what the user has put right since."""
    state = EasyDeLState.create(model=Picky(PickyConfig(), nnx.Rngs(0)))
    with monkeypatch.context() as patched:
        patched.setattr(Picky, "is_so", lambda self: False)
        with pytest.raises(SaveError):
            state.save_state(tmp_path / "run", verbose=False).wait()
        with pytest.raises(ConfigError):
            state.save_state(tmp_path / "run", verbose=False)
    state.save_state(tmp_path / "run", wait=True, verbose=False)


def test_the_first_step_of_a_saver_refuses_it_though_nothing_is_due(unloadable, tmp_path):
    state, _ = unloadable
    with (
        RunSaver(tmp_path / "run", SavePolicy(every_steps=1000)) as saver,
        pytest.raises(ConfigError, match="load_state could not load this"),
    ):
        saver.step(state, step=1)


def test_what_is_not_saved_need_not_load(unloadable, tmp_path):
    state, _ = unloadable
    assert state.save_state(tmp_path / "run", step=1, enable=False, verbose=False).done


def test_a_module_without_a_config_is_saved_for_a_train_state(tmp_path):
    state = EasyDeLState.create(model=Plain())
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    form = TrainState.create(params=EasyDeLState.create(model=Plain()).graphstate)
    loaded = TrainState.load_state(tmp_path / "run", form)
    assert loaded.params["weight"].get_value().shape == (2, 2)


def test_only_the_first_save_in_a_process_builds_the_model(tmp_path, monkeypatch):
    built = []
    abstract_model = loadable.abstract_model

    def counting(*args):
        built.append(args)
        return abstract_model(*args)

    monkeypatch.setattr(loadable, "abstract_model", counting)
    state = my_model().to_state(optax.sgd(0.1))
    for run in ("one", "two"):
        for step in (1, 2):
            state.save_state(tmp_path / run, step=step, wait=True, verbose=False)
    with RunSaver(tmp_path / "three", SavePolicy(every_steps=1)) as saver:
        saver.step(state, step=1)
    assert len(built) == 1
    lora = my_model().apply_lora_to_layers(2, 4.0, ".*").to_state(optax.sgd(0.1))
    lora.save_state(tmp_path / "one", step=3, wait=True, verbose=False)
    assert len(built) == 2


def test_a_model_unlike_its_config_is_saved_and_the_log_says_what_a_load_needs(tmp_path, caplog):
    model = my_model()
    model.config = model.config.replace(num_layers=3)
    state = model.to_state(optax.sgd(0.1))
    for step in (1, 2):
        state.save_state(tmp_path / "run", step=step, wait=True, verbose=False)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "load_state will need config_kwargs= or model_class=" in said
    assert "layers/2/kernel: missing" in said
    loaded = EasyDeLState.load_state(
        tmp_path / "run", config_kwargs={"num_layers": 2}, optimizer="skip", verbose=False
    )
    assert isinstance(loaded.model, MyModel)
    assert isinstance(loaded.model.config, MyModelConfig)


def test_variables_that_jax_holds_in_another_dtype_are_refused_at_the_first_save(tmp_path):
    """Each save of them would succeed, and no load."""
    state = EasyDeLState.create(model=Counting(MyModelConfig(), rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="load_state could not load this") as caught:
        state.save_state(tmp_path / "run", verbose=False)
    assert caught.value.problems == (
        "count: int64, of which JAX makes int32",
        "seen: float64, of which JAX makes float32",
    )
    assert not (tmp_path / "run").exists()
    model = state.merge(state.graphstate)
    model.count, model.seen = nnx.Variable(jnp.asarray(3)), nnx.Variable(jnp.ones(2))
    counted = EasyDeLState.create(model=model)
    counted.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", model_class=Counting, verbose=False)
    assert loaded.model.count.get_value() == 3
    with pytest.raises(ConfigError, match="in another dtype"):  # also once its class is known
        state.save_state(tmp_path / "run", step=1, verbose=False)


def test_attributes_that_the_config_does_not_give_are_told_of_at_the_first_save(tmp_path, caplog):
    """They are static, and a load builds the model anew."""
    model = my_model()
    model.noise.rate = 0.25
    model.eval()
    state = model.to_state(optax.sgd(0.1))
    for step in (1, 2):
        state.save_state(tmp_path / "run", step=step, wait=True, verbose=False)
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "make them options of the config, or set them again after a load" in said
    assert "noise/deterministic: True, and False after a load" in said
    assert "noise/rate: 0.25, and 0.0 after a load" in said
    loaded = EasyDeLState.load_state(tmp_path / "run", optimizer="skip", verbose=False)
    assert loaded.model.noise.rate == 0.0
