"""The OCDBT databases that we index, as TensorStore reads them."""

import random
from pathlib import Path

import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.storage.arrays.ocdbt import (
    DATA_FOLDER,
    MANIFEST_FILE,
    NODE_FOLDER,
    ValueRef,
    leaf_node,
    manifest,
)

NODE_FILE = f"{NODE_FOLDER}/{'0' * 32}"
TIME_NS = 1_700_000_000_123_456_789

KEYS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.tuples(st.sampled_from([b"model.w/c/", b"model.w/", b"m"]), st.binary(max_size=6)).map(
            b"".join
        ),
    ),
    min_size=1,
    max_size=60,
    unique=True,
)


def make(folder: Path, values: dict[bytes, bytes], *, inline=lambda key: False, files=1) -> None:
    """A database of `values`, those that are not `inline` spread over so many data files."""
    (folder / DATA_FOLDER).mkdir(parents=True)
    (folder / NODE_FOLDER).mkdir()
    names = [f"{DATA_FOLDER}/{number:032x}" for number in range(files)]
    contents = {name: bytearray(b"unused") for name in names}
    entries: dict[bytes, bytes | ValueRef] = {}
    for number, (key, value) in enumerate(values.items()):
        if inline(key):
            entries[key] = value
            continue
        content = contents[names[number % files]]
        entries[key] = ValueRef(names[number % files], len(content), len(value))
        content += value
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    node = leaf_node(entries)
    (folder / NODE_FILE).write_bytes(node.data)
    (folder / MANIFEST_FILE).write_bytes(manifest(node, NODE_FILE, time_ns=TIME_NS))


def base(folder: Path) -> ts.KvStore:
    return ts.KvStore.open(f"file://{folder}/").result()


def read(folder: Path) -> dict[bytes, bytes]:
    """All of the database, as TensorStore lists and reads it, nothing cached."""
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    store = ts.KvStore.open(spec, context=ts.Context()).result()
    reads = {key: store.read(key) for key in store.list().result()}
    return {key: bytes(future.result().value) for key, future in reads.items()}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(keys=KEYS, inline=st.integers(0, 2), files=st.integers(1, 5))
def test_tensorstore_lists_and_reads_what_was_indexed(tmp_path_factory, keys, inline, files):
    folder = tmp_path_factory.mktemp("ocdbt")
    values = {key: key * (1 + len(key) % 3) + bytes([number]) for number, key in enumerate(keys)}
    chosen = {0: set(), 1: set(keys[::2]), 2: set(keys)}[inline]
    make(folder, values, inline=chosen.__contains__, files=files)
    assert read(folder) == values


def test_one_entry_is_a_database(tmp_path):
    make(tmp_path / "inline", {b"k": b"v"}, inline=lambda _: True)
    make(tmp_path / "indirect", {b"k": b"v"})
    assert read(tmp_path / "inline") == read(tmp_path / "indirect") == {b"k": b"v"}


def test_values_without_bytes_are_there(tmp_path):
    make(tmp_path / "db", {b"a": b"", b"b": b"x", b"c": b""}, inline=lambda key: key != b"b")
    assert read(tmp_path / "db") == {b"a": b"", b"b": b"x", b"c": b""}


def test_thousands_of_keys_and_large_offsets_are_read(tmp_path):
    """More keys than fit a varint's two bytes, and offsets far inside a sparse file."""
    folder = tmp_path / "db"
    (folder / DATA_FOLDER).mkdir(parents=True)
    (folder / NODE_FOLDER).mkdir()
    name, step = f"{DATA_FOLDER}/{'f' * 32}", 300_007
    entries = {
        f"layers.{number % 97}.kernel/c/{number}".encode(): ValueRef(name, number * step, 5)
        for number in range(20_000)
    }
    with (folder / name).open("wb") as file:
        for number in (0, 1, 16_384, 19_999):
            file.seek(number * step)
            file.write(b"%05d" % number)
    node = leaf_node(entries)
    (folder / NODE_FILE).write_bytes(node.data)
    (folder / MANIFEST_FILE).write_bytes(manifest(node, NODE_FILE, time_ns=TIME_NS))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    assert sorted(store.list().result()) == sorted(entries)
    for number in (0, 1, 16_384, 19_999):
        assert store[f"layers.{number % 97}.kernel/c/{number}"] == b"%05d" % number


