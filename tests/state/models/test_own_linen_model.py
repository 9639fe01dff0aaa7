"""A Linen model of a made-up family: trained, saved, loaded, exported; no NNX class is written."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from cairn import (
    ArgumentError,
    CheckpointReader,
    ConfigError,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    EDPretrainedModel,
    Run,
    ShardingError,
    TrainState,
    TrainStep,
    TreeStructureError,
    make_optimizer,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources
from tests.programs.program import run

MESH = {"auto_shard_model": True, "sharding_axis_dims": (1, 4, 2, 1)}


@dataclass(frozen=True, kw_only=True)
class WaveConfig(EDPretrainedConfig):
    model_type: str = "wave-of-the-tests"
    vocab_size: int = 32
    hidden_size: int = 16
    depth: int = 2


class Block(linen.Module):
    width: int
    dtype: jnp.dtype

    @linen.compact
    def __call__(self, hidden):
        axes = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        wide = linen.Dense(2 * self.width, kernel_init=axes, dtype=self.dtype, name="up")(hidden)
        return hidden + linen.Dense(self.width, dtype=self.dtype, name="down")(jnp.sin(wide))


class Wave(linen.Module):
    config: WaveConfig
    dtype: jnp.dtype = jnp.float32

    @linen.compact
    def __call__(self, input_ids, scale=1.0):
        config = self.config
        table = linen.Embed(config.vocab_size, config.hidden_size, dtype=self.dtype, name="tokens")
        hidden = table(input_ids) * jnp.asarray(scale, self.dtype)
        for number in range(config.depth):
            hidden = Block(config.hidden_size, self.dtype, name=f"block_{number}")(hidden)
        gain = self.param("gain", linen.initializers.ones, (config.hidden_size,))
        return table.attend(hidden * gain.astype(self.dtype)[None, None, :])


class WaveModel(EDPretrainedModel):
    module_class = Wave

    def __call__(self, input_ids, scale=1.0, params=None):
        return self.module.apply({"params": self._fitting(params)}, input_ids, scale)


IDS = jax.random.randint(jax.random.key(1), (8, 6), 0, 32, dtype=jnp.int32)
NAMES = {
    "gain",
    "tokens.embedding",
    *(
        f"block_{number}.{layer}.{leaf}"
        for number in (0, 1)
        for layer in ("up", "down")
        for leaf in ("kernel", "bias")
    ),
}


def wave(seed=0, **options):
    return WaveModel(WaveConfig(sharding_axis_dims=(1, 4, 2, 1)), seed=seed, **options)


def loss_fn(state, params, ids):
    return state.merge(params)(input_ids=ids, labels=ids).loss


def same(one, other):
    structures = [jax.tree.structure(tree) for tree in (one, other)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with step 3 of a sharded state, and the state at steps 3 and 5."""
    uri = tmp_path_factory.mktemp("linen") / "run"
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    state = wave().to_easydel_state(tx=tx, tx_init=tx_init).shard_state()
    step = TrainStep(loss_fn, donate=False)
    losses = []
    for _ in range(3):
        state, metrics = step(state, IDS)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    state.save_state(uri, wait=True, verbose=False, mismatch_allowed=False)
    later = state
    for _ in range(2):
        later, _ = step(later, IDS)
    return uri, state, later, step


def test_a_state_goes_on_after_a_load_as_if_it_had_never_stopped(trained):
    uri, state, later, step = trained
    for options in ({}, {"model_class": WaveModel}):
        loaded = EasyDeLState.load_state(uri, **MESH, **options, verbose=False)
        same((loaded.graphstate, loaded.opt_state), (state.graphstate, state.opt_state))
    kernel = loaded.params["block_0"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size < kernel.size
    for _ in range(2):
        loaded, _ = step(loaded, IDS)
    same((loaded.graphstate, loaded.opt_state), (later.graphstate, later.opt_state))
    assert step.traces == 1
    back = WaveModel.from_nnx(EasyDeLState.load_state(uri, verbose=False).model)
    np.testing.assert_allclose(back(IDS, 0.5), later.model(IDS, 0.5), atol=1)
    same(back.params, jax.tree.map(jnp.asarray, jax.device_get(state.params)))


def test_it_is_exported_and_loaded_back_under_its_own_names(trained, tmp_path):
    uri, state, _, _ = trained
    model = WaveModel.from_nnx(EasyDeLState.load_state(uri, verbose=False).model)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "half", float_dtype="bfloat16", max_shard_size="2KB")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    assert tensors.keys() == NAMES
    np.testing.assert_array_equal(
        tensors["block_1.down.kernel"], state.params["block_1"]["down"]["kernel"]
    )
    for again in (
        WaveModel.from_pretrained(tmp_path / "whole", auto_shard_model=False),
        WaveModel.from_pretrained(str(uri), auto_shard_model=False),
        WaveModel.from_nnx(
            EasyDeLState.load_state(tmp_path / "whole", model_class=WaveModel, verbose=False).model
        ),
        WaveModel.from_nnx(
            EasyDeLState.from_pretrained(
                tmp_path / "whole", model_class=WaveModel, auto_shard_model=False
            ).model
        ),
    ):
        assert type(again) is WaveModel
        assert again.config.depth == 2
        same(again.params, model.params)
        np.testing.assert_array_equal(again(IDS), model(IDS))
    half = WaveModel.from_pretrained(tmp_path / "half", param_dtype=None, auto_shard_model=False)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.params)} == {"bfloat16"}


