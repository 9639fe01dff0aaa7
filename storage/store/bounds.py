"""The most bytes that an object of a run may have, by its kind: a store holds what anybody wrote.

What is larger is damaged, and not read. What writes it is refused, too: nobody writes what can't be
read again. Values of arrays are not of these: they are read by chunk, and `tensor_parts` bounds
what an answer may read.
"""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from cairn.storage.errors import CorruptionError, UnsupportedFormatError

__all__ = [
    "BOUNDS",
    "LEAST_BYTES",
    "MOST_FREE_BYTES",
    "MOST_FREE_DEPTH",
    "MOST_VALUES",
    "OTHERS",
    "Bound",
    "FreeJson",
    "Oversized",
    "bound_of",
    "ensure_within",
    "few",
    "free_context",
    "free_memory",
    "memory_here",
    "refuse_crowded",
    "refuse_oversized",
]

MOST_VALUES: Final = 4_000_000
"""Values in one JSON, by its commas and brackets: of 100,000 leaves with all their axes."""

MOST_FREE_BYTES: Final = 4 << 20
"""Of JSON whose form is not ours, such as a model's config, by its texts and 8 for each value."""

MOST_FREE_DEPTH: Final = 64
"""Of the same: containers within containers."""

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


class _Group(NamedTuple):
    """Files of a container's memory.

    Attributes:
        limit: bytes that it may use; another text, or more than the machine has, is no limit.
        used: bytes that it uses.
        cache: the line of `memory.stat` with the bytes of files that can be read again.
    """

    limit: Path
    used: Path
    cache: str


_GROUPS: Final = (
    _Group(
        Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), "inactive_file"
    ),
    _Group(
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)
"""Of both versions of control groups."""


@functools.cache
def memory_here() -> int:
    """Bytes of memory of this machine, or of its container."""
    machine: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for group in _GROUPS if (limit := _number(group.limit)))])