def test_ranges_and_prefixes_find_their_keys(tmp_path):
    values = {f"w/c/{number}/{other}".encode(): b"x" for number in range(30) for other in range(4)}
    make(tmp_path / "db", {**values, b"w/zarr.json": b"{}", b"w.b/zarr.json": b"{}"})
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path / 'db'}/", "path": "w/"}
    store = ts.KvStore.open(spec).result()
    assert {b"w/" + key for key in store.list().result()} == {*values, b"w/zarr.json"}
    under = store.list(ts.KvStore.KeyRange("c/7/", "c/70")).result()
    assert sorted(under) == [b"c/7/%d" % other for other in range(4)]
    assert store.read("c/31/0").result().state == "missing"


def test_tensorstore_describes_the_database_as_it_is(tmp_path):
    values = {b"w/c/0": b"01234", b"w/c/1": b"56", b"w/zarr.json": b"{}"}
    folder = tmp_path / "db"
    make(folder, values, inline=lambda key: key.endswith(b"json"))
    top = ts.ocdbt.dump(base(folder)).result()
    (version,) = top["versions"]
    node_bytes = (folder / NODE_FILE).stat().st_size
    assert version["generation_number"] == 1
    assert version["commit_time"] == TIME_NS
    assert version["root_height"] == 0
    location = version["root"]["location"]
    assert location == f"btreenode::{NODE_FILE}:0:{node_bytes}"
    assert version["root"]["statistics"] == {
        "num_indirect_value_bytes": 7,
        "num_keys": 3,
        "num_tree_bytes": node_bytes,
    }
    assert top["config"]["compression"] is None
    node = ts.ocdbt.dump(base(folder), node=location).result()
    file = f"{DATA_FOLDER}/{0:032x}"
    assert node["height"] == 0
    assert node["entries"] == [
        {"key": b"w/c/0", "indirect_value": f"value::{file}:6:5"},
        {"key": b"w/c/1", "indirect_value": f"value::{file}:11:2"},
        {"key": b"w/zarr.json", "inline_value": b"{}"},
    ]


def test_each_database_has_an_id_of_its_own(tmp_path):
    for name in ("one", "other"):
        make(tmp_path / name, {b"k": b"v"})
    one, other = (ts.ocdbt.dump(base(tmp_path / name)).result() for name in ("one", "other"))
    assert one["config"]["uuid"] != other["config"]["uuid"]


def test_tensorstore_writes_into_it_and_merges_it_like_its_own(tmp_path):
    """What several processes write is merged by TensorStore, which copies references."""
    values = {b"a/0": b"0" * 2000, b"a/zarr.json": b"{}"}
    folder = tmp_path / "db" / "ocdbt.process_0"
    make(folder, values, inline=lambda key: key.endswith(b"json"))
    context = ts.Context()  # references are copied only between stores of one context
    part, whole = (
        ts.KvStore.open({"driver": "ocdbt", "base": f"file://{one}/"}, context=context).result()
        for one in (folder, folder.parent)
    )
    transaction = ts.Transaction(atomic=True)
    part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()
    assert read(tmp_path / "db") == values
    part.write(b"b", b"new").result()
    assert read(folder) == {**values, b"b": b"new"}


@pytest.mark.parametrize("name", [MANIFEST_FILE, NODE_FILE])
def test_every_flipped_bit_of_the_index_is_an_error_in_tensorstore(tmp_path, name):
    values = {f"layer.{number}/c/0".encode(): b"x" * number for number in range(40)}
    make(tmp_path, values, inline=lambda key: key.endswith(b"3/c/0"), files=3)
    whole = (tmp_path / name).read_bytes()
    rng = random.Random(name)
    places = {*range(16), *range(len(whole) - 4, len(whole))}
    places |= {rng.randrange(len(whole)) for _ in range(60)}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Error (reading|decoding)"):
            read(tmp_path)
    (tmp_path / name).write_bytes(whole)
    assert read(tmp_path) == values


@pytest.mark.parametrize("name", [MANIFEST_FILE, NODE_FILE])
def test_an_index_cut_short_is_an_error_in_tensorstore(tmp_path, name):
    make(tmp_path, {f"k{number}".encode(): b"v" for number in range(40)})
    whole = (tmp_path / name).read_bytes()
    for size in (0, 1, 11, len(whole) // 2, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"Error (reading|decoding)"):
            read(tmp_path)


def test_a_missing_node_is_an_error_and_not_an_empty_database(tmp_path):
    make(tmp_path, {b"k": b"v"})
    (tmp_path / NODE_FILE).unlink()
    with pytest.raises(ValueError, match=NODE_FILE):
        read(tmp_path)
