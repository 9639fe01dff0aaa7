"""Forged runs: each field of each document of a run, and each file, with what a trainer could put.

Fields come from the records' models and from what is stored: a new one is in by itself. A forger
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

from cairn.storage.arrays.value_files import stored_file
from cairn.storage.runs.records.step_index import DIGEST_ROW, END, FILE_ROW, MAGIC, VALUE_ROW
from cairn.storage.store import Record

REAL, OLDER, ADOPTED = "real", "older", "adopted"
"""As saved now, with an index; as version 3 saved it, without; and by plain Orbax, then adopted."""

STEPS: Final = {REAL: (3, 6), OLDER: (3, 6), ADOPTED: (5,)}
"""The first of each is forged; another is there to be compared with it."""

_FORGED: Final = "@forged@"
_ANY_KEY: Final = "*"  # in a place: a new key of an object
_MANY: Final = 50_000
_TABLES: Final = {"files": FILE_ROW, "values": VALUE_ROW, "digests": DIGEST_ROW}
_MOMENT: Final = "2026-11-26T12:00:00Z"  # which is a text as well
_SAMPLES: Final = {
    r"^[0-9a-f]{64}$": "0" * 64,
    r"^[0-9a-f]{8}$": "0" * 8,
    r"^(words|sum)-64:[0-9a-f]{16}$": "words-64:" + "0" * 16,
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
        is_large: it takes seconds to make.
    """

    base: str
    document: str
    field: str
    value: str
    forge: Callable[["Forged"], None]
    tells_sizes: bool = False
    is_large: bool = False

    def __str__(self) -> str:
        return f"{self.base}: {self.document} | {self.field} | {self.value}"


class Forged(NamedTuple):
    """The folders of a copy of a run: its own, and where the files of the forged step lie."""

    base: str
    run: Path
    files: Path

    @property
    def manifest(self) -> Path:
        return self.run / f"manifests/{STEPS[self.base][0]}.1.json"


class Document(NamedTuple):
    """JSON that a run holds somewhere.

    Attributes:
        base: of which run.
        name: its kind.
        schema: of its model, if it has one.
        read: gives it.
        write: puts other bytes in its place, and makes fit what stands above.
    """

    base: str
    name: str
    schema: dict[str, Any]
    read: Callable[[Forged], dict[str, Any]]
    write: Callable[[Forged, bytes], None]


def kinds() -> dict[str, type[Record]]:
    """Every kind of record, by its format."""
    found, waiting = {}, [Record]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found |= {kind.FORMAT: kind for kind in below if hasattr(kind, "FORMAT")}
    return found


# Sealing


def sealed(raw: bytes) -> bytes:
    """A record of these bytes, which have no checksum, with the one that fits."""
    checksum = hashlib.sha256(raw).hexdigest()
    return b'{"checksum":"sha256:' + checksum.encode() + b'",' + raw[1:]


def unsealed(data: bytes) -> dict[str, Any]:
    """The fields of a stored record."""
    body = json.loads(data)
    body.pop("checksum", None)
    return body


