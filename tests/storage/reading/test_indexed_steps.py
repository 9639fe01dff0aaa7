"""Steps that have an index: damage to it is never a wrong value, and little else is read."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    NotACheckpointError,
    ObjectStore,
    Run,
    StepNotFoundError,
    StorageError,
    verify_step,
)
from cairn.state.checkpointing.restore import read_meta, restore_item, restore_leaves
from cairn.state.checkpointing.trees import flatten
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.runs.records.layout import INDEX_FILE
from cairn.storage.runs.records.step_index import open_contents
from tests.faults.report import is_long, trials
from tests.storage.indexes import publish_index, regions_of, shards_of
from tests.storage.seams import paged_table, step_index
from tests.storage.states import abstract, assert_same, floats, put, raw, state

STEPS = (3, 4)
FLIPS = trials(short=4, long=12)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folder of a run with two steps of one layout; nobody changes it."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    with Checkpointer(folder, writer_id="job") as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state(step), meta={"step": step}).wait()
    return folder


@pytest.fixture
def run(stored, tmp_path):
    """A run of its own for each test."""
    shutil.copytree(stored, tmp_path / "run")
    return Run.open(tmp_path / "run")


READINGS = ["in one go", "by pages"]


@pytest.fixture(params=READINGS)
def reading(request, monkeypatch):
    """Small indexes are read whole, larger ones by pages."""
    if request.param == "by pages":
        monkeypatch.setattr(step_index, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(step_index, "_LOADED_BYTES", 0)
    return request.param


def index_file(run, step):
    return Path(run.step_uri(run.step(step)).local_path) / INDEX_FILE


def load(run, step):
    """All of the step, for JAX; nothing else than what was saved.

    Raises:
        CorruptionError: something was noticed.
    """
    uri = run.step_uri(run.step(step))
    for item, tree in state(step).items():
        assert_same(restore_item(uri, item, abstract(tree)), tree)
    assert read_meta(uri) == {"step": step}


def read(run, step):
    """All of the step, without JAX; nothing else than what was saved.

    Raises:
        CorruptionError: something was noticed.
    """
    info = run.step(step)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    for item, tree in state(step).items():
        for path, leaf in flatten(tree).items():
            assert leaf is None or raw(reader.read(item, path)) == raw(leaf)
    assert reader.meta() == {"step": step}


def refusals(run, step):
    """What `load` and `read` raise; None where all came back as it was saved."""
    found = []
    for who in (load, read):
        try:
            who(run, step)
        except StorageError as error:
            found.append(str(error))
        else:
            found.append(None)
    return found


@pytest.mark.parametrize(
    ("reading", "region"),
    [
        (reading, region)
        for number, region in enumerate(["files", "values", "digests", "directory", "end"])
        for turn, reading in enumerate(READINGS)
        if is_long() or region == "end" or (number + turn) % 2
    ],
    indirect=["reading"],
)
def test_a_flipped_bit_of_the_index_is_named_and_never_a_wrong_value(run, reading, region):
    info, path = run.step(3), index_file(run, 3)
    manifest, data = run.manifest(info), path.read_bytes()
    first, last = regions_of(manifest.index, run.contents(info).directory)[region]
    for number, at in enumerate(np.linspace(first, last, FLIPS, dtype=int).tolist()):
        changed = bytearray(data)
        changed[at] ^= 1 << number % 8
        path.write_bytes(changed)
        report = verify_step(run, 3)
        (problem,) = report.problems
        assert problem.startswith(f"{INDEX_FILE}: the index of the step is not what was written")
        assert not report.loads
        errors = refusals(run, 3)
        if region == "end" and reading == "by pages":  # nobody needs it who has the manifest
            assert errors == [None, None]
        else:
            assert all(error and str(path) in error for error in errors), errors
        load(run, 4)
    path.write_bytes(data)
    assert verify_step(run, 3).ok
    assert refusals(run, 3) == [None, None]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.9])
def test_an_index_that_is_cut_short_is_named_and_nothing_is_read_by_it(run, reading, kept):
    path = index_file(run, 3)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    assert all(error and str(path) in error for error in refusals(run, 3))
    (problem,) = verify_step(run, 3).problems
    assert problem.startswith(f"{INDEX_FILE}: ")


def test_an_index_that_is_gone_is_named(run, reading):
    path = index_file(run, 3)
    path.unlink()
    assert all(error and str(path) in error for error in refusals(run, 3))
    report = verify_step(run, 3)
    assert report.problems == (
        f"{INDEX_FILE}: the index of the step is not what was written: file://{path}: expected the "
        f"step's index of {run.manifest(run.step(3)).index.size} bytes, found none. Restore the "
        "file from a backup, or use another step.",
    )
    assert not report.loads
    load(run, 4)


def test_a_folder_that_is_gone_or_holds_nothing_of_the_step_is_said_so(run):
    info = run.step(3)
    manifest, folder = run.manifest(info), index_file(run, 3).parent
    shutil.rmtree(folder)
    (folder / "notes").mkdir(parents=True)
    (folder / "notes.txt").write_text("ours")
    with pytest.raises(NotACheckpointError, match=r"found notes, notes\.txt"):
        CheckpointReader.open(run.step_uri(info), manifest)
    (folder / "commit_success.txt").write_text("")
    with pytest.raises(CorruptionError, match=r"cairn\.index: .* found none"):
        CheckpointReader.open(run.step_uri(info), manifest)
    shutil.rmtree(folder)
    with pytest.raises(StepNotFoundError, match="no such checkpoint"):
        CheckpointReader.open(run.step_uri(info), manifest)


def test_the_index_of_another_step_is_named(run, reading):
    one, other = index_file(run, 3), index_file(run, 4)
    one.write_bytes(other.read_bytes())
    assert all(error and str(one) in error for error in refusals(run, 3))
    (problem,) = verify_step(run, 3).problems
    assert problem.startswith(f"{INDEX_FILE}: ")
    load(run, 4)


def test_the_index_of_a_step_of_the_same_number_in_another_run_is_named(run, reading, tmp_path):
    with Checkpointer(tmp_path / "other", writer_id="job") as checkpointer:
        checkpointer.save(3, state(3), meta={"step": 3}).wait()
    other = Run.open(tmp_path / "other")
    path = index_file(run, 3)
    path.write_bytes(index_file(other, 3).read_bytes())
    assert all(error and str(path) in error for error in refusals(run, 3))
    (problem,) = verify_step(run, 3).problems
    assert problem.startswith(f"{INDEX_FILE}: ")


def test_all_files_of_another_step_with_its_index_are_named(run, reading):
    """The best forgery there is: each file passes its own checks, and they fit each other."""
    folder = index_file(run, 3).parent
    shutil.rmtree(folder)
    shutil.copytree(index_file(run, 4).parent, folder)
    assert all(error and f"{folder}/{INDEX_FILE}" in error for error in refusals(run, 3))
    (problem,) = verify_step(run, 3).problems
    assert problem.startswith(f"{INDEX_FILE}: ")


@pytest.mark.parametrize("where", ["another shard", "behind the end", "another file", "too short"])
def test_a_place_that_is_not_the_values_is_never_a_number(run, where):
    """An index that fits its manifest, and leads elsewhere: the digests tell."""
    info = run.step(3)
    contents = run.contents(info)
    leaf = next(one for one in contents.leaves if one.path == "layers/0/kernel")
    first, second, *others = shards_of(contents, leaf)
    files = [one.name for one in contents.objects if is_data_file(one.name)]
    elsewhere = next(name for name in files if name != first.ref.file)
    moved = {
        "another shard": second.ref,
        "behind the end": first.ref._replace(offset=first.ref.offset + (1 << 40)),
        "another file": first.ref._replace(file=elsewhere),
        "too short": first.ref._replace(length=first.ref.length - 1),
    }[where]
    kept = {
        (one.item, one.path): shards_of(contents, one)
        for one in contents.leaves
        if one.shards is not None
    }
    kept[leaf.item, leaf.path] = [first._replace(ref=moved), second, *others]
    publish_index(run, info, shards=kept)
    for error in refusals(run, 3):
        assert error is not None
        assert re.search(r"layers/0/kernel|cairn\.index", error), error
    problems = verify_step(run, 3).problems
    if where == "another file":  # of another item
        assert [problem.partition(": ")[0] for problem in problems] == [INDEX_FILE]
    else:
        assert any("layers.0.kernel/c/0/0: expected" in problem for problem in problems)


def test_a_load_reads_none_of_the_small_files_of_orbax(gcs):
    items = {"model": {"w": put(floats(64, 32), "fsdp")}, "optimizer": {"m": put(floats(64, 32))}}
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        checkpointer.save(1, items, meta={"step": 1}).wait()
    run = Run.open(f"{gcs.bucket_uri}/run")
    info = run.step(1)
    manifest = run.manifest(info)
    gcs.server.requests.clear()
    reader = CheckpointReader.open(run.step_uri(info), manifest)
    for item, tree in items.items():
        assert_same(restore_item(reader, item, abstract(tree)), tree)
        for path, leaf in tree.items():
            assert raw(reader.read(item, path)) == raw(leaf)
    assert read_meta(reader) == {"step": 1}
    prefix = "run/attempts/1/1/"
    asked = [one for one in gcs.server.requests if one.bucket == gcs.bucket]
    names = {one.name.removeprefix(prefix) for one in asked if one.name}
    assert {name for name in names if not is_data_file(name)} == {INDEX_FILE, "meta/data.json"}
    assert {name.partition("/")[0] for name in names if is_data_file(name)} == {*items}
    assert [one for one in asked if one.operation == "list"] == []
    assert sum(one.name == f"{prefix}{INDEX_FILE}" for one in asked) == 1


def test_a_load_of_one_leaf_reads_few_pages_of_a_large_index(tmp_path, monkeypatch):
    monkeypatch.setattr(paged_table, "PAGE_BYTES", 4096)
    tree = {f"leaf{n}": np.full((4, 2), n, np.float32) for n in range(600)}
    with Checkpointer(tmp_path / "run", writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    run = Run.open(tmp_path / "run")
    info = run.step(1)
    manifest, uri = run.manifest(info), run.step_uri(info)
    directory = run.contents(info).directory
    assert len(directory.values.pages) > 2
    monkeypatch.setattr(step_index, "_WHOLE_BYTES", 0)
    path = Path(uri.local_path) / INDEX_FILE
    # Of both tables only the last pages are left.
    data = bytearray(path.read_bytes())
    for table, row in ((directory.values, 20), (directory.digests, 8)):
        page = 4096 // row * row
        data[table.offset : table.offset + page * (len(table.pages) - 1)] = bytes(
            page * (len(table.pages) - 1)
        )
    path.write_bytes(data)
    reader = CheckpointReader.of(uri, manifest, open_contents(uri, manifest))
    last = directory.leaves[-1].path
    assert raw(reader.read("model", last)) == raw(tree[last])
    assert raw(restore_leaves(reader, "model", tree, [last])[last]) == raw(tree[last])
    first = directory.leaves[0].path
    with pytest.raises(CorruptionError, match=r"cairn\.index: .* of page 0 "):
        reader.read("model", first)


def test_steps_with_an_index_load_from_every_store(root_uri, reading):
    with Checkpointer(root_uri / "run", writer_id="job") as checkpointer:
        checkpointer.save(3, state(3), meta={"step": 3}).wait()
    run = Run.open(root_uri / "run")
    assert refusals(run, 3) == [None, None]
    assert verify_step(run, 3).ok
    objects = ObjectStore(run.step_uri(run.step(3)))
    data = objects.read(INDEX_FILE).value
    for size in (len(data) // 2, 0):
        objects.write(INDEX_FILE, data[:size])
        assert all(error and INDEX_FILE in error for error in refusals(run, 3))
        assert not verify_step(run, 3).loads
    objects.delete(INDEX_FILE)
    assert all(error and INDEX_FILE in error for error in refusals(run, 3))
    assert not verify_step(run, 3).loads
