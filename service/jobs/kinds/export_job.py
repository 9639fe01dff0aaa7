"""What convert and gather share: plan, one durable step per file, publish.

Every execution plans a folder of its own (`<operation>-<random>`), so that two never write into
one; what counts is decided by the manifest, created if absent, at the end.
"""

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from cairn.service.jobs.artifacts import ArtifactRef
from cairn.service.jobs.context import JobContext, Request, Result, step_request
from cairn.storage.errors import CorruptionError, StepNotFoundError
from cairn.storage.reading import CheckpointReader
from cairn.storage.runs import (
    ExportFile,
    ExportKey,
    ExportManifest,
    Manifest,
    Run,
    StepInfo,
    StepState,
    delete_tries,
    find_export,
    publish_export,
    withdraw_export,
)
from cairn.storage.safetensors import Shard, write_shard
from cairn.storage.store import Files, ObjectStore, StoreURI, confine, open_files, rfc3339, utc_now


@dataclass(frozen=True)
class ExportContent:
    """What to write.

    Attributes:
        shards: The large files, one durable step each. Their names and sizes are the same each
            time this is planned.
        metadata: Free text for the header of each.
        small: The other files, by name.
    """

    shards: tuple[Shard, ...]
    metadata: Mapping[str, str]
    small: Mapping[str, bytes]


Planner = Callable[[Run, Manifest, CheckpointReader, Mapping[str, Any]], ExportContent]


def export_request(
    kind: str,
    *,
    root: str,
    run: Run,
    step: StepInfo,
    options: Mapping[str, Any],
    rule_version: int,
) -> dict[str, Any]:
    """The JSON that a job is started with; equal requests make equal artifacts."""
    return {
        **step_request(root, run, step),
        "kind": kind,
        "options": dict(options),
        "rule_version": rule_version,
    }


def run_export(context: JobContext, request: Request, plan: Planner) -> Result:
    """Make the artifact that `request` asks for, or find it."""
    job = _ExportJob(context, request, plan)
    planned = context.step("plan", job.plan)
    if planned["folder"] is None:
        return {"artifact_id": job.ref.id, "bytes": planned["total_bytes"], "existing": True}
    records: list[Result] = []
    done = 0
    for number, shard in enumerate(planned["shards"]):
        write = functools.partial(job.write_shard, planned, number, done)
        records.append(context.step(f"write {shard['name']}", write))
        done += shard["nbytes"]
    records += context.step("finish", lambda: job.write_small(planned))["files"]
    return context.step("publish", lambda: job.publish(planned, records))


def made_by(run: Run, request: Request) -> str | None:
    """Id of the operation that has made the artifact that `request` asks for; None without one.

    One that has lost files does not count.
    """
    key = _key(request)
    existing = find_export(run.objects, key)
    if existing is None:
        return None
    if _wrong_files(open_files(run.uri / key.try_folder(existing.folder)), existing):
        return None
    return existing.folder.rpartition("-")[0]


