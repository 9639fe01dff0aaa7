"""Local copy of an export on a serving machine: complete, verified, switched atomically.

    folder/
      current -> versions/<version>     the version to serve; a symlink, replaced atomically
      versions/<version>/               files of an export, each compared with its checksum
      versions/<version>/pulled.json    run, step, attempt and options of the export
      partial/<version>/                incomplete download of a version, which a pull resumes

A replaced version stays until a pull with `keep` removes it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from cairn.service.client.checked_file import fetch_checked
from cairn.service.client.client import Client
from cairn.service.client.whole_file import take_alone, whole_file
from cairn.service.errors import DownloadError, ProblemResponseError, PullConflictError, PullError
from cairn.service.export_options import has_permanent_address, options_text
from cairn.service.schemas import Artifact, ArtifactFile
from cairn.storage.store.disk.directory_entries import fsync_path, sync_entries

CURRENT: Final = "current"
PULLED: Final = "pulled.json"
_VERSIONS: Final = "versions"
_PARTIAL: Final = "partial"
_LOCK: Final = ".lock"
_NAME_DIGITS: Final = 12
_OF_ITS_OWN: Final = {"format": "huggingface", "dtype": None, "lora": "merge"}
"""Options that decide what a folder's reader loads, with their defaults."""

Tell = Callable[[str, int, int], None]
"""Progress callback with the file's name, its bytes so far, and its size."""


@dataclass(frozen=True)
class Pulled:
    """Version that a folder serves.

    Attributes:
        run: Name of the run.
        step: Step of the run.
        artifact: Id of the export.
        folder: Folder with the files of the export.
        changed: True if the pull switched the folder to this version.
    """

    run: str
    step: int
    artifact: str
    folder: Path
    changed: bool


def pull(
    client: Client,
    run: str,
    step: int,
    folder: Path,
    *,
    root: str,
    options: Mapping[str, Any],
    attempt: int | None = None,
    despite_damage: str | None = None,
    keep: int | None = None,
    tell: Tell = lambda name, done, total: None,
) -> Pulled:
    """Make a folder serve the export of a step; export the step first if needed.

    An export that exists takes a key with the scope `read`; to make one takes `operate`.

    Args:
        client: Client of the control plane.
        run: Name of the run.
        step: A listed step.
        folder: Target folder; created if missing.
        root: Name of the run's root.
        options: Options of the export.
        attempt: Attempt that wrote the step; None for the listed one.
        despite_damage: Reason to serve a damaged step, for the audit trail. With None, the server
            refuses a damaged step, even if it was exported before the damage was found.
        keep: Number of replaced versions that stay; None for all.
        tell: Progress callback, see `Tell`.

    Raises:
        PullConflictError: Another process pulls into the folder; `current` is not a link of Cairn,
            or has an export with another format or dtype.
        PullError: The bytes differ from the export; the step was superseded meanwhile and saved
            anew; or `current` was switched, and the disk then failed to fsync the switch.
        OSError: The disk is full, or writing is not permitted.
        ProblemResponseError: The step does not exist, is damaged, or can't be exported, or not
            with this key.
        ServerUnreachableError: No control plane answers.
    """
    _check_current(folder, options)
    if despite_damage is None and has_permanent_address(options):
        artifact = _existing_or_new(client, run, step, root, options)
    else:  # an export has no address with a config, nor one of a damaged step
        reason = {} if despite_damage is None else {"despite_damage": despite_damage}
        artifact = _export(client, run, step, root, {**options, **reason})
    if attempt is not None and artifact.attempt != attempt:
        raise PullError(
            f"{run}, step {step}: expected that of attempt {attempt}, found that of attempt "
            f"{artifact.attempt}: it was superseded meanwhile, and saved anew. Pull again."
        )
    # Unique, and sorted by step.
    digest = hashlib.sha256(artifact.id.encode()).hexdigest()[:_NAME_DIGITS]
    version = f"{artifact.step:012d}-{artifact.attempt}-{digest}"
    with _alone(folder):
        _check_current(folder, options)
        whole = folder / _VERSIONS / version
        if not whole.is_dir():
            _fetch_all(client, artifact, folder / _PARTIAL / version, tell)
            whole.parent.mkdir(exist_ok=True)
            os.rename(folder / _PARTIAL / version, whole)
        fsync_path(str(whole.parent))  # another pull may have renamed it and died before its fsync
        changed = _switch(folder, version)
        try:
            sync_entries(
                str(folder.absolute())
            )  # also covers a switch that another pull did not fsync
        except OSError as exc:
            raise PullError(
                f"{folder / CURRENT}: expected a disk that keeps it, found one that fails ({exc}). "
                f"It leads to {whole} now, and may lead elsewhere after a power failure. Pull "
                "again once the disk is well."
            ) from exc
        if keep is not None:
            _forget(folder, version, keep)
    return Pulled(run, artifact.step, artifact.id, whole, changed)


