"""Folder of a pretrained model in any store: the names of its files, and reads of small ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cairn.interop.errors import ArgumentError, ConversionError
from cairn.storage.store.files import Files
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["SourceFolder", "parse_json", "refuse_hub_options", "refuse_pointer"]

_MAX_NESTING: Final = 100
"""Most nested levels of a JSON file; configs have fewer, and deeper ones would break recursion."""
_POINTER_START: Final = b"version https://git-lfs.github.com/"


class SourceFolder:
    """Folder in any store. On a local disk its files may be links, as in the hub's cache."""

    def __init__(self, uri: StoreURI) -> None:
        self.uri = uri
        self._files = open_files(uri)
        entries = list(self._files.list(""))
        self._names = [entry.name for entry in entries if not entry.is_dir]
        self._folders = {entry.name for entry in entries if entry.is_dir}
        if uri.scheme == "file":
            # The store's listing omits links that lead out of the folder.
            at = Path(uri.local_path)
            self._names = sorted(p.name for p in at.iterdir() if p.is_file()) if at.is_dir() else []

    def names(self) -> list[str]:
        """Return the names of the folder's files."""
        return self._names

    def has_folder(self, name: str) -> bool:
        """Return whether the folder has a sub-folder of this name."""
        return name in self._folders or any(file.startswith(f"{name}/") for file in self._names)

    def fetch(self, names: Sequence[str]) -> None:
        """Do nothing: a store's files are available. `HubFolder` fetches them."""

    def locate(self, name: str) -> tuple[Files, str]:
        """Return the location of a file, with links resolved."""
        if self.uri.scheme != "file":
            return self._files, name
        real = Path(self.uri.local_path, name).resolve()
        return open_files(parse_uri(real.parent)), real.name

    def read_bytes(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is no such file.

        Raises:
            ConversionError: the file is a pointer of Git LFS, not the content.
        """
        if name not in self._names:
            return None
        files, rel = self.locate(name)
        with files.open_read(rel) as stream:
            content = stream.read()
        refuse_pointer(content, f"{self.uri}/{name}")
        return content


def refuse_hub_options(found: str, **options: object) -> None:
    """Raise ArgumentError if an argument for the hub is passed but nothing is loaded from it.

    Args:
        found: description of what is loaded, for the message.
        **options: the hub's arguments by name; None and False count as absent.

    Raises:
        ArgumentError: an argument is passed; the message names it.
    """
    names = [name for name, value in options.items() if value]
    if names:
        raise ArgumentError(
            path=", ".join(names),
            expected="a hub id with it",
            found=found,
            next_step="leave it out",
        )


def refuse_pointer(start: bytes, path: object) -> None:
    """Raise ConversionError if a file is a pointer of Git LFS in place of the content.

    Args:
        start: the file's first bytes, or all of it.
        path: the file, for the message.

    Raises:
        ConversionError: the file is such a pointer.
    """
    if start.startswith(_POINTER_START):
        raise ConversionError(
            path=path,
            expected="the file itself",
            found="a pointer of Git LFS to it",
            next_step="run git lfs pull in the repository that it was cloned from",
        )


def parse_json(raw: bytes, path: str) -> dict[str, Any]:
    """Return a JSON object, parsed.

    Raises:
        ConversionError: the bytes are no JSON object, a key occurs twice, or the nesting is too
            deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        twice = [k for k, value in pairs if entries[k] is not value and entries[k] != value]
        if twice:
            raise ValueError(f"two values of the key {twice[0]!r}")
        return entries

    try:
        data = json.loads(raw, object_pairs_hook=unique)
    except ValueError as exc:
        raise ConversionError(path=path, expected="JSON", found=str(exc)) from exc
    except RecursionError as exc:
        raise _too_deep(path) from exc
    if _is_deeper(data, _MAX_NESTING):
        raise _too_deep(path)
    if not isinstance(data, dict):
        raise ConversionError(path=path, expected="a JSON object", found=type(data).__name__)
    return data


def _too_deep(path: str) -> ConversionError:
    return ConversionError(
        path=path,
        expected=f"JSON of at most {_MAX_NESTING} levels",
        found="more",
        next_step="take the file again from its source",
    )


def _is_deeper(data: object, levels: int) -> bool:
    """Return whether parsed JSON has more than `levels` nested levels; without recursion."""
    level = [data]
    for _ in range(levels):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True
