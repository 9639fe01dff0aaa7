"""Common part of convert and gather: plan, one durable step per file, publish.

Several files are parts of the job, which workers share; a single file is written where the job
runs. Each file is read back after it is written, and compared with the intended checksum. If the
store is full, the files that are finished stay, and the next execution of the same export uses
them.

Every execution plans a folder of its own (`<operation>-<random>`), so two never write into the same
one. At the end the execution creates the manifest, which names its folder, unless there is one: so
the first one that ends decides which folder counts.
"""

import contextlib
import dataclasses
import functools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import google_crc32c
import numpy as np

from cairn.counts import count_text
from cairn.installation import installed_version
from cairn.interop.conversion.finite import count_nonfinite
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.artifacts import ArtifactRef
from cairn.service.jobs.context import JobContext, Request, Result, run_place, step_request
from cairn.service.jobs.errors import JobFailedError, PartsFailedError
from cairn.storage.errors import (
    CorruptionError,
    NotFoundError,
    StepNotFoundError,
    StorageError,
    StoreFullError,
)
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.damage import refuse_damaged
from cairn.storage.runs.records.exports import (
    ExportFile,
    ExportKey,
    ExportManifest,
    LeftFile,
    LeftTry,
    delete_left,
    delete_tries,
    find_export,
    leave_try,
    left_tries,
    publish_export,
    withdraw_export,
)
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.safetensors.writer import (
    Shard,
    TensorSource,
    peak_bytes,
    shard_header,
    write_shard,
)
from cairn.storage.store.clock import rfc3339, utc_now
from cairn.storage.store.file_checksums import read_crc32c
from cairn.storage.store.files import Files
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

_SMALL_AT_ONCE: Final = 4
"""Small files that are written at a time; each mostly waits for the store."""

RESERVE_BYTES: Final = 64 << 20
"""Free space on a disk that an export leaves, in bytes.

Databases and training jobs may use the same disk, and an operation whose failure cannot be recorded
would seem to run forever. The reserve exceeds what all writers together hand to the disk between
two checks.
"""


@dataclass(frozen=True)
class ExportContent:
    """Content of an export.

    Attributes:
        shards: Large files, one durable step each. Each plan of the same export has the same names
            and sizes.
        metadata: Free text for each file's header.
        small: Other files, by name.
        finite: The job fails if a tensor has a NaN or an infinity.
        notes: Additional entries of the result, by name.
    """

    shards: tuple[Shard, ...]
    metadata: Mapping[str, str]
    small: Mapping[str, bytes]
    finite: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)


Planner = Callable[[Run, Manifest, CheckpointReader, Mapping[str, Any]], ExportContent]


@dataclass(frozen=True)
class Checked:
    """Outcome of a check of the written files.

    Attributes:
        files: Further files of the export, by name.
        notes: Additional entries of the result, by name.
    """

    files: Mapping[str, bytes]
    notes: Mapping[str, str] = field(default_factory=dict)


Check = Callable[[JobContext, StoreURI, StoreURI, Manifest], Checked]
"""Check of the written files; it raises if they are wrong.

Its arguments are the context, the URI of the step, the folder of the files, and the step's
manifest.
"""


def export_request(
    kind: str,
    *,
    root: str,
    run: Run,
    step: StepInfo,
    options: Mapping[str, Any],
    rule_version: int,
    memory_bytes: int | None = None,
    despite_damage: str | None = None,
) -> dict[str, Any]:
    """Return the request of an export job, as JSON; equal requests make equal artifacts."""
    bounded = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    return {
        **step_request(root, run, step, despite_damage=despite_damage),
        "kind": kind,
        "options": dict(options),
        "rule_version": rule_version,
        **bounded,
    }


def run_export(
    context: JobContext, request: Request, plan: Planner, check: Check | None = None
) -> Result:
    """Return the requested artifact's id and size; make the artifact if there is none yet.

    Args:
        context: Context of the job.
        request: Request from `export_request`.
        plan: Function that plans the content of the export.
        check: Check of the written files; None: no check.
    """
    job = _ExportJob(context, request, plan)
    planned = context.step("plan", job.plan)
    if planned["folder"] is None:
        return {"artifact_id": job.ref.id, "bytes": planned["total_bytes"], "existing": True}
    written: list[Result] = []
    try:
        written += _write_large(context, job, planned)
        records = written + context.step("finish", lambda: job.write_small(planned))["files"]
        notes: dict[str, str] = {}
        if check is not None:
            checked = context.step(
                "check", functools.partial(job.check, planned, list(records), check)
            )
            records += checked["files"]
            notes = checked["notes"]
        return context.step("publish", lambda: job.publish(planned, records, notes))
    except JobFailedError as failure:
        if isinstance(failure, PartsFailedError):
            written += [record for record in failure.done if record is not None]
        # Another execution may have published first; garbage collection then removes these files.
        if published := context.step("look again", job.find):
            return published
        if not failure.for_missing_space:
            raise
        raise _told(
            failure, context.step("leave", lambda: job.leave(planned, written))
        ) from failure


