"""Forgeries of several places that fit together; the smallest cases of what was found once."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from backports import zstd

from cairn.storage.arrays.ocdbt import MANIFEST_FILE, ValueRef, leaf_node, manifest
from cairn.storage.arrays.paged_table import table_location
from tests.service.fuzzing.forging import (
    ADOPTED,
    COPIED,
    REAL,
    Abroad,
    Body,
    Forge,
    Forged,
    Forgery,
    ocdbt,
    read_index,
    reseal,
    rewrite,
    unsealed,
    write_index,
)
from tests.service.seams import step_index

_TABLES: Final = {
    "files": step_index.FILE_ROW,
    "values": step_index.VALUE_ROW,
    "digests": step_index.DIGEST_ROW,
}
_NUMBERS: Final = (0, 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
_MIB: Final = 1 << 20
_BOMB_BYTES: Final = 768 * _MIB
_ARRAYS: Final = {ADOPTED: ("params", "w"), COPIED: ("model", "model/norm/scale")}
"""Item and path of an array to forge, which are asked for."""


def by_hand(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Forgery]:
    """All of them."""
    there = next((abroad.run / "attempts/1/3/model/d").iterdir())
    yield from _sources(abroad)
    yield from _databases(abroad, there)
    yield from _indexes(there)
    yield from _exports(abroad)
    yield from _bulk()
    yield Forgery(REAL, "run", "its folder", "a link to the other run", _linked_whole(abroad.run))
    yield Forgery(REAL, "run", "all in it", "links to the other run's", _linked_parts(abroad.run))


def _by_ways(path: Path, above: str = "") -> dict[str, str]:
    """Texts that may lead to a path, from a folder in a run."""
    relative = above + "../" * 12 + str(path)[1:]
    return {"absolute": str(path), "by ..": relative}


# Adopted runs with another source


def _sources(abroad: Abroad) -> Iterator[Forgery]:
    step = abroad.run / "attempts/1/3"
    folders = {
        "other run": abroad.run,
        "step of the other run": step,
        "other root": abroad.run.parent,
        "folder of the canary": abroad.canary.parent,
        "server's data": abroad.data,
        "/etc": Path("/etc"),
        "process": Path("/proc/self"),
    }
    for name, folder in folders.items():
        yield Forgery(ADOPTED, "source", "plain.source, objects", name, _source(folder), True)
    for name in ("step of the other run", "folder of the canary", "server's data"):
        for above in (".", "..", "../.."):
            forge = _linked_step(folders[name], above)
            yield Forgery(COPIED, "step's folder", above, f"a link to {name}", forge, True)
    for name, is_link in {"step of the other run": False, "a link to it": True}.items():
        forge = _source(step, as_model=True, is_link=is_link)
        yield Forgery(ADOPTED, "source", "all of plain", name, forge, True)


def _source(folder: Path, *, as_model: bool = False, is_link: bool = False) -> Forge:
    def forge(forged: Forged) -> None:
        source = folder
        if is_link:
            source = forged.run.with_name(f"link-{forged.run.name}")
            source.symlink_to(folder)

        def change(body: Body) -> None:
            body["plain"]["source"] = f"file://{source}"
            body["objects"] = [*_objects(folder)]
            if as_model:
                body["plain"] |= {"trees": {"model": "model"}, "json_files": {}}
                leaf = {"item": "model", "path": "model/norm/scale", "dtype": "float32"}
                body |= {"items": ["model"], "leaves": [leaf | {"shape": [48], "chunks": [48]}]}

        rewrite(forged.manifest, change)

    return forge


def _linked_step(folder: Path, above: str) -> Forge:
    """The step's folder as a link, or one above it whose like leads to the same files."""

    def forge(forged: Forged) -> None:
        path = Path(os.path.normpath(forged.files / above))
        rest = forged.files.relative_to(path)
        shutil.rmtree(path)
        target = Path(str(folder).removesuffix(f"/{rest}")) if str(rest) != "." else folder
        path.symlink_to(target)
        found = target / rest if (target / rest).exists() else target
        rewrite(forged.manifest, lambda body: body.update(objects=[*_objects(found)]))

    return forge


