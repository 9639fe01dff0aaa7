"""Forgeries of more than one place at a time, which fit together; those that the issue began with."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.arrays import table_place
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, ValueRef, leaf_node, manifest
from cairn.storage.runs.records.step_index import DIGEST_ROW, FILE_ROW, VALUE_ROW
from tests.service.fuzzing.forging import (
    ADOPTED,
    OLDER,
    REAL,
    Abroad,
    Forged,
    Forgery,
    ocdbt,
    read_index,
    reseal,
    rewrite,
    sealed,
    write_index,
)

_TABLES = {"files": FILE_ROW, "values": VALUE_ROW, "digests": DIGEST_ROW}
_NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
_BOMB_BYTES = 768 << 20


def by_hand(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Forgery]:
    """All of them."""
    yield from _sources(abroad)
    yield from _databases(abroad)
    yield from _tables(bases[REAL])
    yield from _indexes(abroad)
    yield from _bulk()
    yield Forgery(REAL, "run", "its folder", "a link to the other run", _linked_whole(abroad))
    yield Forgery(REAL, "run", "all in it", "links to the other run's", _linked_parts(abroad))


def _sources(abroad: Abroad) -> Iterator[Forgery]:
    """An adopted run whose source is another folder, with files of its own choice."""
    folders = {
        "other run": abroad.run,
        "step of the other run": abroad.run / "attempts/1/3",
        "other root": abroad.run.parent,
        "folder of the canary": abroad.canary.parent,
        "server's data": abroad.data,
        "root /": Path("/etc"),
        "process": Path("/proc/self"),
    }
    for name, folder in folders.items():
        yield Forgery(ADOPTED, "source", "plain.source and objects", name, _source(folder), True)
    tree = _source(abroad.run / "attempts/1/3", item="model")
    yield Forgery(ADOPTED, "source", "all of plain", "step of the other run", tree, True)
    link = _source_link(abroad.run / "attempts/1/3")
    yield Forgery(ADOPTED, "source", "plain.source", "a link in the root to another", link, True)


def _source(folder: Path, item: str = "") -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        def change(body: dict[str, Any]) -> None:
            body["plain"] |= {"source": f"file://{folder}"}
            body["objects"] = [*_objects(folder)]
            if item:
                body["plain"] |= {"trees": {item: item}, "json_files": {}}
                path, shape = "model/norm/scale", [48]
                leaf = {"item": item, "path": path, "shape": shape, "dtype": "float32"}
                body |= {"items": [item], "leaves": [leaf | {"chunks": shape}]}

        rewrite(forged.manifest, change)

    return forge


def _source_link(folder: Path) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        link = forged.run.parent / f"link-{forged.run.name}"
        link.symlink_to(folder)
        _source(link, item="model")(forged)

    return forge


def _objects(folder: Path) -> Iterator[dict[str, Any]]:
    names = [path for path in (folder / "environ", folder / "passwd") if path.exists()]
    for path in names or [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        size = path.stat().st_size or 4096  # of a process's files, the size is 0
        yield {"name": str(path.relative_to(folder)), "size": size, "crc32c": "0" * 8}


def _databases(abroad: Abroad) -> Iterator[Forgery]:
    """OCDBT whose values lie in other files, or are longer than any file."""
    there = next((abroad.run / "attempts/1/3/model/d").iterdir())
    size = there.stat().st_size
    for base, item in ((ADOPTED, "params"), (OLDER, "model"), (REAL, "model")):
        refs = {
            f"{name} {kind}": ValueRef(file, *range_)
            for kind, file in (
                ("absolute", str(there)),
                ("by ..", "../" * 12 + str(there)[1:]),
                ("canary by ..", "../" * 12 + str(abroad.canary)[1:]),
            )
            for name, range_ in {
                "all of it": (0, size),
                "1 TiB": (0, 1 << 40),
                "64 bytes": (0, 64),
            }.items()
        }
        for name, ref in refs.items():
            known = "all" in name
            yield Forgery(base, "OCDBT", f"values of {item}", name, _refs(item, ref), known)
    for base, item, path in ((ADOPTED, "params", "w"), (OLDER, "model", "model/norm/scale")):
        for name, array in _ARRAYS.items():
            forge = _array(item, path, array)
            large = array.stored is True
            yield Forgery(base, "array", f"{item}/{path}", name, forge, is_large=large)
        for name, file in {
            "canary": abroad.canary,
            "server's data": abroad.data / "jobs.sqlite",
        }.items():
            for way, text in {"absolute": str(file), "by ..": "../" * 12 + str(file)[1:]}.items():
                array = _Shape((64,), (64,), ValueRef(text, 0, 64))
                forge = _array(item, path, array)
                yield Forgery(base, "array", f"{item}/{path}", f"bytes of the {name} {way}", forge)
            forge = _linked_values(item, path, file)
            yield Forgery(base, "array", f"{item}/{path}", f"bytes of the {name} by a link", forge)


def _refs(item: str, ref: ValueRef) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        database = ocdbt(forged, item)
        entries: dict[bytes, bytes | ValueRef] = {}
        for key in database.list().result():
            is_json = key.endswith((b"json", b".zarray"))
            entries[key] = bytes(database.read(key).result().value) if is_json else ref
        _write_database(forged, item, entries)

    return forge


def _write_database(forged: Forged, item: str, entries: dict[bytes, bytes | ValueRef]) -> None:
    node, folder = leaf_node(entries), forged.files / item
    (folder / "b").mkdir(exist_ok=True)
    (folder / "b/forged").write_bytes(node.data)
    (folder / MANIFEST_FILE).write_bytes(manifest(node, "b/forged", time_ns=0))
    reseal(forged)


class _Shape(NamedTuple):
    """An array that is larger than what is stored of it."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    stored: ValueRef | bool = False


