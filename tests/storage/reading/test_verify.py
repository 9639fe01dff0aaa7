"""Damage of every kind to every file of a step, and what verifying and opening say of it."""

import shutil
import tracemalloc
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests, DigestedBox
from cairn.storage.arrays.digests import digest_chunks, digest_text
from cairn.storage.errors import CorruptionError, StepNotFoundError, StorageError
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.step_files import check_step_files, holds_values
from cairn.storage.reading.verify import verify_step
from cairn.storage.runs.records.layout import manifest_file
from cairn.storage.runs.records.manifest import LeafRecord, Manifest
from cairn.storage.runs.run import Run
from cairn.storage.store.file_checksums import BUFFER_BYTES, read_files
from cairn.storage.store.opening import open_files
from cairn.storage.store.uri import parse_uri
from cairn.storage.training.checkpointer import Checkpointer
from cairn.storage.training.saving.save_job import list_objects
from cairn.storage.training.trees import flatten
from tests.storage.states import state

STEP = 3
ASSETS = {"tokenizer.json": b'{"version": "1.0"}'}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a run with one step; nobody changes it."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(STEP, state(), meta={"step": STEP}, assets=ASSETS).wait()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A run of its own for each test."""
    shutil.copytree(saved, tmp_path / "run")
    return Run.open(tmp_path / "run")


def folder_of(run):
    return Path(run.step_uri(run.step(STEP)).local_path)


def files_of(run):
    """Every file of the step, by name."""
    folder = folder_of(run)
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def crc32c_text(data):
    return f"{google_crc32c.value(data):08x}"


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << (bit % 8)
    path.write_bytes(data)


def flip_in_kernel(run):
    """Flip a bit of the leaf model/layers/0/kernel; the file that it lies in."""
    row = np.asarray(state()["model"]["layers"]["0"]["kernel"])[17].tobytes()
    (hit,) = [path for path in files_of(run).values() if row in path.read_bytes()]
    flip(hit, 8 * hit.read_bytes().index(row) + 5)
    return hit


def test_a_sound_step_has_no_problems(run):
    report = verify_step(run, STEP)
    assert report.problems == ()
    assert report.ok
    assert report.extra == ()
    assert (report.step, report.attempt) == (STEP, 1)
    manifest = run.manifest(run.step(STEP))
    assert report.files == len(manifest.objects) == len(files_of(run))
    assert report.nbytes == manifest.nbytes
    assert report.leaves == len(manifest.leaves) > 5
    report.raise_problems("p")
    assert verify_step(run, run.step(STEP)).ok


def test_the_manifest_has_the_checksum_of_every_file(run):
    manifest = run.manifest(run.step(STEP))
    names = {record.name for record in manifest.objects}
    assert names == {*files_of(run)}
    assert {"commit_success.txt", "_CHECKPOINT_METADATA", "model/_METADATA"} <= names
    assert any(holds_values(name) for name in names)
    assert all(record.crc32c for record in manifest.objects)


@pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "missing", "swapped"])
def test_damage_to_any_file_is_found_and_names_it(run, damage):
    others = dict.fromkeys(files_of(run).values())
    for number, (name, path) in enumerate(files_of(run).items()):
        data = path.read_bytes()
        if damage == "flipped":
            if not data:
                continue
            flip(path, 7919 * (number + 1))
        elif damage == "cut":
            if not data:
                continue
            path.write_bytes(data[:-1])
        elif damage == "grown":
            path.write_bytes(data + b"\0")
        elif damage == "missing":
            path.unlink()
        else:
            other = next(one for one in others if one.read_bytes() != data)
            path.write_bytes(other.read_bytes())
        report = verify_step(run, STEP)
        assert not report.ok, name
        assert any(problem.startswith(f"{name}: ") for problem in report.problems), report.problems
        with pytest.raises(CorruptionError, match="the step is damaged") as caught:
            report.raise_problems(run.uri)
        assert caught.value.problems == report.problems
        path.write_bytes(data)
    assert verify_step(run, STEP).ok


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_to_what_leads_to_the_values_is_found_on_opening(run, damage):
    step = run.step(STEP)
    manifest = run.manifest(step)
    for number, (name, path) in enumerate(files_of(run).items()):
        data = path.read_bytes()
        if not data or (damage == "flipped" and holds_values(name)):
            continue
        if damage == "flipped":
            flip(path, 104729 * (number + 1))
        elif damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()
        with pytest.raises(CorruptionError, match="not what was saved") as caught:
            CheckpointReader.open(run.step_uri(step), manifest)
        assert [problem.partition(": ")[0] for problem in caught.value.problems] == [name]
        path.write_bytes(data)
    CheckpointReader.open(run.step_uri(step), manifest)