def abandon_export(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    """Remove what an operation wrote and did not publish."""
    delete_tries(_run_uri(roots, request), _key(request), f"{operation_id}-")


class _ExportJob:
    """The steps of one export; each may be the first that this process runs."""

    def __init__(self, context: JobContext, request: Request, plan: Planner) -> None:
        self._context = context
        self._request = request
        self._plan = plan
        self._uri = _run_uri(context.roots, request)
        self._key = _key(request)
        self.ref = ArtifactRef(request["root"], request["run"], self._key)

    def plan(self) -> Result:
        """Find the artifact, or decide where it goes and what it consists of.

        One that has lost files does not count any more, and is made again.
        """
        objects = ObjectStore.open(self._uri)
        existing = find_export(objects, self._key)
        if existing is not None and _wrong_files(self._files(existing.folder), existing):
            withdraw_export(objects, self._key, existing)
            delete_tries(self._uri, self._key, existing.folder)
            existing = find_export(objects, self._key)  # or one that another has made meanwhile
        if existing is not None:
            self._context.progress.set(
                done_bytes=existing.nbytes, total_bytes=existing.nbytes, message="exists already"
            )
            return {"folder": None, "total_bytes": existing.nbytes, "shards": []}
        self._context.progress.set(message="planning")
        shards = self._content.shards
        return {
            "folder": f"{self._context.operation_id}-{secrets.token_hex(4)}",
            "total_bytes": sum(shard.nbytes for shard in shards),
            "shards": [{"name": shard.file_name, "nbytes": shard.nbytes} for shard in shards],
        }

    def write_shard(self, planned: Result, number: int, done: int) -> Result:
        """Write one large file; `done` bytes were written before it."""
        shard = self._content.shards[number]
        expected = planned["shards"][number]
        if expected != {"name": shard.file_name, "nbytes": shard.nbytes}:
            raise RuntimeError(f"planned {expected}, now {shard.file_name} of {shard.nbytes}")
        progress = self._context.progress
        progress.set(
            done_bytes=done,
            total_bytes=planned["total_bytes"],
            message=f"writing {shard.file_name}",
        )
        checksum = 0

        def on_data(data: memoryview) -> None:
            nonlocal checksum
            self._context.check()
            checksum = google_crc32c.extend(checksum, np.frombuffer(data, np.uint8))

        size = write_shard(
            self._files(planned["folder"]),
            shard.file_name,
            shard,
            on_bytes=lambda count: progress.advance(
                min(count, done + shard.nbytes - progress.done_bytes)  # the header is no tensor
            ),
            on_data=on_data,
            metadata=self._content.metadata,
        )
        progress.set(done_bytes=done + shard.nbytes)
        return _record(shard.file_name, size, checksum)

    def write_small(self, planned: Result) -> Result:
        """Write all other files."""
        self._context.progress.set(
            done_bytes=planned["total_bytes"],
            total_bytes=planned["total_bytes"],
            message="writing small files",
        )
        files = self._files(planned["folder"])
        records = []
        for name, data in sorted(self._content.small.items()):
            with files.open_write(name) as sink:
                sink.write(data)
            records.append(_record(name, len(data), google_crc32c.value(data)))
        return {"files": records}

    def publish(self, planned: Result, records: list[Result]) -> Result:
        """Make the artifact visible."""
        progress = self._context.progress
        progress.set(
            done_bytes=planned["total_bytes"],
            total_bytes=planned["total_bytes"],
            message="publishing",
        )
        manifest = ExportManifest(
            kind=self._key.kind,
            step=self._key.step,
            attempt=self._key.attempt,
            source=self._request["manifest_digest"],
            options=self._request["options"],
            rule_version=self._request["rule_version"],
            folder=planned["folder"],
            created=rfc3339(utc_now()),
            files=tuple(
                ExportFile.model_validate(record)
                for record in sorted(records, key=lambda record: str(record["name"]))
            ),
        )
        self._context.check()
        self._check_written(planned, manifest)
        counting = publish_export(ObjectStore.open(self._uri), self._key, manifest)
        # Ours, if another was faster; and what an execution left that died in its cleaning up.
        delete_tries(self._uri, self._key, f"{self._context.operation_id}-")
        progress.set(message="done")
        return {
            "artifact_id": self.ref.id,
            "bytes": counting.nbytes,
            "existing": counting.folder != planned["folder"],
        }

    def _check_written(self, planned: Result, manifest: ExportManifest) -> None:
        """Make sure that the folder holds what the manifest is about to promise.

        Raises:
            CorruptionError: One of them is not there, or has another size.
        """
        files = self._files(planned["folder"])
        files.sweep("")  # an execution that was killed may have left halves
        wrong = _wrong_files(files, manifest)
        if wrong:
            raise CorruptionError(
                "the export is not whole",
                path=files.uri,
                expected="every file as it was written",
                found=f"missing or of another size: {', '.join(wrong)}",
                next_step="Resume the operation: it starts over.",
            )

    @functools.cached_property
    def _content(self) -> ExportContent:
        run = Run.open(self._uri)
        step = StepInfo(
            self._key.step,
            self._key.attempt,
            StepState.LISTED,
            manifest_digest=self._request["manifest_digest"],
        )
        manifest = run.manifest(step)
        reader = CheckpointReader.open(run.step_uri(step), manifest)
        return self._plan(run, manifest, reader, self._request["options"])

    def _files(self, folder: str) -> Files:
        return open_files(self._uri / self._key.try_folder(folder))


def _wrong_files(files: Files, manifest: ExportManifest) -> list[str]:
    """Files of the export that are not there, or have another size."""
    found = {entry.name: entry.size for entry in files.list()}
    return [file.name for file in manifest.files if found.get(file.name) != file.size]


def _run_uri(roots: Mapping[str, StoreURI], request: Request) -> StoreURI:
    if request["root"] not in roots:
        raise StepNotFoundError(
            "the root is gone",
            path=request["root"],
            expected=f"one of {', '.join(roots)}",
            found="a job of a root that is configured no more",
            next_step="Configure or add the root again, then resume the operation.",
        )
    return confine(roots[request["root"]], request["run"])


def _key(request: Request) -> ExportKey:
    return ExportKey.of(
        step=request["step"],
        attempt=request["attempt"],
        kind=request["kind"],
        source=request["manifest_digest"],
        options=request["options"],
        rule_version=request["rule_version"],
    )


def _record(name: str, size: int, checksum: int) -> Result:
    return {"name": name, "size": size, "crc32c": f"{checksum:08x}"}
