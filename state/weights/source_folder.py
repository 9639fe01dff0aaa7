"""A folder of somebody's files, in any store or on the hub: its names, and its small files whole.

JAX-free.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cairn.state.errors import ArgumentError, ConversionError
from cairn.storage.errors import NotFoundError
from cairn.storage.store import Files, StoreURI, open_files, parse_uri

__all__ = ["HUB_SCHEME", "SourceFolder", "parse_json", "refuse_hub_options"]

HUB_SCHEME: Final = "hf://"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


class SourceFolder:
    """A folder in any store. On a local disk its files may be links, as in the hub's cache."""

    def __init__(self, uri: StoreURI) -> None:
        self.uri = uri
        self._files = open_files(uri)
        self._names = [entry.name for entry in self._files.list("") if not entry.is_dir]
        if uri.scheme == "file":
            # Links out of the folder are not in the listing.
            at = Path(uri.local_path)
            self._names = sorted(p.name for p in at.iterdir() if p.is_file()) if at.is_dir() else []

    @classmethod
    def find(
        cls,
        name_or_path: str | os.PathLike[str] | StoreURI,
        *,
        hub_files: Sequence[str],
        revision: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
    ) -> SourceFolder:
        """A folder here, in a store, or else of the hub.

        Args:
            name_or_path: a folder, a store URI of one, or a hub id, also as "hf://org/name".
            hub_files: patterns of the files to fetch from the hub.
            revision: branch, tag or commit of a hub id.
            token: of the hub.
            local_files_only: take a hub id from the local cache alone.

        Raises:
            NotFoundError: there is none.
            ArgumentError: something is asked of the hub for a folder that is not there.
        """
        text = str(name_or_path)
        on_hub = text.startswith(HUB_SCHEME)
        if on_hub or ("://" not in text and not Path(text).is_dir()):
            name = text.removeprefix(HUB_SCHEME)
            return cls(parse_uri(_snapshot(name, hub_files, revision, token, local_files_only)))
        refuse_hub_options(f"the folder {text}", revision=revision, token=token)
        if "://" in text and not text.startswith("file://"):
            refuse_hub_options(f"the folder {text}", local_files_only=local_files_only)
        return cls(parse_uri(text))

    def names(self) -> list[str]:
        """The names of its files."""
        return self._names

    def locate(self, name: str) -> tuple[Files, str]:
        """Where the file really is."""
        if self.uri.scheme != "file":
            return self._files, name
        real = Path(self.uri.local_path, name).resolve()
        return open_files(parse_uri(real.parent)), real.name

    def read_bytes(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        if name not in self._names:
            return None
        files, rel = self.locate(name)
        with files.open_read(rel) as stream:
            return stream.read()


def refuse_hub_options(found: str, **options: object) -> None:
    """Checks that nothing is asked of the hub, where something else is loaded.

    Args:
        found: what is loaded, for the message.
        **options: what would be asked of the hub; None and False ask nothing.

    Raises:
        ArgumentError: something is asked; it is named.
    """
    given = [name for name, value in options.items() if value]
    if given:
        raise ArgumentError(
            path=", ".join(given),
            expected="a hub id with it",
            found=found,
            next_step="leave it out",
        )


def parse_json(raw: bytes, path: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConversionError: the bytes are none.
    """
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConversionError(path=path, expected="JSON", found=str(exc)) from exc
    if not isinstance(data, dict):
        raise ConversionError(path=path, expected="a JSON object", found=type(data).__name__)
    return data


def _snapshot(
    text: str,
    hub_files: Sequence[str],
    revision: str | None,
    token: str | None,
    local_files_only: bool,
) -> str:
    if not _HUB_ID.fullmatch(text) or ".." in text:
        raise NotFoundError(
            path=text,
            expected="a folder, a .gguf file, a store URI or a hub id such as org/name",
            found="no such folder, and no hub id",
            next_step="check the path",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return snapshot_download(
            text,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            allow_patterns=list(hub_files),
        )
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    ) as exc:
        raise NotFoundError(
            path=text,
            expected="a folder of this name here, or a repository on the hub",
            found=" ".join(str(exc).split())[:300],
            next_step="check the name, the revision, and HF_TOKEN for private models",
        ) from exc
