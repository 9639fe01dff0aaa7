"""Files of a folder that hold a model's weights, and the file of each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cairn.interop.errors import ConversionError
from cairn.interop.weights.source_folder import SourceFolder, parse_json

__all__ = [
    "BIN_FILE",
    "BIN_INDEX_FILE",
    "INDEX_FILE",
    "SINGLE_FILE",
    "WeightFiles",
    "find_weight_files",
]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"
BIN_FILE = "pytorch_model.bin"

_PART = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f]{1,255}")
"""Pattern of a part of a relative path that stays in the folder: never "." or ".."."""


@dataclass(frozen=True)
class WeightFiles:
    """Files that together hold a model's weights.

    Attributes:
        folder: the folder with the files.
        names: names of the files.
        promised: tensor -> file, from the index; empty without an index.
        dispensable: regular expressions of tensors that may be missing though the index names them:
            converters drop copies of tied weights, but keep the index.
    """

    folder: SourceFolder
    names: tuple[str, ...]
    promised: Mapping[str, str] = field(default_factory=dict)
    dispensable: tuple[str, ...] = ()

    def locate_tensors(self, contents: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return the file of each tensor.

        Args:
            contents: file -> names of the tensors in it.

        Raises:
            ConversionError: a tensor is in two files, or not in the file that the index names; all
                are listed.
        """
        where: dict[str, str] = {}
        for file, tensors in contents.items():
            names = list(tensors)
            twice = sorted(set(names) & where.keys())
            if twice:
                raise ConversionError(
                    path=f"{self.folder.uri}/{file}",
                    expected="every tensor in one file",
                    found=f"{', '.join(twice[:5])} in {where[twice[0]]} as well",
                    next_step="remove files of an earlier export from the folder",
                )
            where.update(dict.fromkeys(names, file))
        astray = []
        for tensor, file in sorted(self.promised.items()):
            actual = where.get(tensor)
            dispensable = any(re.fullmatch(pattern, tensor) for pattern in self.dispensable)
            if actual != file and not (actual is None and dispensable):
                place = "nowhere" if actual is None else f"in {actual}"
                astray.append(f"{file}: lacks {tensor}, which is {place}")
        if astray:
            raise ConversionError(
                path=self.folder.uri,
                expected="every tensor in the file that the index names",
                found=f"{len(astray)} that are not",
                next_step="take the folder again from its source: files of two saves are mixed",
                problems=astray,
            )
        return where


def find_weight_files(
    folder: SourceFolder, *, single: str, index: str, dispensable: tuple[str, ...] = ()
) -> WeightFiles | None:
    """Return the files that hold a folder's weights: the single file, or the shards of an index.

    If the single file exists and the index's shards do not, the index is ignored, as in
    transformers: it is left from an earlier save.

    Args:
        folder: the folder of the model.
        single: name of the single file.
        index: name of the index.
        dispensable: as in `WeightFiles`.

    Returns:
        The files; None if there is neither a single file nor an index.

    Raises:
        ConversionError: the index can't be read, or both its shards and the single file exist.
    """
    names = folder.names()
    raw = folder.read_bytes(index)
    if raw is not None:
        promised = _promised(raw, f"{folder.uri}/{index}", single.rpartition(".")[2])
        indexed = sorted(set(promised.values()))
        if single not in names or indexed == [single]:
            return WeightFiles(folder, tuple(indexed), promised, dispensable)
        if set(indexed) <= set(names):
            raise ConversionError(
                path=folder.uri,
                expected=f"{single}, or {index} with its files",
                found=f"both: {single} and {', '.join(indexed[:4])}",
                next_step="remove those that are not the model's",
            )
    return WeightFiles(folder, (single,)) if single in names else None


def _promised(raw: bytes, path: str, ending: str) -> dict[str, str]:
    """Return the file of each tensor, parsed from an index."""
    mapping = parse_json(raw, path).get("weight_map")
    files = mapping if isinstance(mapping, dict) else {}
    bad = [name for name in files.values() if not isinstance(name, str)]
    texts = {tensor: name for tensor, name in files.items() if isinstance(name, str)}
    bad += sorted(
        name
        for name in {*texts.values()}
        if not all(map(_PART.fullmatch, name.split("/"))) or not name.endswith(f".{ending}")
    )
    if not files or bad:
        raise ConversionError(
            path=path,
            expected=f'a "weight_map" from tensor names to file names of this folder, *.{ending}',
            found=f"the file names {bad[:3]}" if bad else "none",
            next_step="take the folder again from its source",
        )
    return texts
