"""Change tokens of runs, which show a change of the records without reading them.

Every change of what is listed (a manifest, a label, an alias, an attempt, a tombstone, a step that
begins) adds or renames a file in its folder. On a disk that changes the folder's modification time;
in a bucket the listing has the generation of every object.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from typing import Final

from cairn.storage.runs.records.layout import (
    ALIASES,
    ANNOTATIONS,
    ATTEMPTS,
    MANIFESTS,
    RUN_FILE,
    TRASH,
)
from cairn.storage.runs.run import Run
from cairn.storage.store.files_local import SETTLED_NANOSECONDS
from cairn.storage.store.uri import StoreURI

_RECORDS: Final = (MANIFESTS, ANNOTATIONS, TRASH)
_FOLDERS: Final = (*_RECORDS, ALIASES, ATTEMPTS)


def change_token(run: StoreURI) -> str | None:
    """Return the change token of a run; equal tokens mean that nothing has changed in between.

    None if the store offers none, or if a change is too recent for the clock's resolution.
    """
    if run.scheme == "file":
        newest = time.time_ns() - SETTLED_NANOSECONDS
        times = list(_stats(run.local_path))
        if any(stat is not None and stat[1] > newest for stat in times):
            return None
        return _digest(times)
    objects = Run(run).objects
    if objects.is_remote:
        info = objects.read(RUN_FILE)
        listed = [list(objects.etags(folder).items()) for folder in _FOLDERS]
        steps = [objects.folders(attempt) for attempt in objects.folders(ATTEMPTS)]
        return _digest([info and info.generation, listed, steps])
    return None


def record_tokens(run: Run) -> dict[str, str | None]:
    """Return the change tokens of all manifests, annotations and tombstones of a run, by name.

    A token is None if the store offers none, or if the record changed too recently for one.
    """
    return {name: token for folder in _RECORDS for name, token in run.objects.etags(folder).items()}


def _stats(folder: str) -> Iterator[tuple[int, int] | None]:
    """Yield inode and modification time of every watched name; None: it does not exist."""
    for name in (RUN_FILE, *_FOLDERS):
        yield _stat(os.path.join(folder, name))
    attempts = os.path.join(folder, ATTEMPTS)
    try:
        names = sorted(os.listdir(attempts))
    except OSError:
        return
    for name in names:
        if not name.endswith(".json"):
            yield _stat(os.path.join(attempts, name))


def _stat(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _digest(seen: object) -> str:
    return hashlib.sha256(repr(seen).encode()).hexdigest()
