"""Export of a stored model as one GGUF file for llama.cpp and programs that use it.

The `gguf` package makes the header. Tensors are streamed in half precision, or as 8-bit numbers in
groups of 32 that share a scale (q8_0). Biases, norms, routers and learned positions stay float32,
the only type that llama.cpp accepts for them.

Source: ggml's GGUF specification, version 3; llama.cpp's converter.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.finite import count_nonfinite
from cairn.interop.conversion.ops import Array
from cairn.interop.conversion.rules import match
from cairn.interop.conversion.tensor_streams import Leaf, streams
from cairn.interop.errors import ArgumentError, ConfigError, ConversionError
from cairn.interop.families.gguf_writing import gguf_head_is_written, gguf_model, gguf_rules
from cairn.interop.trainers.mapped_model import MappedModel
from cairn.interop.weights.export import served_model
from cairn.interop.weights.gguf_reading import gguf_package
from cairn.interop.weights.gguf_tokenizer import NO_TOKENIZER, tokenizer_metadata
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.safetensors.writer import Shard, TensorSource

__all__ = ["GGUF_FILE", "GGUF_TYPES", "gguf_shard", "stored_gguf"]

GGUF_FILE: Final = "model.gguf"
GGUF_TYPES: Final = ("float32", "float16", "bfloat16", "q8_0")
_FILE_TYPES: Final = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}
_GROUP: Final = 32
_LARGEST_SCALE: Final = float(np.finfo(np.float16).max)
_WHOLE: Final = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight")
_ENDS: Final = ("eos", "eot", "eom")
"""Names of the tokens at each of which llama.cpp ends a text."""


def stored_gguf(
    manifest: Manifest,
    reader: CheckpointReader,
    assets: Mapping[str, bytes],
    *,
    dtype: str = "float16",
    mapped: MappedModel | None = None,
) -> tuple[Shard, str | None]:
    """Return the GGUF file of a stored step, and a note on its tokenizer, see `gguf_shard`.

    Args:
        manifest: manifest of the step.
        reader: open reader of the step.
        assets: contents of the step's small files, by name; the tokenizer is among them.
        dtype: one of `GGUF_TYPES`, for weights of two and more dimensions.
        mapped: the model that another trainer stored in the step; None: the step has one of ours.

    Raises:
        ArgumentError, ConversionError, ConfigError: as `gguf_shard`; or the step has no model of a
            known type.
        TreeMismatchError: the stored leaves are not those that the config describes; all are
            listed.
    """
    config, leaves, where = served_model(manifest, reader, mapped)
    return gguf_shard(config, leaves, assets, dtype=dtype, path=where)


def gguf_shard(
    config: EDPretrainedConfig,
    leaves: Mapping[str, Leaf],
    assets: Mapping[str, bytes],
    *,
    dtype: str,
    path: str,
) -> tuple[Shard, str | None]:
    """Return the GGUF file of a model, and a note on its tokenizer or None.

    The note says why the tokenizer is left out, or differs in llama.cpp. With a file without a
    tokenizer, llama.cpp works on token ids only.

    Args:
        config: config of the model.
        leaves: the floating weights, by path.
        assets: contents of small files, by name; the tokenizer is among them.
        dtype: one of `GGUF_TYPES`, for weights of two and more dimensions.
        path: name of the conversion, for messages.

    Raises:
        ArgumentError: `dtype` is another one, or the `gguf` package is not installed.
        ConversionError: the model is of no family, or its leaves do not match the family's rules.
        ConfigError: the family has no GGUF files, or they can't hold all of the model's options.
    """
    if dtype not in GGUF_TYPES:
        raise ArgumentError(
            path="dtype", expected=f"for GGUF one of {', '.join(GGUF_TYPES)}", found=repr(dtype)
        )
    package = gguf_package()
    if not isinstance(config, DecoderConfig):
        raise ConversionError(
            path=path,
            expected="a model of a known family",
            found=f"a config of type {type(config).__name__}",
            next_step="export it with format 'huggingface'",
        )
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    rules = match(gguf_rules(config), leaves=shapes, path=path)
    # Every type is encoded from float32, which loses nothing when leaves of several dtypes join.
    sources = streams(rules, leaves, joined=np.dtype(np.float32), path=path)
    if gguf_head_is_written(config):
        (embedding,) = (source for source in sources if source.name == "token_embd.weight")
        sources.append(dataclasses.replace(embedding, name="output.weight"))
    said = gguf_model(config, {source.name: source.shape for source in sources})
    sources += [_array(name, array) for name, array in said.tensors.items()]
    encoded = [_encoded(package, source, dtype) for source in sources]
    tokenizer, note = tokenizer_metadata(assets, config.vocab_size)
    general = {
        "general.type": "model",
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
    }
    header = _header(
        package,
        said.architecture,
        {**general, **said.metadata, **_token_ids(config), **(tokenizer or NO_TOKENIZER)},
        sources,
        encoded,
    )
    tensors = tuple(tensor for tensor, _ in encoded)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    shard = Shard(GGUF_FILE, tensors, nbytes, header, int(package.GGUF_DEFAULT_ALIGNMENT))
    return shard, note


def _token_ids(config: DecoderConfig) -> dict[str, int]:
    """Return the metadata keys of the special tokens, with their ids."""
    keys = config.to_hf()
    end = keys.get("eos_token_id")
    ends = list(dict.fromkeys(end if isinstance(end, list | tuple) else [end]))
    if len(ends) > len(_ENDS):
        raise ConfigError(
            path=f"{config.model_type} as GGUF",
            expected=f"at most {len(_ENDS)} tokens that end a text, which is what a file can say",
            found=f"eos_token_id={ends!r}",
            next_step="leave some out of the model's config, or export Hugging Face files instead "
            "(format 'huggingface')",
        )
    ids = dict(zip(_ENDS, ends, strict=False))
    ids |= {"bos": keys.get("bos_token_id"), "padding": keys.get("pad_token_id")}
    return {
        f"tokenizer.ggml.{name}_token_id": number
        for name, number in ids.items()
        if isinstance(number, int)
    }


def _encoded(package: Any, source: TensorSource, dtype: str) -> tuple[TensorSource, Any]:
    """Return the tensor as the file stores it, and GGML's name of its type."""
    types = package.GGMLQuantizationType
    # As llama.cpp's converter does, for files of any type.
    whole = source.name.endswith(("_norm.weight", *_WHOLE))
    if len(source.shape) < 2 or whole or not source.name.endswith(".weight"):
        return _cast(source, np.dtype(np.float32)), types.F32
    if dtype == "q8_0" and source.shape[-1] % _GROUP == 0:
        return _quantized(package, source), types.Q8_0
    if dtype == "bfloat16":
        return _cast(source, np.dtype(ml_dtypes.bfloat16)), types.BF16
    if dtype == "float32":
        return _cast(source, np.dtype(np.float32)), types.F32
    return _cast(source, np.dtype(np.float16)), types.F16


