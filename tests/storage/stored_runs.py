"""Runs made of names and small files, without arrays: what listings and deletions look at."""

from datetime import UTC, datetime
from typing import Any

from cairn import Attempt, Manifest, open_files
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.layout import manifest_file, step_dir
from cairn.storage.runs.records.manifest import ObjectRecord, PlainStep
from tests.storage.records import begin_attempt, release, write_record

PLAIN: dict[str, Any] = {
    "plain": PlainStep(trees={"model": "model"}),
    "objects": (ObjectRecord(name="model/data", size=4, crc32c="aed87dd1"),),
}
"""What a manifest says of the file that `write_data` writes."""


class SetClock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

    def __call__(self):
        return self.now


def begin(run, base_step, writer="w"):
    return begin_attempt(run.objects, writer=writer, base_step=base_step, clock=run.clock).number


def end(run):
    """The run's writer gives it back."""
    lease = read_lease(run.objects)
    attempt = Attempt(lease.attempt, -1, lease.writer, "", lease.instance)
    release(run.objects, attempt, clock=run.clock)


def write_data(run, step, attempt, committed=True, suffix=""):
    files = open_files(run.uri)
    folder = step_dir(attempt, step) + suffix
    for name in ["model/data", *(["commit_success.txt"] if committed else [])]:
        with files.open_write(f"{folder}/{name}") as stream:
            stream.write(b"data")


def publish(run, step, attempt):
    manifest = Manifest(
        step=step,
        attempt=attempt,
        created="2026-11-21T12:00:00Z",
        writer="w",
        items=("model",),
        **PLAIN,
    )
    return write_record(run.objects, manifest_file(step, attempt), manifest, generation=None)[0]


def save(run, step, attempt):
    write_data(run, step, attempt)
    return publish(run, step, attempt)


def states(run):
    return {(info.step, info.attempt): info.state.value for info in run.all_states()}
