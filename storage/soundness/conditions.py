"""Whether a store refuses the conditional writes and deletions that it has to refuse.

The same few requests on three objects of the probe's own, in any store; in three rounds.
"""

import contextlib
from typing import Final

from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.store import ObjectStore

__all__ = ["Conditions"]

_NOT_DONE: Final = "expected it done, found it refused"
_DONE: Final = "expected a refusal, found it done"
_CHANGED: Final = "expected a refusal, found one, but the object had been changed"


class Conditions:
    """What the store did that it must not, found out in rounds of which none has a wait in it.

    Attributes:
        is_doubtful: all that is amiss is that the last deletion was refused. So it is where the
            answer to it was lost, and it was asked for again.
    """

    def __init__(self, objects: ObjectStore, created: str, replaced: str, kept: str) -> None:
        """Nothing is asked yet.

        Args:
            objects: where.
            created: an object that nobody else knows.
            replaced: another.
            kept: a third.
        """
        self._objects = objects
        self._created, self._replaced, self._kept = created, replaced, kept
        self._first, self._second, self._late = (
            f"{created} {word}".encode() for word in ("first", "second", "late")
        )
        self._now = b""
        self._old = b""
        self.is_doubtful = False

    def creation_problems(self) -> list[str]:
        """Of writes of what is not there, and of what is, and a first deletion; a line each.

        Raises:
            StorageError: the store gives no answer, or has no room.
        """
        made = self._objects.at_once(
            lambda: self._done(self._created, self._first, None),
            lambda: self._done(self._replaced, self._first, None),
            lambda: self._done(self._kept, self._late, None),
        )
        if None in made:
            return [f"a write of what is not there yet: {_NOT_DONE}"]
        self._old = made[1]
        refused, now, kept = self._objects.at_once(
            lambda: self._objects.refuses_write(self._created, self._late, generation=None),
            lambda: self._done(self._replaced, self._second, self._old),
            lambda: self._objects.refuses_deletion(self._kept, generation=made[1]),
        )
        problems = []
        if not refused:
            problems.append(f"a write of what must not be there yet, and is: {_DONE}")
        if now is None:
            problems.append(f"a write over what is as it was read: {_NOT_DONE}")
            now = self._objects.write(self._replaced, self._second)
        if not kept:
            problems.append(f"a deletion of another than was read: {_DONE}")
        self._now = now
        return problems

    def replacement_problems(self, found: list[str]) -> list[str]:
        """Of writes and deletions of what was replaced since; after `creation_problems`.

        Args:
            found: what that gave.

        Raises:
            StorageError: the store gives no answer, or has no room.
        """
        if not self._now:
            return []
        kept, write_refused, deletion_refused = self._objects.at_once(
            lambda: self._objects.read(self._created),
            lambda: self._objects.refuses_write(self._replaced, self._late, generation=self._old),
            lambda: self._objects.refuses_deletion(self._replaced, generation=self._old),
        )
        problems = []
        if not found and (kept is None or kept.value != self._first):
            problems.append(f"a write of what must not be there yet, and is: {_CHANGED}")
        if not write_refused:
            problems.append(f"a write over what was replaced since it was read: {_DONE}")
        if not deletion_refused:
            problems.append(f"a deletion of what was replaced since it was read: {_DONE}")
        return problems

    def end(self, found: list[str]) -> list[str]:
        """Remove the objects; what shows then: what was refused and yet done.

        Args:
            found: all that was found before.
        """
        whole, left = True, [self._created, self._kept]
        if self._now and not found:
            with contextlib.suppress(StorageError):  # no answer is none
                whole = not self._objects.refuses_deletion(self._replaced, generation=self._now)
        if not (self._now and whole and not found):
            left.append(self._replaced)
        for name in left:
            with contextlib.suppress(StorageError):  # a later probe removes it
                self._objects.delete(name)
        self.is_doubtful = not whole
        return [] if whole else [f"a write over what was replaced since it was read: {_CHANGED}"]

    def _done(self, key: str, value: bytes, generation: bytes | None) -> bytes | None:
        """The generation of what had to be written; None if it was refused."""
        try:
            return self._objects.write_if(key, value, generation=generation, same_is_success=True)
        except PreconditionFailedError:
            return None
