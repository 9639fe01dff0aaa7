"""Folders of models as they are published quantized: FP8 as DeepSeek's, MXFP4 as gpt-oss's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"

FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_CONFIG = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scale of each number, of one for each block."""
    return torch.kron(scales, torch.ones(block))[: shape[0], : shape[1]]


def in_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in eight bits, and a scale for each block of it."""
    down, right = (-size % step for size, step in zip(weight.shape, block, strict=True))
    padded = torch.nn.functional.pad(weight, (0, right, 0, down))
    rows, columns = padded.shape
    tiles = padded.reshape(rows // block[0], block[0], columns // block[1], block[1])
    scales = tiles.abs().amax((1, 3)) / 448
    return (weight / spread(scales, block, weight.shape)).to(torch.float8_e4m3fn), scales


def in_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [experts, in, out] in four bits: bytes of two, and an exponent for 32 inputs."""
    experts, inputs, outputs = weight.shape
    groups = weight.transpose(1, 2).reshape(experts, outputs, inputs // 32, 32)
    exponents = groups.abs().amax(-1).log2().floor() - 2
    nearest = (groups / 2 ** exponents[..., None])[..., None] - FOUR_BITS
    codes = nearest.abs().argmin(-1)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).byte(), (exponents + 127).byte()


def is_fp8(name: str, tensor: torch.Tensor) -> bool:
    """What of DeepSeek V3 is published in eight bits."""
    inside = name.startswith("model.layers") and not name.endswith("mlp.gate.weight")
    return inside and tensor.ndim == 2


def is_mxfp4(name: str) -> bool:
    """What of gpt-oss is published in four bits."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def quantize(
    plain: Path, folder: Path, change: Callable[[str, torch.Tensor], Tensors], config: object
) -> Path:
    """A copy of a folder whose tensors are changed, and whose config.json says so."""
    shutil.copytree(plain, folder)
    tensors: Tensors = {}
    for name, tensor in load_file(plain / FILE).items():
        tensors |= change(name, tensor)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    edit_config(folder, quantization_config=config)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Other values of keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors; None for none."""
    tensors = load_file(folder / FILE) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / FILE, metadata={"format": "pt"})
