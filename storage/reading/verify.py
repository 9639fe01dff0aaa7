"""Verification of a stored step: is it still what was saved? Reads every byte once.

Every file is compared with the size and the two checksums that were recorded when it was written:
crc32c finds changes within a file, the content sum finds that it is another file. The step's index
is read whole, and each value is also looked up the way that Orbax finds it. Only if files of values
fail are the leaves read too, to report which ones are hit.

Memory: the buffers of `file_checksums`, the index and the contents of Orbax's databases; if leaves
are read, also what `CheckpointReader.iter_blocks` takes.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, SupportsIndex, TypeGuard, TypeVar

from cairn.counts import count_text
from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests
from cairn.storage.arrays.digests import digest_text, parse_digest
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, NODE_FOLDER, ValueRef, is_data_file
from cairn.storage.arrays.orbax_tree import (
    JSON_FILES,
    META_ITEM,
    STEP_METADATA,
    TREE_METADATA,
    StoredTree,
    array_name,
    parse_step_metadata,
    parse_tree_metadata,
)
from cairn.storage.errors import (
    CorruptionError,
    NotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.reading.databases import database_entries
from cairn.storage.reading.indexed_database import leaf_entries
from cairn.storage.reading.item_arrays import DigestSource
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.annotate import note_shared_damage, note_verified
from cairn.storage.runs.damage import known_damage, shared_problems
from cairn.storage.runs.records.annotations import (
    MAX_DAMAGED_LEAVES,
    MAX_PROBLEM_CHARACTERS,
    Annotation,
    Damage,
)
from cairn.storage.runs.records.assets import read_asset
from cairn.storage.runs.records.layout import (
    INDEX_FILE,
    ITERATORS,
    asset_file,
    check_step,
    manifest_file,
)
from cairn.storage.runs.records.manifest import LeafRecord, Manifest, ObjectRecord
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.runs.records.step_contents import StepContents
from cairn.storage.runs.records.step_index import StepIndex, whole_contents
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_files import (
    FilePlace,
    file_places,
    file_problem,
    listed_problems,
    missing_problem,
    removed_by_owner,
    told_problem,
)
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.clock import rfc3339
from cairn.storage.store.file_checksums import forget_cached, read_files
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["VerifyReport", "verify_step"]

_BLOCK_BYTES: Final = 8 << 20

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class VerifyReport:
    """Result of verifying a step.

    Attributes:
        step: the step.
        attempt: the attempt that wrote it.
        files: number of files that were read.
        nbytes: number of bytes that were read.
        leaves: number of leaves that the manifest names.
        seconds: how long it took.
        problems: everything that is not as it was saved, one line each; each begins with the name
            of a file of the step, of an object of the run, or of a leaf.
        loads: True if Cairn loads every value as it was saved: then only files that plain Orbax
            reads are damaged, or bytes that belong to no value.
        extra: files in the step's folder that were not saved with it. They do no harm.
        damaged_leaves: "item: path" of each leaf that can't be read as it was saved. Empty if the
            manifest or the index can't be read, since only they name the leaves.
        shared: problems of other listed steps, by (step, attempt), that share a damaged file or
            asset of this one.
        noted: the damage of the step that was noted before anything was read.
    """

    step: int
    attempt: int
    files: int
    nbytes: int
    leaves: int
    seconds: float
    problems: tuple[str, ...] = ()
    loads: bool = True
    extra: tuple[str, ...] = ()
    damaged_leaves: tuple[str, ...] = ()
    shared: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, hash=False)
    noted: Damage | None = None

    @property
    def ok(self) -> bool:
        """True if there are no problems: the step is what was saved."""
        return not self.problems

    def damage(self, *, at: datetime, by: str = "", job: str = "") -> Damage | None:
        """Return the damage to note for the step; None if nothing is wrong.

        Args:
            at: time of the verification.
            by: name of who verified it.
            job: id of the operation that verified it, or "".
        """
        if self.ok:
            return None
        return Damage(
            at=rfc3339(at),
            by=by,
            job=job,
            leaves=_short(self.damaged_leaves),
            leaf_count=len(self.damaged_leaves),
            problems=_short(self.problems),
            problem_count=len(self.problems),
            loads=self.loads,
        )

    def note(self, run: Run, *, by: str = "", job: str = "") -> Annotation:
        """Note the result in annotations: the step is sound, or damaged as are the `shared` steps.

        Damage that somebody has noted since this verification began stays: its files may have been
        read before they were damaged.

        Args:
            run: the run.
            by: name of who verified it.
            job: id of the operation that verified it, or "".

        Returns:
            The step's annotation now.

        Raises:
            StepChangedError: the step is deleted.
            UnsupportedFormatError, CorruptionError: the annotation can't be read.
            StoreUnavailableError: the store gives no answer.
        """
        at = run.clock()
        info = StepInfo(self.step, self.attempt, StepState.LISTED)
        damage = self.damage(at=at, by=by, job=job)
        noted = note_verified(run, info, damage=damage, by=by, lifts=self.noted)
        for key, problems in self.shared.items():
            damage = replace(self, problems=problems, damaged_leaves=(), loads=False).damage(
                at=at, by=by, job=job
            )
            if damage is not None:
                note_shared_damage(run, key, damage, by=by)
        return noted

    def raise_problems(self, path: object) -> None:
        """Raise the problems as an error, if there are any.

        Args:
            path: name of the step for the error.

        Raises:
            CorruptionError: the step is not what was saved; the error has the report's `problems`.
        """
        if self.problems:
            raise CorruptionError(
                "the step is damaged",
                path=path,
                expected="what was saved",
                found=count_text(len(self.problems), "problem"),
                next_step="Restore the files from a backup, or use another step.",
                problems=self.problems,
            )


def verify_step(
    run: Run, step: SupportsIndex | StepInfo, *, progress: Progress | None = None
) -> VerifyReport:
    """Compare a stored step with its manifest, byte by byte, and return the result, good or bad.

    Args:
        run: the run.
        step: number of a listed step, or any step that has a manifest.
        progress: called now and then with (bytes read, bytes in all); if it raises, verification
            ends.

    Raises:
        InvalidURIError: `step` is not a step number.
        StepNotFoundError: there is no such step.
        StepInFlightError: the step is being written now.
        UnsupportedFormatError, CorruptionError: a record of the run is damaged or lost that would
            decide which attempt holds that step.
        StoreUnavailableError: the store gives no answer, or a disk fails; the step may be sound or
            not.
    """
    started = time.monotonic()
    lost: Exception | None = None
    if not isinstance(step, StepInfo):
        number = check_step(step)
        try:
            step = run.step(number)
        except UNREADABLE as exc:
            history = run.history()
            attempt = history.holder(number)
            if attempt is None:  # other records of the run are damaged or lost
                raise
            step = StepInfo(number, attempt, StepState.LISTED)
            lost = exc if (number, attempt) in history.lost else None
    info, name = step, manifest_file(step.step, step.attempt)
    # Read before any file: a sound result must not remove damage that is noted from now on.
    noted = known_damage(run, (info.step, info.attempt))
    if lost is not None:
        return _unread(info, started, f"{name}: {_text(lost)}", noted)
    try:
        manifest = _twice(run.uri, [name], lambda: run.manifest(info))
    except UNREADABLE as exc:
        return _unread(info, started, f"{name}: {_text(exc)}", noted)
    try:
        contents = _twice(
            run.step_uri(info), [INDEX_FILE], lambda: whole_contents(run.objects, manifest)
        )
    except UNREADABLE as exc:
        return _unread(info, started, f"{INDEX_FILE}: {_text(exc)}", noted)
    check = _StepCheck(run, info, manifest, contents)
    check.files(progress)
    check.small_objects()
    check.leaves()
    return VerifyReport(
        info.step,
        info.attempt,
        files=check.files_read,
        nbytes=check.bytes_read,
        leaves=len(contents.leaves),
        seconds=time.monotonic() - started,
        problems=tuple(check.problems),
        loads=check.loads,
        extra=tuple(check.extra),
        damaged_leaves=tuple(check.damaged_leaves),
        shared=check.shared(),
        noted=noted,
    )


def _unread(info: StepInfo, started: float, problem: str, noted: Damage | None) -> VerifyReport:
    """Return the report of a step whose manifest or index can't be read, so that it can't load."""
    seconds = time.monotonic() - started
    problems = (problem,)
    return VerifyReport(
        info.step, info.attempt, 0, 0, 0, seconds, problems, loads=False, noted=noted
    )


def _twice(folder: StoreURI, names: Iterable[str], read: Callable[[], T]) -> T:
    """Call `read` and return its result; if a check fails, drop the page cache and call it again.

    A damaged page cache is not a damaged step.
    """
    try:
        return read()
    except UNREADABLE:
        forget_cached(folder, names)
        return read()


class _StepCheck:
    """Verification under way."""

    def __init__(
        self, run: Run, info: StepInfo, manifest: Manifest, contents: StepContents
    ) -> None:
        self._run = run
        self._info = info
        self._uri = run.step_uri(info)
        self._manifest = manifest
        self._contents = contents
        self._index = contents if isinstance(contents, StepIndex) else None
        self._records = {record.name: record for record in contents.objects}
        self._places = file_places(self._uri, contents.objects, manifest.source)
        self._sound: set[str] = set()
        self._files: dict[str, str] = {}
        self._assets: dict[str, str] = {}
        self.problems: list[str] = []
        self.extra: list[str] = []
        self.damaged_leaves: list[str] = []
        self.loads = True
        self.files_read = 0
        self.bytes_read = 0

    def files(self, progress: Progress | None) -> None:
        """Compare every file with its record, and note problems."""
        records = self._records
        problems: dict[str, str] = {}
        for place in self._places:
            problems |= self._listed_in(place)
        # A step without an index is not opened if a listing alone shows damage.
        closed = {*problems} if self._index is None else set()
        done, total = (
            0,
            sum(file.size for file in records.values() if file.name not in problems),
        )

        def told(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        for place in self._places:
            waiting = deque(
                sorted(
                    (record for record in place.records if record.name not in problems),
                    key=lambda record: (-record.size, record.name),
                )
            )
            while waiting:
                try:
                    names = [record.name for record in waiting]
                    for checksum in read_files(place.folder, names, progress=told):
                        record = waiting.popleft()
                        self.files_read += 1
                        self.bytes_read += checksum.size
                        problem = file_problem(record, checksum)
                        if problem is not None:
                            problems[record.name] = problem
                except NotFoundError:  # it was removed after it was listed
                    record = waiting.popleft()
                    problems[record.name] = missing_problem(record)
            for record in place.records:
                if record.name in problems:
                    # A second read past the page cache: the damage may be in memory only.
                    again = _read_again(place.folder, record)
                    if again is None:
                        del problems[record.name]
                    else:
                        problems[record.name] = again
        self._sound = records.keys() - problems.keys()
        self._files = problems
        for name in sorted(problems):
            values = is_data_file(name) and name not in closed
            self._found(problems[name], loads=values or not self._is_read(name))

    def _listed_in(self, place: FilePlace) -> dict[str, str]:
        """Return the problems that a folder's listing shows, by file; also note extra files."""
        files = open_files(place.folder)
        listed = {entry.name: entry for entry in files.walk()}
        if place.is_owners and not listed and not files.walk():
            self._found(_text(removed_by_owner(place.folder)), loads=False)
        names = {record.name for record in place.records}
        if self._index is not None:
            names.add(INDEX_FILE)
        self.extra = sorted({*self.extra, *({*listed} - names)})
        return listed_problems(listed, place.records)

    def small_objects(self) -> None:
        """Compare the files of metadata that are sound with the records, and check the assets."""
        problems = list(self._small_problems())
        if problems:
            # Read again past the page cache: only the memory may be damaged.
            self._forget_cached(self._sound)
            assets = [asset_file(asset.sha256) for asset in self._manifest.assets]
            forget_cached(self._run.uri, assets)
            self._assets.clear()
            problems = list(self._small_problems())
        for problem, loads in problems:
            self._found(problem, loads=loads)

    def _small_problems(self) -> Iterator[tuple[str, bool]]:
        """Yield each problem, with True if Cairn still loads every value."""
        has_index = self._index is not None
        try:
            for problem in self._wrong_trees():
                yield problem, has_index
        except UNREADABLE as exc:
            yield f"{STEP_METADATA}: {_text(exc)}", has_index
        for item in self._manifest.items:
            try:
                for problem in self._wrong_digests(item):
                    yield problem, False
            except UNREADABLE as exc:
                yield f"{item}: {_text(exc)}", False
            for problem in self._wrong_database(item):
                yield problem, has_index
        for asset in self._manifest.assets:
            try:
                read_asset(self._run.objects, asset)
            except CorruptionError as exc:
                self._assets[asset.sha256] = problem = f"asset {asset.name}: {_text(exc)}"
                yield problem, False

    def leaves(self) -> None:
        """Read the leaves if files of values are damaged or were added.

        Without an index, no leaf is read if a file that leads to the leaves is damaged: no parser
        gets data that is known to be wrong.
        """
        values = [name for name in self._records if is_data_file(name)]
        if any(
            name not in self._sound and self._is_read(name) and not is_data_file(name)
            for name in self._records
        ):
            self.loads = False
            if self._index is None:
                self.damaged_leaves += [
                    f"{entry.item}: {entry.path}" for entry in self._contents.leaves
                ]
                return
        stored = any(leaf.chunks is not None for leaf in self._contents.leaves)
        # A chunk that was not stored reads as zeros; a file added later can turn it into something
        # else.
        added = self._index is None and any(map(is_data_file, self.extra))
        if self._sound.issuperset(values) and not added and (values or not stored):
            return
        unreadable = self._unreadable_leaves()
        if unreadable:  # with a new reader, which has nothing cached
            self._forget_cached(self._records)
            unreadable = self._unreadable_leaves(unreadable)
        for name, problem in unreadable.items():
            if name:
                self._found(f"{name}: {problem}", loads=False)
                self.damaged_leaves.append(name)
                continue
            # The files that lead to the leaves are damaged too, and mostly listed already.
            self.loads = False
            if not self.problems:
                self.problems.append(problem)

    def shared(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return problems of other steps that share a damaged file or asset, by (step, attempt)."""
        if not self._files and not self._assets:
            return {}
        key = self._info.step, self._info.attempt
        return shared_problems(self._run, key, files=self._files, assets=self._assets)

    def _unreadable_leaves(self, only: Collection[str] = ()) -> dict[str, str]:
        """Read leaves; return why some can't be read, by "item: path", or by "" for all leaves.

        Args:
            only: the leaves to read; by default, and if "" is among them, all.
        """
        problems: dict[str, str] = {}
        try:
            reader = CheckpointReader.of(self._uri, self._manifest, self._contents)
            for item in reader.items():
                for path in reader.leaves(item):
                    name = f"{item}: {path}"
                    if only and not {"", name}.intersection(only):
                        continue
                    try:
                        for _ in reader.iter_blocks(item, path, max_bytes=_BLOCK_BYTES):
                            pass
                    except (CorruptionError, NotFoundError) as exc:
                        problems[name] = _text(exc)
        except StoreUnavailableError:
            raise
        except StorageError as exc:
            problems[""] = _text(exc)
        return problems

    def _forget_cached(self, names: Collection[str]) -> None:
        for place in self._places:
            cached = (record.name for record in place.records if record.name in names)
            forget_cached(place.folder, cached)

    def _found(self, problem: str, *, loads: bool) -> None:
        self.problems.append(problem)
        self.loads = self.loads and loads

    def _is_read(self, name: str) -> bool:
        """Return True if a load by Cairn reads this file: with an index, only JSON and values."""
        if self._index is None or is_data_file(name) or name == f"{META_ITEM}/{JSON_FILES[0]}":
            return True
        return name.startswith(ITERATORS)

    def _wrong_trees(self) -> Iterator[str]:
        """Yield a line for each item whose leaves in Orbax's metadata are not the saved ones."""
        data = self._read(STEP_METADATA)
        if data is None or self._index is None:  # an import read the leaves from it
            return
        step = parse_step_metadata(data, path=self._uri / STEP_METADATA)
        if step.forms != self._index.directory.forms:
            yield f"{STEP_METADATA}: leaves in other forms than the index has them"
        for item in sorted({leaf.item for leaf in self._contents.leaves}):
            name = f"{item}/{TREE_METADATA}"
            forms = step.forms.get(item, {})
            stored = {path for path, form in forms.items() if form.kind == "empty"}
            described = self._read(name)
            tree = StoredTree()
            if described is not None:
                tree = parse_tree_metadata(described, path=name)
                stored |= set(tree.arrays)
            elif name in self._records:
                continue  # damaged, and listed as such
            expected = {tree.current(leaf.path) for leaf in self._leaves_of(item)}
            for path in sorted(expected ^ stored):
                where = "the manifest" if path in expected else "Orbax's metadata"
                yield f"{item}: {path}: only {where} has this leaf"

    def _wrong_digests(self, item: str) -> Iterator[str]:
        """Yield a line for each leaf whose digest is not the sum of its chunks' digests."""
        digests = self._digests(item)
        if digests is None:
            return
        for leaf in self._leaves_of(item):
            recorded = parse_digest(leaf.digest) if leaf.digest else None
            if recorded is None or leaf.chunks is None:
                continue
            total = digests.total(leaf.path)
            if total != recorded:
                computed = "nothing" if total is None else digest_text(total)
                yield f"{item}: {leaf.path}: its chunks add up to {computed}, not to {leaf.digest}"

    def _digests(self, item: str) -> DigestSource | None:
        """Return the digests of an item's chunks; None if there are none, or they are damaged."""
        if self._index is not None:
            return self._index.item(item)
        prefix = f"{item}/{FILE_PREFIX}"
        names = [name for name in self._records if name.startswith(prefix)]
        if not names or not self._sound.issuperset(names):
            return None
        digests = ChunkDigests()
        for name in names:
            digests = digests.merged(ChunkDigests.parse(self._read(name) or b"", path=name))
        return digests

    def _wrong_database(self, item: str) -> Iterator[str]:
        """Yield a line per value that Orbax looks for elsewhere, or that is outside its file."""
        leaves = [leaf for leaf in self._leaves_of(item) if leaf.shards is not None]
        name = f"{item}/{MANIFEST_FILE}"
        nodes = [file for file in self._records if file.startswith(f"{item}/{NODE_FOLDER}/")]
        if not leaves or not self._sound.issuperset((name, *nodes)):
            return
        try:
            entries = database_entries(self._uri / item)
        except ValueError as exc:
            yield f"{name}: {_text(exc)[:400]}"
            return
        for key, entry in sorted(entries.items()):
            record = self._records.get(f"{item}/{entry.file}") if _is_ref(entry) else None
            if _is_ref(entry) and (record is None or entry.offset + entry.length > record.size):
                yield f"{name}: {key} lies outside the files of the step, at {entry}"
        if self._index is None:
            return
        expected = _expected_entries(self._index, item, leaves)
        for key in sorted(expected.keys() | entries.keys()):
            if entries.get(key) != expected.get(key):
                yield (
                    f"{name}: {key}: expected {_shown(expected.get(key))}, "
                    f"found {_shown(entries.get(key))}"
                )

    def _leaves_of(self, item: str) -> list[LeafRecord]:
        return [leaf for leaf in self._contents.leaves if leaf.item == item]

    def _read(self, name: str) -> bytes | None:
        """Return the content of a file of the step that is sound; None for all other files."""
        if name not in self._sound:
            return None
        place = next(folder for folder in self._places if self._records[name] in folder.records)
        content = ObjectStore(place.folder).read(name)
        return None if content is None else content.value


def _read_again(folder: StoreURI, record: ObjectRecord) -> str | None:
    """Read a wrong file again past all caches; return its problem in one line, or None."""
    try:
        stat = open_files(folder).stat(record.name)
        problem = told_problem(record, stat.size, stat.crc32c)
        if problem is not None:
            return problem
        (checksum,) = read_files(folder, [record.name], past_cache=True)
    except NotFoundError:
        return missing_problem(record)
    return file_problem(record, checksum)


def _expected_entries(
    index: StepIndex, item: str, leaves: list[LeafRecord]
) -> dict[str, ValueRef | bytes]:
    """Return the entries that an item's database must have, by key."""
    expected: dict[str, ValueRef | bytes] = {}
    places = index.item(item)
    for leaf in leaves:
        form = index.directory.forms.get(item, {}).get(leaf.path)
        for key, entry in leaf_entries(array_name(leaf.path), leaf, form, places).items():
            expected[key.decode()] = entry
    return expected


def _is_ref(entry: ValueRef | bytes) -> TypeGuard[ValueRef]:
    return isinstance(entry, ValueRef)


def _shown(entry: ValueRef | bytes | None) -> str:
    return "none" if entry is None else str(entry)[:200]


def _short(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines, cut to the number and length that an annotation keeps."""
    return tuple(line[:MAX_PROBLEM_CHARACTERS] for line in lines[:MAX_DAMAGED_LEAVES])


def _text(exc: BaseException) -> str:
    """Return the error's first line."""
    return str(exc).partition("\n")[0]
