"""EasyDeLState.load_state: the quantization arguments."""

import numpy as np
import pytest
from flax import nnx

from cairn import (
    ArgumentError,
    Checkpointer,
    EasyDeLPlatforms,
    EasyDeLQuantizationMethods,
    EasyDeLState,
)
from tests.contract.subjects import TX, assert_same_bits, host, make_decoder
from tests.state.forward import logits_of

SMALL = make_decoder().config.replace(num_hidden_layers=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a decoder in float32 and AdamW."""
    run = tmp_path_factory.mktemp("quantized") / "run"
    make_decoder(SMALL).to_state(TX).save_state(run, wait=True, verbose=False)
    Checkpointer.for_run(run).close()
    return run


def load(run, method="nf4", **arguments):
    given = {"quantization_method": method, "optimizer": "skip", "verbose": False, **arguments}
    return EasyDeLState.load_state(run, **given)


def packed_layers(model):
    """Names of the layers whose kernels are stored as integers."""
    paths = [path for path in host(nnx.state(model)) if path.endswith("qvalue")]
    return {path.split("/kernel")[0].rsplit("/", 1)[-1] for path in paths}


@pytest.mark.parametrize("quantization_method", ["nf4", EasyDeLQuantizationMethods.INT8])
def test_quantization_method_gives_what_quantize_gives(run, quantization_method):
    loaded = load(run, quantization_method)
    assert loaded.model.is_quantized
    expected = make_decoder(SMALL).quantize(quantization_method, 128)
    assert_same_bits(nnx.state(loaded.model), nnx.state(expected))


def test_quantization_method_must_be_known(run):
    with pytest.raises(ArgumentError, match=r"quantization_method: expected one of 'nf4'"):
        load(run, "gptq")


@pytest.mark.parametrize("quantization_block_size", [32, 64])
def test_quantization_block_size_is_how_many_inputs_share_a_scale(run, quantization_block_size):
    loaded = load(run, quantization_block_size=quantization_block_size)
    expected = make_decoder(SMALL).quantize("nf4", quantization_block_size)
    assert loaded.model.quantization.group_size == quantization_block_size
    assert_same_bits(nnx.state(loaded.model), nnx.state(expected))


def test_quantization_pattern_chooses_the_layers(run):
    loaded = load(run, quantization_pattern="q_proj|up_proj")
    assert packed_layers(loaded.model) == {"q_proj", "up_proj"}


@pytest.mark.parametrize("quantize_tensors", [True, False])
def test_quantize_tensors_false_contradicts_a_method(run, quantize_tensors):
    if quantize_tensors:
        assert load(run, quantize_tensors=True).model.is_quantized
        return
    with pytest.raises(ArgumentError, match="quantize_tensors: expected True"):
        load(run, quantize_tensors=False)
    plain = EasyDeLState.load_state(run, quantize_tensors=False, optimizer="skip", verbose=False)
    assert not plain.model.is_quantized


@pytest.mark.parametrize("quantization_platform", [EasyDeLPlatforms.JAX, "cpu", "tpu", "abacus"])
def test_quantization_platform_must_be_the_one_in_use(run, quantization_platform):
    if quantization_platform in ("jax", "cpu"):
        loaded = load(run, quantization_platform=quantization_platform)
        assert_same_bits(nnx.state(loaded.model), nnx.state(load(run).model))
        return
    with pytest.raises(ArgumentError, match=f"platform: expected.*{quantization_platform}"):
        load(run, quantization_platform=quantization_platform)


@pytest.mark.parametrize(
    "argument",
    [
        {"quantization_block_size": 64},
        {"quantization_pattern": "q"},
        {"quantization_platform": "jax"},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_without_a_method_the_others_contradict(run, argument):
    (name,) = argument
    with pytest.raises(ArgumentError, match=f"{name}: expected quantization_method with it"):
        load(run, None, **argument)


def test_a_quantized_checkpoint_stays_as_it_is_stored(run, tmp_path):
    state = load(run)
    state.save_state(tmp_path / "r", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "r").close()
    again = EasyDeLState.load_state(tmp_path / "r", verbose=False)
    assert_same_bits(nnx.state(again.model), nnx.state(state.model))
    ids = np.zeros((1, 4), np.int32)
    np.testing.assert_array_equal(logits_of(again.model, ids), logits_of(state.model, ids))
