"""What a run's records may hold: one that has more is damaged, named, and hides no other."""

import json
import os
import zlib
from random import Random

import numpy as np
import pytest

from cairn import (
    Annotation,
    CorruptionError,
    Manifest,
    ModelInfo,
    ObjectStore,
    Run,
    RunInfo,
    SaveError,
    UnsupportedFormatError,
    annotate_step,
    check_run,
    list_runs,
    parse_uri,
    promote_step,
    repair_run,
)
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.records.exports import ExportManifest
from cairn.storage.runs.records.index_writer import PlacedShard, make_index
from cairn.storage.runs.records.layout import INDEX_FILE, annotation_file, manifest_file
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.runs.records.step_index import open_contents
from cairn.storage.store.bounds import bound_of
from cairn.storage.store.records import Record, RecordLocation, canonical_json, sha256_of
from tests.storage.indexes import forged
from tests.storage.records import parse_index, put_record
from tests.storage.runs.random_steps import data_files, random_manifest, random_parts
from tests.storage.seams import annotations, bounds, manifest, step_index

PLACE = RecordLocation("some-run", f"attempts/1/3/{INDEX_FILE}")


def oversize(run, name):
    """Make a record a byte larger than it may be; the file is sparse, and costs nothing."""
    path = f"{run.uri.local_path}/{name}"
    os.truncate(path, bound_of(name).max_bytes + 1)


def sealed(record: Record, **changes) -> bytes:
    """A record that says something else, with the checksum that fits, as somebody forges it."""
    body = json.loads(record.to_bytes()) | changes
    body.pop("checksum", None)
    return canonical_json(body | {"checksum": sha256_of(canonical_json(body))})


# Records of a run.


def test_a_manifest_above_its_bound_hides_no_other_step(run):
    name = manifest_file(6, 1)
    oversize(run, name)
    problems = {info.step: info.problem for info in run.steps()}
    assert (problems[3], problems[9]) == (None, None)
    assert f"{name}: expected at most" in problems[6]


def test_an_export_of_a_kind_that_no_job_makes_is_damaged():
    told = {"step": 3, "attempt": 1, "source": "sha256:0", "options": {}, "rule_version": 1}
    made = ExportManifest(
        kind="convert", folder="a", created="2026-01-01T00:00:00Z", files=(), **told
    )
    for kind in ("..", "verify", ""):
        with pytest.raises(UnsupportedFormatError, match="fields that don't fit"):
            ExportManifest.parse(sealed(made, kind=kind), "p")


def test_an_annotation_above_its_bound_is_named_and_the_step_stays_listed(run):
    name = annotation_file(6, 1)
    annotate_step(run, 6, labels={"a": "b"})
    oversize(run, name)
    with pytest.raises(CorruptionError, match=rf"larger than any annotation: .*{name}"):
        annotation_of(run, run.step(6))
    assert [info.step for info in run.steps()] == [3, 6, 9]
    assert annotation_of(run, run.step(9)) == Annotation()


def test_an_alias_above_its_bound_hides_no_other(run):
    promote_step(run, 3, "good", expect=None)
    promote_step(run, 6, "bad", expect=None)
    oversize(run, "aliases/bad.json")
    found, unreadable = run.aliases.judge()
    assert [alias.alias for alias in found] == ["good"]
    assert unreadable.keys() == {"aliases/bad.json"}


@pytest.mark.parametrize("name", ["run.json", "lease.json", "attempts/1.json"])
def test_a_record_above_its_bound_is_found_and_mended_and_kept(run, name):
    oversize(run, name)
    (problem,) = [one for one in check_run(run).problems if one.startswith(f"{name}: larger than")]
    assert f"at most {bound_of(name).max_bytes} bytes" in problem
    repair_run(run, by="test", dry_run=False)
    report = check_run(Run.open(run.uri))
    assert report.problems == ()
    (kept,) = [one for one in run.objects.list("damaged/") if name in one]
    assert os.path.getsize(f"{run.uri.local_path}/{kept}") == bound_of(name).max_bytes + 1


def test_a_run_whose_record_is_above_its_bound_hides_no_other(run):
    other = Run.create(run.uri.parent / "other")
    oversize(run, "run.json")
    assert list_runs(run.uri.parent) == ["other", "run"]
    assert other.info().name == "other"
    with pytest.raises(CorruptionError, match=r"larger than any run: .*run\.json"):
        run.info()


# Labels, metrics and free JSON.