def test_a_checkpoint_is_converted_without_jax_under_the_same_names(trained):
    uri, state, _, _ = trained
    stored = Run.open(str(uri))
    (info,) = stored.steps()
    reader = CheckpointReader.open(stored.step_uri(info), stored.manifest(info))
    sources, config = export_sources(stored.manifest(info), reader)
    assert {source.name for source in sources} == NAMES
    assert config["model_type"] == "wave-of-the-tests"
    found = {source.name: whole(source) for source in sources}
    np.testing.assert_array_equal(found["gain"], state.params["gain"])


def test_the_linen_form_and_the_state_compute_the_same():
    model = wave(3)
    state = model.to_easydel_state()
    np.testing.assert_allclose(state.model(IDS), model(IDS), rtol=1e-6)
    np.testing.assert_allclose(state.model(IDS, scale=2.0), model(IDS, 2.0), rtol=1e-6)
    assert (
        state.model.get_static_arguments()
        == WaveModel.nnx_class()(model.config).get_static_arguments()
    )
    assert not state.model.can_generate()
    linen_state = TrainState.create(params=model.params, tx=optax.sgd(0.1), apply_fn=model)
    same(linen_state.params, state.params)
    other = wave(4, dtype=jnp.bfloat16)
    assert other.to_nnx()(IDS).dtype == "bfloat16"
    assert WaveModel.from_nnx(other.to_nnx()).dtype == "bfloat16"
    given = model.to_nnx(params=other.params)
    same(WaveModel.from_nnx(given).params, other.params)
    with pytest.raises(TreeStructureError, match="gain: missing"):
        model.to_nnx(params={"tokens": model.params["tokens"]})


def test_a_class_with_an_init_of_its_own_needs_no_module_class(tmp_path):
    class Deep(EDPretrainedModel):
        def __init__(self, config, input_shape=(1, 2), seed=0, dtype=jnp.float32, _do_init=True):
            super().__init__(config, Wave(config, dtype), input_shape, seed, dtype, _do_init)

        def __call__(self, input_ids, labels=None, params=None):
            logits = self.module.apply({"params": self._fitting(params)}, input_ids)
            return {"logits": logits, "loss": None if labels is None else jnp.float32(labels.sum())}

    model = Deep(WaveConfig(depth=1))
    state = model.to_easydel_state()
    assert float(state.model(IDS, labels=IDS)["loss"]) == int(IDS.sum())  # its own, not ours
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    again = EasyDeLBaseModule.from_pretrained(str(tmp_path / "run"), auto_shard_model=False)
    same(Deep.from_nnx(again).params, model.params)


