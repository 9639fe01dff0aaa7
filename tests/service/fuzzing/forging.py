"""Forged runs: each place of each document of a run, and each file, with what a trainer could put.

Places come from the records' models and from what is stored: a new field is in by itself. A forger
makes checksums anew, so whatever stands above what was forged is made to fit it.
"""

import copy
import functools
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import google_crc32c
import tensorstore as ts

from cairn.storage.arrays.data_files import stored_file
from cairn.storage.store.records import Record
from tests.service.seams import step_index

REAL, COPIED, ADOPTED = "real", "copied", "adopted"
"""As saved now, with an index; as version 3 saved it, without; and by plain Orbax, then adopted."""

STEPS: Final = {REAL: (3, 6), COPIED: (3, 6), ADOPTED: (5,)}
"""The first of each is forged; another is there to be compared with it."""

Body = dict[str, Any]
At = tuple[str | int, ...]

_FORGED: Final = "@forged@"
_NEW_KEY: Final = "*"  # in a place: a key that the object does not have
_MANY: Final = 50_000
_READ_BYTES: Final = 1 << 24  # of a forged file; what is larger has no true checksum
_MOMENT: Final = "2026-11-26T12:00:00Z"  # which is a text as well
_SAMPLES: Final = {
    r"^[0-9a-f]{64}$": "0" * 64,
    r"^[0-9a-f]{8}$": "0" * 8,
    r"^words-64:[0-9a-f]{16}$": "words-64:" + "0" * 16,
}
_RAW: Final = {
    "null": b"null",
    "true": b"true",
    "-1": b"-1",
    "0": b"0",
    "2**31": b"2147483648",
    "2**53": b"9007199254740992",
    "2**63": b"9223372036854775808",
    "10**18 - 1": b"999999999999999999",
    "10**400": b"1" + b"0" * 400,
    "10**5000": b"1" + b"0" * 5000,
    "1e308": b"1e308",
    "1.5": b"1.5",
    "NaN": b"NaN",
    "-Infinity": b"-Infinity",
    "half a surrogate pair": b'"\\ud800"',
    "bytes that are no UTF-8": b'"\xff\xfe"',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep, as objects": b'{"a":' * 500 + b"1" + b"}" * 500,
    "list": b"[]",
    "object": b"{}",
    "list of texts": b'["x"]',
    "twice": b'1,"format":"cairn.run"',
}


class Abroad(NamedTuple):
    """What a trainer of the root must not reach.

    Attributes:
        run: a run of another root, with the same steps as `REAL`.
        canary: a file outside of all roots.
        data: the server's own folder.
        port: where somebody listens whom nobody may call.
    """

    run: Path
    canary: Path
    data: Path
    port: int


class Forged(NamedTuple):
    """The folders of a copy of a run: its own, and where the files of the forged step lie."""

    base: str
    run: Path
    files: Path

    @property
    def manifest(self) -> Path:
        return self.run / f"manifests/{STEPS[self.base][0]}.1.json"


Forge = Callable[[Forged], None]


@dataclass(frozen=True)
class Forgery:
    """One thing forged in a run.

    Attributes:
        base: the run that is forged.
        document: kind of record or file.
        field: the place in it.
        value: the name of what stands there.
        forge: does it to a copy of the run.
        tells_sizes: the forger has put the true size of a foreign file in a record.
    """

    base: str
    document: str
    field: str
    value: str
    forge: Forge
    tells_sizes: bool = False

    def __str__(self) -> str:
        return f"{self.base}: {self.document} | {self.field} | {self.value}"


class Place(NamedTuple):
    """A place in a document: names of what may stand there, and what makes a forgery of one."""

    values: list[str]
    forgery: Callable[[str], Forgery]


