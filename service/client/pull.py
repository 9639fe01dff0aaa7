"""An export kept on a machine that serves it: whole, verified, and changed at once.

    folder/
      current -> versions/<version>     what to serve; replaced at once
      versions/<version>/               files of an export, each compared with its checksum
      partial/<version>/                what was fetched of the next one, and goes on from there

A version that was replaced stays until it is told to go.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cairn.service.client.checked_file import fetch_checked
from cairn.service.client.client import Client
from cairn.service.client.whole_file import take_alone
from cairn.service.errors import DownloadError, PullError
from cairn.service.schemas import Artifact, ArtifactFile
from cairn.storage.store import sync_names, sync_path

CURRENT: Final = "current"
_VERSIONS: Final = "versions"
_PARTIAL: Final = "partial"
_LOCK: Final = ".lock"
_NAME_DIGITS: Final = 12

Tell = Callable[[str, int, int], None]
"""Is told the file, its bytes so far, and of how many."""


@dataclass(frozen=True)
class Pulled:
    """What a folder serves.

    Attributes:
        run: Name of the run.
        step: Of it.
        artifact: Id of the export.
        folder: With its files.
        changed: Whether it was another before.
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
    """Have a folder serve the export of a step; the export is made if it was not yet.

    Args:
        client: Of the control plane.
        run: Name of the run.
        step: A listed step.
        folder: Where; made if it is not there.
        root: Name of the run's root.
        options: Of the export.
        attempt: The one that wrote the step that is meant; None: whichever is listed.
        despite_damage: Why a damaged step is served all the same, for the audit trail; None: it is
            refused, also if it was exported before the damage was found.
        keep: How many of the versions that were replaced stay; None: all.
        tell: See `Tell`.

    Raises:
        PullError: Another process pulls into the folder, what came is not what was exported, or
            the step was set aside meanwhile, and saved anew; or the folder serves it, and the disk
            fails to keep that.
        OSError: The disk is full, or does not let us write.
        ProblemResponseError: There is no such step, it is damaged, or it can't be exported.
        ServerUnreachableError: No control plane answers.
    """
    reason = {} if despite_damage is None else {"despite_damage": despite_damage}
    started = client.convert(run, step, root=root, **options, **reason)
    result = client.wait(started.id).result or {}
    artifact = client.artifact(str(result["artifact_id"]))
    if attempt is not None and artifact.attempt != attempt:
        raise PullError(
            f"{run}, step {step}: expected that of attempt {attempt}, found that of attempt "
            f"{artifact.attempt}: it was set aside meanwhile, and saved anew. Pull again."
        )
    version = _version(artifact)
    with _alone(folder):
        _refuse_foreign(folder / CURRENT)
        whole = folder / _VERSIONS / version
        if not whole.is_dir():
            _fetch_all(client, artifact, folder / _PARTIAL / version, tell)
            whole.parent.mkdir(exist_ok=True)
            os.rename(folder / _PARTIAL / version, whole)
        sync_path(str(whole.parent))  # another pull may have moved it, and died
        changed = _switch(folder, version)
        try:
            sync_names(str(folder.absolute()))  # what another pull did, too
        except OSError as exc:
            raise PullError(
                f"{folder / CURRENT}: expected a disk that keeps it, found one that fails ({exc}). "
                f"It leads to {whole} now, and may lead elsewhere after a power failure. Pull "
                "again once the disk is well."
            ) from exc
        if keep is not None:
            _forget(folder, version, keep)
    return Pulled(run, artifact.step, artifact.id, whole, changed)


def _version(artifact: Artifact) -> str:
    """A name that sorts by step, and is no other export's."""
    digest = hashlib.sha256(artifact.id.encode()).hexdigest()[:_NAME_DIGITS]
    return f"{artifact.step:012d}-{artifact.attempt}-{digest}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    refusal = PullError(
        f"{folder}: expected no other process that pulls into it, found one. Give each a folder of "
        "its own."
    )
    with (folder / _LOCK).open("a") as lock:
        take_alone(lock, refusal)
        yield


def _fetch_all(client: Client, artifact: Artifact, folder: Path, tell: Tell) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = {file.name for file in artifact.files}
    for left in folder.iterdir():
        if left.name not in known:
            left.unlink()
    for file in artifact.files:
        target = folder / file.name
        if target.parent != folder:
            raise PullError(f"{artifact.id}: expected plain names of files, found {file.name!r}")
        _fetch(client, artifact, file, target, tell)
    sync_path(str(folder))


def _fetch(
    client: Client, artifact: Artifact, file: ArtifactFile, target: Path, tell: Tell
) -> None:
    """Go on with a file, and compare it."""
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
    """Have `current` name a version; whether it was another before."""
    link, wanted = folder / CURRENT, f"{_VERSIONS}/{version}"
    if link.is_symlink() and os.readlink(link) == wanted:
        return False
    made = folder / f".{CURRENT}.{os.getpid()}"
    made.unlink(missing_ok=True)
    made.symlink_to(wanted)
    os.replace(made, link)
    return True


def _refuse_foreign(link: Path) -> None:
    """Raise if there is something that no pull has made."""
    if not link.is_symlink():
        found = "another thing" if link.exists() else None
    else:
        target = os.readlink(link)
        found = None if Path(target).parent == Path(_VERSIONS) else f"one to {target}"
    if found is not None:
        raise PullError(
            f"{link}: expected a link that Cairn made, or nothing, found {found}. Move it away, or "
            "choose another folder."
        )


def _forget(folder: Path, serving: str, keep: int) -> None:
    """Remove the versions that were fetched longest ago; the one that is served stays.

    Each is moved away first: what is left of one if this breaks off must not look whole.
    """
    others = [one for one in (folder / _VERSIONS).iterdir() if one.name != serving]
    others.sort(key=lambda one: one.stat().st_mtime_ns, reverse=True)
    partial = folder / _PARTIAL
    partial.mkdir(exist_ok=True)
    for one in others[keep:]:
        shutil.rmtree(partial / one.name, ignore_errors=True)
        os.rename(one, partial / one.name)
    sync_path(str(folder / _VERSIONS))
    for left in partial.iterdir():
        shutil.rmtree(left)
