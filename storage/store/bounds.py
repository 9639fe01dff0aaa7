"""Upper bounds on the size of a run's objects, by kind: a store may hold what anybody wrote.

Readers report a larger object as damaged, without reading it. Writers refuse to write one, as it
could not be read again. The bounds do not cover array values: those are read by chunk, and
`tensor_parts` bounds what an answer may read.
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
    "DEFAULT_BOUND",
    "MAX_FREE_JSON_BYTES",
    "MAX_FREE_JSON_DEPTH",
    "MAX_JSON_VALUES",
    "MIN_BOUND_BYTES",
    "Bound",
    "FreeJson",
    "Oversized",
    "bound_of",
    "check_json_size",
    "check_not_oversized",
    "check_writable",
    "free_json_context",
    "free_memory",
    "max_entries",
    "total_memory",
]

MAX_JSON_VALUES: Final = 4_000_000
"""Most values in one JSON, counted by commas and brackets; enough for 100,000 leaves."""

MAX_FREE_JSON_BYTES: Final = 4 << 20
"""Most bytes of free-form JSON, such as a model's config: its strings, and 8 for each value."""

MAX_FREE_JSON_DEPTH: Final = 64
"""Most nested levels of free-form JSON."""

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


class _ControlGroup(NamedTuple):
    """Files that describe the memory of a control group (container).

    Attributes:
        limit: bytes that it may use; no number, or more than the machine has, means no limit.
        used: bytes that it uses.
        cache: key in `memory.stat` of the bytes of reclaimable file cache.
    """

    limit: Path
    used: Path
    cache: str


_CONTROL_GROUPS: Final = (
    _ControlGroup(
        Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), "inactive_file"
    ),
    _ControlGroup(
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)
"""Files of control groups version 2, and of version 1."""


@functools.cache
def total_memory() -> int:
    """Return the bytes of memory of this machine, or of its container."""
    machine: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for group in _CONTROL_GROUPS if (limit := _number(group.limit)))])


def free_memory() -> int:
    """Return the bytes of memory that are free now on this machine, or in its container."""
    free = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    room = total_memory() if free is None else free << 10
    for group in _CONTROL_GROUPS:
        limit, used = _number(group.limit), _number(group.used)
        if limit is not None and used is not None:
            cache = _numbers(group.limit.parent / "memory.stat").get(group.cache, 0)
            room = min(room, limit - used + cache)
    return max(0, room)


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file with lines of a key and a number, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}


class Bound(NamedTuple):
    """Upper bound on the size of objects of one kind.

    Attributes:
        kind: name of the kind.
        names: patterns of the objects' names in a run; "*" matches any text without a slash.
        max_bytes: most bytes of an object.
        why: content of the largest object that must fit.
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
    Bound("policy", (".cairn/policies/*.json",), 64 * _KIB, "its patterns, bounds and labels"),
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
"""Bounds of objects, by their names; the first match counts.

They are documented in `docs/reference/storage/bounds.md`.
"""

DEFAULT_BOUND: Final = Bound(
    "small object", ("*",), 1 * _MIB, "probes of a store, and what else there is"
)
"""Bound of all other objects that are read whole."""


MIN_BOUND_BYTES: Final = min(bound.max_bytes for bound in (*BOUNDS, DEFAULT_BOUND))
"""Size in bytes that every kind allows, so that smaller objects need no look-up of their kind."""

_BY_LENGTH: Final = {
    length: [
        (re.compile("[^/]*".join(map(re.escape, name.split("*")))), bound)
        for bound in BOUNDS
        for name in bound.names
        if name.count("/") + 1 == length
    ]
    for length in range(1, 5)
}
"""Patterns and their bounds, by the pattern's number of segments."""


@functools.lru_cache(maxsize=1 << 14)
def bound_of(path: str) -> Bound:
    """Return the bound of the object at this path."""
    segments = path.split("/")[-max(_BY_LENGTH) :]
    for start in range(len(segments)):
        tail = "/".join(segments[start:])
        for pattern, bound in _BY_LENGTH[len(segments) - start]:
            if pattern.fullmatch(tail):
                return bound
    return DEFAULT_BOUND


