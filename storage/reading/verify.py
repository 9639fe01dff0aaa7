"""Is a stored step still what was saved? Reads every byte of it once, and no JAX.

Every file is compared with the manifest's size and checksums: of files of array values the content
sum where there is one, since it finds more than their crc32c and costs less. Only if such files
fail are the leaves read too, to say which of them are hit.

Memory: the buffers of `file_checksums`, the manifest and the digests of the chunks; where leaves
are read, also what `CheckpointReader.iter_blocks` holds. None grows with the size of the arrays.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, SupportsIndex

from cairn.storage.arrays import (
    FILE_PREFIX,
    STEP_METADATA,
    TREE_METADATA,
    ChunkDigests,
    StoredTree,
    digest_text,
    parse_digest,
    parse_step_metadata,
    parse_tree_metadata,
)
from cairn.storage.errors import (
    CorruptionError,
    NotFoundError,
    StorageError,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.step_files import file_problem, holds_values, listed_problems
from cairn.storage.runs import (
    LeafRecord,
    Manifest,
    ObjectRecord,
    Run,
    StepInfo,
    check_step,
    manifest_file,
    read_asset,
)
from cairn.storage.store import ObjectStore, StoreURI, open_files, read_files

__all__ = ["VerifyReport", "verify_step"]

_BLOCK_BYTES: Final = 8 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class VerifyReport:
    """What verifying a step found.

    Attributes:
        step: the step.
        attempt: the attempt that wrote it.
        files: files that were read.
        nbytes: their bytes.
        leaves: leaves that the manifest names.
        seconds: how long it took.
        problems: everything that is not as it was saved, one line each; each begins with the name
            of a file of the step, of an object of the run, or of a leaf.
        extra: files in the step's folder that were not saved with it. They do no harm.
    """

    step: int
    attempt: int
    files: int
    nbytes: int
    leaves: int
    seconds: float
    problems: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the step is what was saved."""
        return not self.problems

    def raise_problems(self, path: object) -> None:
        """Raise what was found, if anything was.

        Args:
            path: how the error names the step.

        Raises:
            CorruptionError: the step is not what was saved; it has the same `problems`.
        """
        if self.problems:
            raise CorruptionError(
                "the step is damaged",
                path=path,
                expected="what was saved",
                found=f"{len(self.problems)} problems",
                next_step="Restore the files from a backup, or use another step.",
                problems=self.problems,
            )


def verify_step(
    run: Run, step: SupportsIndex | StepInfo, *, progress: Progress | None = None
) -> VerifyReport:
    """Compare a stored step with its manifest, byte by byte; what was found, good or bad.

    Args:
        run: the run.
        step: a listed step's number, or any step that has a manifest.
        progress: called now and then with (bytes read, bytes in all); what it raises ends it.

    Raises:
        InvalidURIError: `step` is no step's number.
        StepNotFoundError: there is no such step.
        StepInFlightError: it is being written now.
        StoreUnavailableError: the store gives no answer.
    """
    started = time.monotonic()
    step = step if isinstance(step, StepInfo) else check_step(step)
    try:
        info = step if isinstance(step, StepInfo) else run.step(step)
        manifest = run.manifest(info)
    except (CorruptionError, UnsupportedFormatError) as exc:
        number, attempt = _key(run, step)
        problem = f"{manifest_file(number, attempt)}: {_text(exc)}"
        return VerifyReport(number, attempt, 0, 0, 0, time.monotonic() - started, (problem,))
    check = _StepCheck(run, run.step_uri(info), manifest)
    check.files(progress)
    check.small_objects()
    check.leaves()
    return VerifyReport(
        info.step,
        info.attempt,
        files=check.files_read,
        nbytes=check.bytes_read,
        leaves=len(manifest.leaves),
        seconds=time.monotonic() - started,
        problems=tuple(check.problems),
        extra=tuple(check.extra),
    )


