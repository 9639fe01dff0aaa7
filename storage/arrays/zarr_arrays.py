"""How a leaf is stored as an array of zarr, in its own elements, and the description of that.

Source: zarr v3 specification, and TensorStore, which writes the descriptions.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import tensorstore as ts

from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.four_bits import packed_shape, packing_axis
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.arrays.value_files import Compression, codecs

__all__ = ["StoredLayout", "stored_layout", "zarr_description"]

_WORD: Final = "uint32"
_OCTET: Final = "uint8"


class StoredLayout(NamedTuple):
    """An array of zarr.

    Attributes:
        shape: in elements as stored.
        dtype: of these, by name.
        cut: outer shards and inner chunks.
    """

    shape: tuple[int, ...]
    dtype: str
    cut: ChunkShapes


def stored_layout(
    shape: tuple[int, ...], dtype: str, cut: ChunkShapes, form: StoredForm | None
) -> StoredLayout:
    """How a leaf is stored.

    Args:
        shape: its own.
        dtype: its own, by name.
        cut: shards and chunks in its own elements; for a key with the axis of its words.
        form: how it is stored, if not as it is.
    """
    match form:
        case None:
            return StoredLayout(shape, dtype, cut)
        case StoredForm(kind="key"):
            return StoredLayout((*shape, *cut.shard[len(shape) :]), _WORD, cut)
        case StoredForm(kind="packed"):
            # Parts are packed along their last even axis; those behind it have odd divisors only.
            axis = packing_axis(cut.chunk)
            assert axis is not None, "packed leaves have an even axis"
            shard, chunk = (packed_shape(part, axis) for part in cut)
            return StoredLayout(packed_shape(shape, axis), _OCTET, ChunkShapes(shard, chunk))
        case _:
            return StoredLayout(shape, _OCTET, cut)


@lru_cache(maxsize=4096)
def zarr_description(layout: StoredLayout, compression: Compression | None) -> bytes:
    """The content of an array's "zarr.json", as TensorStore writes it.

    TensorStore knows the dtypes' names and their fill values.
    """
    of_chunks, of_index = codecs(compression)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "shape": list(layout.shape),
            "data_type": layout.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(layout.cut.shard)},
            },
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": list(layout.cut.chunk),
                        "codecs": of_chunks,
                        "index_codecs": of_index,
                        "index_location": "end",
                    },
                }
            ],
        },
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    store: Any = array.kvstore
    return bytes(store["zarr.json"])
