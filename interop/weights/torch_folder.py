"""Weights of `torch.save`: `pytorch_model.bin`, or the shards of its index.

Such a file is a pickle, and a pickle can run code. Files are only loaded with
`torch.load(weights_only=True)`, which builds nothing but tensors and plain containers.
"""

from __future__ import annotations

import functools
import importlib
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from cairn.interop.conversion.boxes import Box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ArgumentError, ConversionError
from cairn.interop.weights.source_folder import SourceFolder, refuse_pointer
from cairn.interop.weights.weight_files import WeightFiles
from cairn.storage.safetensors.format import DTYPES
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import parse_uri

__all__ = ["TorchFolder"]

_OLDEST = "2.10"
"""Oldest safe release of torch: before it, a file could corrupt memory (CVE-2026-24747)."""
_ZIP_START = b"PK\x03\x04"
_RECORD = re.compile(r"[^/]+/data/[^/]+")
"""Entries of torch's zip files that hold the numbers of a tensor."""
_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}


class TorchFolder:
    """Source of the tensors in a folder's `.bin` files.

    Files that torch has written since 1.6 (2020) are memory-mapped: a tensor takes memory when it
    is read. Older files are read whole. A store's files are first copied to the local disk.
    """

    def __init__(self, files: WeightFiles) -> None:
        """Open the files.

        Raises:
            ArgumentError: torch is not installed, or too old to be safe.
            NotFoundError: a file is not there.
            ConversionError: a file has more than tensors, or is cut short; or a tensor is in two
                files, or not in the file that the index names.
        """
        self._torch = _torch()
        files.folder.fetch(files.names)
        contents = {name: self._open(files.folder, name) for name in files.names}
        files.locate_tensors(contents)
        self._tensors = {
            name: tensor for tensors in contents.values() for name, tensor in tensors.items()
        }

    @functools.cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @functools.cached_property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of every tensor."""
        return {name: _DTYPES[_name_of(tensor.dtype)] for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Array:
        """Return a whole tensor."""
        return self._array(name, self._tensors[name])

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        return self._array(name, self._tensors[name][low:high])

    def cover(self, name: str, box: Box) -> Box:
        """Return the box itself: the file is memory-mapped, so nothing else is read."""
        return box

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of one tensor."""
        return [self._array(name, self._tensors[name][box]) for box in boxes]

    def _array(self, name: str, tensor: Any) -> Array:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # torch does not know NumPy's bfloat16, so the bytes are viewed as it.
        flat = plain.reshape(-1).view(self._torch.uint8).numpy()
        array: Array = np.array(flat).view(self.dtypes[name]).reshape(tuple(tensor.shape))
        return array

    def _open(self, folder: SourceFolder, name: str) -> dict[str, Any]:
        at, rel = folder.locate(name)
        at.stat(rel)  # raises NotFoundError
        shown = f"{folder.uri}/{name}"
        if at.uri.scheme == "file":
            return _tensors(self._torch, Path(at.uri.local_path, rel), shown)
        # The file stays mapped after its name is removed.
        with tempfile.TemporaryDirectory() as local:
            at.copy(rel, open_files(parse_uri(local)), name)
            return _tensors(self._torch, Path(local, name), shown)


def _tensors(torch: Any, path: Path, shown: str) -> dict[str, Any]:
    """Return the tensors of one file, by name.

    Raises:
        ConversionError: the file has anything but tensors, or can't be read.
    """
    with path.open("rb") as stream:
        start = stream.read(64)
    refuse_pointer(start, shown)
    zipped = start.startswith(_ZIP_START)
    try:
        sizes = _record_sizes(path) if zipped else path.stat().st_size
        content = torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    except MemoryError:
        raise
    except Exception as exc:  # a broken file can make the loader raise anything
        raise ConversionError(
            path=shown,
            expected="tensors, as torch.save writes a state_dict, and nothing that can run code",
            found=_error_text(exc),
            next_step="take the file again from its source, if it was cut short; or ask its maker "
            "for safetensors (save_pretrained)",
        ) from exc
    problems = _problems(torch, content)
    if problems:
        raise ConversionError(
            path=shown,
            expected="a state_dict: names and plain tensors",
            found=f"{len(problems)} of something else",
            next_step="save the model's state_dict() alone",
            problems=problems,
        )
    _check_sizes(content, sizes, shown)
    tensors: dict[str, Any] = content
    return tensors


def _problems(torch: Any, content: Any) -> list[str]:
    if not isinstance(content, dict):
        return [f"the file: {type(content).__name__}"]
    problems = []
    for name, value in content.items():
        kind = type(value).__name__
        if not isinstance(name, str):
            problems.append(f"the name {name!r}"[:200])
        elif not isinstance(value, torch.Tensor):
            problems.append(f"{name}: {kind}")
        elif value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            problems.append(f"{name}: a tensor that is {value.layout}, {value.dtype}")
        elif _name_of(value.dtype) not in _DTYPES:
            problems.append(f"{name}: {value.dtype}")
    return problems


def _record_sizes(path: Path) -> Counter[int]:
    """Return how many tensor entries of the zip file have each size in bytes."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if len({entry.filename for entry in entries}) != len(entries):
        raise ValueError("two entries of one name")
    # Compressed or encrypted entries can't be memory-mapped.
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"compressed entries: {', '.join(packed[:3])}")
    return Counter(entry.file_size for entry in entries if _RECORD.fullmatch(entry.filename))


def _check_sizes(tensors: Mapping[str, Any], sizes: Counter[int] | int, shown: str) -> None:
    """Raise ConversionError if a tensor is longer than its bytes in the file.

    torch's loader does not check it.

    Args:
        tensors: tensors of the file, by name.
        sizes: how many entries of the zip file have each size in bytes; or the file's size in
            bytes, if it is no zip file.
        shown: the file, for messages.

    Raises:
        ConversionError: a tensor is longer.
    """
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors.values())
        if storage.nbytes()
    }
    if isinstance(sizes, int):
        wrong = [sum(storages.values())] if sum(storages.values()) > sizes else []
    else:
        wrong = sorted(Counter(storages.values()) - sizes)
    if wrong:
        raise ConversionError(
            path=shown,
            expected="tensors that are as long as what the file has of them",
            found=f"tensors of {', '.join(map(str, wrong[:5]))} bytes",
            next_step="take the file again from its source",
        )


def _error_text(exc: Exception) -> str:
    """Return a loader's error text, without its advice to trust the file."""
    text = " ".join(str(exc).split())
    refused = _GLOBAL.search(text)
    if refused is not None:
        return f"{refused[1]}, which is no part of a tensor"
    return f"{type(exc).__name__}: {text.partition(' In PyTorch 2.6')[0][:300]}"


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as exc:
        raise ArgumentError(
            path="pytorch_model.bin",
            expected="the package 'torch', which reads it",
            found="it is not installed",
            next_step="pip install 'cairn-checkpoints[torch]', or take the model's safetensors",
        ) from exc
    if Version(torch.__version__) < Version(_OLDEST):
        raise ArgumentError(
            path="pytorch_model.bin",
            expected=f"torch {_OLDEST} or newer: before, such a file could corrupt memory "
            "(CVE-2026-24747)",
            found=torch.__version__,
            next_step="upgrade torch, or take the model's safetensors",
        )
    return torch
