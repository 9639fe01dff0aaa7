"""Links of an earlier step's data files into a new step, with a check of their content.

A file is linked first and then checked in the new step's folder, where no one else touches it. On a
disk its size must match; it is read and verified if it was modified, replaced, or not read for
long. In a bucket, size and checksum of the copy must match. Stores that speak S3 list no checksum:
they copy a file only if it has the ETag with which it was written, and it is read as on a disk. A
damaged link is removed, and the caller writes the values again, from memory. See ADR 12.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from cairn.state.checkpointing.dedup_policy import DedupPolicy
from cairn.state.checkpointing.saves.save_metrics import record_damage, record_dedup
from cairn.storage.arrays.data_files import StoredFile, WrittenFile
from cairn.storage.arrays.ocdbt import DATA_FOLDER
from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.store.file_checksums import read_files
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["DedupFile", "link_files", "new_files"]

_LINKS_AT_ONCE: Final = 16
_READS_AT_ONCE: Final = 4

T = TypeVar("T")


class _Mark(NamedTuple):
    """Version of a file on a disk, the same for all hard links to it.

    Attributes:
        modified: modification time, in nanoseconds.
        inode: inode number; shows a replacement that has the same size and time.
    """

    modified: int
    inode: int


class DedupFile(NamedTuple):
    """Data file that this process wrote or linked, which the next step may link.

    Attributes:
        record: name, size and checksums of the file as it was written.
        written: time when it was written.
        seen: time when its bytes were last written or verified.
        steps: number of steps that have it.
        mark: version of the file, which shows modifications: on a disk its own, in a bucket without
            checksums the etag; None where the store lists a checksum.
    """

    record: StoredFile
    written: datetime
    seen: datetime
    steps: int
    mark: _Mark | str | None


class _ListedFile(NamedTuple):
    """Size, checksum and version of a stored file, as far as the store lists them."""

    size: int
    crc32c: str | None
    mark: _Mark | str | None


def new_files(
    folder: StoreURI, files: Iterable[WrittenFile], now: datetime
) -> dict[str, DedupFile]:
    """Return files that were just written into the database in `folder`, by name."""
    new = {}
    for file in files:
        mark: _Mark | str | None = file.etag
        if folder.scheme == "file" and (status := _stat(folder, file.record.name)) is not None:
            mark = status.mark
        new[file.record.name] = DedupFile(file.record, written=now, seen=now, steps=1, mark=mark)
    return new


def link_files(
    source: StoreURI,
    target: StoreURI,
    files: Mapping[str, DedupFile],
    *,
    policy: DedupPolicy,
    now: datetime,
) -> dict[str, DedupFile]:
    """Link files of one database into another; return those that are now in both, by name.

    The result omits files that the policy allows to be shared no longer, that can't be linked (for
    example because the step was deleted), or that are damaged; damage is logged.

    Args:
        source: folder of the database that has the files.
        target: folder of the other database, which has none of them.
        files: the files to link, by name.
        policy: how long files may be shared.
        now: the current time.

    Raises:
        StoreUnavailableError: the store does not respond to the listing of the links.
    """
    names = [
        name
        for name, file in files.items()
        if policy.may_link(steps=file.steps, written=file.written, now=now)
    ]
    if not names:
        return {}
    link = _hard_link(source, target) if target.scheme == "file" else _copy(source, target, files)
    done = _each(link, names, _LINKS_AT_ONCE)
    linked = [name for name in names if done[name]]
    shown = _listed_files(target, linked)
    problems: dict[str, str | None] = {}
    due = []
    for name in linked:
        listed, file = shown.get(name), files[name]
        if listed is None:
            problems[name] = "nothing"
        elif listed.size != file.record.size or listed.crc32c not in (None, file.record.crc32c):
            problems[name] = _text(listed.size, listed.crc32c)
        elif listed.crc32c is None:
            is_disk = isinstance(listed.mark, _Mark)
            is_proved = listed.mark == file.mark if is_disk else file.mark is not None
            if not is_proved or policy.must_verify(seen=file.seen, now=now):
                due.append(name)
    problems |= _each(lambda name: _read_problem(target, files[name].record), due, _READS_AT_ONCE)
    sound = {}
    for name in linked:
        file, problem = files[name], problems.get(name)
        if problem is not None:
            open_files(target).delete_tree(name)
            expected = _text(file.record.size, file.record.crc32c)
            record_damage(source / name, expected=expected, found=problem)
            continue
        sound[name] = file._replace(
            seen=now if name in due else file.seen,
            steps=file.steps + 1,
            mark=shown[name].mark,
        )
    record_dedup(
        shared=sum(file.record.size for file in sound.values()),
        verified=sum(files[name].record.size for name in due),
    )
    return sound


def _each(work: Callable[[str], T], names: list[str], at_once: int) -> dict[str, T]:
    if not names:
        return {}
    with ThreadPoolExecutor(min(at_once, len(names)), "cairn-link") as pool:
        return dict(zip(names, pool.map(work, names), strict=True))


def _hard_link(source: StoreURI, target: StoreURI) -> Callable[[str], bool]:
    os.makedirs(os.path.join(target.local_path, DATA_FOLDER), exist_ok=True)

    def link(name: str) -> bool:
        with contextlib.suppress(OSError):  # no such call, another disk, or the step was deleted
            os.link(os.path.join(source.local_path, name), os.path.join(target.local_path, name))
            return True
        return False

    return link


def _copy(
    source: StoreURI, target: StoreURI, files: Mapping[str, DedupFile]
) -> Callable[[str], bool]:
    origin, goal = open_files(source), open_files(target)

    def copy(name: str) -> bool:
        record, mark = files[name].record, files[name].mark
        etag = mark if isinstance(mark, str) else None
        try:
            origin.copy(name, goal, name, etag=etag)
        except PreconditionFailedError:
            expected = f"{_text(record.size, record.crc32c)}, ETag {etag}"
            record_damage(source / name, expected=expected, found="another ETag")
            return False
        except StorageError:
            return False
        return True

    return copy


def _listed_files(folder: StoreURI, names: Iterable[str]) -> dict[str, _ListedFile]:
    """Return what the store tells about these files, by name; omit missing files."""
    if folder.scheme == "file":
        files = {name: _stat(folder, name) for name in names}
        return {name: file for name, file in files.items() if file is not None}
    return {
        f"{DATA_FOLDER}/{entry.name}": _ListedFile(
            entry.size, entry.crc32c, entry.etag if entry.crc32c is None else None
        )
        for entry in open_files(folder).walk(DATA_FOLDER)
    }


def _read_problem(folder: StoreURI, record: StoredFile) -> str | None:
    """Read a file and return what is wrong with it; None if it equals what was written."""
    try:
        (read,) = read_files(folder, [record.name], threads=1, past_cache=True)
    except (OSError, StorageError) as exc:  # unreadable counts as damaged
        return str(exc).partition("\n")[0]
    if (read.size, read.crc32c, read.content) == (record.size, record.crc32c, record.content):
        return None
    return _text(read.size, read.crc32c)


def _text(size: int, crc32c: str | None) -> str:
    return f"{size} bytes" if crc32c is None else f"{size} bytes, crc32c {crc32c}"


def _stat(folder: StoreURI, name: str) -> _ListedFile | None:
    try:
        status = os.stat(os.path.join(folder.local_path, name))
    except OSError:
        return None
    return _ListedFile(status.st_size, None, _Mark(status.st_mtime_ns, status.st_ino))
