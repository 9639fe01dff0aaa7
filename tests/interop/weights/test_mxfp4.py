"""Models in MXFP4, as gpt-oss is published, are imported as what their weights stand for."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from cairn import ConversionError, DecoderForCausalLM
from cairn.interop.weights.files import open_pretrained
from tests.interop.families.known.test_gpt_oss import EXPERTS
from tests.interop.families.matrix import SIZES, tiny
from tests.interop.weights.quantized_folders import (
    FILE,
    FOUR_BITS,
    MXFP4_CONFIG,
    edit_config,
    edit_tensors,
    in_mxfp4,
    is_mxfp4,
    quantize,
)
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits

NAME = "model.layers.1.mlp.experts.gate_up_proj"
OTHER = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss") / "plain"
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
    tiny("gpt_oss", **{**sizes, **EXPERTS, "sliding_window": 9}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    def change(name, tensor):
        if not is_mxfp4(name):
            return {name: tensor}
        blocks, scales = in_mxfp4(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    return quantize(plain, tmp_path_factory.mktemp("mxfp4") / "mxfp4", change, MXFP4_CONFIG)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "mxfp4")


def dequantized(folder):
    tensors = load_file(folder / FILE)
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            codes = torch.stack([tensor % 16, tensor // 16], -1).flatten(-2).long()
            powers = 2.0 ** (tensors[f"{base}_scales"].float() - 127)
            values = FOUR_BITS[codes] * powers[..., None]
            found[base] = values.flatten(2).transpose(1, 2).contiguous()
        elif not name.endswith("_scales"):
            found[name] = tensor
    return found


def test_every_weight_is_its_code_times_a_power_of_two(plain, whole):
    expected = dequantized(whole)
    weights = open_pretrained(whole, dequantized_dtype=np.dtype(np.float32)).weights
    original = load_file(plain / FILE)
    assert weights.shapes == {name: tuple(one.shape) for name, one in original.items()}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights.read(name), tensor.numpy(), err_msg=name)
    assert (expected[NAME] - original[NAME]).abs().max() < 0.3
    kept = open_pretrained(whole, dequantized_dtype=None).weights.read(NAME)
    np.testing.assert_array_equal(kept.astype(np.float32), expected[NAME])  # bfloat16 holds them


def test_every_code_and_every_exponent_is_what_transformers_says(folder, plain):
    """All bytes, all scales, through the loader of transformers."""
    numbers = np.random.default_rng(0)
    stored = load_file(folder / FILE)
    shape = stored[f"{NAME}_scales"].shape
    scales = np.resize(numbers.permutation(np.arange(60, 190, dtype=np.uint8)), shape)
    blocks = numbers.integers(0, 256, (*shape, 16), dtype=np.uint8)
    edit_tensors(
        folder,
        **{f"{NAME}_blocks": torch.from_numpy(blocks), f"{NAME}_scales": torch.from_numpy(scales)},
    )
    theirs = loaded_by_transformers(folder).state_dict()[NAME].numpy()
    weights = open_pretrained(folder, dequantized_dtype=np.dtype(np.float32)).weights
    np.testing.assert_array_equal(weights.read(NAME), theirs)


def loaded_by_transformers(folder):
    asked = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=asked, attn_implementation="eager"
    ).eval()


def test_logits_equal_what_transformers_makes_of_the_same_folder(whole):
    theirs = loaded_by_transformers(whole)
    expected = dequantized(whole)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = tokens(2, 24)
    logits = torch_logits(theirs, ids)
    found = logits_of(DecoderForCausalLM.from_pretrained(whole), ids)
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()


def test_an_export_is_plain(folder, tmp_path):
    edit_config(folder, dtype="bfloat16")
    DecoderForCausalLM.from_pretrained(folder, param_dtype=None).save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported, expected = load_file(tmp_path / "out" / FILE), dequantized(folder)
    assert exported.keys() == expected.keys()
    assert torch.equal(exported[NAME], expected[NAME].bfloat16())


def test_what_is_not_converted_passes_through(folder):
    """Experts of one layer as they are, beside those of others in four bits."""
    tensor = dequantized(folder)[OTHER]
    edit_tensors(folder, **{f"{OTHER}_blocks": None, f"{OTHER}_scales": None, OTHER: tensor})
    weights = open_pretrained(folder).weights
    assert (weights.dtypes[OTHER].name, weights.dtypes[NAME].name) == ("float32", "float32")
    np.testing.assert_array_equal(weights.read(OTHER), tensor)


def test_the_smallest_and_the_largest_scale_are_the_formats(folder):
    stored = load_file(folder / FILE)
    scales = torch.full_like(stored[f"{NAME}_scales"], 0)
    scales[0] = 254
    edit_tensors(folder, **{f"{NAME}_scales": scales})
    found = open_pretrained(folder, dequantized_dtype=np.dtype(np.float32)).weights.read(NAME)
    np.testing.assert_array_equal(found, dequantized(folder)[NAME])
    assert 0 < np.abs(found[1:]).max() < 1e-37
    assert np.isinf(found[0]).any()


def test_a_scale_that_is_no_number_is_refused(folder):
    scales = load_file(folder / FILE)[f"{NAME}_scales"]
    scales[1, 2, 0] = 255
    edit_tensors(folder, **{f"{NAME}_scales": scales})
    with pytest.raises(ConversionError, match=rf"NaN \(255\) in {NAME}_scales") as caught:
        DecoderForCausalLM.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_all_that_is_wrong_with_blocks_and_scales_is_listed(folder):
    stored = load_file(folder / FILE)
    layers = [f"model.layers.{number}.mlp.experts" for number in range(3)]
    edit_tensors(
        folder,
        **{
            f"{layers[0]}.down_proj_scales": None,
            f"{layers[0]}.gate_up_proj_blocks": None,
            f"{layers[1]}.down_proj_scales": torch.ones(5, 64, 4, dtype=torch.uint8),
            f"{layers[1]}.gate_up_proj": torch.ones(5, 64, 192),
            f"{layers[2]}.down_proj_blocks": stored[f"{layers[2]}.down_proj_blocks"].to(torch.int8),
            f"{layers[2]}.gate_up_proj_blocks": torch.ones(5, 192, 32, dtype=torch.uint8),
        },
    )
    with pytest.raises(ConversionError, match="a scale for each quantized tensor") as caught:
        DecoderForCausalLM.from_pretrained(folder)
    assert sorted(caught.value.problems) == sorted(
        [
            f"{layers[0]}.down_proj_scales: missing",
            f"{layers[0]}.gate_up_proj_blocks: missing",
            f"{layers[1]}.down_proj_scales: expected [5, 64, 3], found [5, 64, 4]",
            f"{layers[1]}.gate_up_proj: there in four bits, and as it is too",
            f"{layers[2]}.down_proj_blocks: expected uint8, found int8",
            f"{layers[2]}.gate_up_proj_blocks: expected [experts, out, in/32, 16], found "
            "[5, 192, 32]",
        ]
    )
