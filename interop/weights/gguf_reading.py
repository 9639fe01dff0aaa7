"""Reader of GGUF files: metadata as a config, tensors dequantized one by one.

Source: ggml's GGUF specification, version 3; the `gguf` package reads and dequantizes.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.boxes import Box, whole_box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import RuleTable
from cairn.interop.errors import ArgumentError, ConfigError, ConversionError
from cairn.interop.families.family import Family, get_family, get_gguf_family
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm
from cairn.interop.weights.gguf_tokenizer import NO_TOKENIZER_KINDS, as_it_cuts
from cairn.interop.weights.source_folder import refuse_pointer
from cairn.storage.errors import NotFoundError

_UNQUANTIZED = ("F32", "F16")
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_ALIGNMENT = "general.alignment"
_LEAST_ALIGNMENT = 8
_TEMPLATE = "tokenizer.chat_template"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""Keys of the tokens at each of which llama.cpp ends a text."""


class GGUFFile:
    """GGUF file, memory-mapped: a source of weights and of a config.

    Attributes:
        path: the file.
        shapes: every tensor's shape in NumPy's order, [out, in] for matrices.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file and check that every tensor can be dequantized.

        Raises:
            NotFoundError: there is no such file.
            ConversionError: the file is no GGUF file, or has tensors of unsupported types (all are
                listed), or its tensors are not aligned as its metadata says.
            ArgumentError: the `gguf` package is not installed.
        """
        self.path = Path(path)
        self._gguf = gguf_package()
        if not self.path.is_file():
            raise NotFoundError(
                "no such file",
                path=self.path,
                expected="a GGUF file",
                found="a folder" if self.path.is_dir() else "nothing",
                next_step="Check the path.",
            )
        with self.path.open("rb") as stream:
            refuse_pointer(stream.read(64), self.path)
        try:
            reader = _reader_class(self._gguf)(self.path)
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError) as exc:
            unknown = _UNKNOWN_TYPE.search(str(exc))
            if unknown is not None:
                raise ConversionError(
                    path=self.path,
                    expected=f"tensors of the types {', '.join(self._supported())}",
                    found=f"the type number {unknown.group(1)}, which 'gguf' does not know",
                    next_step="upgrade the package 'gguf', or quantize the model to another type",
                ) from exc
            about = f"{_ALIGNMENT}: " if "alignment" in str(exc) else ""
            raise ConversionError(
                path=self.path,
                expected="a readable GGUF file, version 2 or 3",
                found=f"{about}{exc}",
                next_step="take the file again from its source: it may be cut short",
            ) from exc
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check_alignment(int(reader.data_offset))
        self._check_types()
        self.shapes: Mapping[str, Shape] = {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of each tensor that `read` returns: always float32."""
        return dict.fromkeys(self.shapes, np.dtype(np.float32))

    def read(self, name: str) -> Array:
        """Return one tensor, dequantized to float32."""
        tensor = self._tensors[name]
        values: Array = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return values.reshape(self.shapes[name])

    def cover(self, name: str, box: Box) -> Box:
        """Return the box of the whole tensor: boxes can't be read alone."""
        return whole_box(self.shapes[name])

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of one tensor, which is dequantized whole, but only once."""
        values = self.read(name)
        return [values[box] for box in boxes]

    @functools.cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Values of all metadata keys except the vocabulary's lists."""
        return {
            name: field.contents()
            for name, field in self._fields.items()
            if not name.startswith(("GGUF.", "tokenizer.")) or name in (*_TOKEN_IDS, *_ENDS)
        }

    def config(self) -> DecoderConfig:
        """Return the model's config, special token ids included.

        Raises:
            ConfigError: the architecture is unknown, keys are missing or not read, or the file is
                one part of a split model.
        """
        architecture = str(self.metadata.get("general.architecture"))
        self._check_whole()
        prefix = f"{architecture}."
        own = {
            name.removeprefix(prefix): value
            for name, value in self.metadata.items()
            if name.startswith(prefix)
        }
        content = GGUFContent(own, self.shapes, self.read)
        family = get_gguf_family(architecture, content, path=str(self.path))
        data = _form(family).config(content, family.model_type)
        data |= {
            name: self.metadata[key] for key, name in _TOKEN_IDS.items() if key in self.metadata
        }
        ends = list(dict.fromkeys(self.metadata[key] for key in _ENDS if key in self.metadata))
        if ends:
            data["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return DecoderConfig(**family.read_options(data))

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the family's rule table between leaves and GGUF's tensors."""
        return _form(get_family(config.model_type)).rules(config)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, as transformers writes them, by name.

        The result is empty, with a warning, if transformers is missing or can't convert the
        tokenizer.
        """
        kind = self._fields.get("tokenizer.ggml.model")
        if kind is None or kind.contents() in NO_TOKENIZER_KINDS:
            return {}
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            self._warn_left_out("transformers (cairn-checkpoints[torch]) to convert it", "none")
            return {}
        # Not `AutoTokenizer`: it reads the vocabulary twice to get a config, which is slow, and
        # in transformers 5.0 it chose CodeLlama's tokenizer for every Llama.
        try:
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
                str(self.path.parent), gguf_file=self.path.name, local_files_only=True
            )
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as exc:  # a panic of the Rust library is no Exception
            problem = f"{kind.contents()!r}, of which transformers says {type(exc).__name__}: {exc}"
            self._warn_left_out("tokenizer.ggml.model and what belongs to it to be whole", problem)
            return {}
        named = self._named_templates()
        if named:
            usual = tokenizer.chat_template
            tokenizer.chat_template = named if usual is None else {"default": usual, **named}
        with tempfile.TemporaryDirectory() as folder:
            # Several templates would need a folder; tokenizer_config.json can hold them as well.
            tokenizer.save_pretrained(folder, save_jinja_files=not named)
            files = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
        if kind.contents() != "gpt2":
            return files
        name = self._fields.get("tokenizer.ggml.pre")
        cut = None if name is None else str(name.contents())
        silent = "tokenizer.ggml.add_bos_token" not in self._fields
        begin = tokenizer.bos_token if silent else None
        mended = as_it_cuts(files["tokenizer.json"], cut, begin)
        if mended is None:
            rules = "tokenizer.ggml.pre to name rules by which text is cut that are known"
            self._warn_left_out(rules, repr(cut))
            return {}
        return {**files, "tokenizer.json": mended}

    def _warn_left_out(self, expected: str, found: str) -> None:
        warnings.warn(
            f"{self.path}: the tokenizer is left out: expected {expected}, found {found}. Take the "
            "tokenizer's files from the model's own folder",
            stacklevel=3,
        )

    def _named_templates(self) -> dict[str, str]:
        """Return the additional chat templates, by name."""
        start = f"{_TEMPLATE}."
        templates = {
            name: template for name, template in self._fields.items() if name.startswith(start)
        }
        return {
            name.removeprefix(start): str(template.contents())
            for name, template in templates.items()
        }

    def _check_alignment(self, start: int) -> None:
        """Raise ConversionError if the file's alignment is wrong: all weights would be shifted.

        Args:
            start: offset in bytes of the first tensor.
        """
        field = self._fields.get(_ALIGNMENT)
        if field is None:
            return
        said, size = int(field.contents()), self.path.stat().st_size
        problem = ""
        if said < _LEAST_ALIGNMENT or said & (said - 1):
            problem = repr(said)
        else:
            ends = [int(tensor.data_offset + tensor.n_bytes) for tensor in self._tensors.values()]
            end = max(ends, default=start)
            apart = [
                name for name, tensor in self._tensors.items() if int(tensor.data_offset) % said
            ]
            if apart:
                problem = f"{said}, and {', '.join(apart[:3])} elsewhere"
            elif not end <= size <= end + -end % said:
                problem = f"{said}, by which the tensors end at byte {end} of {size}"
        if problem:
            raise ConversionError(
                path=self.path,
                expected=f"{_ALIGNMENT} to be a power of two of at least {_LEAST_ALIGNMENT}, "
                "by which the tensors lie",
                found=problem,
                next_step="take the file again from its source",
            )

    def _supported(self) -> tuple[str, ...]:
        types = [kind for kind in self._gguf.GGMLQuantizationType if _dequantizes(kind)]
        packed = sorted(kind.name for kind in types if kind.name not in _UNQUANTIZED)
        return (*_UNQUANTIZED, *packed)

    def _check_whole(self) -> None:
        parts, kind = self.metadata.get("split.count", 0), self.metadata.get("general.type")
        problems = []
        if isinstance(parts, int) and parts > 1:
            problems.append(f"split.count={parts!r}")
        if kind not in (None, "model"):
            problems.append(f"general.type={kind!r}")
        if problems:
            raise ConfigError(
                path=str(self.path),
                expected="one file with a whole model",
                found="; ".join(problems),
                next_step="merge its parts (llama-gguf-split --merge), or take the model itself",
            )

    def _check_types(self) -> None:
        problems = [
            f"{name}: type {tensor.tensor_type.name}"
            for name, tensor in self._tensors.items()
            if not _dequantizes(tensor.tensor_type)
        ]
        if problems:
            raise ConversionError(
                path=self.path,
                expected=f"tensors of the types {', '.join(self._supported())}",
                found=f"{len(problems)} of other types",
                next_step="quantize the model to one of these types",
                problems=problems,
            )


def _form(family: Family) -> GGUFForm:
    if family.gguf is None:
        raise ConfigError(
            path=f"model_type={family.model_type!r}",
            expected="a family that has GGUF files",
            found="one without",
            next_step="leave the model_type as the file has it",
        )
    return family.gguf


@functools.cache
def _dequantizes(kind: Any) -> bool:
    """Return whether the package can dequantize a type; tried on one block, for it has no list."""
    gguf = gguf_package()
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@functools.cache
def _reader_class(gguf: Any) -> Any:
    """Return a subclass of the package's reader that slices a plain array, not a `np.memmap`.

    The reader takes some slices for each word of a vocabulary, and slices of a memmap are slow.
    """

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Array:
            return self._data

        @data.setter
        def data(self, mapped: Array) -> None:
            self._data = np.asarray(mapped)  # a view, which holds the mapping

    return Reader


def gguf_package() -> Any:
    """Return the module `gguf`.

    Raises:
        ArgumentError: the package is not installed.
    """
    try:
        module = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ImportError as exc:
        raise ArgumentError(
            path="GGUF",
            expected="the package 'gguf'",
            found="it is not installed",
            next_step="pip install 'cairn-checkpoints[gguf]'",
        ) from exc
    return module
