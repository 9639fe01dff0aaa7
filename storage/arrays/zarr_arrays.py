"""Layout of a leaf as a zarr array of stored elements, and its zarr description.

Source: zarr v3 specification, and TensorStore, which writes the descriptions.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import tensorstore as ts

from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import Compression, codecs
from cairn.storage.arrays.four_bits import packed_shape, packing_axis
from cairn.storage.arrays.orbax_tree import StoredForm

__all__ = ["StoredLayout", "stored_layout", "zarr_description"]

_WORD: Final = "uint32"
_OCTET: Final = "uint8"


class StoredLayout(NamedTuple):
    """Layout of a zarr array.

    Attributes:
        shape: shape of the array of stored elements.
        dtype: name of the stored elements' dtype.
        cut: shapes of outer shards and inner chunks.
    """

    shape: tuple[int, ...]
    dtype: str
    cut: ChunkShapes


def stored_layout(
    shape: tuple[int, ...], dtype: str, cut: ChunkShapes, form: StoredForm | None
) -> StoredLayout:
    """Return the stored layout of a leaf.

    Args:
        shape: shape of the leaf.
        dtype: name of the leaf's dtype.
        cut: shards and chunks in the leaf's elements; for a key with the axis of its words.
        form: stored form of the leaf; None: it is stored as it is.
    """
    match form:
        case None:
            return StoredLayout(shape, dtype, cut)
        case StoredForm(kind="key"):
            return StoredLayout((*shape, *cut.shard[len(shape) :]), _WORD, cut)
        case StoredForm(kind="packed"):
            # The last even axis of a chunk is that of the device's shard, too: the sizes of later
            # axes are odd, and have only odd divisors.
            axis = packing_axis(cut.chunk)
            assert axis is not None, "packed leaves have an even axis"
            shard, chunk = (packed_shape(part, axis) for part in cut)
            return StoredLayout(packed_shape(shape, axis), _OCTET, ChunkShapes(shard, chunk))
        case _:
            return StoredLayout(shape, _OCTET, cut)


@lru_cache(maxsize=4096)
def zarr_description(layout: StoredLayout, compression: Compression | None) -> bytes:
    """Return the content of an array's "zarr.json", as TensorStore writes it.

    TensorStore generates it, since it knows the names and fill values of dtypes.
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