class Oversized(bytes):
    """Placeholder for the value of an object that exceeds its bound; it holds none of the bytes.

    It is an empty `bytes`, so that code which only tests for existence works. Parsers call
    `check_not_oversized`.

    Attributes:
        size: bytes of the object.
        bound: bound that it exceeds.
    """

    size: int
    bound: Bound

    def __new__(cls, size: int, bound: Bound) -> "Oversized":
        """Create the placeholder of an object with this size."""
        placeholder = super().__new__(cls)
        placeholder.size, placeholder.bound = size, bound
        return placeholder

    def error(self, path: object) -> CorruptionError:
        """Return the error for the object at `path`: it is too large."""
        return CorruptionError(
            f"larger than any {self.bound.kind}",
            path=path,
            expected=f"at most {self.bound.max_bytes} bytes",
            found=f"{self.size} bytes",
            next_step="Restore the object from a backup, or see what `cairn repair` can do.",
        )


def check_not_oversized(data: bytes, path: object) -> None:
    """Raise CorruptionError if `data` is the placeholder of an object that exceeds its bound.

    Raises:
        CorruptionError: the object is too large.
    """
    if isinstance(data, Oversized):
        raise data.error(path)


def check_json_size(data: bytes, path: object) -> None:
    """Raise CorruptionError if JSON is too large to read, or has too many values.

    `MAX_JSON_VALUES` bounds memory: an empty list of two bytes takes 64 bytes.

    Raises:
        CorruptionError: the JSON is too large, or has too many values.
    """
    check_not_oversized(data, path)
    count = sum(map(data.count, (b",", b"[", b"{"))) if len(data) > MAX_JSON_VALUES else 0
    if count > MAX_JSON_VALUES:
        raise CorruptionError(
            "too many values in JSON",
            path=path,
            expected=f"at most {MAX_JSON_VALUES}, by its commas and brackets",
            found=str(count),
            next_step="Restore the object from a backup.",
        )


def max_entries(most: int) -> BeforeValidator:
    """Return a validator that refuses mappings with more than `most` entries.

    It runs before pydantic validates the entries.
    """

    def checked(mapping: Any) -> Any:
        if isinstance(mapping, dict) and len(mapping) > most:
            raise PydanticCustomError("too_long", f"at most {most} entries, found {len(mapping)}")
        return mapping

    return BeforeValidator(checked)


def free_json_context(data: bytes) -> dict[str, bool]:
    """Return the validation context of a record: `is_small` skips measuring free-form JSON."""
    containers = data.count(b"[") + data.count(b"{")
    return {"is_small": len(data) <= MAX_FREE_JSON_BYTES and containers <= MAX_FREE_JSON_DEPTH}


def _check_free_json(body: Any, info: ValidationInfo) -> Any:
    if info.context and info.context.get("is_small"):
        return body
    size, parts = 0, [(body, 0)]
    while parts:
        part, depth = parts.pop()
        size += 8 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, dict):
            size += sum(len(name) for name in part if isinstance(name, str))
            parts += [(child, depth + 1) for child in part.values()]
        elif isinstance(part, list | tuple):
            parts += [(child, depth + 1) for child in part]
        if size + 8 * len(parts) > MAX_FREE_JSON_BYTES:
            raise PydanticCustomError("too_long", f"at most {MAX_FREE_JSON_BYTES} bytes of JSON")
        if depth > MAX_FREE_JSON_DEPTH:
            raise PydanticCustomError("too_long", f"at most {MAX_FREE_JSON_DEPTH} containers deep")
    return body


FreeJson = Annotated[dict[str, Any], BeforeValidator(_check_free_json)]
"""Free-form JSON of bounded size and depth, such as a model's config."""


def check_writable(path: str, size: int) -> None:
    """Raise UnsupportedFormatError if an object of this size could not be read again.

    Raises:
        UnsupportedFormatError: the size exceeds the bound of the object's kind.
    """
    bound = bound_of(path)
    if bound is not DEFAULT_BOUND and size > bound.max_bytes:
        raise UnsupportedFormatError(
            f"too large a {bound.kind} to be read again",
            path=path,
            expected=f"at most {bound.max_bytes} bytes",
            found=f"{size} bytes",
            next_step="Give it less to hold: fewer or shorter entries, or fewer files.",
        )
