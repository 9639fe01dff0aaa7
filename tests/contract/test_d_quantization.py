"""EasyDeLBaseModule.quantize: each method, its group size and its pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import ArgumentError, Checkpointer, EasyDeLQuantizationMethods, EasyDeLState
from tests.contract.subjects import SAME_MESH, assert_same_bits, host, make_decoder
from tests.state.forward import logits_of
from tests.state.my_model import batch

BITS = {"nf4": 4, "8bit": 8, "a8bit": 8, "a8q": 8, "a4q": 4, "aqt": 8}


def quantized(method="nf4", **arguments):
    return make_decoder().quantize(method=method, **arguments)


def logits(model):
    return logits_of(model, batch(2, 8))


def kernels(model):
    """Paths of kernels that are stored as floats, and of those stored as integers."""
    leaves = host(nnx.state(model, nnx.Param))
    packed = {path.split("/kernel")[0] for path in leaves if path.endswith("qvalue")}
    floats = {path.split("/kernel")[0] for path in leaves if path.endswith("/kernel")}
    return floats, packed


@pytest.fixture(scope="module")
def exact():
    return logits(make_decoder())


@pytest.mark.parametrize("method", ["nf4", "8bit", "a8bit", "a8q", "a4q"])
def test_quantize_by_each_method_stays_near_the_float_model(method, exact):
    model = make_decoder()
    assert model.quantize(method=method) is model
    assert model.is_quantized
    error = np.abs(logits(model) - exact).max() / np.abs(exact).max()
    assert 0 < error < {4: 0.35, 8: 0.05}[BITS[method]]
    bits = np.dtype(host_values(model).dtype)
    assert jnp.iinfo(bits).bits == BITS[method]


def host_values(model):
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves = jax.tree.leaves_with_path(state)
    return next(leaf for path, leaf in leaves if "qvalue" in str(path))


def test_no_two_methods_give_the_same_numbers():
    found = {method: logits(quantized(method)).tobytes() for method in BITS}
    assert len(set(found.values())) == len(BITS)


def test_easydelquantizationmethods_aqt_maps_too(exact):
    model = quantized(EasyDeLQuantizationMethods.AQT)
    assert model.is_quantized
    assert model.quantization.method is EasyDeLQuantizationMethods.AQT
    assert np.abs(logits(model) - exact).max() < 0.05 * np.abs(exact).max()


def test_method_must_be_a_known_one():
    with pytest.raises(ArgumentError, match=r"expected one of .*'nf4'.*found 'gptq'"):
        make_decoder().quantize(method="gptq")


def test_group_size_is_how_many_weights_share_a_scale(exact):
    errors = {}
    for group_size in (16, 64):
        model = quantized("nf4", group_size=group_size)
        assert model.quantization.group_size == group_size
        errors[group_size] = np.abs(logits(model) - exact).mean()
        scales = [
            leaf.size for path, leaf in host(nnx.state(model)).items() if "array/scale" in path
        ]
        errors["scales", group_size] = sum(scales)
    assert errors["scales", 16] == 4 * errors["scales", 64]
    assert errors[16] < errors[64]


def test_quantization_pattern_chooses_the_layers():
    model = quantized("nf4", quantization_pattern="q_proj|v_proj")
    floats, packed = kernels(model)
    assert packed
    assert all(path.endswith(("q_proj", "v_proj")) for path in packed)
    assert not any(path.endswith(("q_proj", "v_proj")) for path in floats)
    assert any(path.endswith("k_proj") for path in floats)


@pytest.mark.parametrize("method", ["nf4", "8bit"])
def test_load_state_with_a_quantization_method_quantizes_while_loading(method, tmp_path):
    make_decoder().to_state().save_state(tmp_path / "r", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "r").close()
    loaded = EasyDeLState.load_state(
        tmp_path / "r", quantization_method=method, quantization_block_size=64, verbose=False
    )
    assert loaded.model.is_quantized
    assert_same_bits(nnx.state(loaded.model), nnx.state(quantized(method, group_size=64)))


def test_a_quantized_state_is_restored_bit_for_bit(tmp_path):
    state = quantized("nf4").shard_model().to_state()
    state.save_state(tmp_path / "r", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "r").close()
    loaded = EasyDeLState.load_state(tmp_path / "r", **SAME_MESH)
    assert loaded.graphdef == state.graphdef
    assert_same_bits(loaded.graphstate, state.graphstate)
