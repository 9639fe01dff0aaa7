"""Index of an OCDBT database whose data files we wrote: one node, one manifest.

OCDBT is TensorStore's key-value format. A B+tree leaf node maps keys to small values or to ranges
of data files, and the manifest points at the tree's root. The format lets data files have any
name and origin; we write them straight from the saved arrays (see `data_files`), and this module
writes the node and the manifest that make them a database. Pure.

Source: TensorStore, "ocdbt Key-Value Store driver", section "Storage format"
(tensorstore/kvstore/ocdbt/index.rst), and manifests written by TensorStore 0.1.86.
"""

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import google_crc32c
import numpy as np

__all__ = [
    "DATA_FOLDER",
    "MANIFEST_FILE",
    "MAX_INLINE_BYTES",
    "MAX_NODE_BYTES",
    "NODE_FOLDER",
    "Node",
    "ValueRef",
    "is_data_file",
    "leaf_node",
    "manifest",
]

MANIFEST_FILE: Final = "manifest.ocdbt"
DATA_FOLDER: Final = "d"
"""Folder of the data files and of nothing else: every byte in it is part of a value."""

NODE_FOLDER: Final = "b"

_VALUES: Final = re.compile(rf"[^/]+/(ocdbt\.process_[^/]+/)?(d|{DATA_FOLDER})/[^/]+")
"""Pattern of the paths of data files in a step, with the folder names of Orbax and of Cairn."""

_OTHER_VALUES: Final = re.compile(
    r"(ocdbt\.process_[^/]+/)?d/[0-9a-f]{32}|.+/([0-9]+(\.[0-9]+)*|c(/[0-9]+)*)"
)
"""Pattern of other files with elements.

They are data files of a tree that is no item, and chunks of arrays that each have a folder.
"""

_MANIFEST_MAGIC: Final = 0x0CDB3A2A
_NODE_MAGIC: Final = 0x0CDB20DE
MAX_INLINE_BYTES: Final = 1024
MAX_NODE_BYTES: Final = 100_000_000
_VERSION_TREE_ARITY_LOG2: Final = 4
_INLINE, _INDIRECT = 0, 1
_GROUP_BITS: Final = 7
_FEW: Final = 64


class ValueRef(NamedTuple):
    """Location of a value.

    Attributes:
        file: path of the data file, relative to the database's folder.
        offset: offset of the first byte.
        length: number of bytes.
    """

    file: str
    offset: int
    length: int


class Node(NamedTuple):
    """Encoded node.

    Attributes:
        data: the bytes of its file.
        keys: number of keys.
        indirect_bytes: sum of the lengths of all values in data files.
    """

    data: bytes
    keys: int
    indirect_bytes: int


def is_data_file(name: str) -> bool:
    """Return True if a path in a step is that of a file with array elements."""
    return any(kind.fullmatch(name) for kind in (_VALUES, _OTHER_VALUES))


def leaf_node(entries: Mapping[bytes, bytes | ValueRef]) -> Node:
    """Return the only node of a tree with these entries: key -> value, or its location.

    There must be at least one entry.
    """
    keys = sorted(entries)
    values = [entries[key] for key in keys]
    refs = [value for value in values if isinstance(value, ValueRef)]
    files = sorted({ref.file for ref in refs})
    numbers = {file: number for number, file in enumerate(files)}
    shared = [_shared(a, b) for a, b in itertools.pairwise(keys)]
    suffixes = [key[skip:] for key, skip in zip(keys, [0, *shared], strict=True)]
    lengths = [value.length if isinstance(value, ValueRef) else len(value) for value in values]
    body = b"".join(
        [
            b"\x00",  # height
            _file_table(files),
            _varint(len(keys)),
            _varints(shared),
            _varints(map(len, suffixes)),
            *suffixes,
            _varints(lengths),
            bytes(_INDIRECT if isinstance(value, ValueRef) else _INLINE for value in values),
            _varints(numbers[ref.file] for ref in refs),
            _varints(ref.offset for ref in refs),
            *(value for value in values if not isinstance(value, ValueRef)),
        ]
    )
    return Node(_framed(_NODE_MAGIC, body), len(keys), sum(ref.length for ref in refs))


def manifest(node: Node, node_file: str, *, time_ns: int) -> bytes:
    """Return the manifest of a database whose first and only version has `node` as its root.

    Args:
        node: the root node.
        node_file: path of the node's file, relative to the database's folder.
        time_ns: commit time, in nanoseconds since the epoch.
    """
    config = b"".join(
        [
            os.urandom(16),  # the database's UUID
            _varint(0),  # kind: a single manifest
            _varint(MAX_INLINE_BYTES),
            _varint(MAX_NODE_BYTES),
            bytes([_VERSION_TREE_ARITY_LOG2]),
            _varint(0),  # nodes are not compressed
        ]
    )
    version = b"".join(
        [
            _varint(1),  # versions
            _varint(1),  # generation
            b"\x00",  # the root's height
            _varints([0, 0, len(node.data)]),  # its file, offset and length
            _varints([node.keys, len(node.data), node.indirect_bytes]),
            time_ns.to_bytes(8, "little"),
        ]
    )
    no_older_versions = _varint(0)
    body = config + _file_table([node_file]) + version + no_older_versions
    return _framed(_MANIFEST_MAGIC, body)


def _framed(magic: int, body: bytes) -> bytes:
    """Return `body` with TensorStore's header (magic number, length) and checksum."""
    plain = b"\x00\x00"  # format version, no compression
    size = 4 + 8 + len(plain) + len(body) + 4
    data = magic.to_bytes(4, "big") + size.to_bytes(8, "little") + plain + body
    checksum: int = google_crc32c.value(data)
    return data + checksum.to_bytes(4, "little")


def _file_table(files: Sequence[str]) -> bytes:
    """Return an encoded table of file paths, without base paths and without shared prefixes."""
    paths = [file.encode() for file in files]
    return b"".join(
        [
            _varint(len(paths)),
            _varints(0 for _ in paths[1:]),  # bytes shared with the path before
            _varints(map(len, paths)),
            _varints(0 for _ in paths),  # bytes of the base path
            *paths,
        ]
    )


def _shared(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix of two byte strings."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (differing.bit_length() + 7) // 8


def _varints(numbers: Iterable[int]) -> bytes:
    values = np.fromiter(numbers, np.uint64)
    if len(values) < _FEW:
        return b"".join(map(_varint, values.tolist()))
    # `_varint` for all at once: a column for each seven bits.
    shifts = np.arange(0, 64, _GROUP_BITS, dtype=np.uint64)
    groups = values[:, None] >> shifts
    has_more = groups >= 1 << _GROUP_BITS
    octets = (groups & np.uint64(0x7F)).astype(np.uint8) | (has_more.astype(np.uint8) << 7)
    is_used = groups > 0
    is_used[:, 0] = True
    return octets[is_used].tobytes()


def _varint(number: int) -> bytes:
    """Return a number in seven bits per byte, lowest first; the high bit means that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
