"""Files of a step in the store."""

from dataclasses import replace

from cairn.service.actions.caches import OpenStep
from cairn.service.actions.tensors import version_of
from cairn.service.http.downloads import NOTHING, StoredFile
from cairn.service.schemas import StepFile
from cairn.storage.errors import NotFoundError
from cairn.storage.runs.step_files import FilePlace, file_places, removed_by_owner
from cairn.storage.store.open_files import open_files

_NAMED = 20
_NEXT_STEP = "Restore the file from a backup, or use another step."
_NEXT_OF_OWNERS = "Its owner has changed it since it was adopted: use another step."


def list_files(step: OpenStep, *, after: int, limit: int) -> tuple[list[StepFile], bool]:
    """Return the next files of a step, by name, and whether there are more.

    Args:
        step: Step to list.
        after: Number of files that the client has.
        limit: Largest number of files.
    """
    records = step.contents.objects
    page = [
        StepFile(name=record.name, bytes=record.size, crc32c=record.crc32c)
        for record in records[after : after + limit]
    ]
    return page, len(records) > after + limit


def find_step_file(step: OpenStep, name: str) -> StoredFile:
    """Return a file of a step, ready for download; an imported step's is in its owner's folder.

    Raises:
        NotFoundError: The manifest names no such file.
        StepNotFoundError: The step was imported, and its owner has removed it.
        CorruptionError: The stored file is gone, or has another size or checksum.
        StoreUnavailableError: The store does not answer.
    """
    for place in file_places(step.uri, step.contents.objects, step.manifest.source):
        for record in place.records:
            if record.name == name:
                return _checked(step, place, name, record.size, record.crc32c)
    names = [record.name for record in step.contents.objects]
    more = ", …" if len(names) > _NAMED else ""
    raise NotFoundError(
        "no such file",
        path=step.uri,
        expected=f"one of {', '.join(names[:_NAMED])}{more}",
        found=repr(name[:200]),
        next_step="Ask for one of these.",
    )


def _checked(
    step: OpenStep, place: FilePlace, name: str, size: int, crc32c: str | None
) -> StoredFile:
    files = open_files(place.folder)
    next_step = _NEXT_OF_OWNERS if place.is_owners else _NEXT_STEP
    stored_file = StoredFile(
        files,
        name,
        size,
        version_of(step, "file", name),
        crc32c,
        next_step,
        is_of_others=place.is_owners,
    )
    try:
        stored = files.stat(name)
    except NotFoundError as exc:
        if place.is_owners and not files.list():
            raise removed_by_owner(place.folder) from exc
        raise stored_file.changed(f"{size} bytes", NOTHING) from exc
    if stored.size != size:
        raise stored_file.changed(f"{size} bytes", f"{stored.size}")
    if stored.crc32c is not None and crc32c not in (None, stored.crc32c):
        raise stored_file.changed(f"crc32c {crc32c}", stored.crc32c)
    is_of_others = place.is_owners and (stored.crc32c is None or crc32c is None)
    return replace(stored_file, etag=stored.etag, is_of_others=is_of_others)
