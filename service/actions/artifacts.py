"""Artifacts of convert and gather: list, get, files for download."""

from cairn.service.access.callers import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.http.downloads import StoredFile
from cairn.service.jobs.artifacts import ArtifactRef
from cairn.service.jobs.kinds import convert, gather
from cairn.service.schemas import Artifact, ArtifactFile, OperationKind
from cairn.storage.errors import ArtifactNotFoundError
from cairn.storage.runs.records.exports import ExportManifest, exports_of_run, published_exports
from cairn.storage.runs.run import Run
from cairn.storage.store.clock import from_rfc3339
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI


def get_artifact(plane: ControlPlane, caller: Caller, artifact: str) -> Artifact:
    """Return an artifact, with its files.

    Raises:
        ArtifactNotFoundError: The caller's roots have no such artifact, or no longer.
    """
    ref = ArtifactRef.parse(artifact)
    manifest, folder = ref.open(caller.visible(plane.roots))
    return artifact_body(ref, manifest, folder)


def artifact_body(ref: ArtifactRef, manifest: ExportManifest, folder: StoreURI) -> Artifact:
    """Return an artifact in the form of the API."""
    return Artifact(
        id=ref.id,
        kind=OperationKind(manifest.kind),
        root=ref.root,
        run=ref.run,
        step=manifest.step,
        attempt=manifest.attempt,
        manifest_digest=manifest.source,
        options=manifest.options,
        uri=str(folder),
        bytes=manifest.nbytes,
        files=[
            ArtifactFile(name=file.name, bytes=file.size, crc32c=file.crc32c)
            for file in manifest.files
        ],
        created=from_rfc3339(manifest.created),
    )


def find_file(plane: ControlPlane, caller: Caller, artifact: str, name: str) -> StoredFile:
    """Return a file of an artifact, ready for download.

    Raises:
        ArtifactNotFoundError: See `get_artifact`; or the artifact has no such file.
        CorruptionError: The stored file has another size.
    """
    manifest, folder = ArtifactRef.parse(artifact).open(caller.visible(plane.roots))
    return stored_file(manifest, folder, name)


def stored_file(manifest: ExportManifest, folder: StoreURI, name: str) -> StoredFile:
    """Return a file of an export, ready for download.

    Raises:
        ArtifactNotFoundError: The export has no such file.
        CorruptionError: The stored file has another size.
    """
    file = next((file for file in manifest.files if file.name == name), None)
    if file is None:
        raise ArtifactNotFoundError(
            "no such file",
            path=folder,
            expected=", ".join(file.name for file in manifest.files[:20]),
            found=repr(name[:200]),
        )
    download = StoredFile(
        open_files(folder),
        name,
        file.size,
        f"{file.crc32c}-{file.size:x}-{manifest.folder[-8:]}",
        file.crc32c,
        "Delete the export, then convert or gather the checkpoint again.",
    )
    size = download.files.stat(name).size
    if size != file.size:
        raise download.changed(f"{file.size} bytes", f"{size}")
    return download


def list_artifacts(plane: ControlPlane, root: str, run: str, step: int) -> list[Artifact]:
    """Return the artifacts of a listed step, newest first; read from the store.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        UnsupportedFormatError, CorruptionError: The manifest of an export is unreadable.
        StoreUnavailableError: The store does not answer.
    """
    stored_run = plane.run(root, run)
    info = stored_run.step(step)
    manifests = [
        manifest
        for kind in (convert.KIND, gather.KIND)
        for manifest in published_exports(stored_run.objects, info.step, info.attempt, kind)
    ]
    manifests.sort(key=lambda export: export.created, reverse=True)
    return [artifact_of(root, stored_run, manifest) for manifest in manifests]


def list_run_artifacts(
    plane: ControlPlane, root: str, run: str, most: int
) -> tuple[list[Artifact], bool]:
    """Return the artifacts of a run, and whether there are more; read from the store.

    Artifacts of the highest steps come first, those of superseded steps included.

    Raises:
        RunNotFoundError: There is no such run.
        UnsupportedFormatError, CorruptionError: The manifest of an export is unreadable.
        StoreUnavailableError: The store does not answer.
    """
    stored_run = plane.run(root, run)
    manifests, more = exports_of_run(stored_run.objects, most)
    return [artifact_of(root, stored_run, manifest) for manifest in manifests], more


def artifact_of(root: str, run: Run, manifest: ExportManifest) -> Artifact:
    """Return a published export of a run in the form of the API."""
    key = manifest.key
    folder = run.uri / key.try_folder(manifest.folder)
    return artifact_body(ArtifactRef(root, run.uri.name, key), manifest, folder)


def file_of(run: Run, manifest: ExportManifest, name: str) -> StoredFile:
    """Return a file of a published export of a run; see `stored_file`."""
    return stored_file(manifest, run.uri / manifest.key.try_folder(manifest.folder), name)
