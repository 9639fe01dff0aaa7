"""Every chunk that Cairn writes carries a crc32c and has our chunk shape: one guarded override.

Orbax builds the storage spec of each array in `build_array_write_spec`, with a checksum on the
shard index only, so that a flipped bit in the data loads as a number. It has no option for either.
While a folder is guarded here, the specs of arrays written below it get `{"name": "crc32c"}` as
their last inner codec, and our inner chunk shape. The codec is part of the stored spec: every
reader verifies it, without Cairn. Specs of all other folders pass through untouched.

Imports Orbax. The override is pinned to the Orbax release it was tested with, and refuses to write
if the spec does not look as expected. See ADR 0002.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import tensorstore as ts
from orbax.checkpoint._src.serialization import tensorstore_utils

from storage.chunk_shape import inner_chunk_shape
from storage.dtypes import dtype_named
from storage.errors import UnsupportedFormatError

__all__ = ["TESTED_ORBAX", "ChunkShapes", "ChunkTable", "checksummed_chunks", "guard_spec"]

TESTED_ORBAX: Final = ("0.12.8",)
STORE_RETRIES: Final = {"max_retries": 10, "initial_delay": "500ms", "max_delay": "16s"}
"""How TensorStore asks a store again that answers 429 or 5xx: for about two minutes in all.

Its own default goes on for some fifteen, during which a save would be neither durable nor failed.
"""

_PARAMETERS: Final = {"info", "arg", "global_shape", "local_shape", "dtype", "use_ocdbt"}
_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Final = {"name": "crc32c"}
_COLUMN_READ_ITEMS: Final = frozenset({"model"})
"""Items whose leaves exports transpose; others are always cut into row strips."""


class ChunkShapes(NamedTuple):
    """How one array was cut.

    Attributes:
        shard: outer shape, in elements per axis.
        chunk: inner shape; divides `shard`.
    """

    shard: tuple[int, ...]
    chunk: tuple[int, ...]


ChunkTable = dict[tuple[str, str], ChunkShapes]
"""The cut of every array written, by (item, Orbax's name of the array)."""

_lock = threading.Lock()
_guarded: dict[str, ChunkTable] = {}
_installed = False


@contextmanager
def checksummed_chunks(folder: str) -> Iterator[ChunkTable]:
    """Arrays that Orbax writes below `folder` meanwhile, in any thread, get checksummed chunks.

    Gives a table that fills up with the cut of each array as Orbax plans it.

    Args:
        folder: the folder in the form that Orbax was given; its temporary siblings count too.

    Raises:
        UnsupportedFormatError: the installed Orbax is not one this was tested with.
    """
    _install()
    prefix = _normal(folder)
    table: ChunkTable = {}
    with _lock:
        _guarded[prefix] = table
    try:
        yield table
    finally:
        with _lock:
            _guarded.pop(prefix, None)


def _install() -> None:
    """Wrap Orbax's function once, after checking that it is the one we know."""
    global _installed
    with _lock:
        if _installed:
            return
        original = tensorstore_utils.build_array_write_spec
        found = version("orbax-checkpoint")
        missing = _PARAMETERS - inspect.signature(original).parameters.keys()
        if found not in TESTED_ORBAX or missing:
            raise UnsupportedFormatError(
                "chunks would be written without checksums",
                path="orbax-checkpoint",
                expected=f"version {' or '.join(TESTED_ORBAX)}",
                found=f"{found}, {len(missing)} parameters unknown",
                next_step="Install the pinned version of orbax-checkpoint.",
            )
        tensorstore_utils.build_array_write_spec = _guarding(original)
        tensorstore_utils.get_ts_context = _ending(tensorstore_utils.get_ts_context)
        _installed = True


def _guarding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_array_write_spec(info: Any, *args: Any, **keywords: Any) -> Any:
        spec = original(info, *args, **keywords)
        table = _table_of(info.parent_dir.as_posix())
        if table is not None:
            item = info.parent_dir.name
            table[item, info.name] = guard_spec(spec.json, info.name, item=item)
        return spec

    return build_array_write_spec


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Contexts whose retries come to an end."""

    @functools.wraps(original)
    def get_ts_context(*args: Any, **keywords: Any) -> ts.Context:
        known = original(*args, **keywords).spec.to_json()
        return ts.Context({**known, "gcs_request_retries": STORE_RETRIES})

    return get_ts_context


def _table_of(directory: str) -> ChunkTable | None:
    """The table of the guarded folder that `directory` lies below, or None."""
    normal = _normal(directory)
    with _lock:
        for prefix, table in _guarded.items():
            if normal.startswith((f"{prefix}/", f"{prefix}.orbax-checkpoint-tmp")):
                return table
    return None


def _normal(path: str) -> str:
    """One spelling for "gs://bucket/x" and "/gs/bucket/x", which etils uses interchangeably."""
    path = path.rstrip("/")
    for scheme in ("gs", "s3"):
        if path.startswith(f"{scheme}://"):
            return f"/{scheme}/{path.removeprefix(f'{scheme}://')}"
    return path


def guard_spec(spec: dict[str, Any], name: str, *, item: str) -> ChunkShapes:
    """Change Orbax's TensorStore write spec of one array in place; how the array is cut.

    Args:
        spec: zarr3 spec with one sharding codec, or a cast of one.
        name: the array's name, for the error.
        item: the item it belongs to.

    Raises:
        UnsupportedFormatError: the spec is not of the form that this knows how to change.
    """
    array = spec["base"] if spec.get("driver") == "cast" else spec
    try:
        metadata = array["metadata"]
        (sharding,) = metadata["codecs"]
        configuration = sharding["configuration"]
        known = (
            array["driver"] == "zarr3"
            and sharding["name"] == "sharding_indexed"
            and configuration["codecs"] == [_BYTES]
        )
        shape, dtype = metadata["shape"], dtype_named(array["dtype"])
        shard = configuration["chunk_shape"]
    except (KeyError, TypeError, ValueError) as exc:
        raise _unknown_spec(name, spec) from exc
    if not known:
        raise _unknown_spec(name, spec)
    chunk = inner_chunk_shape(shape, shard, dtype.itemsize, square=item in _COLUMN_READ_ITEMS)
    configuration["codecs"].append(dict(_CRC32C))
    configuration["chunk_shape"] = chunk
    return ChunkShapes(tuple(shard), chunk)


def _unknown_spec(name: str, spec: dict[str, Any]) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        "the array would be written without checksums",
        path=name,
        expected="a zarr3 spec with one uncompressed sharding_indexed codec",
        found=str(spec)[:300],
        next_step="Install the pinned version of orbax-checkpoint.",
    )