def free_memory() -> int:
    """Bytes of memory that can be taken now on this machine, or in its container."""
    free = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    room = memory_here() if free is None else free << 10
    for group in _GROUPS:
        limit, used = _number(group.limit), _number(group.used)
        if limit is not None and used is not None:
            cache = _numbers(group.limit.parent / "memory.stat").get(group.cache, 0)
            room = min(room, limit - used + cache)
    return max(0, room)


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _numbers(path: Path) -> dict[str, int]:
    """The second word of each line by the first."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}


class Bound(NamedTuple):
    """How large objects of one kind may be.

    Attributes:
        kind: what they are.
        names: how they are called in a run; "*" is any text without a slash.
        max_bytes: of each.
        why: what the largest one holds.
    """

    kind: str
    names: tuple[str, ...]
    max_bytes: int
    why: str


BOUNDS: Final[Sequence[Bound]] = (
    Bound("run", ("run.json",), 16 * _MIB, "1,000 labels of 2,000 characters, six bytes each"),
    Bound("lease", ("lease.json",), 64 * _KIB, "a few short fields"),
    Bound("attempt", ("attempts/*.json",), 64 * _KIB, "a few short fields"),
    Bound(
        "manifest",
        ("manifests/*.json",),
        32 * _MIB,
        "150,000 files of an adopted folder; of a saved step a few kB",
    ),
    Bound(
        "annotation",
        ("annotations/*.json",),
        24 * _MIB,
        "1,000 labels of 2,000 characters, 10,000 metrics, 200 lines of damage",
    ),
    Bound("alias", ("aliases/*.json",), 4 * _MIB, "100 moves, each with its reason"),
    Bound("tombstone, intent or hold", ("trash/*.json",), 1 * _MIB, "a retention policy"),
    Bound(
        "manifest of an export, or what a try has left",
        ("exports/*/*.json", "exports/*/*/*.json"),
        16 * _MIB,
        "100,000 files",
    ),
    Bound("asset", ("assets/*",), 128 * _MIB, "a tokenizer's vocabulary"),
    Bound("step index", ("cairn.index",), 512 * _MIB, "20 million values"),
    Bound("commit marker", ("commit_success.txt",), 64 * _KIB, "a line"),
    Bound(
        "metadata of Orbax",
        ("_CHECKPOINT_METADATA", "_METADATA", "_strings.json", "array_metadatas/*"),
        32 * _MIB,
        "100,000 leaves",
    ),
    Bound("description of an array", ("zarr.json", ".zarray"), 1 * _MIB, "shapes and codecs"),
    Bound("manifest of OCDBT", ("manifest.ocdbt",), 64 * _MIB, "its versions"),
    Bound("JSON item", ("data.json", "metadata"), 16 * _MIB, "what was saved as `meta`"),
    Bound("iterator's state", ("iterators/*/*",), 16 * _MIB, "what the iterator told"),
    Bound("chunk digests", ("chunk_digests.process_*.json",), 128 * _MIB, "8 million chunks"),
    Bound(
        "part of a step that is being saved",
        ("cairn.process_*.json",),
        512 * _MIB,
        "what one process wrote; readers never see it",
    ),
)
"""The first that has a name counts. Docs: `docs/reference/storage/bounds.md`."""

OTHERS: Final = Bound("small object", ("*",), 1 * _MIB, "probes of a store, and what else there is")
"""All other objects that are read as a whole."""


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]*".join(map(re.escape, name.split("*"))))


LEAST_BYTES: Final = min(bound.max_bytes for bound in (*BOUNDS, OTHERS))
"""What no kind forbids."""

_BY_LENGTH: Final = {
    length: [
        (_pattern(name), bound)
        for bound in BOUNDS
        for name in bound.names
        if name.count("/") + 1 == length
    ]
    for length in range(1, 5)
}
"""Names of so many segments."""


@functools.lru_cache(maxsize=1 << 14)
def bound_of(path: str) -> Bound:
    """The bound of the object that has this path."""
    segments = path.split("/")[-max(_BY_LENGTH) :]
    for start in range(len(segments)):
        tail = "/".join(segments[start:])
        for pattern, bound in _BY_LENGTH[len(segments) - start]:
            if pattern.fullmatch(tail):
                return bound
    return OTHERS


class Oversized(bytes):
    """Stands for the value of an object that is larger than any of its kind: none of it was kept.

    It is empty, so that whoever asks only whether there is an object learns that. What parses it
    calls `refuse_oversized`.

    Attributes:
        size: bytes that the object has.
        bound: what it may have.
    """

    size: int
    bound: Bound

    def __new__(cls, size: int, bound: Bound) -> "Oversized":
        """Of an object of that size, and what bounds it."""
        made = super().__new__(cls)
        made.size, made.bound = size, bound
        return made

    def error(self, path: object) -> CorruptionError:
        """That the object at `path` is no such one as was written there."""
        return CorruptionError(
            f"larger than any {self.bound.kind}",
            path=path,
            expected=f"at most {self.bound.max_bytes} bytes",
            found=f"{self.size} bytes",
            next_step="Restore the object from a backup, or see what `cairn repair` can do.",
        )


def refuse_oversized(data: bytes, path: object) -> None:
    """Raise if `data` only stands for what is too large to be read.

    Raises:
        CorruptionError: it does.
    """
    if isinstance(data, Oversized):
        raise data.error(path)


def refuse_crowded(data: bytes, path: object) -> None:
    """Raise if JSON is too large to be read, or has more values than memory is worth.

    An empty list of two bytes takes 64 of memory.

    Raises:
        CorruptionError: so it is.
    """
    refuse_oversized(data, path)
    count = sum(map(data.count, (b",", b"[", b"{"))) if len(data) > MOST_VALUES else 0
    if count > MOST_VALUES:
        raise CorruptionError(
            "too many values in JSON",
            path=path,
            expected=f"at most {MOST_VALUES}, by its commas and brackets",
            found=str(count),
            next_step="Restore the object from a backup.",
        )


def few(most: int) -> BeforeValidator:
    """Refuse a mapping of more entries, before each of them is looked at."""

    def checked(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            raise PydanticCustomError("too_long", f"at most {most} entries, found {len(given)}")
        return given

    return BeforeValidator(checked)


def free_context(data: bytes) -> dict[str, bool]:
    """What validators of a record are told of it: whether free JSON in it has to be measured."""
    containers = data.count(b"[") + data.count(b"{")
    return {"is_small": len(data) <= MOST_FREE_BYTES and containers <= MOST_FREE_DEPTH}


def _checked_free(given: Any, info: ValidationInfo) -> Any:
    if info.context and info.context.get("is_small"):
        return given
    size, parts = 0, [(given, 0)]
    while parts:
        part, depth = parts.pop()
        size += 8 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, dict):
            size += sum(len(name) for name in part if isinstance(name, str))
            parts += [(one, depth + 1) for one in part.values()]
        elif isinstance(part, list | tuple):
            parts += [(one, depth + 1) for one in part]
        if size + 8 * len(parts) > MOST_FREE_BYTES:
            raise PydanticCustomError("too_long", f"at most {MOST_FREE_BYTES} bytes of JSON")
        if depth > MOST_FREE_DEPTH:
            raise PydanticCustomError("too_long", f"at most {MOST_FREE_DEPTH} containers deep")
    return given


FreeJson = Annotated[dict[str, Any], BeforeValidator(_checked_free)]
"""JSON of any form, such as a model's config; not too much of it."""


def ensure_within(path: str, size: int) -> None:
    """Raise unless an object of this size, once it is written, can be read again.

    Raises:
        UnsupportedFormatError: it could not.
    """
    bound = bound_of(path)
    if bound is not OTHERS and size > bound.max_bytes:
        raise UnsupportedFormatError(
            f"too large a {bound.kind} to be read again",
            path=path,
            expected=f"at most {bound.max_bytes} bytes",
            found=f"{size} bytes",
            next_step="Give it less to hold: fewer or shorter entries, or fewer files.",
        )
