"""Check that a store refuses conditional writes whose condition fails, and a disk deletions too.

Uses a few requests on objects of the probe's own, in three rounds. In a bucket the run protocol
needs no conditional deletion (see `cairn.storage.store.graves`), so none is tried there.
"""

import contextlib
from typing import Final

from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.store.objects import ObjectStore

__all__ = ["Conditions"]

_NOT_DONE: Final = "expected it done, found it refused"
_DONE: Final = "expected a refusal, found it done"
_CHANGED: Final = "expected a refusal, found one, but the object had been changed"


class Conditions:
    """Check of conditional requests, in rounds of concurrent calls."""

    def __init__(self, objects: ObjectStore, created: str, replaced: str, kept: str) -> None:
        """Prepare the check; no request yet.

        Args:
            objects: the store.
            created: name of an object that only this check uses.
            replaced: name of a second such object.
            kept: name of a third such object, which only disks need.
        """
        self._objects = objects
        self._deletes = not objects.is_remote
        self._created, self._replaced, self._kept = created, replaced, kept
        self._first, self._second, self._late = (
            f"{created} {word}".encode() for word in ("first", "second", "late")
        )
        self._now = b""
        self._old = b""

    def creation_problems(self) -> list[str]:
        """Test creation, replacement and deletion; return one line per problem.

        Raises:
            StorageError: the store gives no answer, or has no room.
        """
        objects = self._objects
        generations = objects.gather(
            lambda: self._write_if(self._created, self._first, None),
            lambda: self._write_if(self._replaced, self._first, None),
            *([lambda: self._write_if(self._kept, self._late, None)] if self._deletes else []),
        )
        if None in generations:
            return [f"a write of what is not there yet: {_NOT_DONE}"]
        self._old = generations[1]
        refused, now, *kept = objects.gather(
            lambda: objects.refuses_write(self._created, self._late, generation=None),
            lambda: self._write_if(self._replaced, self._second, self._old),
            # `_old` is another object's generation: not that of `_kept`
            *(
                [lambda: objects.refuses_deletion(self._kept, generation=self._old)]
                if self._deletes
                else []
            ),
        )
        problems = []
        if not refused:
            problems.append(f"a write of what must not be there yet, and is: {_DONE}")
        if now is None:
            problems.append(f"a write over what is as it was read: {_NOT_DONE}")
            now = objects.write(self._replaced, self._second)
        if False in kept:
            problems.append(f"a deletion of another than was read: {_DONE}")
        self._now = now
        return problems

    def replacement_problems(self, earlier: list[str]) -> list[str]:
        """Test requests with the generation of a replaced value; call after `creation_problems`.

        Args:
            earlier: problems so far.

        Raises:
            StorageError: the store gives no answer, or has no room.
        """
        if not self._now:
            return []
        objects = self._objects
        kept, write_refused, *deletion_refused = objects.gather(
            lambda: objects.read(self._created),
            lambda: objects.refuses_write(self._replaced, self._late, generation=self._old),
            *(
                [lambda: objects.refuses_deletion(self._replaced, generation=self._old)]
                if self._deletes
                else []
            ),
        )
        problems = []
        if not earlier and (kept is None or kept.value != self._first):
            problems.append(f"a write of what must not be there yet, and is: {_CHANGED}")
        if not write_refused:
            problems.append(f"a write over what was replaced since it was read: {_DONE}")
        if False in deletion_refused:
            problems.append(f"a deletion of what was replaced since it was read: {_DONE}")
        return problems

    def end(self, problems: list[str]) -> list[str]:
        """Remove the objects; return the problems that this shows.

        The last value must still be there: it is not if the store reported a write as refused but
        made it.

        Args:
            problems: problems so far.
        """
        is_whole = True
        if self._now and not problems:
            with contextlib.suppress(StorageError):  # no answer proves nothing
                stored = self._objects.read(self._replaced)
                is_whole = stored is not None and stored.value == self._second
        names = [self._created, self._replaced, *([self._kept] if self._deletes else [])]
        with contextlib.suppress(StorageError):  # a later probe removes them
            self._objects.delete_many(names)
        if is_whole:
            return []
        return [f"a write over what was replaced since it was read: {_CHANGED}"]

    def _write_if(self, key: str, value: bytes, generation: bytes | None) -> bytes | None:
        """Write and return the new generation; None if the store refuses."""
        try:
            return self._objects.write_if(key, value, generation=generation, same_is_success=True)
        except PreconditionFailedError:
            return None
