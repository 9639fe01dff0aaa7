"""A control plane whose disk runs full during an export; a test starts it and reads it.

    python -m tests.bad_input.converting_job FOLDER MEANS

Store and databases are in that folder. It leaves half of what an export takes, starts the export,
tells what came of it as JSON, makes room, and resumes. Means: `disk`, a small disk is mounted at
the folder, and is filled; `limit`, files may be no larger than the smaller half of them.
"""

import hashlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cairn.service.jobs.kinds.export_job import RESERVE_BYTES
from tests.service.jobs import CONFIG, artifact_of, done, save_llama, serving, tries, watch

CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"
ROOM_BYTES = 5 << 20
"""Half of the files, beside what an export leaves free."""
LIMIT_BYTES = 5 << 20
"""More than the databases take, and their journals."""


def held(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in the folders of tries, by name: size and inode."""
    found = [path for path in folder.glob("llama/exports/*/*/*/*") if path.is_file()]
    return {path.name: (path.stat().st_size, path.stat().st_ino) for path in found}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """But for the room that an export leaves, and half of what it takes."""
    free, ballast = os.statvfs(folder), folder / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, free.f_bavail * free.f_frsize - RESERVE_BYTES - ROOM_BYTES
        )
    yield
    ballast.unlink()


@contextmanager
def limited(_: Path) -> Iterator[None]:
    """No file may be as large as those of the layers' products."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


MEANS = {"disk": (filled, 1024), "limit": (limited, 6144)}
"""How there is no room, and for a model of which inner width: files of 1 MiB, and of 6."""


def main(folder: Path, means: str) -> None:
    root = folder / "store"
    full, width = MEANS[means]
    save_llama(root / "llama", config=CONFIG.replace(hidden_size=256, intermediate_size=width))
    body = {"max_shard_size": "1MB", "memory": "500MB"}  # of which one file at a time takes half
    with serving(root, folder / "data") as http:
        with full(folder):
            operation = http.post(CONVERT, json=body).json()["id"]
            failed = watch(http, operation)
            kept = held(root)
            left = os.statvfs(folder)
            published = [path.name for path in root.glob("llama/exports/*/*.json")]
            again = watch(http, http.post(CONVERT, json=body).json()["id"])
            still = held(root)
        http.post(f"/v1/operations/{operation}:resume")
        ended = watch(http, operation)
        files = artifact_of(http, ended)["files"]
    [resumed] = tries(root, "llama")
    after, made = held(root), digests(resumed)
    for path in [*root.glob("llama/exports/*/*.json")]:
        path.unlink()
    resumed.rename(folder / "resumed")
    with serving(root, folder / "other") as http:
        done(http, CONVERT, body)
    [unhindered] = tries(root, "llama")
    report = {
        "failed": failed,
        "kept": kept,
        "free": left.f_bavail * left.f_frsize,
        "published": published,
        "again": again,
        "still": still,
        "ended": ended,
        "after": after,
        "files": [file["name"] for file in files],
        "same": made == digests(unhindered),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