def _write_large(context: JobContext, job: "_ExportJob", planned: Result) -> list[Result]:
    """Write the large files, each in a step of its own, and return their records."""
    if planned.get("parts"):
        parts = [
            {**shard, "number": number, "planned": planned}
            for number, shard in enumerate(planned["shards"])
        ]
        return context.parts(planned["parts"], parts, at_once=planned["gather"])
    records, done = [], 0  # a single file
    for number, shard in enumerate(planned["shards"]):
        write = functools.partial(job.write_shard, planned, number, done)
        records.append(context.step(f"write {shard['name']}", write))
        done += shard["nbytes"]
    return records


def write_part(context: JobContext, request: Request, part: Result, plan: Planner) -> Result:
    """Write one of several large files, as a part of the job, and return its record."""
    job = _ExportJob(context, request, plan)
    alone = {**part["planned"], "total_bytes": part["nbytes"]}
    return job.write_shard(alone, part["number"], 0)


def made_by(run: Run, request: Request) -> str | None:
    """Return the id of the operation that made the requested artifact; None: there is none.

    An artifact that has lost files does not count.
    """
    existing = find_export(run.objects, _key(request))
    if existing is None or lost_files(run, existing):
        return None
    return existing.folder.rpartition("-")[0]


def lost_files(run: Run, manifest: ExportManifest) -> list[str]:
    """Return the names of files of a published export that are missing, or have another size."""
    return _wrong_files(open_files(run.uri / manifest.key.try_folder(manifest.folder)), manifest)