def _objects(folder: Path) -> Iterator[Body]:
    names = [path for path in (folder / "environ", folder / "passwd") if path.exists()]
    for path in names or [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        size = path.stat().st_size or 4096  # of a process's files, the size is 0
        yield {"name": str(path.relative_to(folder)), "size": size, "crc32c": "0" * 8}


# Exports whose files lie elsewhere


def _exports(abroad: Abroad) -> Iterator[Forgery]:
    there = [*abroad.run.glob("exports/*/*/*/")]  # a server has made it, or not
    for folder in [*there, abroad.canary.parent, abroad.data] if there else ():
        forge = _export(folder, str(folder), is_link=True)
        yield Forgery(REAL, "export", "its try", f"a link to {folder.name}", forge, True)
        for way, text in _by_ways(folder).items():
            forge = _export(folder, text)
            yield Forgery(REAL, "export", "folder, files", f"{folder.name}, {way}", forge, True)


def _export(folder: Path, text: str, *, is_link: bool = False) -> Forge:
    def forge(forged: Forged) -> None:
        (path,) = forged.run.glob("exports/*/convert-*.json")
        files = [*_objects(folder)]
        change = {"files": files} if is_link else {"files": files, "folder": text}
        if is_link:
            tried = path.with_suffix("") / unsealed(path.read_bytes())["folder"]
            shutil.rmtree(tried)
            tried.symlink_to(folder)
        rewrite(path, lambda body: body.update(change))

    return forge


# Databases of arrays


class _Shape(NamedTuple):
    """An array that is larger than what is stored of it, or whose one chunk lies elsewhere."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    is_packed: bool = True
    stored: Callable[[], bytes | ValueRef] | None = None

    @property
    def dtype(self) -> str:
        return "float32" if self.is_packed else "uint8"

    def description(self, *, newer: bool) -> Body:
        """As the formats 3 and 2 of zarr have it."""
        if newer:
            zstd_ = [{"name": "zstd", "configuration": {"level": 1}}] * self.is_packed
            grid = {"name": "regular", "configuration": {"chunk_shape": self.chunk}}
            own = {"zarr_format": 3, "node_type": "array", "data_type": self.dtype}
            own |= {"chunk_grid": grid, "chunk_key_encoding": {"name": "default"}}
            return own | {
                "shape": self.shape,
                "fill_value": 0,
                "codecs": [{"name": "bytes"}, *zstd_],
            }
        own = {"zarr_format": 2, "shape": self.shape, "chunks": self.chunk, "order": "C"}
        own |= {"dtype": "<f4" if self.is_packed else "|u1", "fill_value": None, "filters": None}
        compressor = {"id": "zstd", "level": 1} if self.is_packed else None
        return own | {"compressor": compressor, "dimension_separator": "."}


def _databases(abroad: Abroad, there: Path) -> Iterator[Forgery]:
    big = (_BOMB_BYTES // 4,)
    shapes = {
        "1 chunk of 768 MiB of zeros": _Shape(big, big, stored=_zeros),
        "1 chunk of 768 MiB that is not there": _Shape(big, big),
        "2**40 chunks": _Shape((2**40,), (1,)),
        "2**60 elements": _Shape((2**60,), (2**60,)),
        "1 chunk of 2**40 elements that is not there": _Shape((2**40,), (2**40,)),
        "2**45 elements in chunks of 2**20": _Shape((2**45,), (2**20,)),
        "32 axes": _Shape((2,) * 32, (1,) * 32),
    }
    targets = {"other run's": there, "canary": abroad.canary, "jobs": abroad.data / "jobs.sqlite"}
    for base, (item, path) in _ARRAYS.items():
        field = f"{item}/{path}"
        for name, made in shapes.items():
            forge = _array(item, path, made)
            yield Forgery(base, "array", field, name, forge)
        for name, to in targets.items():
            for way, file in [*_by_ways(to).items(), ("by a link", "d/linked")]:
                ref = ValueRef(file, 0, 64)
                made = _Shape((64,), (64,), is_packed=False, stored=lambda ref=ref: ref)
                forge = _array(item, path, made, linked=to)
                yield Forgery(base, "array", field, f"64 bytes of {name}, {way}", forge)
            for way, file in _by_ways(to).items():
                for length in (64, 1 << 40):
                    forge = _refs(item, ValueRef(file, 0, length))
                    yield Forgery(base, "OCDBT", item, f"{length} bytes of {name}, {way}", forge)


def _array(item: str, path: str, made: _Shape, linked: Path | None = None) -> Forge:
    def forge(forged: Forged) -> None:
        if linked is not None:
            (forged.files / item / "d/linked").symlink_to(linked)
        name = path.replace("/", ".").encode()
        entries: dict[bytes, bytes | ValueRef] = {**_entries(forged, item)}
        (old,) = entries.keys() & {name + b"/zarr.json", name + b"/.zarray"}
        for key in [key for key in entries if key.startswith(name + b"/")]:
            del entries[key]
        newer = old.endswith(b"zarr.json")
        entries[old] = json.dumps(made.description(newer=newer)).encode()
        if made.stored is not None:
            entries[name + (b"/c/0" if newer else b"/0")] = made.stored()
        _write(forged, item, entries)

        def change(body: Body) -> None:
            for leaf in body["leaves"]:
                if (leaf["item"], leaf["path"]) == (item, path):
                    leaf |= {"shape": made.shape, "chunks": made.chunk, "dtype": made.dtype}
                    leaf |= {"shards": None, "digest": None, "spec": None}

        rewrite(forged.manifest, change)

    return forge


def _refs(item: str, ref: ValueRef) -> Forge:
    """Every chunk of an item elsewhere."""

    def forge(forged: Forged) -> None:
        own = _entries(forged, item)
        is_json = {key: key.endswith((b".json", b".zarray")) for key in own}
        _write(forged, item, {key: own[key] if is_json[key] else ref for key in own})

    return forge


def _entries(forged: Forged, item: str) -> dict[bytes, bytes]:
    database = ocdbt(forged, item)
    return {key: database[key] for key in database.list().result()}


def _write(forged: Forged, item: str, entries: dict[bytes, bytes | ValueRef]) -> None:
    node, folder = leaf_node(entries), forged.files / item
    (folder / "b").mkdir(exist_ok=True)
    (folder / "b/forged").write_bytes(node.data)
    (folder / MANIFEST_FILE).write_bytes(manifest(node, "b/forged", time_ns=0))
    reseal(forged)


# Indexes


def _indexes(there: Path) -> Iterator[Forgery]:
    for table, row in _TABLES.items():
        for name in row.names or ("",):
            for number in _NUMBERS:
                forge = _rows(
                    table, lambda rows, name=name, number=number: _set(rows, name, number)
                )
                yield Forgery(REAL, f"index's {table}", name, str(number), forge)
    folders = _by_ways(there.parent) | {"below": _by_ways(there.parent, "model/../")["by .."]}
    for name, folder in folders.items():
        forge = _value_file(folder, bytes.fromhex(there.name))
        yield Forgery(REAL, "index's files", "folder and name", name, forge)
    leaf = b'{"item":"model","path":"x","shape":[1],"dtype":"float32"},'
    for name, text in {"spaces": b" ", "leaves": leaf}.items():
        value = f"768 MiB of {name}, packed"
        yield Forgery(REAL, "index", "directory", value, _packed(text))


def _set(rows: Any, name: str, number: int) -> None:
    column = rows[name] if name else rows
    column[0] = np.uint64(number).astype(column.dtype.base)


def _rows(table: str, change: Callable[[Any], object]) -> Forge:
    def forge(forged: Forged) -> None:
        tables, directory = read_index(forged)
        offset, count, _ = directory[table]
        rows = np.frombuffer(tables, _TABLES[table], count, offset).copy()
        change(rows)
        directory[table] = list(table_location(rows, offset))
        after = tables[offset + rows.nbytes :]
        write_index(forged, tables[:offset] + rows.tobytes() + after, directory)

    return forge


def _value_file(folder: str, name: bytes) -> Forge:
    def forge(forged: Forged) -> None:
        tables, directory = read_index(forged)
        directory["folders"] = [folder] * len(directory["folders"])
        write_index(forged, tables, directory)
        _rows("files", lambda rows: np.copyto(rows["name"], np.frombuffer(name, np.uint8)))(forged)

    return forge


def _packed(text: bytes) -> Forge:
    def forge(forged: Forged) -> None:
        packer, many = zlib.compressobj(1), text * (_MIB // len(text))
        parts = [packer.compress(b'{"format":"cairn.step_index","version":3,"leaves":[')]
        parts += [packer.compress(many) for _ in range(_BOMB_BYTES // _MIB)]
        packed = b"".join([*parts, packer.compress(b"{}]}"), packer.flush()])
        write_index(forged, read_index(forged)[0], packed=packed)

    return forge


@cache
def _zeros() -> bytes:
    """A chunk of 768 MiB of zeros, as zstd packs it."""
    packer = zstd.ZstdCompressor(1)
    parts = [packer.compress(bytes(_MIB)) for _ in range(_BOMB_BYTES // _MIB)]
    return b"".join([*parts, packer.flush()])


# Records that are valid but for how much they hold, and links


def _bulk() -> Iterator[Forgery]:
    names = {"run.json": "labels", "annotations/3.1.json": "labels"}
    for name, field in {**names, "manifests/3.1.json": "environment"}.items():
        for count, length in ((1, 64 * _MIB), (10**6, 48)):
            forge = _many(name, field, count, "x" * length)
            yield Forgery(REAL, name, field, f"64 MB in {count} texts", forge)
    name = "annotations/3.1.json"
    forge = _many(name, "metrics", 300_000, 0.5)
    yield Forgery(REAL, name, "metrics", "300,000", forge)


def _many(name: str, field: str, count: int, entry: object) -> Forge:
    def change(body: Body) -> None:
        body[field] = {f"{number:07}": entry for number in range(count)}

    return lambda forged: rewrite(forged.run / name, change)


def _linked_whole(to: Path) -> Forge:
    def forge(forged: Forged) -> None:
        os.rename(forged.run, forged.run.with_name(f"away-{forged.run.name}"))
        forged.run.symlink_to(to)

    return forge


def _linked_parts(to: Path) -> Forge:
    def forge(forged: Forged) -> None:
        os.rename(forged.run, forged.run.with_name(f"away-{forged.run.name}"))
        forged.run.mkdir()
        for path in to.iterdir():
            (forged.run / path.name).symlink_to(path)

    return forge