def _existing_or_new(
    client: Client, run: str, step: int, root: str, options: Mapping[str, Any]
) -> Artifact:
    """Return the export of a step that was made with these options; make it if there is none."""
    try:
        return client.export(run, step, root=root, **options)
    except ProblemResponseError as exc:
        if exc.problem.get("type") != "urn:cairn:problem:artifact-not-found":
            raise
        missing = exc
    try:
        return _export(client, run, step, root, options)
    except ProblemResponseError as exc:
        if exc.status != HTTPStatus.FORBIDDEN:
            raise
        text = (
            f"{missing.problem.get('detail')} Your key may not make it, which takes the scope "
            '"operate". An automation (`cairn policies`) exports each step that an alias moves '
            "to; the gate `exported` with these options lets no alias move before."
        )
        raise ProblemResponseError({**missing.problem, "detail": text}, missing.status) from exc


def _export(client: Client, run: str, step: int, root: str, options: Mapping[str, Any]) -> Artifact:
    started = client.convert(run, step, root=root, **options)
    result = client.wait(started.id).result or {}
    return client.artifact(str(result["artifact_id"]))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    refusal = PullConflictError(
        f"{folder}: expected no other process that pulls into it, found one. Give each a folder of "
        "its own."
    )
    with (folder / _LOCK).open("a") as lock:
        take_alone(lock, refusal)
        yield


def _fetch_all(client: Client, artifact: Artifact, folder: Path, tell: Tell) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in artifact.files}
    for left in folder.iterdir():
        if left.name not in names:
            left.unlink()
    for file in artifact.files:
        target = folder / file.name
        if target.parent != folder:
            raise PullError(f"{artifact.id}: expected plain names of files, found {file.name!r}")
        _fetch(client, artifact, file, target, tell)
    if PULLED not in names:
        _describe(folder / PULLED, artifact)
    fsync_path(str(folder))


def _describe(path: Path, artifact: Artifact) -> None:
    """Write which export a version is, for people and for the next pull."""
    described = artifact.model_dump(
        mode="json", include={"id", "root", "run", "step", "attempt", "options"}
    )
    with whole_file(path) as file:
        file.write(f"{json.dumps(described)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _fetch(
    client: Client, artifact: Artifact, file: ArtifactFile, target: Path, tell: Tell
) -> None:
    """Download the missing end of a file, and compare its checksum."""
    try:
        fetch_checked(
            lambda start: client.artifact_blocks(artifact.id, file.name, start=start),
            target,
            size=file.bytes,
            crc32c=file.crc32c,
            name=f"{artifact.id}: {file.name}",
            tell=lambda done: tell(file.name, done, file.bytes),
        )
    except DownloadError as exc:
        raise PullError(str(exc)) from exc


def _switch(folder: Path, version: str) -> bool:
    """Point `current` at a version; return True if it pointed elsewhere before."""
    link, destination = folder / CURRENT, f"{_VERSIONS}/{version}"
    if link.is_symlink() and os.readlink(link) == destination:
        return False
    new_link = folder / f".{CURRENT}.{os.getpid()}"
    new_link.unlink(missing_ok=True)
    new_link.symlink_to(destination)
    os.replace(new_link, link)
    return True


def _check_current(folder: Path, options: Mapping[str, Any]) -> None:
    """Check that `current` is free, or an export that serves the same readers.

    Raises:
        PullConflictError: No pull created `current`, or it has an export of another format or
            dtype.
    """
    _refuse_foreign(folder / CURRENT)
    try:
        described = json.loads((folder / CURRENT / PULLED).read_text(encoding="utf-8"))
        present = _deciding(described["options"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # no version is there, or the export itself has a file of this name
    if present != _deciding(options):
        raise PullConflictError(
            f"{folder / CURRENT} is an export with {options_text(present)}, and this pull asks for "
            f"one with {options_text(_deciding(options))}, which a server of the first may not "
            f"load. Pull it into a folder of its own; or remove {folder / CURRENT} first."
        )


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    deciding = {name: options.get(name, default) for name, default in _OF_ITS_OWN.items()}
    return deciding | ({"format": "huggingface"} if deciding["format"] == "pytorch" else {})


def _refuse_foreign(link: Path) -> None:
    """Raise `PullConflictError` if `current` exists and no pull created it."""
    if not link.is_symlink():
        content = "another thing" if link.exists() else None
    else:
        target = os.readlink(link)
        content = None if Path(target).parent == Path(_VERSIONS) else f"one to {target}"
    if content is not None:
        raise PullConflictError(
            f"{link}: expected a link that Cairn made, or nothing, found {content}. Move it away, "
            "or choose another folder."
        )


def _forget(folder: Path, serving: str, keep: int) -> None:
    """Remove the oldest versions, but never the served one.

    Each is renamed into `partial/` first: after a crash, a half-removed version must not look
    complete.
    """
    others = [version for version in (folder / _VERSIONS).iterdir() if version.name != serving]
    others.sort(key=lambda version: version.stat().st_mtime_ns, reverse=True)
    partial = folder / _PARTIAL
    partial.mkdir(exist_ok=True)
    for version in others[keep:]:
        shutil.rmtree(partial / version.name, ignore_errors=True)
        os.rename(version, partial / version.name)
    fsync_path(str(folder / _VERSIONS))
    for left in partial.iterdir():
        shutil.rmtree(left)