def leave_export(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    """Remove an operation's unpublished files, except those that the export's next run can use."""
    delete_tries(run_place(roots, request), _key(request), f"{operation_id}-", keep_left=True)


def abandon_export(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    """Remove the unpublished files of an operation."""
    delete_tries(run_place(roots, request), _key(request), f"{operation_id}-")


class _ExportJob:
    """Steps of one export. Any of them may be the first that this process runs."""

    def __init__(self, context: JobContext, request: Request, plan: Planner) -> None:
        self._context = context
        self._request = request
        self._plan = plan
        self._uri = run_place(context.roots, request)
        self._key = _key(request)
        self.ref = ArtifactRef(request["root"], request["run"], self._key)

    def plan(self) -> Result:
        """Find the artifact, or plan its folder and files.

        An artifact that has lost files does not count, and is made again.

        Raises:
            StepDamagedError: The step is damaged, perhaps since the job was requested, and the
                request gives no reason to use it nonetheless.
        """
        refuse_damaged(
            Run.open(self._uri), self._step, despite_damage=self._request.get("despite_damage")
        )
        objects = ObjectStore.open(self._uri)
        existing = find_export(objects, self._key)
        if existing is not None and _wrong_files(self._files(existing.folder), existing):
            # The manifest before the files, so that nobody finds an artifact without them.
            withdraw_export(objects, self._key, existing)
            delete_tries(self._uri, self._key, existing.folder)
            # Another execution may have made it meanwhile.
            existing = find_export(objects, self._key)
        if existing is not None:
            objects.sync(self._key.manifest)
            self._context.progress.set(
                done_bytes=existing.nbytes, total_bytes=existing.nbytes, message="exists already"
            )
            return {"folder": None, "total_bytes": existing.nbytes, "shards": []}
        self._context.progress.set(message="planning")
        shards = self._content.shards
        left = self._left()
        token = secrets.token_hex(4)
        return {
            "folder": f"{self._context.operation_id}-{token}",
            "parts": token if len(shards) > 1 else None,
            "gather": self._at_once(shards),
            "total_bytes": sum(shard.nbytes for shard in shards),
            "shards": [
                {"name": shard.file_name, "nbytes": shard.nbytes, "left": left.get(shard.file_name)}
                for shard in shards
            ],
        }

    def find(self) -> Result:
        """Return the artifact if another execution made it meanwhile; else an empty result."""
        with contextlib.suppress(StorageError):
            objects = ObjectStore.open(self._uri)
            existing = find_export(objects, self._key)
            if existing is not None and not _wrong_files(self._files(existing.folder), existing):
                objects.sync(self._key.manifest)
                delete_tries(self._uri, self._key, f"{self._context.operation_id}-")
                return {"artifact_id": self.ref.id, "bytes": existing.nbytes, "existing": True}
        return {}

    def leave(self, planned: Result, written: Sequence[Result]) -> Result:
        """Keep the finished files for the next run of this export; return their number and bytes.

        Args:
            planned: Result of `plan`.
            written: Records of the files that were written.
        """
        taken = [shard["left"]["record"] for shard in planned["shards"] if shard.get("left")]
        whole = {record["name"]: record for record in (*taken, *written)}
        files = [
            LeftFile(
                name=record["name"],
                size=record["size"],
                crc32c=record["crc32c"],
                notes={"nonfinite": record.get("nonfinite", {})},
            )
            for _, record in sorted(whole.items())
        ]
        objects, folder = ObjectStore.open(self._uri), planned["folder"]
        while files:
            left = LeftTry(by=installed_version(), at=rfc3339(utc_now()), files=tuple(files))
            try:
                leave_try(objects, self._key, folder, left)
                break
            except StoreFullError:  # delete one file to make room for the record
                self._files(folder).delete_tree(files.pop().name)
        return {"files": len(files), "bytes": sum(file.size for file in files)}

    def _left(self) -> dict[str, Result]:
        """Return the usable files that earlier tries left, by name: folder and record of each."""
        written: dict[str, Result] = {}
        for folder, left in left_tries(ObjectStore.open(self._uri), self._key).items():
            if left.by != installed_version():
                continue
            present = {entry.name: entry.size for entry in self._files(folder).list()}
            for file in left.files:
                if file.name not in written and present.get(file.name) == file.size:
                    record = {name: getattr(file, name) for name in ExportFile.model_fields}
                    written[file.name] = {"folder": folder, "record": {**record, **file.notes}}
        return written

    def write_shard(self, planned: Result, number: int, done: int) -> Result:
        """Write a large file, and return its record.

        Args:
            planned: Result of `plan`.
            number: Position of the file among the large files.
            done: Bytes of the large files before it.
        """
        shard = self._content.shards[number]
        expected = planned["shards"][number]
        if (expected["name"], expected["nbytes"]) != (shard.file_name, shard.nbytes):
            raise RuntimeError(f"planned {expected}, now {shard.file_name} of {shard.nbytes}")
        progress = self._context.progress
        if (left := expected.get("left")) and self._take(planned, shard, left, done):
            return {**left["record"], "taken": True}
        progress.set(
            done_bytes=done,
            total_bytes=planned["total_bytes"],
            message=f"writing {shard.file_name}",
        )
        files = self._files(planned["folder"])
        checksum = 0
        nonfinite: Counter[str] = Counter()

        def on_data(data: memoryview) -> None:
            nonlocal checksum
            self._context.check()
            _require_room(files, shard.file_name, len(data))
            checksum = google_crc32c.extend(checksum, np.frombuffer(data, np.uint8))

        written = write_shard(
            files,
            shard.file_name,
            _counting(shard, nonfinite),
            on_bytes=lambda count: progress.advance(
                # The header is not counted as tensor bytes.
                min(count, done + shard.nbytes - progress.done_bytes)
            ),
            on_data=on_data,
            metadata=self._content.metadata,
            read_back=True,
        )
        progress.set(done_bytes=done + shard.nbytes)
        record = _record(shard.file_name, written.size, checksum)
        self._compare(planned["folder"], record, read_back=written.read_back)
        return {**record, "nonfinite": dict(nonfinite)}

    def _take(self, planned: Result, shard: Shard, left: Result, done: int) -> bool:
        """Move a file of an earlier try into this try's folder; return False if it is not usable.

        The file is moved before it is checked: in its old folder, another execution could move it.
        """
        name, files = shard.file_name, self._files(planned["folder"])
        progress = self._context.progress
        progress.set(
            done_bytes=done, total_bytes=planned["total_bytes"], message=f"reading {name} again"
        )
        try:
            if not files.exists(name):  # the file exists if this step ran before
                self._files(left["folder"]).move(name, files, name)
            self._compare(planned["folder"], left["record"])
            header = shard_header(shard, self._content.metadata)
            if files.read_range(name, 0, len(header)) != header:
                raise CorruptionError(
                    "a file of an earlier try holds other tensors",
                    path=files.uri / name,
                    expected="the header that is planned now",
                    found="another",
                )
        except (NotFoundError, CorruptionError) as exc:
            logger.warning("operation %s: written anew: %s", self._context.operation_id, exc)
            files.delete_tree(name)
            return False
        progress.set(done_bytes=done + shard.nbytes)
        return True

    def write_small(self, planned: Result) -> Result:
        """Write the small files, and return their records."""
        self._all_written(planned, "writing small files")
        return {"files": self._write(planned["folder"], self._content.small)}

    def check(self, planned: Result, records: list[Result], check: Check) -> Result:
        """Run the check of the export against its checkpoint, before anything is published.

        Args:
            planned: Result of `plan`.
            records: Records of the written files.
            check: The check.
        """
        self._all_written(planned, "checking")
        self._check_finite(_nonfinite(records))
        folder = self._files(planned["folder"]).uri
        run = Run.open(self._uri)
        reference = self._uri / f"steps/{self._key.step}"
        checked = check(self._context, reference, folder, run.manifest(self._step))
        if (info := run.step(self._key.step)).attempt != self._key.attempt:
            raise StepNotFoundError(
                "the step was saved anew while its export was checked",
                path=reference,
                expected=f"attempt {self._key.attempt}",
                found=f"attempt {info.attempt}",
                next_step="Convert it again.",
            )
        files = self._write(planned["folder"], checked.files)
        return {"files": files, "notes": dict(checked.notes)}

    def _all_written(self, planned: Result, message: str) -> None:
        total = planned["total_bytes"]
        self._context.progress.set(done_bytes=total, total_bytes=total, message=message)

    def _write(self, folder: str, small: Mapping[str, bytes]) -> list[Result]:
        files = self._files(folder)

        def write(name: str) -> Result:
            with files.open_write(name) as sink:
                sink.write(small[name])
            record = _record(name, len(small[name]), google_crc32c.value(small[name]))
            self._compare(folder, record)
            return record

        with ThreadPoolExecutor(_SMALL_AT_ONCE, "cairn-small-files") as pool:
            return list(pool.map(write, sorted(small)))

    def publish(self, planned: Result, records: list[Result], notes: Mapping[str, str]) -> Result:
        """Publish the manifest, which makes the artifact visible."""
        self._all_written(planned, "publishing")
        nonfinite = _nonfinite(records)
        taken = sum(record["size"] for record in records if record.get("taken"))
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
                ExportFile.model_validate({name: record[name] for name in ExportFile.model_fields})
                for record in sorted(records, key=lambda record: str(record["name"]))
            ),
        )
        self._context.check()
        self._check_finite(nonfinite)
        self._check_written(planned, manifest)
        counting = publish_export(ObjectStore.open(self._uri), self._key, manifest)
        # Remove our files if another execution published first, and those of executions that died
        # while cleaning up.
        delete_tries(self._uri, self._key, f"{self._context.operation_id}-")
        delete_left(self._uri, self._key)
        self._context.progress.set(message="done")
        return {
            "artifact_id": self.ref.id,
            "bytes": counting.nbytes,
            "existing": counting.folder != planned["folder"],
            **({"nonfinite": nonfinite} if nonfinite else {}),
            **({"taken_over": taken} if taken else {}),
            **self._content.notes,
            **notes,
        }

    def _check_finite(self, nonfinite: Mapping[str, int]) -> None:
        """Raise if the export's weights are not finite, and the request does not allow that.

        Args:
            nonfinite: Number of NaNs and infinities, by tensor.

        Raises:
            InvalidRequestError: There are NaNs or infinities, and the request does not allow them.
        """
        if not nonfinite or not self._content.finite:
            return
        problems = [
            f"{name}: {count_text(count, 'number that is NaN', 'numbers that are NaN')} or infinite"
            for name, count in sorted(nonfinite.items())
        ]
        raise InvalidRequestError(
            f"step {self._key.step}: expected finite weights in the dtype of the export, found "
            f"{count_text(len(problems), 'tensor')} with numbers that are not: "
            f"{'; '.join(problems[:5])}. Take an earlier step, or a wider dtype; or allow them "
            "(allow_nonfinite).",
            extra={"problems": problems},
        )

    def _compare(self, folder: str, record: Result, *, read_back: str | None = None) -> None:
        """Compare a stored file with its intended record; the store's own checksum is trusted.

        Args:
            folder: Folder of the file.
            record: Intended size and checksum.
            read_back: CRC-32C of the bytes that were read back when the file was written; None: the
                file is read here, unless the store has a checksum.

        Raises:
            CorruptionError: The file differs.
        """
        files = self._files(folder)
        stat = files.stat(record["name"])
        stored = {"size": stat.size, "crc32c": stat.crc32c or read_back}
        if stored["crc32c"] is None and stat.size == record["size"]:
            size, crc = read_crc32c(
                files, record["name"], stat.size, progress=lambda _: self._context.check()
            )
            stored = {"size": size, "crc32c": crc}
        if stored != {name: record[name] for name in stored}:
            raise CorruptionError(
                "a file is not what was written",
                path=f"{files.uri}/{record['name']}",
                expected=f"{record['size']} bytes of crc32c {record['crc32c']}",
                found=f"{stored['size']} bytes of crc32c {stored['crc32c']}",
                next_step="Check the store, then resume the operation: it starts over.",
            )

    def _check_written(self, planned: Result, manifest: ExportManifest) -> None:
        """Check that the folder has all files that the manifest lists.

        Raises:
            CorruptionError: A file is missing, or has another size.
        """
        files = self._files(planned["folder"])
        files.sweep("")  # removes partial files of a killed execution
        wrong = _wrong_files(files, manifest)
        if wrong:
            raise CorruptionError(
                "the export is not whole",
                path=files.uri,
                expected="every file as it was written",
                found=f"missing or of another size: {', '.join(wrong)}",
                next_step="Resume the operation: it starts over.",
            )

    def _at_once(self, shards: Sequence[Shard]) -> int | None:
        """Return the number of files that fit into the memory limit at a time; None: no limit.

        Raises:
            InvalidRequestError: The memory is too small for a single file.
        """
        memory = self._request.get("memory_bytes")
        if memory is None:
            return None
        largest = max(shards, key=peak_bytes)
        at_once = memory // peak_bytes(largest)
        if not at_once:
            raise InvalidRequestError(
                f"memory: expected at least {peak_bytes(largest)} bytes, which writing "
                f"{largest.file_name} takes, found {memory}. Allow as much, or leave it out."
            )
        return int(at_once)

    @property
    def _step(self) -> StepInfo:
        return StepInfo(
            self._key.step,
            self._key.attempt,
            StepState.LISTED,
            manifest_digest=self._request["manifest_digest"],
        )

    @functools.cached_property
    def _content(self) -> ExportContent:
        run = Run.open(self._uri)
        manifest = run.manifest(self._step)
        reader = CheckpointReader.open(run.step_uri(self._step), manifest)
        return self._plan(run, manifest, reader, self._request["options"])

    def _files(self, folder: str) -> Files:
        return open_files(self._uri / self._key.try_folder(folder))


