"""Inner parts of `interop` that tests limit, walk through or set up by themselves.

Everything else is reached as users, or other rooms of the package, reach it.
"""

from cairn.interop.config import hf_keys
from cairn.interop.conversion import box_reads, boxes, inverses, layout_ops, ops, value_ops
from cairn.interop.families import deepseek_gguf, gguf_names, hf_config, key_kinds
from cairn.interop.placement import decoder_axes as axes_by_path
from cairn.interop.placement import load_cost, specs, step_plan
from cairn.interop.weights import (
    gguf_reading,
    gguf_tokenizer,
    gguf_writing,
    peft_config,
    peft_names,
    safetensors_folder,
    stacked_arrays,
    stored_leaves,
    weight_files,
)
from cairn.interop.weights import text_model as text_models

__all__ = [
    "GGUF_FILE",
    "HARMLESS_KEYS",
    "KINDS",
    "PRE_TOKENIZERS",
    "GGUFFile",
    "SafetensorsFolder",
    "WeightFiles",
    "activation_from_hf",
    "box_reads",
    "chat_templates",
    "decoder_axes",
    "deepseek_gguf",
    "gguf_names",
    "gguf_shard",
    "intersection",
    "inverses",
    "layout_ops",
    "load_cost",
    "modules_of_rules",
    "ops",
    "plan_step",
    "served_leaves",
    "shard_shape",
    "stacked_arrays",
    "target_modules",
    "text_config",
    "tokenizer_metadata",
    "value_ops",
]

# `box_reads`, `load_cost` and `stacked_arrays` have limits, which tests lower. `ops`, `inverses`,
# `layout_ops`, `value_ops`, `deepseek_gguf` and `gguf_names` define operations, each of which needs
# a case.

# Tables of keys of config.json: each key is held against transformers.
HARMLESS_KEYS = hf_keys.HARMLESS_KEYS
KINDS = key_kinds.KINDS
activation_from_hf = hf_config.activation_from_hf

# Boxes and plans, of shapes that no model has, against NumPy and JAX.
intersection = boxes.intersection
decoder_axes = axes_by_path.decoder_axes
plan_step = step_plan.plan_step
shard_shape = specs.shard_shape

# Modules of PEFT, leaves and files by themselves, where a model hides which of them went wrong.
SafetensorsFolder = safetensors_folder.SafetensorsFolder
WeightFiles = weight_files.WeightFiles
modules_of_rules = peft_names.modules_of_rules
served_leaves = stored_leaves.served_leaves
target_modules = peft_config.target_modules
text_config = text_models.text_config

# GGUF files of models without a stored step, and with nothing but a tokenizer.
GGUF_FILE = gguf_writing.GGUF_FILE
GGUFFile = gguf_reading.GGUFFile
PRE_TOKENIZERS = gguf_tokenizer._SPLITS
chat_templates = gguf_tokenizer._templates
gguf_shard = gguf_writing.gguf_shard
tokenizer_metadata = gguf_tokenizer.tokenizer_metadata