def test_a_file_of_another_step_with_the_same_crc32c_is_found(run, tmp_path):
    """Files of checksummed parts have one crc32c, whatever is in them."""
    objects = list_objects(run.step_uri(run.step(STEP)))
    manifest = publish_again(run, objects=objects)
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(STEP, state(seed=7), meta={"step": STEP}, assets=ASSETS).wait()
    other = Run.open(tmp_path / "other")
    values = [(path.stat().st_size, path) for path in files_of(other).values()]
    replaced = set()
    for name, path in files_of(run).items():
        data = path.read_bytes()
        twins = [
            twin
            for size, twin in values
            if size == len(data)
            and twin.parent.name == path.parent.name
            and crc32c_text(twin.read_bytes()) == crc32c_text(data)
            and twin.read_bytes() != data
        ]
        if not twins:
            continue
        replaced.add(holds_values(name))
        path.write_bytes(twins[0].read_bytes())
        report = verify_step(run, STEP)
        assert [problem.partition(": words-64:")[0] for problem in report.problems][:1] == [name]
        if not holds_values(name):
            with pytest.raises(CorruptionError, match=name):
                CheckpointReader.open(run.step_uri(run.step(STEP)), manifest)
        path.write_bytes(data)
    assert replaced == {False, True}
    assert verify_step(run, STEP).ok


def test_opening_names_all_damaged_files_in_one_error(run):
    files = files_of(run)
    flip(files["model/_METADATA"], 3)
    files["optimizer/_METADATA"].unlink()
    files["commit_success.txt"].write_bytes(b"more")
    with pytest.raises(CorruptionError) as caught:
        check_step_files(run.step_uri(run.step(STEP)), run.manifest(run.step(STEP)))
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "commit_success.txt",
        "model/_METADATA",
        "optimizer/_METADATA",
    ]
    assert "optimizer/_METADATA: missing" in str(caught.value)


def test_a_damaged_value_file_does_not_keep_others_from_being_opened(run):
    """A flip there is found when the leaf is read."""
    step, values = run.step(STEP), [name for name in files_of(run) if holds_values(name)]
    for name in values:
        flip(files_of(run)[name], 4001)
    assert CheckpointReader.open(run.step_uri(step), run.manifest(step)).meta() == {"step": STEP}


def test_the_leaf_that_damage_hits_is_named_and_no_other(run):
    hit = flip_in_kernel(run)
    report = verify_step(run, STEP)
    name = hit.relative_to(folder_of(run)).as_posix()
    leaves = [problem for problem in report.problems if not problem.startswith(f"{name}: ")]
    assert [leaf.startswith("model: layers/0/kernel: ") for leaf in leaves] == [True]


def test_files_that_were_not_saved_with_the_step_are_named_and_do_no_harm(run):
    (folder_of(run) / "notes.txt").write_text("ours")
    report = verify_step(run, STEP)
    assert report.ok
    assert report.extra == ("notes.txt",)
    CheckpointReader.open(run.step_uri(run.step(STEP)), run.manifest(run.step(STEP)))


def test_a_damaged_manifest_is_found_and_named(run):
    path = Path(run.uri.local_path) / manifest_file(STEP, 1)
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 8 * len(data) // 40):
        flip(path, bit)
        report = verify_step(run, STEP)
        assert [problem.partition(": ")[0] for problem in report.problems] == ["manifests/3.1.json"]
        path.write_bytes(data)
    assert verify_step(run, STEP).ok


def test_a_damaged_asset_is_found_and_named(run):
    (path,) = (Path(run.uri.local_path) / "assets").iterdir()
    flip(path, 9)
    assert [problem.partition(": ")[0] for problem in verify_step(run, STEP).problems] == [
        "asset tokenizer.json"
    ]


def publish_again(run, **changes):
    """Replace the manifest by one that says other things, with a checksum that fits."""
    manifest = run.manifest(run.step(STEP))
    changed = Manifest.model_validate(manifest.model_dump() | changes)
    run.objects.write(manifest_file(STEP, 1), changed.to_bytes())
    return changed


def test_leaves_that_only_one_side_knows_are_named(run):
    leaves = run.manifest(run.step(STEP)).leaves
    ghost = LeafRecord(item="model", path="ghost", shape=(1,), dtype="float32")
    dropped = next(leaf for leaf in leaves if leaf.item == "optimizer")
    publish_again(run, leaves=[leaf for leaf in (*leaves, ghost) if leaf != dropped])
    assert verify_step(run, STEP).problems == (
        "model: ghost: only the manifest has this leaf",
        f"optimizer: {dropped.path}: only Orbax's metadata has this leaf",
    )