def _dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _seal(path: Path, body: dict[str, Any]) -> None:
    path.write_bytes(sealed(_dumped(body)))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the fields of a record."""
    body = unsealed(path.read_bytes())
    change(body)
    _seal(path, body)


def reseal(forged: Forged) -> None:
    """Have the records of the forged step say what its files are now; of links, nothing new."""
    body = unsealed(forged.manifest.read_bytes())
    if body.get("index"):
        tables, directory = read_index(forged)
        _record_files(directory["objects"], forged)
        write_index(forged, tables, sealed(_dumped(directory)))
    else:
        names = {one["name"] for one in body["objects"]}
        new = [one for one in forged.files.rglob("*") if one.is_file() and not one.is_symlink()]
        for path in new:
            name = str(path.relative_to(forged.files))
            if name not in names:
                body["objects"].append({"name": name, "size": 0, "crc32c": "0" * 8})
        _record_files(body["objects"], forged)
        _seal(forged.manifest, body)


def _record_files(records: list[dict[str, Any]], forged: Forged) -> None:
    for record in records:
        path = forged.files / record["name"]
        if path.is_file() and os.path.realpath(path) == os.path.abspath(path):
            if path.stat().st_size < 1 << 24:
                record.update(stored_file(record["name"], path.read_bytes())._asdict())
            record["size"] = path.stat().st_size
            if "modified_ns" in record:
                record["modified_ns"] = path.stat().st_mtime_ns


def read_index(forged: Forged) -> tuple[bytes, dict[str, Any]]:
    """The tables of the step's index, and its directory."""
    data = (forged.files / "cairn.index").read_bytes()
    offset, length, _, _ = END.unpack_from(data, len(data) - END.size)
    return data[:offset], unsealed(zlib.decompress(data[offset : offset + length]))


def write_index(forged: Forged, tables: bytes, directory: bytes, packed: bytes = b"") -> None:
    """Store an index of these bytes, and the manifest that has it."""
    packed = packed or zlib.compress(directory, 1)
    digest = hashlib.sha256(packed)
    data = tables + packed + END.pack(len(tables), len(packed), digest.digest(), MAGIC)
    (forged.files / "cairn.index").write_bytes(data)
    body = unsealed(forged.manifest.read_bytes())
    body["index"] |= {
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "directory": [len(tables), len(packed)],
        "directory_sha256": digest.hexdigest(),
    }
    _seal(forged.manifest, body)


def _store(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# Documents


def documents(bases: dict[str, Forged]) -> list[Document]:
    """Every kind of document that the runs have, once for each run."""
    found: dict[tuple[str, str], Document] = {}
    for base, forged in bases.items():
        for path in sorted(forged.run.rglob("*.json")):
            name = str(path.relative_to(forged.run))
            kind = kinds().get(json.loads(path.read_bytes()).get("format"))
            if kind is not None:
                made = _record(base, name, kind)
                found.setdefault((base, made.name), made)
        for path in sorted(forged.files.rglob("*")):
            name = str(path.relative_to(forged.files))
            if path.is_file() and path.read_bytes()[:1] == b"{":
                found.setdefault((base, path.name), _plain(base, name))
            if path.name == "manifest.ocdbt" and "process" not in name:
                found.setdefault((base, "zarr.json"), _zarr(base, str(path.parent.name)))
        if (forged.files / "cairn.index").exists():
            found[base, "index"] = _directory(base)
        for path in sorted(forged.run.rglob("*.safetensors")):
            name = str(path.relative_to(forged.run))
            found.setdefault((base, "safetensors"), _safetensors(base, name))
    return list(found.values())


def _record(base: str, name: str, kind: type[Record]) -> Document:
    return Document(
        base,
        kind.FORMAT,
        kind.model_json_schema(),
        lambda forged: unsealed((forged.run / name).read_bytes()),
        lambda forged, raw: _store(forged.run / name, sealed(raw)),
    )


def _directory(base: str) -> Document:
    kind = kinds()["cairn.step_index"]
    return Document(
        base,
        kind.FORMAT,
        kind.model_json_schema(),
        lambda forged: read_index(forged)[1],
        lambda forged, raw: write_index(forged, read_index(forged)[0], sealed(raw)),
    )


def _plain(base: str, name: str) -> Document:
    def write(forged: Forged, raw: bytes) -> None:
        (forged.files / name).write_bytes(raw)
        reseal(forged)

    return Document(
        base, name, {}, lambda forged: json.loads((forged.files / name).read_bytes()), write
    )


def _zarr(base: str, item: str) -> Document:
    def write(forged: Forged, raw: bytes) -> None:
        database = ocdbt(forged, item)
        database.write(_first_array(database), raw).result()
        reseal(forged)

    def read(forged: Forged) -> dict[str, Any]:
        database = ocdbt(forged, item)
        return dict(json.loads(database.read(_first_array(database)).result().value))

    return Document(base, f"zarr.json of {item}", {}, read, write)


def ocdbt(forged: Forged, item: str) -> Any:
    """The database of the arrays of an item."""
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{forged.files}/{item}/"}).result()


def _first_array(database: Any) -> bytes:
    names = database.list().result()
    return min(name for name in names if name.endswith((b"zarr.json", b".zarray")))


def _safetensors(base: str, name: str) -> Document:
    def read(forged: Forged) -> dict[str, Any]:
        data = (forged.run / name).read_bytes()
        return dict(json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]))

    def write(forged: Forged, raw: bytes) -> None:
        path = forged.run / name
        data = path.read_bytes()
        values = data[8 + struct.unpack("<Q", data[:8])[0] :]
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + values)
        reseal_export(path)

    return Document(base, "safetensors header", {}, read, write)


