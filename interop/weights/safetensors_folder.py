"""Weights in safetensors files of a folder in any store."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cairn.interop.conversion.box_reads import covering_box, read_boxes
from cairn.interop.conversion.boxes import Box, whole_box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ConversionError
from cairn.interop.weights.weight_files import WeightFiles
from cairn.storage.safetensors.format import DTYPES, SafetensorsHeader
from cairn.storage.safetensors.reader import read_elements, read_header, read_tensor

__all__ = ["SafetensorsFolder"]


class SafetensorsFolder:
    """Source of the tensors in a folder's safetensors files; boxes of tensors can be read alone."""

    def __init__(self, files: WeightFiles) -> None:
        """Read the files' headers.

        Raises:
            NotFoundError: a file is not there.
            CorruptionError: a file contradicts its header.
            ConversionError: a tensor is in two files, or not in the file that the index names, or
                has a dtype that NumPy lacks.
        """
        self._folder = files.folder
        self._headers: dict[str, SafetensorsHeader] = {}
        self._folder.fetch(files.names)
        for name in files.names:
            at, rel = self._folder.locate(name)
            header = self._headers[name] = read_header(at, rel)
            _refuse_packed(header, f"{self._folder.uri}/{name}")
        contents = {name: header.tensors for name, header in self._headers.items()}
        self._where = files.locate_tensors(contents)

    @functools.cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        return {name: self._headers[at].tensors[name].shape for name, at in self._where.items()}

    @functools.cached_property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of every tensor."""
        return {name: self._headers[at].tensors[name].dtype for name, at in self._where.items()}

    def read(self, name: str) -> Array:
        """Return a whole tensor."""
        (tensor,) = self.boxes(name, [whole_box(self.shapes[name])])
        return tensor

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        file = self._where[name]
        at, rel = self._folder.locate(file)
        tensor: Array = read_tensor(at, rel, name, header=self._headers[file], rows=(low, high))
        return tensor

    def cover(self, name: str, box: Box) -> Box:
        """Return the box to read for `box`: itself, or whole rows where gaps are short."""
        return covering_box(self.shapes[name], self.dtypes[name].itemsize, box)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of a tensor.

        Only the boxes' byte ranges are read, and gaps of up to 1 MiB between them: to read some
        columns of a matrix, whole rows are read in parts, and only the columns are kept.
        """
        file = self._where[name]
        at, rel = self._folder.locate(file)
        header = self._headers[file]

        def read(first: int, out: Array) -> None:
            read_elements(at, rel, name, first, out, header=header)

        return read_boxes(self.shapes[name], self.dtypes[name], boxes, read)


def _refuse_packed(header: SafetensorsHeader, path: str) -> None:
    problems = [
        f"{name}: {tensor.code}"
        for name, tensor in header.tensors.items()
        if tensor.code not in DTYPES
    ]
    if problems:
        raise ConversionError(
            path=path,
            expected=f"tensors of the dtypes {', '.join(DTYPES)}",
            found=f"{len(problems)} of others",
            next_step="take the weights as they were before quantization, or dequantize them",
            problems=problems,
        )