def test_a_manifest_without_checksums_has_its_leaves_read_instead(run):
    """As older releases wrote it."""
    objects = run.manifest(run.step(STEP)).objects
    unknown = {"crc32c": None, "content": None}
    publish_again(run, objects=[record.model_copy(update=unknown) for record in objects])
    assert verify_step(run, STEP).ok
    flip_in_kernel(run)
    problems = verify_step(run, STEP).problems
    assert [problem.startswith("model: layers/0/kernel: ") for problem in problems] == [True]


def test_digests_of_chunks_that_do_not_add_up_to_the_leaf_are_found(run):
    manifest = run.manifest(run.step(STEP))
    arrays = flatten(state()["model"])
    records = {leaf.path: leaf for leaf in manifest.leaves if leaf.item == "model"}
    boxes = {}
    for path, leaf in records.items():
        origin = (0,) * len(leaf.shape)
        digests = digest_chunks(np.asarray(arrays[path]), origin, leaf.chunks)
        boxes[path] = [DigestedBox(origin, digests.shape, digests)]
    for file in folder_of(run).glob(f"model/{FILE_PREFIX}*"):
        file.unlink()
    known = ChunkDigests(boxes)
    (folder_of(run) / f"model/{FILE_PREFIX}0.json").write_bytes(known.to_bytes())
    told = [
        records[leaf.path].model_copy(update={"digest": digest_text(known.total(leaf.path))})
        if leaf.item == "model"
        else leaf
        for leaf in manifest.leaves
    ]
    objects = list_objects(run.step_uri(run.step(STEP)))
    publish_again(run, leaves=told, objects=objects)
    assert verify_step(run, STEP).problems == ()
    changed = [
        leaf.model_copy(update={"digest": digest_text(5)}) if leaf.path == "norm/scale" else leaf
        for leaf in told
    ]
    publish_again(run, leaves=changed, objects=objects)
    (problem,) = verify_step(run, STEP).problems
    assert problem.startswith("model: norm/scale: its chunks add up to keyed-sum-64:")


def test_an_unknown_step_is_not_found(run):
    with pytest.raises(StepNotFoundError, match="step 9"):
        verify_step(run, 9)


def test_progress_goes_up_to_all_bytes_and_ends_the_work_by_raising(run):
    told = []
    report = verify_step(run, STEP, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (report.nbytes, report.nbytes)

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        verify_step(run, STEP, progress=stop)


def test_a_step_is_verified_on_every_store(root_uri):
    with Checkpointer(root_uri / "run") as checkpointer:
        checkpointer.save(STEP, state(), meta={}, assets=ASSETS).wait()
    run = Run.open(root_uri / "run")
    report = verify_step(run, STEP)
    assert report.ok, report.problems
    folder = run.step_uri(run.step(STEP))
    manifest = run.manifest(run.step(STEP))
    assert all(record.crc32c for record in manifest.objects)
    files = open_files(folder)
    value = next(record.name for record in manifest.objects if holds_values(record.name))
    for name in (value, "model/_METADATA"):
        data = bytearray(files.read_range(name, 0, 1 << 20))
        data[len(data) // 2] ^= 4
        with files.open_write(name) as stream:
            stream.write(data)
    found = {problem.partition(": ")[0] for problem in verify_step(run, STEP).problems}
    assert {value, "model/_METADATA"} <= found
    with pytest.raises(CorruptionError, match="model/_METADATA"):
        CheckpointReader.open(folder, manifest)


def test_checksums_of_many_and_of_large_files(root_uri):
    numbers = np.random.default_rng(0)
    sizes = [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 17, *range(20)]
    contents = {f"folder/{n}": numbers.bytes(size) for n, size in enumerate(sizes)}
    files = open_files(root_uri)
    for name, content in contents.items():
        with files.open_write(name) as stream:
            stream.write(content)
    expected = {name: crc32c_text(data) for name, data in contents.items()}
    for threads in (None, 1, 3):
        found = list(read_files(root_uri, contents, threads=threads))
        assert {one.name: one.crc32c for one in found} == expected
        assert [(one.name, one.size) for one in found] == [
            (name, len(data)) for name, data in contents.items()
        ]
    assert {record.name: record.crc32c for record in list_objects(root_uri)} == expected
    with pytest.raises(StorageError, match="folder/none"):
        list(read_files(root_uri, [*contents, "folder/none"]))


def test_memory_does_not_grow_with_the_files(tmp_path):
    for name in ("a", "b", "c"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(100 * BUFFER_BYTES)
    tracemalloc.start()
    try:
        list(read_files(parse_uri(tmp_path), ["a", "b", "c"], threads=3))
        assert tracemalloc.get_traced_memory()[1] < 5 * BUFFER_BYTES
    finally:
        tracemalloc.stop()


def test_checksums_that_are_known_are_not_taken_again(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    records = list_objects(parse_uri(tmp_path), known={"a": "00000001"})
    assert {record.name: record.crc32c for record in records} == {
        "a": "00000001",
        "b": crc32c_text(b"b"),
    }