class Document(NamedTuple):
    """JSON that a run holds somewhere: how it is read, and written so that all fits it.

    Attributes:
        base: of which run.
        name: its kind.
        schema: of its model, if it has one.
        read: gives it.
        write: puts other bytes in its place.
    """

    base: str
    name: str
    schema: Body
    read: Callable[[Forged], Body]
    write: Callable[[Forged, bytes], object]


def kinds() -> dict[str, type[Record]]:
    """Every kind of record, by its format."""
    found, waiting = {}, [Record]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= {kind.FORMAT: kind for kind in below if hasattr(kind, "FORMAT")}
    return found


# Records and indexes that fit


def sealed(raw: bytes) -> bytes:
    """A record of these bytes, which have no checksum, with the one that fits."""
    return b'{"checksum":"sha256:%s",' % hashlib.sha256(raw).hexdigest().encode() + raw[1:]


def unsealed(data: bytes) -> Body:
    """The fields of a stored record."""
    return {name: value for name, value in json.loads(data).items() if name != "checksum"}


def dumped(body: Body) -> bytes:
    """As a record is stored."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def rewrite(path: Path, change: Callable[[Body], object]) -> None:
    """Change the fields of a record."""
    body = unsealed(path.read_bytes())
    change(body)
    path.write_bytes(sealed(dumped(body)))


def reseal(forged: Forged, *, links: bool = False) -> None:
    """Have the records of the forged step say what its files are now.

    Args:
        forged: the run.
        links: of links to files too, how large these are, which a forger may know.
    """

    def note(records: list[Body]) -> None:
        for record in records:
            path = forged.files / record["name"]
            is_own = os.path.realpath(path) == os.path.abspath(path)
            if not path.is_file() or not (is_own or links):
                continue
            if is_own and path.stat().st_size < _READ_BYTES:
                record |= stored_file(record["name"], path.read_bytes())._asdict()
            record["size"] = path.stat().st_size
            if "modified_ns" in record:
                record["modified_ns"] = path.stat().st_mtime_ns

    body = unsealed(forged.manifest.read_bytes())
    if body.get("index"):
        tables, directory = read_index(forged)
        note(directory["objects"])
        write_index(forged, tables, directory)
        return
    named = {one["name"] for one in body["objects"]}
    for path in forged.files.rglob("*"):
        name = str(path.relative_to(forged.files))
        if path.is_file() and name not in named:
            body["objects"].append({"name": name, "size": 0, "crc32c": "0" * 8})
    note(body["objects"])
    forged.manifest.write_bytes(sealed(dumped(body)))


def read_index(forged: Forged) -> tuple[bytes, Body]:
    """The tables of the step's index, and its directory."""
    data = (forged.files / "cairn.index").read_bytes()
    offset, length, _, _ = step_index.END.unpack_from(data, len(data) - step_index.END.size)
    return data[:offset], unsealed(zlib.decompress(data[offset : offset + length]))


def write_index(
    forged: Forged, tables: bytes, directory: Body | bytes = b"", packed: bytes = b""
) -> None:
    """Store an index, and the manifest that has it.

    Args:
        forged: the run.
        tables: its tables.
        directory: its fields, or its bytes.
        packed: its bytes as zlib made them.
    """
    raw = directory if isinstance(directory, bytes) else dumped(directory)
    packed = packed or zlib.compress(sealed(raw), 1)
    digest = hashlib.sha256(packed)
    data = (
        tables
        + packed
        + step_index.END.pack(len(tables), len(packed), digest.digest(), step_index.MAGIC)
    )
    (forged.files / "cairn.index").write_bytes(data)
    known = {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "directory": [len(tables), len(packed)],
        "directory_sha256": digest.hexdigest(),
    }
    rewrite(forged.manifest, lambda body: body["index"].update(known))


def ocdbt(forged: Forged, item: str) -> Any:
    """The database of the arrays of an item."""
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{forged.files}/{item}/"}).result()


# What a run holds


