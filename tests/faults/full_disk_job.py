"""A job on a disk that is filled to another level before each save, and what came of each.

    python -m tests.faults.full_disk_job '{"folder": PATH, "means": [...], "trials": N, "seed": N}'

Means: "bytes" and "inodes" leave so many of them on the disk of `folder`, which must be a small one
of its own; "limit" lets no file grow beyond so many bytes. Prints JSON: {"full": saves that failed,
"fitted": saves that did not, "lost": [what broke], "hit": {what could not be written: how often}}.
"""

import json
import os
import random
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cairn import Checkpointer, Run, StorageError, StoreFullError
from tests.faults.contents import KEY, contents, damage, placed

TRIALS_PER_RUN = 8
"""Steps pile up, and the disk is small."""

PAGE = 4096

HIT = re.compile(
    r"lease\.json|attempts/\d+\.json|manifests/|commit_success|_CHECKPOINT_METADATA|_METADATA"
    r"|_sharding|array_metadatas|manifest\.ocdbt|/[bd]\b|data\.json|cairn\.index"
)
"""The kinds of files, as errors name them."""


class FullDisk:
    """The experiment on one folder."""

    def __init__(self, folder: Path, means: list[str], seed: int) -> None:
        self.folder = folder
        self.means = means
        self.seed = seed
        self.draw = random.Random(seed)
        self.lost: list[str] = []
        self.hit: Counter[str] = Counter()
        self.fitted = 0
        self.needs = {"bytes": 0, "inodes": 0, "limit": 0}

    def measure(self) -> None:
        """How much room the save of a step takes, of each kind."""
        with Checkpointer(self.folder / "measured", writer_id="job") as checkpointer:
            self._save(checkpointer, 0, [self.seed])
            before = os.statvfs(self.folder)
            self._save(checkpointer, 1, [self.seed])
            after = os.statvfs(self.folder)
        sizes = [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]
        self.needs = {
            "bytes": (before.f_bavail - after.f_bavail) * after.f_frsize,
            "inodes": before.f_ffree - after.f_ffree,
            "limit": max(sizes),
        }
        shutil.rmtree(self.folder / "measured")

    def run(self, number: int, trials: int) -> None:
        """Save into one run, each step first on a full disk and then with room."""
        uri = self.folder / f"run-{number}"
        with ExitStack() as last:
            checkpointer = None
            for trial in range(trials):
                if checkpointer is None or self.draw.random() < 0.3:
                    last.close()
                    checkpointer = last.enter_context(Checkpointer(uri, writer_id="job"))
                    if trial == 0:
                        self._save(checkpointer, 0, [self.seed, number, 0])
                mean = self.draw.choice(self.means)
                left = self.draw.randrange(self.needs[mean])
                wrong = self._trial(checkpointer, mean, left, [self.seed, number, trial + 1])
                if wrong:
                    self.lost.append(f"{left} {mean} left: " + "; ".join(wrong))
        shutil.rmtree(uri)

    def _trial(self, checkpointer: Checkpointer, mean: str, left: int, key: list[int]) -> list[str]:
        """Save a step with so much room left, then with plenty; what is wrong."""
        run = Run.open(checkpointer.uri)
        before = run.step_attempts()
        step = max(before) + 1
        error = None
        with filled(self.folder, mean, left):
            try:
                self._save(checkpointer, step, [*key, 0])
            except StoreFullError as exc:
                error = exc
            except StorageError as exc:
                return [f"{type(exc).__name__}: {exc}"]
            wrong = [text for info in run.steps() for text in damage(run, info)]
            listed = run.step_attempts()
        if error is None:
            self.fitted += 1
            return wrong + ([] if step in listed else [f"step {step} is not listed"])
        if listed != before:
            wrong.append(f"listed before: {before}, after: {listed}")
        if f"file://{self.folder}/run-" not in str(error):
            wrong.append(f"names no path: {error}")
        named = HIT.findall(str(error))
        self.hit[named[-1].strip("/") if named else "a file not named"] += 1
        try:
            self._save(checkpointer, step, [*key, 1])
        except StorageError as exc:
            return [*wrong, f"with room again: {type(exc).__name__}: {exc}"]
        return wrong + [text for info in run.steps() for text in damage(run, info)]

    def _save(self, checkpointer: Checkpointer, step: int, key: list[int]) -> None:
        checkpointer.save(step, placed(contents(key)), meta={KEY: key}).wait()


@contextmanager
def filled(folder: Path, mean: str, left: int) -> Iterator[None]:
    """Leave so much room of a kind, and give all of it back at the end."""
    if mean == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    ballast = folder / "ballast"
    ballast.mkdir()
    try:
        free = os.statvfs(folder)
        if mean == "bytes":
            with (ballast / "bytes").open("wb") as file:
                room = free.f_bavail * free.f_frsize - left
                os.posix_fallocate(file.fileno(), 0, room // PAGE * PAGE)
        else:
            for number in range(free.f_ffree - left):
                (ballast / str(number)).touch()
        yield
    finally:
        shutil.rmtree(ballast)


def main(folder: str, means: list[str], trials: int, seed: int) -> dict[str, Any]:
    """Run the experiment; see the top of this file."""
    experiment = FullDisk(Path(folder), means, seed)
    experiment.measure()
    for number, done in enumerate(range(0, trials, TRIALS_PER_RUN)):
        experiment.run(number, min(TRIALS_PER_RUN, trials - done))
    return {
        "full": sum(experiment.hit.values()),
        "fitted": experiment.fitted,
        "lost": experiment.lost,
        "hit": dict(experiment.hit.most_common()),
        "needs": experiment.needs,
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