_ARRAYS: Final = {
    "1 chunk of 768 MiB of zeros": _Shape((_BOMB_BYTES // 4,), (_BOMB_BYTES // 4,), stored=True),
    "1 chunk of 768 MiB that is not there": _Shape((_BOMB_BYTES // 4,), (_BOMB_BYTES // 4,)),
    "2**40 chunks": _Shape((2**40,), (1,)),
    "2**60 elements": _Shape((2**60,), (2**60,)),
    "2**45 elements in chunks of 2**20": _Shape((2**45,), (2**20,)),
    "32 axes": _Shape((2,) * 32, (1,) * 32),
}


def _array(item: str, path: str, made: _Shape) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        database = ocdbt(forged, item)
        entries: dict[bytes, bytes | ValueRef] = {}
        for key in database.list().result():
            entries[key] = bytes(database.read(key).result().value)
        name = path.replace("/", ".").encode()
        (old,) = (key for key in entries if key in (name + b"/zarr.json", name + b"/.zarray"))
        entries = {key: value for key, value in entries.items() if not key.startswith(name + b"/")}
        is_newer = old.endswith(b"zarr.json")
        entries[old] = json.dumps(_newer(made) if is_newer else _former(made)).encode()
        if made.stored:
            zeros = made.stored is True
            entries[name + (b"/c/0" if is_newer else b"/0")] = _zeros() if zeros else made.stored
        _write_database(forged, item, entries)

        def change(body: dict[str, Any]) -> None:
            for leaf in body["leaves"]:
                if (leaf["item"], leaf["path"]) == (item, path):
                    leaf |= {"shape": made.shape, "chunks": made.chunk, "shards": None}
                    dtype = "float32" if isinstance(made.stored, bool) else "uint8"
                    leaf |= {"dtype": dtype, "digest": None, "spec": None}

        rewrite(forged.manifest, change)

    return forge


def _linked_values(item: str, path: str, to: Path) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        (forged.files / item / "d/linked").symlink_to(to)
        _array(item, path, _Shape((64,), (64,), ValueRef("d/linked", 0, 64)))(forged)

    return forge


def _newer(made: _Shape) -> dict[str, Any]:
    is_packed = isinstance(made.stored, bool)
    zstd = {"name": "zstd", "configuration": {"level": 1}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": made.shape,
        "data_type": "float32" if is_packed else "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": made.chunk}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}, *([zstd] if is_packed else [])],
    }


def _former(made: _Shape) -> dict[str, Any]:
    is_packed = isinstance(made.stored, bool)
    return {
        "zarr_format": 2,
        "shape": made.shape,
        "chunks": made.chunk,
        "dtype": "<f4" if is_packed else "|u1",
        "compressor": {"id": "zstd", "level": 1} if is_packed else None,
        "fill_value": None,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }


@cache
def _zeros() -> bytes:
    """A chunk of 768 MiB of zeros, as zstd packs it."""
    from backports import zstd

    packer = zstd.ZstdCompressor(1)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(768)]
    return b"".join([*parts, packer.flush()])


def _tables(real: Forged) -> Iterator[Forgery]:
    """Every field of the first row of every table of an index."""
    for table, row in _TABLES.items():
        for name in row.names or ("",):
            for number in _NUMBERS:
                forge = _row(table, row, name, number)
                yield Forgery(REAL, f"index's {table}", name, str(number), forge)


