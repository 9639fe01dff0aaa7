"""Arrays written as a database of an item, without Orbax, and read by TensorStore."""

import itertools
import math

import numpy as np
import tensorstore as ts

from cairn import parse_uri
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_file_writers import open_data_file_writer
from cairn.storage.arrays.data_files import write_data_files
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, leaf_node, manifest
from cairn.storage.arrays.orbax_tree import array_name
from tests.multi_process.seams import host_arrays, tree_writer


def numbers(shape, dtype, seed=0):
    """An array of any bits that the dtype has a value for."""
    random = np.random.default_rng(seed)
    wanted = dtype_named(dtype)
    if dtype in ("bool", "int2", "int4", "float4_e2m1fn"):
        return random.integers(-2, 2, shape).astype(np.float32).astype(wanted)
    return np.frombuffer(random.bytes(math.prod(shape) * wanted.itemsize), wanted).reshape(shape)


def held(array, cut, origins=None):
    """A host array, whole or in two parts of views."""
    parts = [host_arrays.HostBox(array, (0,) * array.ndim)]
    if origins:
        cuts = [*origins, array.shape[0]]
        parts = [
            host_arrays.HostBox(array[low:high], (low, *(0,) * (array.ndim - 1)))
            for low, high in itertools.pairwise(cuts)
        ]
    return host_arrays.HostArray(
        array.shape, array.dtype, ChunkShapes(*cut), tuple(parts), None, None
    )


def write(folder, arrays, forms=None, **options):
    """Write a database of held arrays by path; the files written."""
    uri = parse_uri(folder)
    sink = open_data_file_writer(uri)
    try:
        files = write_data_files(sink, tree_writer.shards_of(arrays, forms or {}), **options)
    finally:
        sink.close()
    entries = dict(tree_writer.index_entries(arrays))
    for file in files:
        entries |= file.refs
    node = leaf_node(entries)
    base = ts.KvStore.open(uri.kvstore_spec()).result()
    base.write("b/node", node.data).result()
    base.write(MANIFEST_FILE, manifest(node, "b/node", time_ns=1)).result()
    return files


def read(folder, path):
    """The array, as TensorStore's zarr3 driver reads it."""
    name = array_name(path)
    kvstore = {"driver": "ocdbt", "base": parse_uri(folder).kvstore_spec(), "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, context=ts.Context()).result().read().result()


def assert_equal(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
