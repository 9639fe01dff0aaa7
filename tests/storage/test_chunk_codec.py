import random
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from storage import chunk_codec
from storage.chunk_codec import checksummed_chunks, guard_spec
from storage.chunk_shape import (
    CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    SQUARE_ABOVE_BYTES,
    inner_chunk_shape,
)
from storage.errors import UnsupportedFormatError
from storage.orbax_save import StoredItem, start_save
from storage.uri import parse_uri
from tests.storage.states import abstract, floats, put, raw

SHARDS = st.lists(st.integers(1, 5000), min_size=0, max_size=4).map(tuple)


def spec(shape=(64, 32), shard=(16, 32), codecs=None):
    """A write spec as Orbax 0.12.8 builds it."""
    inner = codecs or [{"name": "bytes", "configuration": {"endian": "little"}}]
    configuration = {"chunk_shape": shard, "codecs": inner, "index_codecs": []}
    return {
        "driver": "zarr3",
        "dtype": "float32",
        "metadata": {
            "shape": shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
            "codecs": [{"name": "sharding_indexed", "configuration": configuration}],
        },
    }


@given(SHARDS, st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_inner_chunks_divide_their_shard_and_stay_small(shard, copies, itemsize, square):
    whole = tuple(size * copies for size in shard)
    chunk = inner_chunk_shape(whole, shard, itemsize, square=square)
    assert len(chunk) == len(shard)
    assert all(size % part == 0 for size, part in zip(shard, chunk, strict=True))
    nbytes = int(np.prod(chunk, dtype=int)) * itemsize
    assert nbytes >= min(LEAST_CHUNK_BYTES, int(np.prod(shard, dtype=int)) * itemsize)
    if nbytes > CHUNK_BYTES:  # the axis that was cut has no divisor in between
        axis = next(axis for axis, part in enumerate(chunk) if part > 1)
        smaller = max(part for part in range(1, chunk[axis]) if shard[axis] % part == 0)
        assert nbytes // chunk[axis] * smaller < LEAST_CHUNK_BYTES


@given(SHARDS, st.sampled_from([1, 2, 4]))
def test_strips_lie_in_one_piece_in_memory(shard, itemsize):
    chunk = inner_chunk_shape(shard, shard, itemsize, square=False)
    cut = [axis for axis in range(len(shard)) if chunk[axis] < shard[axis]]
    if cut:
        last = max(cut)
        assert all(chunk[axis] == 1 for axis in range(last))


def test_a_large_matrix_is_cut_into_squares_so_that_both_directions_read_little():
    assert SQUARE_ABOVE_BYTES < 49152 * 4096 * 4
    assert inner_chunk_shape((49152, 4096), (6144, 4096), 4) == (1024, 1024)


def test_a_small_matrix_is_cut_into_row_strips():
    assert SQUARE_ABOVE_BYTES > 4096 * 1024 * 4
    assert inner_chunk_shape((4096, 1024), (2048, 1024), 4) == (1024, 1024)
    assert inner_chunk_shape((1024, 4096), (1024, 4096), 4) == (256, 4096)


def test_nobody_reads_optimizer_leaves_by_columns_so_they_are_never_cut_across():
    assert inner_chunk_shape((8192, 16384), (1024, 16384), 4, square=False) == (64, 16384)


@pytest.mark.parametrize(
    "shard", [(1048583,), (2 * 1048583,), (1, 1048583), (1048583, 1), (200_000, 7, 11)]
)
def test_a_size_with_a_large_prime_factor_is_not_cut_into_single_elements(shard):
    """A raveled model may have any number of elements; a chunk each would never be written."""
    whole = (64, *shard)  # large enough for squares
    chunk = inner_chunk_shape(whole, (1, *shard), 4)
    assert np.prod(chunk) * 4 >= LEAST_CHUNK_BYTES
    assert np.prod(shard) / np.prod(chunk) < 1000


def test_the_guard_appends_the_checksum_and_keeps_the_outer_shard():
    guarded = spec()
    shapes = guard_spec(guarded, "w", item="model")
    sharding = guarded["metadata"]["codecs"][0]["configuration"]
    assert [codec["name"] for codec in sharding["codecs"]] == ["bytes", "crc32c"]
    assert guarded["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] == (16, 32)
    assert shapes == ((16, 32), (16, 32))


@pytest.mark.parametrize(
    "foreign",
    [
        spec(codecs=[{"name": "bytes"}, {"name": "zstd"}]),
        {"driver": "zarr", "metadata": {}},
        {**spec(), "driver": "zarr"},
        {**spec(), "metadata": {**spec()["metadata"], "codecs": []}},
    ],
    ids=["compressed", "zarr2", "other driver", "no codecs"],
)
def test_a_spec_of_unknown_form_is_refused_rather_than_written_unchecked(foreign):
    with pytest.raises(UnsupportedFormatError, match="without checksums"):
        guard_spec(foreign, "w", item="model")


def test_an_untested_orbax_is_refused(monkeypatch):
    monkeypatch.setattr(chunk_codec, "_installed", False)
    monkeypatch.setattr(chunk_codec, "version", lambda _: "0.99.0")
    with (
        pytest.raises(UnsupportedFormatError, match=r"0\.12\.8, found 0\.99\.0"),
        checksummed_chunks("/tmp/x"),
    ):
        pass


def saved(folder: Path, leaves: dict[str, object]) -> Path:
    with checksummed_chunks(str(folder)):
        start_save(parse_uri(folder), {"model": StoredItem(leaves, {})}, {}).result()
    return folder


def test_no_flipped_bit_loads_as_another_number_on_a_plain_orbax_load(tmp_path):
    """Plain Orbax, no help from Cairn: the codec is in the stored spec."""
    leaves = {"w": put(floats(256, 64), "fsdp", None), "b": floats(100), "s": np.asarray(1.5)}
    step = saved(tmp_path / "1" / "7", leaves)
    expected = {name: raw(leaf) for name, leaf in leaves.items()}
    assert {name: raw(leaf) for name, leaf in loaded(step, leaves).items()} == expected
    files = [file for file in step.rglob("d/*") if file.stat().st_size]
    files += list(step.rglob("manifest.ocdbt"))
    rng = random.Random(0)
    raised = 0
    for file in files:
        whole = file.read_bytes()
        for _ in range(12):
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            try:
                found = loaded(step, leaves)
            except Exception:
                raised += 1
            else:  # bytes that nothing refers to may change, numbers may not
                assert {name: raw(leaf) for name, leaf in found.items()} == expected
        file.write_bytes(whole)
    assert raised > len(files)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_inside_an_array_always_raises(tmp_path, bit):
    leaves = {"w": put(floats(256, 64), "fsdp", None)}
    step = saved(tmp_path / "1" / "7", leaves)
    shard = np.asarray(leaves["w"].addressable_shards[0].data).tobytes()
    (file,) = (file for file in step.rglob("d/*") if shard in file.read_bytes())
    damaged = bytearray(file.read_bytes())
    damaged[damaged.find(shard) + len(shard) // 2] ^= 1 << bit
    file.write_bytes(damaged)
    with pytest.raises(Exception, match="reading array index") as caught:
        loaded(step, leaves)
    assert "Digest mismatch" in str(caught.value.__cause__)


def loaded(step: Path, leaves: dict[str, object]) -> dict[str, object]:
    return ocp.load(step, abstract(leaves), checkpointable_name="model")


def test_other_folders_are_saved_as_orbax_would(tmp_path):
    with checksummed_chunks(str(tmp_path / "1" / "7")):
        ocp.save(tmp_path / "1" / "70", {"w": floats(8, 8)})
    assert "crc32c" not in _inner_codecs(tmp_path / "1" / "70" / "state", "w")


def test_saved_arrays_name_the_checksum_in_their_own_spec(tmp_path):
    step = saved(tmp_path / "1" / "7", {"w": floats(8, 8), "key": jax.random.key(0)})
    assert _inner_codecs(step / "model", "w") == ["bytes", "crc32c"]
    assert _inner_codecs(step / "model", "key") == ["bytes", "crc32c"]


def _inner_codecs(item: Path, name: str) -> list[str]:
    store = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"},
        },
        read=True,
    ).result()
    (sharding,) = store.spec().to_json()["metadata"]["codecs"]
    return [codec["name"] for codec in sharding["configuration"]["codecs"]]
