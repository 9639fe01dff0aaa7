"""Whether a store refuses the conditional writes and deletions that it has to refuse.

The same few requests on an object of the probe's own, in any store.
"""

import contextlib
from collections.abc import Callable
from typing import Final

from cairn.storage.errors import PreconditionFailedError, StorageError
from cairn.storage.store import ObjectStore, Versioned

__all__ = ["condition_problems"]

_NOT_DONE: Final = "expected it done, found it refused"


def condition_problems(objects: ObjectStore, key: str) -> list[str]:
    """What the store did that it must not, a line each; the object is removed in the end.

    Args:
        objects: where.
        key: an object that nobody else knows.

    Raises:
        StorageError: the store gives no answer, or has no room.
    """
    try:
        return _problems(objects, key)
    finally:
        with contextlib.suppress(StorageError):  # a later probe removes it
            objects.delete(key)


def _problems(objects: ObjectStore, key: str) -> list[str]:
    first, second, late = (f"{key} {word}".encode() for word in ("first", "second", "late"))
    try:
        old = objects.write_if(key, first, generation=None, same_is_success=True)
    except PreconditionFailedError:
        return [f"a write of what is not there yet: {_NOT_DONE}"]
    problems = []
    if found := _not_refused(lambda: objects.write_if(key, late, generation=None), first):
        problems.append(f"a write of what must not be there yet, and is: {found}")
        old = objects.write(key, first)
    try:
        objects.write_if(key, second, generation=old, same_is_success=True)
    except PreconditionFailedError:
        problems.append(f"a write over what is as it was read: {_NOT_DONE}")
        objects.write(key, second)
    if found := _not_refused(lambda: objects.write_if(key, late, generation=old), second):
        problems.append(f"a write over what was replaced since it was read: {found}")
        objects.write(key, second)
    if found := _not_refused(lambda: objects.delete_if(key, generation=old), second):
        problems.append(f"a deletion of what was replaced since it was read: {found}")
    return problems


def _not_refused(call: Callable[[], object], kept: bytes) -> str:
    """What happened instead of a refusal that keeps what was there; "" if that happened."""
    try:
        call()
    except PreconditionFailedError as exc:
        if isinstance(exc.current, Versioned) and exc.current.value == kept:
            return ""
        return "expected a refusal, found one, but the object had been changed"
    return "expected a refusal, found it done"