def _told(failure: JobFailedError, left: Result) -> JobFailedError:
    """Return a failure whose text also names the files that the next run can use.

    Args:
        failure: The failure.
        left: Number and bytes of those files.
    """
    if not left["files"]:
        return failure
    files = count_text(left["files"], "file")
    more = (
        f"{failure.data.get('detail')} {files} of {left['bytes']} bytes are whole and stay for a "
        "day: resume the operation, or start the same again, and it goes on with them."
    )
    return JobFailedError({**failure.data, "detail": more, "kept_bytes": left["bytes"]})


def _require_room(files: Files, name: str, nbytes: int) -> None:
    """Raise if writing a file would leave too little free space.

    Args:
        files: Folder to write to.
        name: Name of the file.
        nbytes: Size of the file in bytes.

    Raises:
        StoreFullError: Less than `RESERVE_BYTES` would be left.
    """
    room = files.free_bytes()
    if room is not None and room < RESERVE_BYTES + nbytes:
        raise StoreFullError(
            "the store is full",
            path=files.uri / name,
            expected=f"{RESERVE_BYTES} bytes of the disk that stay free",
            found=f"{room}, and {nbytes} to write",
            next_step="Free space, then try again; what was stored before is untouched.",
        )


def _counting(shard: Shard, nonfinite: Counter[str]) -> Shard:
    """Return a shard whose tensors count their NaNs and infinities while they are read.

    Args:
        shard: The shard.
        nonfinite: Counter by tensor, which is incremented.
    """

    def counting(tensor: TensorSource) -> TensorSource:
        def blocks(max_bytes: int) -> Iterator[np.ndarray]:
            for block in tensor.blocks(max_bytes):
                if count := count_nonfinite(block):
                    nonfinite[tensor.name] += count
                yield block

        return dataclasses.replace(tensor, blocks=blocks)

    return dataclasses.replace(shard, tensors=tuple(map(counting, shard.tensors)))


def _nonfinite(records: Sequence[Result]) -> dict[str, int]:
    """Return the numbers of NaNs and infinities in the written files, by tensor."""
    return {name: n for record in records for name, n in record.get("nonfinite", {}).items()}


def _wrong_files(files: Files, manifest: ExportManifest) -> list[str]:
    """Return the names of files that are missing, or have another size."""
    sizes = {entry.name: entry.size for entry in files.list()}
    return [file.name for file in manifest.files if sizes.get(file.name) != file.size]


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