@pytest.mark.parametrize(
    "entries",
    [
        {"labels": {"a": "x" * (annotations.LONGEST_LABEL + 1)}},
        {"labels": {"x" * 257: "a"}},
        {"labels": {str(n): "" for n in range(annotations.MOST_LABELS + 1)}},
        {"metrics": {"x" * 257: 1}},
        {"metrics": {str(n): n for n in range(annotations.MOST_METRICS + 1)}},
        {"better": {str(n): "min" for n in range(annotations.MOST_METRICS + 1)}},
    ],
    ids=["long label", "long name", "labels", "long metric", "metrics", "better"],
)
def test_entries_beyond_what_can_be_noted_are_damaged_and_refused(run, entries):
    name = annotation_file(6, 1)
    put_record(run.objects, name, Annotation())
    record = Annotation.parse(run.objects.read(name).value, name)
    run.objects.write(name, sealed(record, **entries))
    with pytest.raises(CorruptionError, match=f"the annotation holds more than it may: .*{name}"):
        annotation_of(run, run.step(6))
    with pytest.raises(UnsupportedFormatError, match="can't be kept"):
        Annotation.of(entries.get("labels"), entries.get("metrics"), entries.get("better"))


def test_entries_at_their_bounds_are_no_larger_than_their_record_may_be(run):
    labels = {
        f"{n:0256}": "\x01" * annotations.LONGEST_LABEL for n in range(annotations.MOST_LABELS)
    }
    metrics = {f"{n:0256}": 1e300 for n in range(annotations.MOST_METRICS)}
    noted = Annotation.of(labels, metrics, dict.fromkeys(metrics, "min"))
    assert len(noted.to_bytes()) < bound_of(annotation_file(6, 1)).max_bytes
    other = Run.create(run.uri.parent / "other", labels=labels)
    assert other.info().labels == labels


def test_labels_of_a_run_beyond_what_can_be_kept_are_damaged(run):
    info = RunInfo.parse(run.objects.read("run.json").value, "run.json")
    run.objects.write("run.json", sealed(info, labels={"a": "x" * (annotations.LONGEST_LABEL + 1)}))
    with pytest.raises(CorruptionError, match="the run holds more than it may"):
        run.info()


def test_free_json_beyond_its_bound_is_damaged():
    record = made()[1].with_location(RecordLocation("r", "manifests/3.1.json"))
    deep: object = "x"
    for _ in range(70):
        deep = [deep]
    for model in ({"config": {"a": "x" * bounds.MAX_FREE_JSON_BYTES}}, {"config": {"a": deep}}):
        with pytest.raises(CorruptionError, match=r"holds more than it may: .*model\.config"):
            Manifest.parse(sealed(record, model=model), "p")
    held = ModelInfo(config={"a": "x" * (bounds.MAX_FREE_JSON_BYTES - 100)})
    kept = record.model_copy(update={"model": held})
    assert Manifest.parse(kept.to_bytes(), "p") == kept


def test_a_leaf_of_more_axes_than_an_array_has_is_damaged():
    record = random_manifest(Random(0)).with_location(RecordLocation("r", "manifests/3.1.json"))
    axes = {"item": "model", "path": "a", "shape": [1] * 65, "dtype": "int8"}
    with pytest.raises(CorruptionError, match=r"leaves\.0\.shape"):
        Manifest.parse(sealed(record, leaves=[axes]), "p")


# The index of a step.


def made(seed=0, leaves=12):
    """(file, manifest)."""
    rng = Random(seed)
    return make_index(random_manifest(rng), PLACE, **random_parts(rng, leaves))


def stored(folder, data):
    """The folder of a step with this index."""
    ObjectStore(uri := parse_uri(folder)).write(INDEX_FILE, data)
    return uri


def directory_of(data, indexed):
    offset, length = indexed.index.directory
    return zlib.decompress(data[offset : offset + length])


def test_a_directory_is_inflated_no_further_than_its_leaves_and_files_need(tmp_path):
    data, indexed = made()
    data, indexed = forged(data, indexed, directory_of(data, indexed) + b" " * (32 << 20))
    ref = indexed.index
    most = step_index.directory_bytes(ref.leaves, ref.files, ref.size)
    assert len(data) < 1 << 16 < most < 5 << 20
    uri = stored(tmp_path, data)
    with pytest.raises(CorruptionError, match=f"a directory of at most {most} bytes, for its"):
        open_contents(uri, indexed)


@pytest.mark.parametrize("leaves", [10**6, 10**12])
def test_a_manifest_that_announces_much_does_not_inflate_more_than_any_step_has(leaves):
    assert step_index.directory_bytes(leaves, leaves, 1 << 40) == step_index.MOST_DIRECTORY_BYTES


def test_a_directory_at_what_it_may_have_is_read(tmp_path, monkeypatch):
    data, indexed = made()
    plain = directory_of(data, indexed)
    for most, fits in ((len(plain), True), (len(plain) - 1, False)):
        monkeypatch.setattr(step_index, "MOST_DIRECTORY_BYTES", most)
        if fits:
            open_contents(stored(tmp_path, data), indexed).check()
            parse_index(data, "p", PLACE)
            continue
        for read in (
            lambda: open_contents(stored(tmp_path, data), indexed),
            lambda: parse_index(data, "p", PLACE),
        ):
            with pytest.raises(CorruptionError, match="a directory of at most"):
                read()
        with pytest.raises(UnsupportedFormatError, match="too large a step to be read again"):
            made()


