"""Tokens and logits that a trainer computed with its own model, to hold an export against.

A file has `tokens`, integers [batch, length], and `logits`, [batch, length, vocabulary].
"""

import zipfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from cairn.service.errors import InvalidRequestError
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.errors import CorruptionError, InvalidURIError, NotFoundError, SourceRefusedError
from cairn.storage.runs.run import Run
from cairn.storage.safetensors.reader import read_header, read_tensor
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.files import Files
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

_NAMES: Final = ("tokens", "logits")
_MOST_BYTES: Final = 4 << 30
"""Most bytes of a file's arrays; they are held in memory."""

SNIPPET: Final = "docs/howto/from-maxtext.md shows ten lines that write it"


class Reference(NamedTuple):
    """Tokens [B, T], and the logits [B, T, V] that the trainer's model has for them."""

    tokens: np.ndarray
    logits: np.ndarray


def check_reference_place(run: Run, file: str) -> None:
    """Raise if a file of reference logits has another ending, or lies where we may not read.

    Raises:
        InvalidRequestError: It is no address of a .npz or .safetensors file.
        SourceRefusedError: The server may not open its folder.
    """
    _place(run.uri, file)


def read_reference(uri: StoreURI, file: str, vocabulary: int, work: Path) -> Reference:
    """Return the content of a file of reference logits.

    Args:
        uri: The run or the step, whose server may open the file's folder.
        file: Address of the file.
        vocabulary: Number of tokens of the model; logits of more are cut to it.
        work: Folder for a copy.

    Raises:
        InvalidRequestError: There is no such file, or it holds something else; all is named.
        SourceRefusedError: The server may not open its folder.
    """
    files, name = _place(uri, file)
    try:
        size = files.stat(name).size
    except NotFoundError as exc:
        raise _wrong(file, "a file", "none") from exc
    if size > _MOST_BYTES:
        raise _wrong(file, f"at most {_MOST_BYTES} bytes", str(size))
    copy = open_files(parse_uri(work))
    files.copy(name, copy, name)
    try:
        if name.endswith(".safetensors"):
            header = read_header(copy, name)
            arrays = {key: read_tensor(copy, name, key, header=header) for key in _NAMES}
        else:
            arrays = _npz(work / name)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, CorruptionError) as exc:
        raise _wrong(file, f"arrays called {' and '.join(_NAMES)}", str(exc)[:300]) from exc
    tokens, logits = (arrays[key] for key in _NAMES)
    shapes = f"tokens {tokens.dtype} {tokens.shape}, logits {logits.dtype} {logits.shape}"
    fits = tokens.ndim == 2 and logits.ndim == 3 and logits.shape[:2] == tokens.shape
    if not fits or tokens.dtype.kind not in "iu" or not is_floating(logits.dtype):
        expected = "tokens, integers [batch, length], and logits [batch, length, vocabulary]"
        raise _wrong(file, expected, shapes)
    is_within = tokens.size and tokens.min() >= 0 and tokens.max() < vocabulary
    if not is_within or logits.shape[2] < vocabulary:
        raise _wrong(file, f"tokens below {vocabulary}, and as many logits or more", shapes)
    return Reference(tokens.astype(np.int64), logits[..., :vocabulary].astype(np.float32))


def _place(uri: StoreURI, file: str) -> tuple[Files, str]:
    try:
        address = parse_uri(file)
    except InvalidURIError as exc:
        raise _wrong(file, "the address of a file", str(exc)) from exc
    if not address.name.endswith((".npz", ".safetensors")):
        raise _wrong(file, "a file that ends in .npz or .safetensors", address.name)
    try:
        folder = source_folder(uri, str(address.parent))
    except SourceRefusedError as exc:
        raise SourceRefusedError(
            "the file of reference logits lies where this server may not read",
            path=file,
            expected="a file in the root of the run, or in a folder that an administrator allows",
            found=str(address.parent),
            next_step="Move it there, or start the server with --adopt-from FOLDER (or set "
            "CAIRN_ADOPT_FROM).",
        ) from exc
    return open_files(folder), address.name


def _npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:  # sizes are compared before anything is unpacked
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    if sum(sizes.values()) > _MOST_BYTES:
        raise ValueError(f"arrays of {sum(sizes.values())} bytes, at most {_MOST_BYTES}")
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in _NAMES}


def _wrong(file: str, expected: str, found: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"reference_logits {file}: expected {expected}, found {found}; {SNIPPET}"
    )