def test_what_could_not_be_rebuilt_is_refused():
    class Silent(EDPretrainedModel):
        def __call__(self, input_ids, params=None):
            return self.module.apply({"params": self._fitting(params)}, input_ids)

    config = WaveConfig(depth=1)
    with pytest.raises(NotImplementedError, match="Silent does not define module_class"):
        Silent(config)
    silent = Silent(config, Wave(config))
    with pytest.raises(NotImplementedError, match="Silent does not define module_class"):
        silent.to_easydel_state()
    other = WaveModel(config, Wave(config.replace(hidden_size=8)))
    with pytest.raises(ArgumentError, match=r"to_nnx: expected the module that WaveModel"):
        other.to_easydel_state()
    with pytest.raises(ArgumentError, match=r"from_nnx: expected what to_nnx of a Wave"):
        WaveModel.from_nnx(None)

    class Needy(EDPretrainedModel):
        def __init__(self, config, width, dtype=jnp.float32, _do_init=True):
            super().__init__(config, Wave(config, dtype), dtype=dtype, _do_init=_do_init)

    with pytest.raises(ConfigError, match=r"Needy.__init__: .*found missing .* 'width'"):
        Needy(config, 4).to_easydel_state()

    class Taken(linen.Module):
        config: WaveConfig
        dtype: jnp.dtype = jnp.float32

        @linen.compact
        def __call__(self, input_ids):
            return linen.Embed(4, 4, name="config")(input_ids) + linen.Embed(4, 4, name="half")(
                input_ids
            )

    class TakenModel(EDPretrainedModel):
        module_class = Taken

    with pytest.raises(ConfigError, match=r"other use for; found config, half"):
        TakenModel(config).to_nnx()


def test_a_precision_that_the_linen_module_would_not_hear_of_is_refused(trained, tmp_path):
    uri = trained[0]
    with pytest.raises(ArgumentError, match="WaveModel: precision: expected None"):
        EasyDeLState.load_state(uri, precision="highest", verbose=False)
    wave().save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="WaveModel: precision: expected None"):
        WaveModel.from_pretrained(tmp_path, precision="highest")
    half = WaveModel.from_pretrained(tmp_path, dtype="bfloat16", auto_shard_model=False)
    assert half(IDS).dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.params)} == {"float32"}


def test_rules_of_the_config_place_it_too():
    @dataclass(frozen=True, kw_only=True)
    class RuledConfig(WaveConfig):
        model_type: str = "ruled-wave-of-the-tests"

        def get_partition_rules(self):
            return (("embedding", PartitionSpec("fsdp")), (".*", PartitionSpec()))

    model = WaveModel(RuledConfig(sharding_axis_dims=(1, 8, 1, 1)))
    state = model.to_easydel_state().shard_state()
    table = state.params["tokens"]["embedding"]
    assert table.addressable_shards[0].data.shape == (4, 16)