class _StepCheck:
    """One verification under way."""

    def __init__(self, run: Run, uri: StoreURI, manifest: Manifest) -> None:
        self._run = run
        self._uri = uri
        self._manifest = manifest
        self._objects = ObjectStore(uri)
        self._sound: dict[str, ObjectRecord] = {}
        self.problems: list[str] = []
        self.extra: list[str] = []
        self.files_read = 0
        self.bytes_read = 0

    def files(self, progress: Progress | None) -> None:
        """Compare every file with the manifest."""
        records = {record.name: record for record in self._manifest.objects}
        listed = {entry.name: entry for entry in open_files(self._uri).walk()}
        self.extra = sorted({*listed} - {*records}) if records else []
        problems = listed_problems(listed, self._manifest.objects)
        wanted = sorted(
            (record for record in records.values() if record.name not in problems),
            key=lambda record: (-record.size, record.name),
        )
        done, total = 0, sum(record.size for record in wanted)

        def told(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        summed = {
            record.name for record in wanted if record.content_sum and holds_values(record.name)
        }
        names = [record.name for record in wanted]
        for found in read_files(self._uri, names, content_only=summed, progress=told):
            self.files_read += 1
            self.bytes_read += found.size
            problem = file_problem(records[found.name], found)
            if problem is not None:
                problems[found.name] = problem
        self._sound = {name: record for name, record in records.items() if name not in problems}
        self.problems += [problems[name] for name in sorted(problems)]

    def small_objects(self) -> None:
        """Compare what the sound metadata says with the manifest, and the assets with theirs."""
        self.problems += self._wrong_trees()
        for item in self._manifest.items:
            self.problems += self._wrong_digests(item)
        for asset in self._manifest.assets:
            try:
                read_asset(self._run.objects, asset)
            except CorruptionError as exc:
                self.problems.append(f"asset {asset.name}: {_text(exc)}")

    def leaves(self) -> None:
        """Read the leaves if files of values are damaged, or have no checksum in the manifest.

        Not if a file that leads to them is damaged: no parser gets what is known not to be ours.
        """
        values = [record for record in self._manifest.objects if holds_values(record.name)]
        if any(
            record.name not in self._sound and not holds_values(record.name)
            for record in self._manifest.objects
        ):
            return
        stored = any(leaf.chunks is not None for leaf in self._manifest.leaves)
        checked = all(record.name in self._sound and record.crc32c for record in values)
        if checked and (values or not stored):
            return
        sound = self._manifest.model_copy(update={"objects": tuple(self._sound.values())})
        try:
            reader = CheckpointReader.open(self._uri, sound)
            for item in reader.items():
                for path in reader.leaves(item):
                    self.problems += self._unreadable(reader, item, path)
        except StoreUnavailableError:
            raise
        except StorageError as exc:  # what leads to the leaves is damaged too, and listed above
            if not self.problems:
                self.problems.append(_text(exc))

    def _unreadable(self, reader: CheckpointReader, item: str, path: str) -> Iterator[str]:
        try:
            for _ in reader.iter_blocks(item, path, max_bytes=_BLOCK_BYTES):
                pass
        except (CorruptionError, NotFoundError) as exc:
            yield f"{item}: {path}: {_text(exc)}"

    def _wrong_trees(self) -> Iterator[str]:
        """Items whose leaves, as Orbax lists them, are not the manifest's."""
        data = self._read(STEP_METADATA)
        if data is None:
            return
        step = parse_step_metadata(data, path=self._uri / STEP_METADATA)
        for item in sorted({leaf.item for leaf in self._manifest.leaves}):
            name = f"{item}/{TREE_METADATA}"
            forms = step.forms.get(item, {})
            found = {path for path, form in forms.items() if form.kind == "empty"}
            described = self._read(name)
            tree = StoredTree()
            if described is not None:
                tree = parse_tree_metadata(described, path=name)
                found |= set(tree.arrays)
            elif name in {record.name for record in self._manifest.objects}:
                continue  # damaged, and listed as such
            expected = {tree.current(leaf.path) for leaf in self._leaves_of(item)}
            for path in sorted(expected ^ found):
                where = "the manifest" if path in expected else "Orbax's metadata"
                yield f"{item}: {path}: only {where} has this leaf"

    def _wrong_digests(self, item: str) -> Iterator[str]:
        """Leaves whose digest in the manifest is not what those of their chunks add up to."""
        prefix = f"{item}/{FILE_PREFIX}"
        names = [record.name for record in self._manifest.objects if record.name.startswith(prefix)]
        if not names or not self._sound.keys() >= {*names}:
            return
        known = ChunkDigests()
        for name in names:
            known = known.merged(ChunkDigests.parse(self._read(name) or b"", path=name))
        for leaf in self._leaves_of(item):
            told = parse_digest(leaf.digest) if leaf.digest else None
            if told is None or leaf.chunks is None:
                continue
            total = known.total(leaf.path)
            if total != told:
                found = "nothing" if total is None else digest_text(total)
                yield f"{item}: {leaf.path}: its chunks add up to {found}, not to {leaf.digest}"

    def _leaves_of(self, item: str) -> list[LeafRecord]:
        return [leaf for leaf in self._manifest.leaves if leaf.item == item]

    def _read(self, name: str) -> bytes | None:
        """A file of the step that was found sound; None for all others."""
        found = self._objects.read(name) if name in self._sound else None
        return None if found is None else found.value


def _key(run: Run, step: int | StepInfo) -> tuple[int, int]:
    """(step, attempt) from names alone, where the manifest can't be read."""
    if isinstance(step, StepInfo):
        return step.step, step.attempt
    return step, run.step_attempts().get(step, 0)


def _text(exc: BaseException) -> str:
    """The error's first line."""
    return str(exc).partition("\n")[0]