def _row(table: str, row: Any, name: str, number: int) -> Callable[[Forged], None]:
    def change(rows: Any) -> None:
        column = rows[name] if name else rows
        column[0] = np.uint64(number).astype(column.dtype.base)

    return lambda forged: _change_table(forged, table, row, change)


def _change_table(forged: Forged, table: str, row: Any, change: Callable[[Any], None]) -> None:
    tables, directory = read_index(forged)
    offset, count, _ = directory[table]
    rows = np.frombuffer(tables, row, count, offset).copy()
    change(rows)
    end = offset + rows.nbytes
    directory[table] = list(table_place(rows, offset))
    data = json.dumps(directory, separators=(",", ":")).encode()
    write_index(forged, tables[:offset] + rows.tobytes() + tables[end:], sealed(data))


def _indexes(abroad: Abroad) -> Iterator[Forgery]:
    """Indexes that lead elsewhere, and that are larger than they look."""
    there = next((abroad.run / "attempts/1/3/model/d").iterdir())
    for name, folder in {
        "absolute": str(there.parent),
        "by ..": "../" * 12 + str(there.parent)[1:],
        "by .., below the item": "model/" + "../" * 13 + str(there.parent)[1:],
    }.items():
        forge = _folder(folder, bytes.fromhex(there.name))
        yield Forgery(REAL, "index's files", "folder and name", name, forge)
    for name, make in {"spaces": _spaces, "leaves": _leaves}.items():
        value = f"768 MiB of {name}, packed"
        yield Forgery(REAL, "index", "directory", value, _packed(make), is_large=True)


def _folder(folder: str, name: bytes) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        tables, directory = read_index(forged)
        directory["folders"] = [folder] * len(directory["folders"])
        write_index(forged, tables, sealed(json.dumps(directory).encode()))

        def change(rows: Any) -> None:
            rows["name"] = np.frombuffer(name, np.uint8)

        _change_table(forged, "files", FILE_ROW, change)

    return forge


def _packed(make: Callable[[], bytes]) -> Callable[[Forged], None]:
    return lambda forged: write_index(forged, read_index(forged)[0], b"", make())


@cache
def _spaces() -> bytes:
    packer = zlib.compressobj(1)
    parts = [packer.compress(b'{"a":1,')]
    parts += [packer.compress(b" " * (1 << 20)) for _ in range(_BOMB_BYTES >> 20)]
    return b"".join([*parts, packer.compress(b'"b":1}'), packer.flush()])


@cache
def _leaves() -> bytes:
    leaf = b'{"item":"model","path":"x","shape":[1],"dtype":"float32"},'
    packer = zlib.compressobj(1)
    parts = [packer.compress(b'{"format":"cairn.step_index","version":3,"leaves":[')]
    many = leaf * ((1 << 20) // len(leaf))
    parts += [packer.compress(many) for _ in range(_BOMB_BYTES >> 20)]
    return b"".join([*parts, packer.compress(leaf[:-1] + b"]}"), packer.flush()])


def _bulk() -> Iterator[Forgery]:
    """Records that are valid but for how much they hold."""
    kinds = {
        "run.json": "labels",
        "annotations/3.1.json": "labels",
        "manifests/3.1.json": "environment",
    }
    for name, field in kinds.items():
        for size, texts, length in (
            ("64 MB in one text", 1, 64 << 20),
            ("64 MB in 1,000,000 texts", 10**6, 48),
        ):
            forge = _entries(name, field, texts, "x" * length)
            yield Forgery(REAL, name, field, size, forge, is_large=True)
    name = "annotations/3.1.json"
    forge = _entries(name, "metrics", 300_000, 0.5)
    yield Forgery(REAL, name, "metrics", "300,000", forge, is_large=True)


def _entries(name: str, field: str, count: int, entry: object) -> Callable[[Forged], None]:
    def change(body: dict[str, Any]) -> None:
        body[field] = {f"{number:07}": entry for number in range(count)}

    return lambda forged: rewrite(forged.run / name, change)


def _linked_whole(abroad: Abroad) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        os.rename(forged.run, forged.run.with_name(f"away-{forged.run.name}"))
        forged.run.symlink_to(abroad.run)

    return forge


def _linked_parts(abroad: Abroad) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        away = forged.run.with_name(f"away-{forged.run.name}")
        os.rename(forged.run, away)
        forged.run.mkdir()
        for path in abroad.run.iterdir():
            (forged.run / path.name).symlink_to(path)

    return forge
