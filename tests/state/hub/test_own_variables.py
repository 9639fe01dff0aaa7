"""Folders of classes of one's own: all that the model computes with, but no random streams."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from cairn import (
    CheckpointReader,
    ConversionError,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    Run,
)
from cairn.interop.conversion.tensor_streams import whole
from cairn.interop.weights.export import export_sources


@dataclass(frozen=True, kw_only=True)
class AveragingConfig(EDPretrainedConfig):
    model_type: str = "averaging-of-the-tests"
    width: int = 64


class Scale(nnx.Variable):
    pass


class Averaging(EasyDeLBaseModule):
    def __init__(self, config, rngs=None, **settings):
        super().__init__(config=config, **settings)
        width = config.width
        self.layer = nnx.Linear(width, width, param_dtype=self.param_dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, param_dtype=self.param_dtype, rngs=rngs)
        self.scale = Scale(jnp.float32(1))
        self.calls = nnx.Variable(jnp.int32(0))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.streams = nnx.Rngs(noise=3)
        self.drawn = nnx.Variable(jax.random.key(5))

    def __call__(self, inputs):
        self.calls[...] += 1
        return self.dropout(self.norm(self.layer(inputs.astype(self.dtype)))) * self.scale[...]


INPUTS = jax.random.normal(jax.random.key(1), (16, 64)) * 3 + 2
NAMES = {
    *("layer.kernel", "layer.bias", "norm.scale", "norm.bias"),
    *("norm.mean", "norm.var", "scale", "calls"),
}


@pytest.fixture
def model():
    """A model that has seen data."""
    made = Averaging(AveragingConfig(), rngs=nnx.Rngs(0))
    made.train()
    for _ in range(3):
        made(INPUTS)
    made.scale[...] = jnp.float32(3)
    made.eval()
    return made


def same_variables(one, other):
    for name in NAMES:
        layer, _, leaf = name.rpartition(".")
        found = [getattr(getattr(model, layer) if layer else model, leaf) for model in (one, other)]
        assert found[0].dtype == found[1].dtype, name
        np.testing.assert_array_equal(found[0][...], found[1][...], err_msg=name)


def test_averages_and_own_variables_come_back_from_a_folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == NAMES
    for shard in (True, False):
        again = Averaging.from_pretrained(tmp_path, auto_shard_model=shard)
        same_variables(again, model)
        again.eval()
        np.testing.assert_allclose(again(INPUTS), model(INPUTS), rtol=1e-5)
        again.calls[...] -= 1
        model.calls[...] -= 1


def test_a_checkpoint_is_converted_without_jax_to_the_same_tensors(model, tmp_path):
    model.save_pretrained(tmp_path / "folder")
    model.to_state().save_state(tmp_path / "run", wait=True, verbose=False)
    run = Run.open(str(tmp_path / "run"))
    (info,) = run.steps()
    manifest = run.manifest(info)
    sources, _ = export_sources(manifest, CheckpointReader.open(run.step_uri(info), manifest))
    written = load_file(tmp_path / "folder" / "model.safetensors")
    assert {source.name for source in sources} == NAMES
    for source in sources:
        np.testing.assert_array_equal(whole(source), written[source.name], err_msg=source.name)
    again = Averaging.from_pretrained(str(tmp_path / "run"), auto_shard_model=False)
    same_variables(again, model)


def test_what_a_forward_pass_leaves_behind_is_not_written(model, tmp_path):
    model.inputs, model.cache = nnx.Intermediate((INPUTS,)), nnx.Cache(jnp.zeros(3))
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == NAMES
    same_variables(Averaging.from_pretrained(tmp_path, auto_shard_model=False), model)


def test_a_dtype_for_parameters_leaves_other_variables_alone(model, tmp_path):
    model.save_pretrained(tmp_path)
    half = Averaging.from_pretrained(tmp_path, param_dtype="bfloat16", auto_shard_model=False)
    assert half.norm.scale.dtype == half.layer.kernel.dtype == "bfloat16"
    np.testing.assert_array_equal(half.norm.mean[...], model.norm.mean[...])
    assert half.calls.dtype == "int32"
    state = EasyDeLState.load_state(
        tmp_path, model_class=Averaging, param_dtype="bfloat16", verbose=False
    )
    same_variables(state.model, half)


def test_a_quantized_load_has_them_too(model, tmp_path):
    model.save_pretrained(tmp_path)
    small = Averaging.from_pretrained(
        tmp_path, quantization_method="8bit", quantization_pattern="layer", auto_shard_model=False
    )
    assert small.is_quantized
    np.testing.assert_array_equal(small.norm.var[...], model.norm.var[...])
    assert float(small.scale[...]) == 3
    small.save_pretrained(tmp_path / "again", float_dtype="float32")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == NAMES


def test_a_folder_that_lacks_them_is_refused_by_their_names(model, tmp_path):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.mean"], tensors["scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError) as refused:
        Averaging.from_pretrained(tmp_path, auto_shard_model=False)
    assert "norm.mean" in str(refused.value)
    assert "scale" in str(refused.value)


def test_numbers_that_jax_would_hold_otherwise_are_refused_as_in_a_save(model, tmp_path):
    model.seen = nnx.Variable(np.zeros(2))
    model.narrow = nnx.Variable(np.zeros(2, np.float32))
    model.count = nnx.Variable(0)
    with pytest.raises(ConversionError, match="make them arrays in the model") as refused:
        model.save_pretrained(tmp_path)
    assert refused.value.problems == (
        "count: int64, of which JAX makes int32",
        "seen: float64, of which JAX makes float32",
    )
    assert not [*tmp_path.iterdir()]