def reseal_export(path: Path) -> None:
    """Have the manifest of an export say what its file is now."""
    for found in path.parent.parent.parent.glob("*.json"):
        body = unsealed(found.read_bytes())
        for record in body.get("files", ()):
            if record["name"] == path.name:
                data = path.read_bytes()
                record |= {"size": len(data), "crc32c": f"{google_crc32c.value(data):08x}"}
        _seal(found, body)


def reseal_source(forged: Forged, source: Path) -> None:
    """Have the records of a copy of an adopted run name the copy of the folder, not `source`."""
    for path in (forged.run / "run.json", forged.manifest):
        body = unsealed(path.read_bytes())
        text = json.dumps(body).replace(str(source), str(forged.files.parent))
        _seal(path, json.loads(text))


def add_samples(forged: Forged) -> None:
    """Give a run a record of each kind that it has none of."""
    step = STEPS[forged.base][0]
    export = next(forged.run.glob("exports/*/*/"), None)
    names = {
        "cairn.tombstone": "trash/9.1.json",
        "cairn.intent": f"trash/{step}.1.intent.json",
        "cairn.hold": f"trash/{step}.1.{'0' * 16}.hold.json",
        "cairn.store": ".cairn-store.json",
    }
    if forged.base != ADOPTED:
        names["cairn.step_part"] = f"attempts/1/{step}/cairn.process_0.json"
    if export is not None:
        left = export / "left-try"
        left.mkdir()
        (left / "x").write_bytes(b"x")
        names["cairn.export-try"] = str(left.relative_to(forged.run)) + ".json"
    run = unsealed((forged.run / "run.json").read_bytes())["run"]
    for kind, name in names.items():
        record = kinds()[kind]
        schema = record.model_json_schema()
        path = forged.run / name
        path.parent.mkdir(exist_ok=True)
        own = {"format": kind, "version": record.VERSION, "key": name, "run": run}
        _seal(path, complete(schema, schema.get("$defs", {})) | own)


# Fields and values


def complete(schema: dict[str, Any], defs: dict[str, Any], value: Any = None) -> Any:
    """A value with all that its schema has besides; a sample where there is none."""
    if "$ref" in schema:
        return complete(defs[schema["$ref"].rpartition("/")[2]], defs, value)
    if "anyOf" in schema:
        chosen = next(one for one in schema["anyOf"] if one.get("type") != "null")
        return complete(chosen, defs, value)
    match schema.get("type"):
        case "object":
            known = value if isinstance(value, dict) else {}
            own = schema.get("properties", {})
            fields = {name: complete(one, defs, known.get(name)) for name, one in own.items()}
            more = schema.get("additionalProperties")
            if not known and not own and more:
                fields = {"k": complete(more if isinstance(more, dict) else {}, defs)}
            elif isinstance(more, dict):
                fields = {name: complete(more, defs, one) for name, one in known.items()}
            return {**known, **fields}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})]
            if not isinstance(value, list) or not value:
                return [complete(one, defs) for one in items]
            last = len(items) - 1
            return [complete(items[min(at, last)], defs, one) for at, one in enumerate(value)]
        case "string" if value is None:
            return _SAMPLES[schema["pattern"]] if "pattern" in schema else _MOMENT
        case "integer" | "number" if value is None:
            return 1
        case "boolean" if value is None:
            return True
    return schema.get("enum", ["x"])[0] if value is None else value


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a document; of a list, those in its first and second entry."""
    if at:
        yield at
    if isinstance(value, dict):
        for name in _unlike(value):
            yield from places(value[name], (*at, name))
        yield (*at, _ANY_KEY)
    if isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*at, number))


def _unlike(value: dict[str, Any]) -> Iterator[str]:
    """Keys of an object's entries; of objects and lists that are alike, the first."""
    seen = set()
    for name, entry in value.items():
        kind = tuple(entry) if isinstance(entry, dict) else type(entry)
        if not isinstance(entry, dict | list) or kind not in seen:
            yield name
        seen.add(kind)


