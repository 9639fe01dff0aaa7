"""Artifact ids, each of which names a published export and can be parsed without a database.

The form is `<root>~<run>~<step>~<attempt>~<kind>-<digest>`; no part may contain "~".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cairn.storage.errors import ArtifactNotFoundError, NotFoundError
from cairn.storage.runs.records.exports import ExportKey, ExportManifest, find_export
from cairn.storage.store.disk.confinement import safe_join
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.uri import RUN_NAME, StoreURI

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NUMBER = r"0|[1-9][0-9]{0,17}"
_ID: Final = re.compile(
    rf"(?P<root>{_NAME})~(?P<run>{RUN_NAME})~(?P<step>{_NUMBER})~(?P<attempt>{_NUMBER})"
    r"~(?P<kind>[a-z][a-z0-9_]{0,31})-(?P<digest>[0-9a-f]{8,64})"
)


@dataclass(frozen=True)
class ArtifactRef:
    """Address of an artifact.

    Attributes:
        root: name of the store root.
        run: name of the run.
        key: key of the export in the run.
    """

    root: str
    run: str
    key: ExportKey

    @property
    def id(self) -> str:
        """Artifact id."""
        key = self.key
        return f"{self.root}~{self.run}~{key.step}~{key.attempt}~{key.kind}-{key.digest}"

    @classmethod
    def parse(cls, artifact_id: str) -> "ArtifactRef":
        """Parse an artifact id.

        Raises:
            ArtifactNotFoundError: The text is not an artifact id.
        """
        match = _ID.fullmatch(artifact_id)
        if match is None:
            raise _missing(artifact_id, "a text of another form")
        key = ExportKey(int(match["step"]), int(match["attempt"]), match["kind"], match["digest"])
        return cls(match["root"], match["run"], key)

    def open(self, roots: Mapping[str, StoreURI]) -> tuple[ExportManifest, StoreURI]:
        """Return the artifact's manifest, and the folder of its files.

        Raises:
            ArtifactNotFoundError: The artifact does not exist, or no longer.
        """
        if self.root not in roots:
            raise _missing(self.id, f"no root {self.root!r}")
        run = safe_join(roots[self.root], self.run)
        try:
            manifest = find_export(ObjectStore.open(run), self.key)
        except NotFoundError:
            manifest = None
        if manifest is None:
            raise _missing(self.id, "nothing published")
        return manifest, run / self.key.try_folder(manifest.folder)


def _missing(artifact_id: str, found: str) -> ArtifactNotFoundError:
    return ArtifactNotFoundError(
        "no such artifact",
        path=artifact_id,
        expected="the artifact_id of an operation's result",
        found=found,
        next_step="Convert or gather the checkpoint again.",
    )
