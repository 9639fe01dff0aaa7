"""Check that a step's stored files equal the bytes that were written.

The checksums are computed from the bytes in memory. If a stored file differs, for example because
it was damaged on the way to the store, the save fails.
"""

from collections.abc import Iterator, Mapping

from cairn.storage.arrays.data_files import StoredFile, stored_file
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.errors import SaveError
from cairn.storage.runs.records.layout import COMMIT_FILE
from cairn.storage.runs.records.manifest import ObjectRecord
from cairn.storage.store.file_checksums import FileChecksum, read_files
from cairn.storage.store.files import FileEntry
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["check_files"]


def check_files(
    folder: StoreURI, meant: Mapping[str, StoredFile], *, marker: bytes
) -> tuple[ObjectRecord, ...]:
    """Check all files of a step and return their records.

    A data file's size is checked, and its checksum if the store lists one; data files are not read,
    as they are large, and were written to disks by direct I/O. Other files are read if the store
    lists no checksum. Files that this save did not write are always read.

    Args:
        folder: the step's folder, committed: no writes happen any more.
        meant: the files that were written, by name.
        marker: expected content of Orbax's commit file.

    Raises:
        SaveError: files are missing or differ from what was written; all are listed.
        StoreUnavailableError: the store does not respond.
    """
    committed = stored_file(COMMIT_FILE, marker)
    entries = {entry.name: entry for entry in open_files(folder).walk() if not entry.is_dir}
    meant = {**meant, COMMIT_FILE: committed}
    checksums = read_files(folder, _unproved(entries, meant))
    read = {checksum.name: checksum for checksum in checksums}
    problems = [
        problem
        for name, file in sorted(meant.items())
        if file is not committed and (problem := _wrong(file, entries.get(name), read.get(name)))
    ]
    if _wrong(committed, entries.get(COMMIT_FILE), read.get(COMMIT_FILE)):
        commit = ObjectStore(folder, patient=True).read(COMMIT_FILE)
        text = "none" if commit is None else repr(commit.value[:200])
        problems.append(f"{COMMIT_FILE}: expected {marker!r}, found {text}")
    if problems:
        raise SaveError(
            "files of the step are not what was written",
            path=folder,
            expected="every file that was written, and Orbax's commit",
            found=f"{len(problems)} that are not",
            next_step="Find out who else writes there, or what damages files there, and save "
            "again; the step is not listed.",
            problems=problems,
        )
    records = []
    for name, entry in sorted(entries.items()):
        file = meant.get(name) or read.get(name) or stored_file(name, b"")
        crc32c = file.crc32c or entry.crc32c
        assert crc32c is not None  # from the store's listing or from a read
        records.append(
            ObjectRecord(name=name, size=entry.size, crc32c=crc32c, content=file.content)
        )
    return tuple(records)


def _unproved(entries: Mapping[str, FileEntry], meant: Mapping[str, StoredFile]) -> Iterator[str]:
    """Yield the names of the files that must be read, since size and listing prove too little."""
    for name, entry in entries.items():
        is_empty = meant[name].size == 0 if name in meant else entry.size == 0
        proved = entry.crc32c is not None or is_data_file(name)
        if not is_empty and not (name in meant and proved):
            yield name


def _wrong(file: StoredFile, entry: FileEntry | None, read: FileChecksum | None) -> str | None:
    """Return one line about how a stored file differs from the expected one; None if it doesn't.

    Args:
        file: the expected file.
        entry: the stored file in a listing; None if missing.
        read: checksums from a read; None if it was not read.
    """
    expected = f"{file.name}: expected {file.size} bytes, crc32c {file.crc32c}"
    if entry is None:
        return f"{expected}, found none"
    crc32c = entry.crc32c or (read.crc32c if read else None)
    if (entry.size, crc32c or file.crc32c) != (file.size, file.crc32c):
        return f"{expected}, found {entry.size} bytes, crc32c {crc32c or 'not looked at'}"
    if read is not None and read.content != file.content:
        return f"{expected}, {file.content}, found {read.content}"
    return None
