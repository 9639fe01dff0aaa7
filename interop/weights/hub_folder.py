"""A repository of the Hugging Face hub as a folder; files are fetched when they are needed.

The first download resolves the revision to a commit; all files come from that commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cairn.interop.weights.source_folder import SourceFolder, refuse_hub_options
from cairn.storage.errors import NotFoundError
from cairn.storage.store.files import Files
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["HUB_SCHEME", "find_folder"]

HUB_SCHEME: Final = "hf://"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def find_folder(
    name_or_path: str | os.PathLike[str] | StoreURI,
    *,
    config_file: str,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> SourceFolder:
    """Return a folder on the local disk, in a store, or else on the hub.

    Args:
        name_or_path: a folder, a store URI of one, or a hub id, also as "hf://org/name".
        config_file: name of the file that is fetched from the hub at once.
        revision: branch, tag or commit of a hub id.
        token: access token of the hub.
        local_files_only: use only the local cache for a hub id.

    Raises:
        NotFoundError: there is no such folder or repository.
        ArgumentError: a hub argument is given for a folder that is not on the hub.
    """
    text = str(name_or_path)
    on_hub = text.startswith(HUB_SCHEME)
    if on_hub or ("://" not in text and not Path(text).is_dir()):
        name = text.removeprefix(HUB_SCHEME)
        return HubFolder(name, config_file, revision, token, local_files_only)
    refuse_hub_options(f"the folder {text}", revision=revision, token=token)
    if "://" in text and not text.startswith("file://"):
        refuse_hub_options(f"the folder {text}", local_files_only=local_files_only)
    return SourceFolder(parse_uri(text))


class HubFolder(SourceFolder):
    """Commit of a hub repository; fetched files are in the hub library's local cache."""

    def __init__(
        self,
        repository: str,
        config_file: str,
        revision: str | None,
        token: str | None,
        local_files_only: bool,
    ) -> None:
        """Fetch `config_file`, and the names of the other files.

        Raises:
            NotFoundError: there is no such repository, or the hub can't be reached.
        """
        if not _HUB_ID.fullmatch(repository) or ".." in repository:
            raise NotFoundError(
                path=repository,
                expected="a folder, a .gguf file, a store URI or a hub id such as org/name",
                found="no such folder, and no hub id",
                next_step="check the path",
            )
        self._repository = repository
        self._revision = revision
        self._token = token
        self._local_files_only = local_files_only
        snapshot = self._download([config_file])
        super().__init__(parse_uri(snapshot))
        self._revision = Path(snapshot).name
        if not local_files_only:
            self._names = sorted({*self._names, *self._listed()})

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch these files into the cache; names that the repository lacks are ignored.

        Raises:
            NotFoundError: the hub can't be reached.
        """
        here = Path(self.uri.local_path)
        missing = [n for n in names if n in self._names and not (here / n).is_file()]
        if missing:
            self._download(missing)

    def locate(self, name: str) -> tuple[Files, str]:
        """Return the location of a file in the cache, with links resolved; fetch it if needed."""
        self.fetch([name])
        return super().locate(name)

    def _download(self, names: Sequence[str]) -> str:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )

        try:
            return snapshot_download(
                self._repository,
                revision=self._revision,
                token=self._token,
                local_files_only=self._local_files_only,
                allow_patterns=list(names),
            )
        except (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        ) as exc:
            raise self._not_found(exc) from exc

    def _listed(self) -> list[str]:
        """Return the names of the commit's files; [] if the hub fails but weights are cached."""
        from huggingface_hub import HfApi

        try:
            # Not `list_repo_files`: it retries for half a minute if the hub can't be reached.
            info = HfApi(token=self._token).model_info(self._repository, revision=self._revision)
            return [file.rfilename for file in info.siblings or ()]
        except Exception as exc:  # the error classes differ between versions of the hub's library
            if any(name.endswith((".safetensors", ".bin")) for name in self._names):
                return []
            raise self._not_found(exc) from exc

    def _not_found(self, exc: Exception) -> NotFoundError:
        return NotFoundError(
            path=self._repository,
            expected="a folder of this name here, or a repository on the hub",
            found=" ".join(str(exc).split())[:300],
            next_step="check the name, the revision, and HF_TOKEN for private models",
        )