def put(body: Any, full: Any, at: tuple[str | int, ...]) -> Any:
    """Mark a place in a document, with what is missing around it; what was there."""
    for step in at[:-1]:
        full = full[step]
        missing = step not in body if isinstance(body, dict) else step >= len(body)
        if missing or body[step] is None:
            if isinstance(body, dict):
                body[step] = copy.deepcopy(full)
            else:
                body.append(copy.deepcopy(full))
        body = body[step]
    if at[-1] == _ANY_KEY:
        body[_FORGED] = next(iter(body.values()), 1)
        return None
    old = full[at[-1]]
    if isinstance(body, list) and at[-1] >= len(body):
        body.append(_FORGED)
    else:
        body[at[-1]] = _FORGED
    return old


@functools.cache
def texts(abroad: Abroad) -> dict[str, str]:
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
    for name, path in (
        ("other run", abroad.run),
        ("other record", abroad.run / "run.json"),
        ("canary", abroad.canary),
        ("folder of the canary", abroad.canary.parent),
        ("server's data", abroad.data),
    ):
        found[name] = str(path)
        found[f"{name}, file://"] = f"file://{path}"
        found[f"{name}, .."] = "../" * 12 + str(path)[1:]
    return found


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


def names_of_values(abroad: Abroad, old: Any, *, key: bool) -> list[str]:
    """What `value_of` knows for a place.

    Args:
        abroad: what paths lead to.
        old: what is there.
        key: the place is that of a key, which is a text.
    """
    found = [*texts(abroad)]
    if key:
        return found
    found += _RAW
    if isinstance(old, int) and not isinstance(old, bool):
        found += ["one more", "one less"]
    return found + ["many"] * bool(isinstance(old, dict | list) and old)


def value_of(abroad: Abroad, old: Any, name: str) -> bytes:
    """The JSON of that name, in the place of `old`."""
    match name:
        case "one more" | "one less":
            return b"%d" % (old + 1 if name == "one more" else old - 1)
        case "many" if isinstance(old, dict):
            entry = next(iter(old.values()))
            return json.dumps({f"k{number}": entry for number in range(_MANY)}).encode()
        case "many":
            return json.dumps(old[:1] * _MANY).encode()
    return _RAW[name] if name in _RAW else json.dumps(texts(abroad)[name]).encode()


def _in_document(document: Document, at: tuple[str | int, ...], name: str, abroad: Abroad):
    def forge(forged: Forged) -> None:
        body = document.read(forged)
        full = complete(document.schema, document.schema.get("$defs", {}), body)
        old = put(body, full, at)
        value = value_of(abroad, old, name)
        document.write(forged, _dumped(body).replace(f'"{_FORGED}"'.encode(), value))

    return forge


class Field(NamedTuple):
    """A place in a document.

    Attributes:
        values: names of what may stand there.
        forgery: makes the forgery of a value.
    """

    values: list[str]
    forgery: Callable[[str], Forgery]


