"""Objects at their bound are read, above it they are damaged; the page says the bounds."""

import os
import re

import pytest

from cairn import CorruptionError, ObjectStore, UnsupportedFormatError, parse_uri
from cairn.storage.reading.step_files import check_step_files
from cairn.storage.runs.records.manifest import ObjectRecord
from cairn.storage.store.bounds import (
    DEFAULT_BOUND,
    Oversized,
    bound_of,
)
from tests.programs.program import REPOSITORY
from tests.storage.records import load_json
from tests.storage.seams import annotations, bounds, exports, manifest, step_index
from tests.storage.seams import objects as objects_module

PAGE = REPOSITORY / "docs/reference/storage/bounds.md"
NAMES = [(bound, name.replace("*", "1.1")) for bound in bounds.BOUNDS for name in bound.names]
SMALL = 50


def of_kind(data: bytes, path: object) -> Exception | dict:
    try:
        return load_json(data, path=path)
    except CorruptionError as exc:
        return exc


@pytest.fixture
def small_bounds(monkeypatch):
    """All kinds have the same small bound."""
    monkeypatch.setattr(
        bounds,
        "_BY_LENGTH",
        {
            length: [(pattern, bound._replace(max_bytes=SMALL)) for pattern, bound in names]
            for length, names in bounds._BY_LENGTH.items()
        },
    )
    monkeypatch.setattr(bounds, "MIN_BOUND_BYTES", SMALL)
    bound_of.cache_clear()
    yield
    bound_of.cache_clear()


def unbounded_write(objects, name, data):
    """As somebody else writes who knows no bound."""
    objects._kv.write(name, data).result()


@pytest.mark.parametrize(("bound", "name"), NAMES, ids=[name for _, name in NAMES])
def test_each_kind_is_known_by_its_name_wherever_it_lies(bound, name):
    assert bound_of(name) == bound_of(f"runs/some/{name}") == bound
    assert bound_of(f"{name}.other") != bound or "*" in bound.names[-1]


def test_other_names_have_the_bound_of_small_objects():
    for name in ("x", "run.json/x", "attempts/1/7/x", "model/d/0123456789abcdef"):
        assert bound_of(name) is DEFAULT_BOUND