def add_samples(forged: Forged) -> None:
    """Give a run a record of each kind that it has none of."""
    step = STEPS[forged.base][0]
    names = {
        "cairn.tombstone": "trash/9.1.json",
        "cairn.intent": f"trash/{step}.1.intent.json",
        "cairn.hold": f"trash/{step}.1.{'0' * 16}.hold.json",
        "cairn.store": ".cairn-store.json",
        "cairn.step_part": f"attempts/1/{step}/cairn.process_0.json",
    }
    for export in forged.run.glob("exports/*/*/"):
        names["cairn.export-try"] = f"{export.relative_to(forged.run)}/left-try.json"
    run = unsealed((forged.run / "run.json").read_bytes())["run"]
    for kind, name in names.items():
        schema = kinds()[kind].model_json_schema()
        path = forged.run / name
        path.parent.mkdir(exist_ok=True)
        own = {"format": kind, "version": kinds()[kind].VERSION, "key": name, "run": run}
        path.write_bytes(sealed(dumped(complete(schema, schema.get("$defs", {})) | own)))


def documents(bases: dict[str, Forged]) -> list[Document]:
    """Every kind of document that the runs have, once for each run."""
    found: dict[tuple[str, str], Document] = {}
    for base, forged in bases.items():
        made = []
        for path in sorted(forged.run.rglob("*.json")):
            kind = kinds().get(json.loads(path.read_bytes()).get("format"))
            if kind is not None:
                made.append(_record(base, path.relative_to(forged.run), kind))
        for path in sorted(forged.files.rglob("*")):
            if path.is_file() and path.read_bytes()[:1] == b"{":
                made.append(_file(base, path.relative_to(forged.files)))
            if path.name == "manifest.ocdbt" and path.parent.parent == forged.files:
                made.append(_array(base, path.parent.name))
        if (forged.files / "cairn.index").exists():
            made.append(_index(base))
        exports = sorted(forged.run.rglob("*.safetensors"))
        made += [_export(base, path.relative_to(forged.run)) for path in exports]
        for one in made:
            found.setdefault((base, one.name.rpartition("/")[2]), one)
    return list(found.values())


def _record(base: str, name: Path, kind: type[Record]) -> Document:
    return Document(
        base,
        kind.FORMAT,
        kind.model_json_schema(),
        lambda forged: unsealed((forged.run / name).read_bytes()),
        lambda forged, raw: (forged.run / name).write_bytes(sealed(raw)),
    )


def _index(base: str) -> Document:
    return Document(
        base,
        "cairn.step_index",
        kinds()["cairn.step_index"].model_json_schema(),
        lambda forged: read_index(forged)[1],
        lambda forged, raw: write_index(forged, read_index(forged)[0], raw),
    )


def _file(base: str, name: Path) -> Document:
    def write(forged: Forged, raw: bytes) -> None:
        (forged.files / name).write_bytes(raw)
        reseal(forged)

    read = lambda forged: json.loads((forged.files / name).read_bytes())  # noqa: E731
    return Document(base, str(name), {}, read, write)


def _array(base: str, item: str) -> Document:
    def first(database: Any) -> bytes:
        names = database.list().result()
        return min(name for name in names if name.endswith((b"zarr.json", b".zarray")))

    def read(forged: Forged) -> Body:
        database = ocdbt(forged, item)
        return dict(json.loads(database[first(database)]))

    def write(forged: Forged, raw: bytes) -> None:
        database = ocdbt(forged, item)
        database[first(database)] = raw
        reseal(forged)

    return Document(base, f"zarr.json of {item}", {}, read, write)


def _export(base: str, name: Path) -> Document:
    def parts(path: Path) -> tuple[bytes, bytes]:
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        return data[8:end], data[end:]

    def write(forged: Forged, raw: bytes) -> None:
        path = forged.run / name
        data = struct.pack("<Q", len(raw)) + raw + parts(path)[1]
        path.write_bytes(data)
        now = {"size": len(data), "crc32c": f"{google_crc32c.value(data):08x}"}
        for manifest in path.parent.parent.parent.glob("*.json"):
            rewrite(
                manifest,
                lambda body: [one.update(now) for one in body["files"] if one["name"] == path.name],
            )

    read = lambda forged: dict(json.loads(parts(forged.run / name)[0]))  # noqa: E731
    return Document(base, "safetensors header", {}, read, write)


