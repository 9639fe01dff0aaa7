"""Models in FP8, as DeepSeek V3 is published, are imported as what their weights stand for."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from cairn import ConfigError, ConversionError, DecoderForCausalLM
from cairn.interop.weights.files import open_pretrained
from tests.interop.families.known.test_deepseek_v3 import LATENT
from tests.interop.families.matrix import SIZES, tiny
from tests.interop.weights.quantized_folders import (
    FILE,
    FP8_CONFIG,
    edit_config,
    edit_tensors,
    in_fp8,
    is_fp8,
    quantize,
    spread,
)
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits

ODD = (16, 8)
"""A block that divides few of the model's sizes."""
EVEN = (2, 2)
NAME = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{NAME}_scale_inv"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek") / "plain"
    tiny("deepseek_v3", **{**SIZES, **LATENT}).save_pretrained(folder)
    return folder


def quantized(plain, folder, block):
    def change(name, tensor):
        if not is_fp8(name, tensor):
            return {name: tensor}
        codes, scales = in_fp8(tensor, block)
        return {name: codes, f"{name}_scale_inv": scales}

    return quantize(plain, folder, change, {**FP8_CONFIG, "weight_block_size": [*block]})


@pytest.fixture(scope="module")
def odd(plain, tmp_path_factory):
    return quantized(plain, tmp_path_factory.mktemp("odd") / "fp8", ODD)


@pytest.fixture
def folder(odd, tmp_path):
    return shutil.copytree(odd, tmp_path / "fp8")


def dequantized(folder, block):
    tensors = load_file(folder / FILE)
    return {
        name: tensor.float() * spread(tensors[f"{name}_scale_inv"], block, tensor.shape)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def test_every_weight_is_its_code_times_the_scale_of_its_block(odd):
    expected = dequantized(odd, ODD)
    weights = open_pretrained(odd, dequantized_dtype=np.dtype(np.float32)).weights
    assert weights.shapes == {name: tuple(one.shape) for name, one in expected.items()}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights.read(name), tensor.numpy(), err_msg=name)
    original = weights.read(NAME)
    assert np.abs(original).max() > 0.1


def test_logits_equal_a_model_of_transformers_with_the_dequantized_weights(plain, odd, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "dequantized")
    save_file(dequantized(odd, ODD), folder / FILE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_same_logits(DecoderForCausalLM.from_pretrained(odd), theirs)


def test_logits_equal_what_transformers_makes_of_the_same_folder(plain, tmp_path):
    """It asks for sizes that blocks divide."""
    folder = quantized(plain, tmp_path / "even", EVEN)
    asked = FineGrainedFP8Config(weight_block_size=EVEN, dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=asked
    ).eval()
    assert_same_logits(DecoderForCausalLM.from_pretrained(folder), theirs)


def assert_same_logits(model, theirs):
    ids = tokens(2, 24)
    expected = torch_logits(theirs, ids)
    assert np.abs(logits_of(model, ids) - expected).max() <= 1e-4 * np.abs(expected).max()


def test_an_export_is_plain(folder, tmp_path):
    edit_config(folder, dtype="bfloat16")
    DecoderForCausalLM.from_pretrained(folder, param_dtype=None).save_pretrained(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in said
    exported = load_file(tmp_path / "out" / FILE)
    expected = dequantized(folder, ODD)
    assert exported.keys() == expected.keys()
    assert torch.equal(exported[NAME], expected[NAME].bfloat16())
    assert exported["model.norm.weight"].dtype == torch.float32  # as it was


@pytest.mark.parametrize(
    ("said", "found"), [("float16", "float16"), (None, "bfloat16"), ("auto", "bfloat16")]
)
def test_who_keeps_stored_dtypes_gets_that_of_the_config(said, found, folder):
    edit_config(folder, dtype=said)
    weights = open_pretrained(folder).weights
    assert weights.dtypes[NAME].name == weights.read(NAME).dtype.name == found


def test_float32_is_not_rounded_on_the_way(folder):
    edit_config(folder, dtype="bfloat16")
    model = DecoderForCausalLM.from_pretrained(folder, param_dtype="float32")
    expected = dequantized(folder, ODD)[NAME].numpy().T
    np.testing.assert_array_equal(model.model.layers[0].mlp.down_proj.kernel[...], expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (32, 1)], ids=str)
def test_one_scale_for_a_tensor_or_for_each_output(shape, plain, tmp_path):
    scales = torch.rand(shape) + 0.5

    def change(name, tensor):
        if name != NAME:
            return {name: tensor}
        module = NAME.removesuffix(".weight")
        return {
            NAME: (tensor / scales).to(torch.float8_e4m3fn),
            SCALE: scales,
            f"{module}.activation_scale": torch.tensor(2.0),
        }

    config = {**FP8_CONFIG, "weight_block_size": None, "activation_scheme": "static"}
    folder = quantize(plain, tmp_path / "fp8", change, config)
    weights = open_pretrained(folder, dequantized_dtype=np.dtype(np.float32)).weights
    stored = load_file(folder / FILE)
    expected = (stored[NAME].float() * stored[SCALE]).numpy()
    np.testing.assert_array_equal(weights.read(NAME), expected)
    DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)