@pytest.mark.parametrize(("bound", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_file_above_its_bound_is_damaged_and_not_read(tmp_path, bound, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = ObjectStore.open(tmp_path)
    with path.open("wb") as file:
        file.truncate(bound.max_bytes + 1)
    objects._kv = Counted(objects._kv, [])
    found = objects.read(name)
    (parsed,) = objects.parse_many([name], of_kind).values()
    assert found == objects.read_many([name])[name]
    assert objects._kv.reads == [slice(0, 0)] * 3
    assert str(path) in str(parsed)
    assert f"expected at most {bound.max_bytes} bytes, found {bound.max_bytes + 1}" in str(parsed)
    with pytest.raises(CorruptionError, match=f"larger than any {bound.kind}"):
        load_json(found.value, path=name)


@pytest.mark.parametrize("listed", [True, False])
def test_an_object_at_its_bound_is_read_and_one_above_is_damaged(objects, small_bounds, listed):
    good, bad = "manifests/1.1.json", "manifests/2.1.json"
    unbounded_write(objects, good, b"{}" + b" " * (SMALL - 2))
    unbounded_write(objects, bad, b"{}" + b" " * (SMALL - 1))
    if listed:
        assert objects.children("manifests") == [good, bad]
    assert len(objects.read(good).value) == SMALL
    found = objects.read(bad)
    assert (found.value, found.value.size) == (b"", SMALL + 1)
    parsed = objects.parse_many([good, bad], of_kind)
    assert parsed[good] == {}
    assert isinstance(parsed[bad], CorruptionError)
    mended = objects.write_if(bad, b'{"a":1}', generation=found.generation)
    assert objects.read(bad) == (b'{"a":1}', mended)
    assert objects.parse_many([bad], of_kind) == {bad: {"a": 1}}


def test_a_bucket_is_not_asked_for_what_its_listing_tells_to_be_too_large(gcs, small_bounds):
    objects = ObjectStore.open(f"{gcs.bucket_uri}/run")
    name = "annotations/1.1.json"
    unbounded_write(objects, name, b" " * 1_000_000)
    objects.etags("annotations")
    sent = []
    objects._kv = Counted(objects._kv, sent)
    assert objects.read(name).value.size == 1_000_000
    assert sent == [slice(SMALL, SMALL + 1), slice(0, 0)]


class Counted:
    """A store of TensorStore's whose reads are noted."""

    def __init__(self, store, reads):
        self._store, self.reads = store, reads

    def read(self, name, **options):
        self.reads.append(options.get("byte_range"))
        return self._store.read(name, **options)


@pytest.mark.parametrize("read", ["read_each", "parse_many"])
def test_of_many_large_objects_few_are_held(tmp_path, monkeypatch, read):
    monkeypatch.setattr(objects_module, "_WINDOW_BYTES", 3 << 20)
    objects = ObjectStore.open(tmp_path)
    (tmp_path / "manifests").mkdir()
    names = [f"manifests/{number}.1.json" for number in range(40)]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 20)
    asked, held = Counted(objects._kv, []), []
    objects._kv = asked

    def parsed(data, path):
        held.append(len(asked.reads))
        return len(data)

    if read == "parse_many":
        assert list(objects.parse_many(names, parsed).values()) == [1 << 20] * 40
    else:
        for _, stored in objects.read_each(names):
            parsed(stored.value, None)
    assert max(begun - done for done, begun in enumerate(held)) == 3
    assert objects.existing([*names, "manifests/none.json"]) == set(names)


def test_what_could_not_be_read_again_is_not_written(objects, small_bounds):
    for name in ("aliases/a.json", "assets/a"):
        objects.write(name, b"x" * SMALL)
        for write in (
            lambda data, name=name: objects.write(name, data),
            lambda data, name=name: objects.write_if(name, data, generation=None),
            lambda data, name=name: objects.start_write(name, data)(),
        ):
            with pytest.raises(UnsupportedFormatError, match=f"{SMALL + 1} bytes"):
                write(b"x" * (SMALL + 1))
    objects.write("model/d/0123", b"x" * (SMALL + 1))
    assert bound_of("model/d/0123") is DEFAULT_BOUND


def test_json_of_more_values_than_memory_is_worth_is_damaged():
    data = b'{"a":[' + b"[]," * (bounds.MAX_JSON_VALUES // 2) + b"1]}"
    with pytest.raises(CorruptionError, match="too many values in JSON: x: expected at most 4000"):
        load_json(data, path="x")


def test_an_oversized_object_is_still_one():
    stands = Oversized(5, DEFAULT_BOUND)
    assert (stands, len(stands), stands.size) == (b"", 0, 5)


# The page.


def rows(title: str) -> list[list[str]]:
    section = PAGE.read_text().split(f"## {title}\n", 1)[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


def size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def test_the_page_has_the_table():
    assert rows("Objects") == [
        [one.kind, ", ".join(f"`{name}`" for name in one.names), size(one.max_bytes), one.why]
        for one in (*bounds.BOUNDS, DEFAULT_BOUND)
    ]


def test_the_page_has_the_counts():
    from cairn.storage.reading.item_arrays import MEMORY_OF_A_CHUNK, MOST_LEAF_CHUNKS
    from cairn.storage.safetensors.format import MAX_HEADER_BYTES

    found = dict(rows("What is in them"))
    assert found["values in one JSON, by its commas and brackets"] == f"{bounds.MAX_JSON_VALUES:,}"
    free = found["a model's config, an environment, options of an export, a policy"]
    bytes_of_json = size(bounds.MAX_FREE_JSON_BYTES)
    assert free == f"{bytes_of_json} of JSON, {bounds.MAX_FREE_JSON_DEPTH} containers deep"
    names = f"names of {annotations.LONGEST_NAME} characters"
    assert found["labels of a step or a run"] == (
        f"{annotations.MOST_LABELS:,}, {names}, texts of {annotations.LONGEST_LABEL:,}"
    )
    assert found["metrics of a step"] == f"{annotations.MOST_METRICS:,}, {names}"
    axes = f"{manifest.MOST_LEAVES:,}, with {manifest._MOST_AXES} axes each"
    assert found["leaves of a step"] == axes
    assert found["files of a step"] == f"{manifest.MOST_FILES:,}"
    assert found["shards of a leaf"] == f"{step_index.MOST_SHARDS:,}"
    assert found["chunks of a shard"] == f"{step_index.MAX_SHARD_CHUNKS:,}"
    plain = found["chunks of a leaf that TensorStore reads, such as of an adopted step"]
    assert plain == f"{MOST_LEAF_CHUNKS:,}"
    assert f"one part in {MEMORY_OF_A_CHUNK} of the memory" in found["bytes of such a chunk"]
    assert found["files of an export"] == f"{exports._MOST_FILES:,}"
    assert found["header of a safetensors file"] == f"{MAX_HEADER_BYTES:,} bytes"
    text = PAGE.read_text()
    plain, leaf, file, most = (
        step_index._PLAIN_BYTES,
        step_index._LEAF_BYTES,
        step_index._FILE_BYTES,
        step_index.MOST_DIRECTORY_BYTES,
    )
    assert f"up to {size(plain)}, {size(leaf)} for each leaf and {size(file)} for each" in text
    assert f"never beyond {size(most)}" in text


def test_a_large_file_of_no_kind_is_not_read_to_open_its_step(tmp_path):
    (tmp_path / "other").touch()
    os.truncate(tmp_path / "other", 1 << 44)  # 16 TiB of nothing
    record = ObjectRecord(name="other", size=1 << 44, crc32c="00000000")
    check_step_files(parse_uri(tmp_path), (record,))
    with pytest.raises(CorruptionError, match=f"{1 << 43} expected"):
        check_step_files(parse_uri(tmp_path), (record.model_copy(update={"size": 1 << 43}),))