# Places in documents


def complete(schema: Body, defs: Body, value: Any = None) -> Any:
    """A value with all that its schema has besides; a sample where there is none."""
    if "$ref" in schema:
        return complete(defs[schema["$ref"].rpartition("/")[2]], defs, value)
    if "anyOf" in schema:
        chosen = next(one for one in schema["anyOf"] if one.get("type") != "null")
        return complete(chosen, defs, value)
    match schema.get("type"):
        case "object":
            known = value if isinstance(value, dict) else {}
            own, more = schema.get("properties", {}), schema.get("additionalProperties")
            fields = {name: complete(one, defs, known.get(name)) for name, one in own.items()}
            if isinstance(more, dict):
                entries = known or {"k": None}
                fields |= {name: complete(more, defs, one) for name, one in entries.items()}
            return {**known, **fields}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})]
            if not isinstance(value, list) or not value:
                return [complete(one, defs) for one in items]
            last = len(items) - 1
            return [complete(items[min(at, last)], defs, one) for at, one in enumerate(value)]
        case kind if value is None:
            text = _SAMPLES[schema["pattern"]] if "pattern" in schema else _MOMENT
            return schema.get(
                "enum", [{"integer": 1, "number": 1, "boolean": True}.get(kind, text)]
            )[0]
    return value


def places(value: Any, at: At = ()) -> Iterator[At]:
    """Every place in a document; of entries that are alike, those of the first."""
    if at:
        yield at
    if isinstance(value, dict):
        alike = set()
        for name, entry in value.items():
            kind = tuple(entry) if isinstance(entry, dict) else type(entry)
            if not isinstance(entry, dict | list) or kind not in alike:
                yield from places(entry, (*at, name))
            alike.add(kind)
        yield (*at, _NEW_KEY)
    if isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*at, number))


def in_documents(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Place]:
    """Every place of every document."""
    for document in documents(bases):
        full = _completed(document, document.read(bases[document.base]))
        for at in places(full):
            names = _names(abroad, None if at[-1] == _NEW_KEY else _at(full, at), at)
            yield Place(names, functools.partial(_in_place, document, at, abroad))


def _completed(document: Document, body: Body) -> Body:
    return dict(complete(document.schema, document.schema.get("$defs", {}), body))


def _at(value: Any, at: At) -> Any:
    return functools.reduce(lambda value, step: value[step], at, value)


def _in_place(document: Document, at: At, abroad: Abroad, name: str) -> Forgery:
    def forge(forged: Forged) -> None:
        body = document.read(forged)
        full = _completed(document, body)
        above, last = body, at[-1]
        for depth, step in enumerate(at[:-1], 1):
            if isinstance(above, dict) and above.get(step) is None:
                above[step] = copy.deepcopy(_at(full, at[:depth]))
            elif isinstance(above, list) and step >= len(above):
                above.append(copy.deepcopy(_at(full, at[:depth])))
            above = above[step]
        old = None
        if last == _NEW_KEY:
            above[_FORGED] = next(iter(above.values()), 1)
        else:
            old = _at(full, at)
            if isinstance(above, list):
                above[last:] = [_FORGED, *above[last + 1 :]]
            else:
                above[last] = _FORGED
        raw = dumped(body).replace(f'"{_FORGED}"'.encode(), _value(abroad, old, name))
        document.write(forged, raw)

    return Forgery(document.base, document.name, ".".join(map(str, at)), name, forge)