def test_scales_that_are_exponents_are_powers_of_two(folder):
    exponents = torch.randint(120, 135, (2, 7), dtype=torch.uint8)
    edit_tensors(folder, **{SCALE: exponents.view(torch.float8_e8m0fnu)})
    edit_config(
        folder,
        quantization_config={**FP8_CONFIG, "weight_block_size": [*ODD], "scale_fmt": "ue8m0"},
    )
    weights = open_pretrained(folder, dequantized_dtype=np.dtype(np.float32)).weights
    codes = load_file(folder / FILE)[NAME].float()
    expected = codes * spread(2.0 ** (exponents.float() - 127), ODD, codes.shape)
    np.testing.assert_array_equal(weights.read(NAME), expected.numpy())


def test_all_that_is_wrong_with_scales_is_listed(folder):
    stored = load_file(folder / FILE)
    layer = "model.layers.1.self_attn"
    edit_tensors(
        folder,
        **{
            SCALE: None,
            f"{layer}.o_proj.weight_scale_inv": torch.ones(3, 3),
            f"{layer}.q_a_proj.weight_scale_inv": torch.ones(1, 4).byte(),
            f"{layer}.q_b_proj.weight": stored[f"{layer}.q_b_proj.weight"].to(torch.bfloat16),
            f"{layer}.kv_b_proj.weight": stored[f"{layer}.kv_b_proj.weight"].to(torch.float8_e5m2),
            "model.norm.weight_scale_inv": torch.ones(1, 1),
            "more.weight_scale_inv": torch.ones(1, 1),
            "model.layers.0.input_layernorm.weight": torch.ones(32).to(torch.float8_e4m3fn),
        },
    )
    with pytest.raises(ConversionError, match="a scale for each quantized tensor") as caught:
        DecoderForCausalLM.from_pretrained(folder)
    assert sorted(caught.value.problems) == sorted(
        [
            f"{SCALE}: missing, expected [2, 7]",
            f"{layer}.o_proj.weight_scale_inv: expected [2, 4], found [3, 3]",
            f"{layer}.q_a_proj.weight_scale_inv: expected float32, found uint8",
            f"{layer}.q_b_proj.weight_scale_inv: a scale of {layer}.q_b_proj.weight, which is "
            "bfloat16",
            f"{layer}.kv_b_proj.weight: expected float8_e4m3fn, found float8_e5m2",
            f"{layer}.kv_b_proj.weight_scale_inv: a scale of {layer}.kv_b_proj.weight, which is "
            "float8_e5m2",
            "model.norm.weight_scale_inv: a scale of model.norm.weight, which is float32",
            "more.weight_scale_inv: a scale of more.weight, which is not there",
            "model.layers.0.input_layernorm.weight_scale_inv: missing, expected none, as it is no "
            "matrix",
        ]
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(wrong, folder):
    scales = load_file(folder / FILE)[SCALE]
    scales[1, 2] = wrong
    edit_tensors(folder, **{SCALE: scales})
    with pytest.raises(ConversionError, match="scales that are numbers") as caught:
        DecoderForCausalLM.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert f"NaN or infinity in {SCALE}" in str(caught.value)


def test_a_config_without_the_key_leaves_scales_unexpected(folder):
    with pytest.raises(ConversionError, match=f"unexpected tensor: {SCALE}"):
        DecoderForCausalLM.from_pretrained(folder, config_kwargs={"quantization_config": None})


def test_the_key_may_come_from_config_kwargs(folder):
    config = json.loads((folder / "config.json").read_text())
    asked = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    weights = open_pretrained(folder, config_kwargs={"quantization_config": asked}).weights
    assert SCALE not in weights.shapes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "one of fp8, mxfp4; found 'gptq'"),
        ({"quant_method": "awq"}, "found 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "found 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "found 'compressed-tensors'"),
        ({"load_in_8bit": True}, "found {'load_in_8bit': True}"),
        ({"quant_method": ["fp8"]}, r"found \['fp8'\]"),
        ("fp8", "found 'fp8'"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "found fmt='e5m2'"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, r"found weight_block_size=\[128\]"),
        ({**FP8_CONFIG, "weight_block_size": [0, 1]}, r"found weight_block_size=\[0, 1\]"),
        ({**FP8_CONFIG, "weight_block_size": 128}, "found weight_block_size=128"),
        ({**FP8_CONFIG, "expert_dtype": "fp4"}, "found expert_dtype='fp4'"),
        ({**FP8_CONFIG, "activation_scheme": []}, r"found activation_scheme=\[\]"),
        ({**FP8_CONFIG, "rotation": 1, "fmt": "e5m2"}, "found fmt='e5m2'; rotation=1"),
        ({"quant_method": "mxfp4", "group": 16}, "found group=16"),
    ],
    ids=str,
)
def test_other_ways_of_quantizing_are_refused_with_those_that_are_read(config, said, folder):
    edit_config(folder, quantization_config=config)
    with pytest.raises(ConfigError, match=f"quantization_config: expected .*{said}"):
        open_pretrained(folder)
