"""Each kind of JSON object in a run tells that a bit of it was flipped, as the manifest does."""

import json

import pytest

from cairn import (
    Alias,
    Annotation,
    CorruptionError,
    Lease,
    Manifest,
    Run,
    RunInfo,
    Tombstone,
    UnsupportedFormatError,
)
from cairn.state.checkpointing.saves.process_records import _Columns, _StepRecord
from cairn.storage.arrays.data_files import StoredFile
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.arrays.paged_table import TableLocation
from cairn.storage.runs.policies import PolicyRecord, policy_file
from cairn.storage.runs.records.exports import ExportFile, ExportManifest, LeftFile, LeftTry
from cairn.storage.runs.records.layout import alias_file
from cairn.storage.runs.records.manifest import AssetRecord, LeafRecord, ObjectRecord
from cairn.storage.store.records import Record, RecordLocation, canonical_json
from tests.storage.records import (
    Hold,
    IndexDirectory,
    Intent,
    StoreRecord,
    attempt_file,
    begin_attempt,
    list_attempts,
    load_json,
)

AT = "2026-11-21T12:00:00Z"
FILE = ObjectRecord(name="checksum", size=2, crc32c="0" * 8)
RECORDS = [
    Alias(alias="production", step=3, attempt=1, at=AT, sequence=1, by="é", reason='"checksum":"'),
    Annotation(labels={"checksum": "sha256:" + "0" * 64}, metrics={"loss": 0.5, "other": 2.0}),
    PolicyRecord(
        kind="schedule",
        name="nightly",
        fields={"checksum": "sha256:" + "0" * 64, "cron": "0 3 * * *"},
        at=AT,
        sequence=2,
        id="0" * 16,
    ),
    ExportManifest(
        kind="convert",
        step=3,
        attempt=1,
        source="sha256:0",
        options={"checksum": "sha256:" + "0" * 64, "dtype": "bfloat16"},
        rule_version=1,
        folder="a",
        created=AT,
        files=(ExportFile(name="config.json", size=2, crc32c="0" * 8),),
    ),
    LeftTry(
        by="1.0",
        at=AT,
        files=(LeftFile(name="checksum", size=2, crc32c="0" * 8, notes={"checksum": "sha256:0"}),),
    ),
    Lease(writer="job", attempt=3, expires=AT, durable=(5, 3)),
    Manifest(
        step=3,
        attempt=1,
        created=AT,
        writer="job",
        items=("model",),
        objects=(FILE,),
        plain={"trees": {"model": ""}},
    ),
    IndexDirectory(
        step=3,
        attempt=1,
        created=AT,
        writer="job",
        items=("model",),
        assets=(AssetRecord(name="checksum", sha256="0" * 64, size=2),),
        model=None,
        environment={"checksum": "sha256:" + "0" * 64},
        leaves=(LeafRecord(item="model", path="checksum", shape=(2,), dtype="int4"),),
        forms={"model": {"checksum": StoredForm("packed", (2,), "int4")}},
        meta_digest="sha256:0",
        objects=(FILE,),
        folders=("model/d",),
        origins=((2, 1),),
        files=TableLocation(0, 1, ("0" * 64,)),
        values=TableLocation(45, 1, ("0" * 64,)),
        digests=TableLocation(65, 0, ()),
    ),
    _StepRecord(
        items={
            "model": _Columns(
                files=(StoredFile("d/checksum", 2, "0" * 8, "words-64:" + "0" * 16),),
                paths=("w",),
                keys=("w/c/0",),
                leaf="",
                file="",
                offset="",
                length="",
                rank="",
                origin="",
                chunks="",
                digests="",
            )
        },
    ),
    RunInfo(name="run", created=AT, labels={"checksum": "sha256:" + "0" * 64}),
    Tombstone(at=AT, expires=AT, by="job", reason="old"),
    Tombstone(at=AT, expires=AT, policy={"keep_last": 1}, judged=3),
    Intent(at=AT, by="job", reason="old", token="0" * 16),
    Hold(at=AT, by="job", reason="promote it", token="0" * 16),
    StoreRecord(at=AT, cairn="1.0", checked=("lock",), store={"checksum": "sha256:" + "0" * 64}),
]