@functools.cache
def _texts(abroad: Abroad) -> dict[str, str]:
    """What a forger writes for a name, a path or an address."""
    found = {
        "root /": "/",
        "..": "..",
        "process": "/proc/self/environ",
        "gs://": "gs://cairn-nobody/x",
        "s3://": "s3://cairn-nobody/x",
        "memory://": "memory://x",
        "http://": f"http://127.0.0.1:{abroad.port}/x",
        "nothing": "",
        "NUL": "a\x00b",
        "lines": "a\r\nSet-Cookie: forged=1\r\n\r\n",
        "markup": "<script>forged()</script>",
        "1 MB": "x" * 10**6,
    }
    for name, path in {
        "other run": abroad.run,
        "other record": abroad.run / "run.json",
        "canary": abroad.canary,
        "folder of the canary": abroad.canary.parent,
        "server's data": abroad.data,
    }.items():
        found |= {name: str(path), f"{name}, file://": f"file://{path}"}
        found[f"{name}, .."] = "../" * 12 + str(path)[1:]
    return found


def _names(abroad: Abroad, old: Any, at: At) -> list[str]:
    """Names of what may stand in a place, in which `old` is; for a key, texts alone."""
    found = [*_texts(abroad)]
    if at[-1] == _NEW_KEY:
        return found
    found += _RAW
    if isinstance(old, int) and not isinstance(old, bool):
        found += ["one more", "one less"]
    return found + ["many"] * bool(isinstance(old, dict | list) and old)


def _value(abroad: Abroad, old: Any, name: str) -> bytes:
    """The JSON of that name, in the place of `old`."""
    match name:
        case "one more" | "one less":
            return b"%d" % (old + 1 if name == "one more" else old - 1)
        case "many" if isinstance(old, dict):
            entry = next(iter(old.values()))
            return json.dumps({f"k{number}": entry for number in range(_MANY)}).encode()
        case "many":
            return json.dumps(old[:1] * _MANY).encode()
    return _RAW[name] if name in _RAW else json.dumps(_texts(abroad)[name]).encode()


# Files


def in_files(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Forgery]:
    """Something else in the place of each file and each folder."""
    made: dict[str, Callable[[Path], object]] = {
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a pipe": os.mkfifo,
        "8 GiB of nothing": lambda path: (path.touch(), os.truncate(path, 8 << 30)),
        "nothing": lambda path: path.write_bytes(b""),
        "a folder": os.mkdir,
        "64 bytes": lambda path: path.write_bytes(bytes(range(64))),
        "an open bracket": lambda path: path.write_bytes(b"{"),
    }
    for base, forged in bases.items():
        links = {
            "server's data": abroad.data,
            "folder of the canary": abroad.canary.parent,
            "canary": abroad.canary,
            "/": Path("/"),
            "/dev/zero": Path("/dev/zero"),
            "/proc/self/environ": Path("/proc/self/environ"),
            "the run itself": forged.run,
        }
        for folder in (forged.run, forged.files)[: 1 + (base == ADOPTED)]:
            for path in (folder, *sorted(folder.rglob("*"))):
                own = folder == forged.run
                name = path.relative_to(folder)
                twin = abroad.run / name if own else abroad.run / "attempts/1/3"
                kind = "folder" if path.is_dir() else "file"
                field = str(name) if own else f"files/{name}"
                for value, to in {**links, "its like in the other run": twin}.items():
                    for told in (False, True) if kind == "file" else (False,):
                        forge = _replaced(own, name, _link(to), told=told)
                        value_ = f"a link to {value}" + ", its size told" * told
                        yield Forgery(base, kind, field, value_, forge, told)
                for value, make in made.items():
                    yield Forgery(base, kind, field, value, _replaced(own, name, make))


def _link(to: Path) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(to)


def _replaced(
    own: bool, name: Path, make: Callable[[Path], object], *, told: bool = False
) -> Forge:
    def forge(forged: Forged) -> None:
        path = (forged.run if own else forged.files) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        if forged.files in path.parents and path.name != "cairn.index":
            reseal(forged, links=told)

    return forge