def _cast(source: TensorSource, dtype: np.dtype[Any]) -> TensorSource:
    def blocks(max_bytes: int) -> Iterator[Array]:
        widening = max(1, dtype.itemsize // source.dtype.itemsize)
        for block in source.blocks(max(1, max_bytes // widening)):
            with np.errstate(over="ignore", invalid="ignore"):  # the writer counts them
                yield block.astype(dtype, copy=False)

    return TensorSource(source.name, source.shape, dtype, blocks, source.held_bytes)


def _quantized(package: Any, source: TensorSource) -> TensorSource:
    """Return a tensor encoded as q8_0: groups of consecutive numbers, each with a scale."""
    kind = package.GGMLQuantizationType.Q8_0
    _, group_bytes = package.GGML_QUANT_SIZES[kind]
    shape = (*source.shape[:-1], source.shape[-1] // _GROUP * group_bytes)

    def blocks(max_bytes: int) -> Iterator[Array]:
        left = np.empty(0, np.float32)
        for block in source.blocks(max_bytes):
            if count_nonfinite(block):
                raise ConversionError(
                    path=source.name,
                    expected="finite weights, which q8_0 alone can hold",
                    found="some that are NaN or infinite",
                    next_step="take an earlier step, or export it with another dtype",
                )
            flat = np.concatenate([left, block.reshape(-1).astype(np.float32)])
            whole = flat.size // _GROUP * _GROUP
            left = flat[whole:]
            if whole and np.abs(flat[:whole]).max() / 127 > _LARGEST_SCALE:
                raise ConversionError(
                    path=source.name,
                    expected=f"weights up to {127 * _LARGEST_SCALE:.7g}, whose scale is a float16",
                    found=f"{np.abs(flat[:whole]).max():.7g}",
                    next_step="export it with another dtype (bfloat16 holds it)",
                )
            if whole:
                yield package.quants.quantize(flat[:whole].reshape(1, -1), kind).reshape(-1)

    return TensorSource(
        source.name, shape, np.dtype(np.uint8), blocks, source.held_bytes + (48 << 20)
    )


def _array(name: str, array: Array) -> TensorSource:
    return TensorSource(name, tuple(array.shape), array.dtype, lambda max_bytes: iter([array]))


def _header(
    package: Any,
    architecture: str,
    metadata: Mapping[str, Any],
    sources: Sequence[TensorSource],
    encoded: Sequence[tuple[TensorSource, Any]],
) -> bytes:
    """Return the bytes before the tensors, as the `gguf` package writes them."""
    writer = package.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for source, (tensor, kind) in zip(sources, encoded, strict=True):
        # For quantized tensors the package expects the shape in bytes.
        shape = tensor.shape if tensor.dtype == np.uint8 else source.shape
        writer.add_tensor_info(source.name, shape, tensor.dtype, tensor.nbytes, kind)
    buffer = io.BytesIO()
    writer.fout, writer.state = [buffer], package.gguf_writer.WriterState.EMPTY
    writer.open_output_file = lambda path=None: None  # it writes to `buffer`
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = buffer.getvalue()
    return header + bytes(-len(header) % int(package.GGUF_DEFAULT_ALIGNMENT))


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, list(value))