def kinds(base=Record):
    return {each for one in base.__subclasses__() for each in (one, *kinds(one))}


def test_every_kind_of_object_is_tried_here():
    ours = {
        kind for kind in kinds() if kind.__module__.startswith(("cairn.storage.", "cairn.state."))
    }
    assert {type(record).__name__ for record in RECORDS} | {"_Announcement", "AttemptRecord"} == {
        kind.__name__ for kind in ours
    }


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_flipped_bit_of_an_object_is_an_error(record):
    data = record.to_bytes()
    assert type(record).parse(data, "p") == record
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises((CorruptionError, UnsupportedFormatError), match=r": a/1\.json: "):
            type(record).parse(bytes(flipped), "a/1.json")


def test_a_flipped_digit_of_an_attempt_does_not_change_which_steps_count(tmp_path):
    objects = Run.create(tmp_path / "run").objects
    begin_attempt(objects, writer="job", base_step=12)
    stored = objects.read(attempt_file(1)).value
    objects.write(attempt_file(1), stored.replace(b'"base_step":12', b'"base_step":13'))
    with pytest.raises(
        CorruptionError, match=r"the attempt is not what was written: .*attempts/1\.json"
    ):
        list_attempts(objects)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_object_of_another_version_or_without_a_checksum_is_refused_by_name(record):
    body = json.loads(record.to_bytes())
    with pytest.raises(UnsupportedFormatError, match="found version 2"):
        type(record).parse(canonical_json(body | {"version": 2}), "p")
    del body["checksum"]
    with pytest.raises(CorruptionError, match=r"expected a checksum"):
        type(record).parse(canonical_json(body), "p")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_object_is_refused_in_the_place_of_another(record):
    key = "a/1.json"
    if isinstance(record, Alias):
        key = alias_file("production")
    elif isinstance(record, PolicyRecord):
        key = policy_file("schedule", "nightly")
    place = RecordLocation("0" * 32, key)
    with pytest.raises(UnsupportedFormatError, match="without its place"):
        type(record).parse(record.to_bytes(), "p", place)
    placed = record.with_location(place).to_bytes()
    assert type(record).parse(placed, "p", place) == record
    for other in (RecordLocation("1" * 32, key), RecordLocation("0" * 32, "a/2.json")):
        with pytest.raises(CorruptionError, match="of another"):
            type(record).parse(placed, "p", other)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_the_fields_before_the_checksum_hold_no_keys_of_users(record):
    """Else the first `checksum` in the JSON could be one of theirs."""
    before = {
        name: value for name, value in record.model_dump(mode="json").items() if name < "checksum"
    }
    assert not [name for name, value in before.items() if isinstance(value, dict)]


@pytest.mark.parametrize("data", [b"root:x:0:0:secret", b"[secret", b"\xffsecret", b'"secret"'])
def test_error_has_no_bytes_of_what_is_no_record(data):
    with pytest.raises(UnsupportedFormatError) as raised:
        Manifest.parse(data, "there")
    assert "secret" not in str(raised.value)
    assert f"{len(data)} bytes" in str(raised.value) or "found str" in str(raised.value)


def test_json_is_canonical_and_comes_back():
    data = canonical_json({"b": 1, "a": "é"})
    assert data == '{"a":"é","b":1}'.encode()
    assert load_json(data, path="x.json") == {"a": "é", "b": 1}


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": object()}, {"x": b"bytes"}])
def test_what_is_no_json_is_refused(value):
    with pytest.raises(UnsupportedFormatError, match="not JSON"):
        canonical_json(value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"1", b"[" * 100_000])
def test_bytes_that_are_no_json_object_are_refused(data):
    with pytest.raises(UnsupportedFormatError, match=r"x\.json"):
        load_json(data, path="x.json")
