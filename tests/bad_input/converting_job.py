"""A control plane whose disk runs full during an export; a test starts it and reads it.

    python -m tests.bad_input.converting_job FOLDER

Store and databases are on that disk. It fills the disk but for half of what an export takes, starts
the export, tells what came of it as JSON, makes room, and resumes.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from cairn.service.jobs.kinds.export_job import RESERVE_BYTES
from tests.service.jobs import CONFIG, artifact_of, done, save_llama, serving, tries, watch

CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"
ROOM_BYTES = 5 << 20
"""Half of the files, beside what an export leaves free."""


def held(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in the folders of tries, by name: size and inode."""
    found = [path for path in folder.glob("llama/exports/*/*/*/*") if path.is_file()]
    return {path.name: (path.stat().st_size, path.stat().st_ino) for path in found}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def main(folder: Path) -> None:
    root, ballast = folder / "store", folder / "ballast"
    # Files of 1 MiB, and of an embedding of 2.
    save_llama(root / "llama", config=CONFIG.replace(hidden_size=256, intermediate_size=1024))
    body = {"max_shard_size": "1MB"}
    with serving(root, folder / "data") as http:
        free = os.statvfs(folder)
        with ballast.open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, free.f_bavail * free.f_frsize - RESERVE_BYTES - ROOM_BYTES
            )
        operation = http.post(CONVERT, json=body).json()["id"]
        failed = watch(http, operation)
        kept = held(root)
        left = os.statvfs(folder)
        published = [path.name for path in root.glob("llama/exports/*/*.json")]
        again = watch(http, http.post(CONVERT, json=body).json()["id"])
        still = held(root)
        ballast.unlink()
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
    main(Path(sys.argv[1]))