def test_another_process_loads_it_once_the_class_is_defined(trained):
    uri, state, _, _ = trained
    code = f"""
from cairn import EasyDeLState
from cairn.interop.errors import InteropError
try:
    EasyDeLState.load_state({str(uri)!r}, verbose=False)
except InteropError as error:
    assert "import the module that defines it" in str(error) or "model_type" in str(error), error
else:
    raise SystemExit("loaded what is not defined")
import tests.state.models.test_own_linen_model as defined
state = EasyDeLState.load_state({str(uri)!r}, verbose=False)
assert int(state.step) == 3
assert isinstance(state.model, defined.WaveModel.nnx_class())
"""
    done = run(["-c", code], timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(state.step) == 3


class Averaging(linen.Module):
    """Has running averages, as a ResNet has, and a variable of its own."""

    config: WaveConfig
    dtype: jnp.dtype = jnp.float32

    @linen.compact
    def __call__(self, input_ids):
        hidden = linen.Embed(self.config.vocab_size, 8, name="tokens")(input_ids)
        hidden = linen.BatchNorm(use_running_average=True, name="norm")(hidden)
        return hidden * self.variable("scales", "scale", lambda: jnp.float32(2)).value


class Sowing(linen.Module):
    """Writes to collections that it does not read."""

    config: WaveConfig
    dtype: jnp.dtype = jnp.float32
    activation: object = jnp.sin

    @linen.compact
    def __call__(self, input_ids):
        hidden = linen.Embed(self.config.vocab_size, 8, name="tokens")(input_ids)
        hidden = linen.Dropout(0.5, deterministic=not self.has_rng("dropout"))(hidden)
        zero, add = (lambda: jnp.float32(0)), (lambda one, other: one + other)
        self.sow("losses", "spread", hidden.std(), init_fn=zero, reduce_fn=add)
        self.sow("intermediates", "hidden", hidden)
        return self.activation(hidden)


def test_variables_that_would_be_lost_are_refused_by_name(tmp_path):
    class AveragingModel(EDPretrainedModel):
        module_class = Averaging

        def __call__(self, input_ids, params=None):
            rest = {"batch_stats": {}, "scales": {}}
            variables = {"params": self._fitting(params), **rest}
            return self.module.apply(variables, input_ids, mutable=list(rest))[0]

    model = AveragingModel(WaveConfig())
    said = r"batch_stats: norm/mean, norm/var; scales: scale; use layers without them"
    for make in (
        model.to_easydel_state,
        lambda: model.save_pretrained(tmp_path / "hf"),
        lambda: AveragingModel.nnx_class()(model.config),
    ):
        with pytest.raises(ConfigError, match=said):
            make()
    assert not (tmp_path / "hf").exists()


def test_collections_that_are_only_written_and_functions_made_anew_are_no_matter(tmp_path):
    class SowingModel(WaveModel):
        @classmethod
        def module_class(cls, config, dtype):
            return Sowing(config, dtype, activation=functools.partial(jnp.multiply, 2.0))

        def __call__(self, input_ids, params=None):
            return self.module.apply({"params": self._fitting(params)}, input_ids)

    model = SowingModel(WaveConfig())
    state = model.to_easydel_state()
    state.save_state(tmp_path / "run", wait=True, verbose=False)
    loaded = EasyDeLState.load_state(tmp_path / "run", verbose=False)
    same(loaded.graphstate, state.graphstate)
    np.testing.assert_array_equal(loaded.model(IDS), model(IDS))
    other = SowingModel(WaveConfig(), Sowing(WaveConfig(), activation=lambda hidden: hidden))
    with pytest.raises(ArgumentError, match="functions that are made anew each time differ too"):
        other.to_easydel_state()


def test_names_of_mesh_axes_place_it_as_names_of_dimensions_do():
    def module(config, dtype, axes):
        normal = linen.initializers.normal()

        class Placed(linen.Module):
            @linen.compact
            def __call__(self, input_ids):
                init = linen.with_partitioning(normal, axes)
                return self.param("table", init, (32, 16))[input_ids]

        return Placed()

    def model(axes):
        class PlacedModel(WaveModel):
            module_class = functools.partial(module, axes=axes)

        return PlacedModel(WaveConfig(sharding_axis_dims=(1, 4, 2, 1)))

    for axes, spec in (
        (("tp", None), PartitionSpec("tp")),
        (("vocab", "fsdp"), PartitionSpec("tp", "fsdp")),
        ((("fsdp", "tp"), None), PartitionSpec(("fsdp", "tp"))),
        (("vocab", "tp"), PartitionSpec("tp")),
    ):
        placed = model(axes)
        assert placed.get_named_sharding()["table"].spec == spec
        state = placed.to_easydel_state().shard_state()
        assert state.params["table"].sharding.spec == spec
    with pytest.raises(ShardingError, match="unknown axis name 'rows'"):
        model(("rows", None)).to_easydel_state().shard_state()


def test_a_module_without_parameters_has_none():
    class Empty(linen.Module):
        config: WaveConfig
        dtype: jnp.dtype = jnp.float32

        def __call__(self, input_ids):
            return input_ids * 2

    class EmptyModel(WaveModel):
        module_class = Empty

    assert EmptyModel(WaveConfig()).params == {}


def test_an_attribute_that_the_config_does_not_give_is_refused():
    class Warm(WaveModel):
        temperature = 1.0

        def __call__(self, input_ids, params=None):
            return self.module.apply({"params": self._fitting(params)}, input_ids, self.temperature)

    model = Warm(WaveConfig(), seed=5)
    model.comment = "of no matter"
    np.testing.assert_allclose(model.to_easydel_state().model(IDS), model(IDS), rtol=1e-6)
    model.temperature = 5.0
    with pytest.raises(ArgumentError, match=r"found temperature=5.0, and 1.0 in the other; put"):
        model.to_easydel_state()


def test_a_class_that_a_later_one_hides_is_told_at_the_first_save(tmp_path, caplog):
    def of_sign(sign):
        class Signed(WaveModel):
            def __call__(self, input_ids, params=None):
                return sign * self.module.apply({"params": self._fitting(params)}, input_ids)

        return Signed

    first, second = of_sign(1), of_sign(-1)
    second(WaveConfig()).to_easydel_state().save_state(tmp_path / "b", wait=True, verbose=False)
    assert "defined later" not in caplog.text
    model = first(WaveConfig())
    model.to_easydel_state().save_state(tmp_path / "a", wait=True, verbose=False)
    assert "load_state will make another tests.state.models" in caplog.text
    loaded = EasyDeLState.load_state(tmp_path / "a", model_class=first, verbose=False)
    np.testing.assert_allclose(loaded.model(IDS), model(IDS), rtol=1e-6)