@pytest.mark.parametrize("field", ["leaves", "files"])
def test_an_index_of_other_counts_than_its_manifest_is_refused(tmp_path, field):
    data, indexed = made()
    count = getattr(indexed.index, field)
    ref = indexed.index.model_copy(update={field: count + 1})
    with pytest.raises(CorruptionError, match=f"{count + 1} .*, as in the manifest, found"):
        open_contents(stored(tmp_path, data), indexed.model_copy(update={"index": ref}))


def test_an_index_that_is_said_to_be_huge_is_not_read(tmp_path):
    data, indexed = made()
    uri = stored(tmp_path, data)
    os.truncate(tmp_path / INDEX_FILE, 1 << 40)
    for size in (1 << 40, bound_of(INDEX_FILE).max_bytes + 1):
        ref = indexed.index.model_copy(update={"size": size})
        with pytest.raises(CorruptionError, match=f"larger than any step index: .*found {size} b"):
            open_contents(uri, indexed.model_copy(update={"index": ref}))
    ref = indexed.index.model_copy(update={"directory": (0, 1 << 40)})
    with pytest.raises(CorruptionError, match=f"found {1 << 40} bytes at 0"):
        open_contents(uri, indexed.model_copy(update={"index": ref}))


@pytest.mark.parametrize(
    "place",
    [[0, -5, []], [-1, 0, []], [0, 10**12, ["00"] * 8]],
    ids=["negative rows", "negative offset", "rows that are not there"],
)
def test_tables_lie_before_the_directory(tmp_path, place):
    data, indexed = made()
    index = parse_index(data, "p", PLACE)[1]
    data, indexed = forged(data, indexed, sealed(index.directory, digests=place))
    with pytest.raises(CorruptionError, match="expected tables within"):
        open_contents(stored(tmp_path, data), indexed)


def test_a_file_of_more_bytes_than_json_keeps_exact_is_damage(tmp_path):
    data, indexed = made()
    table = parse_index(data, "p", PLACE)[1].directory.files
    contents = open_contents(stored(tmp_path, data), indexed)
    rows = contents.tables()[0].copy()
    rows["size"][0] = 2**53
    contents._files.rows = lambda start, stop: rows[start:stop]
    assert table.rows == len(rows)
    with pytest.raises(CorruptionError, match="files of at most"):
        _ = contents.objects


@pytest.mark.parametrize("parts", ["shards", "chunks in a shard"])
def test_a_leaf_in_more_parts_than_memory_is_worth_is_refused(tmp_path, monkeypatch, parts):
    leaf = LeafRecord(
        item="model",
        path="a",
        shape=(16,),
        dtype="int8",
        chunks=(1,),
        shards=(1 if parts == "shards" else 16,),
    )
    records = [one for one in data_files(Random(0)) if one.name.startswith("model/")]
    ref = ValueRef(records[0].name, 0, 1)
    digests = np.zeros(leaf.shards, np.uint64)
    given = {
        "leaves": [leaf],
        "forms": {},
        "meta_digest": None,
        "shards": {
            ("model", "a"): [
                PlacedShard((at,), ref, digests) for at in range(0, 16, leaf.shards[0])
            ]
        },
        "objects": records,
        "origins": {},
    }
    data, indexed = make_index(random_manifest(Random(0)), PLACE, **given)
    name = "MOST_SHARDS" if parts == "shards" else "MAX_SHARD_CHUNKS"
    monkeypatch.setattr(step_index, name, 16)
    open_contents(stored(tmp_path, data), indexed).check()
    monkeypatch.setattr(step_index, name, 15)
    with pytest.raises(CorruptionError, match=f"16 {parts}, expected at most 15"):
        open_contents(stored(tmp_path, data), indexed)
    with pytest.raises(SaveError, match=f"16 {parts}, expected at most 15"):
        make_index(random_manifest(Random(0)), PLACE, **given)


# Who writes more than is read.


def test_a_step_of_more_leaves_or_files_than_are_read_is_not_saved(monkeypatch):
    made(leaves=12)
    monkeypatch.setattr(manifest, "MOST_LEAVES", 11)
    with pytest.raises(UnsupportedFormatError, match=r"at most 11 leaves .*, found 12 leaves"):
        made(leaves=12)
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "MOST_FILES", 0)
    with pytest.raises(UnsupportedFormatError, match="and 0 files, found 12 leaves"):
        made(leaves=12)