def in_documents(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Field]:
    """Every place of every document."""
    for document in documents(bases):
        full = complete(
            document.schema, document.schema.get("$defs", {}), document.read(bases[document.base])
        )
        for at in places(full):
            is_key = at[-1] == _ANY_KEY
            old = functools.reduce(
                lambda value, step: value[step], at[: -1 if is_key else None], full
            )
            names = names_of_values(abroad, None if is_key else old, key=is_key)
            yield Field(names, functools.partial(_of_place, document, at, abroad))


def _of_place(document: Document, at: tuple[str | int, ...], abroad: Abroad, name: str) -> Forgery:
    forge = _in_document(document, at, name, abroad)
    return Forgery(document.base, document.name, ".".join(map(str, at)), name, forge)


# Files


def _link(to: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def in_files(bases: dict[str, Forged], abroad: Abroad) -> Iterator[Forgery]:
    """Something else in the place of each file and each folder."""
    for base, forged in bases.items():
        top = [(forged.run, path) for path in sorted(forged.run.rglob("*"))]
        if forged.run not in forged.files.parents:
            top += [(forged.files, path) for path in sorted(forged.files.rglob("*"))]
        top += [(forged.run, forged.run), (forged.files, forged.files)]
        for folder, path in top:
            rel = path.relative_to(folder)
            twin = abroad.run / (rel if folder == forged.run else ".")
            links = {
                "its like in the other run": twin,
                "server's data": abroad.data,
                "folder of the canary": abroad.canary.parent,
                "canary": abroad.canary,
                "/": Path("/"),
                "/dev/zero": Path("/dev/zero"),
                "/proc/self/environ": Path("/proc/self/environ"),
                "the run itself": forged.run,
            }
            made = {f"a link to {name}": _link(to) for name, to in links.items()}
            made |= {
                "a link to itself": _loop,
                "a pipe": os.mkfifo,
                "8 GiB of nothing": _sparse,
                "nothing": lambda path: path.write_bytes(b""),
                "a folder": os.mkdir,
                "64 random bytes": lambda path: path.write_bytes(os.urandom(64)),
            }
            if path.is_file():
                made |= {"half of it": _halved, "its end is gone": _shortened}
            for name, make in made.items():
                for told in (False, True) if "link" in name and path.is_file() else (False,):
                    yield Forgery(
                        base,
                        "folder" if path.is_dir() else "file",
                        ("" if folder == forged.run else "source/") + str(rel),
                        name + (", its size told" if told else ""),
                        _in_place(folder == forged.run, rel, make, told=told),
                        told,
                    )


def _halved(path: Path) -> None:
    path.write_bytes(b"\x00" * 100)


def _shortened(path: Path) -> None:
    path.write_bytes(b"{" * 3)


def _in_place(
    own: bool, rel: Path, make: Callable[[Path], None], *, told: bool
) -> Callable[[Forged], None]:
    def forge(forged: Forged) -> None:
        path = (forged.run if own else forged.files) / rel
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)
        if told:
            _tell_size(forged, path)
        elif path.is_relative_to(forged.files) and path != forged.files and forged.files.exists():
            if path.name != "cairn.index":
                reseal(forged)

    return forge


def _tell_size(forged: Forged, path: Path) -> None:
    """Have the step's records, or the export's, name the true size of what a link leads to."""
    if not path.is_relative_to(forged.files) or path.name == "cairn.index":
        return
    name, size = str(path.relative_to(forged.files)), os.stat(path).st_size if path.exists() else 0
    body = unsealed(forged.manifest.read_bytes())
    if body.get("index"):
        tables, directory = read_index(forged)
        for record in directory["objects"]:
            record |= {"size": size, "crc32c": None} if record["name"] == name else {}
        write_index(forged, tables, sealed(_dumped(directory)))
    else:
        for record in body["objects"]:
            record |= {"size": size} if record["name"] == name else {}
        _seal(forged.manifest, body)
