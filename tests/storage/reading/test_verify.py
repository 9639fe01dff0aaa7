"""Damage of every kind to every file of a step, and what verifying and opening say of it."""

import errno
import os
import shutil
import tracemalloc
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    Manifest,
    Run,
    StepDamagedError,
    StepNotFoundError,
    StorageError,
    StoreUnavailableError,
    open_files,
    parse_uri,
    promote_step,
    verify_step,
)
from cairn.state.checkpointing.restore import read_meta, restore_item
from cairn.state.checkpointing.trees import flatten
from cairn.storage.arrays.digests import digest_text
from cairn.storage.arrays.ocdbt import is_data_file, leaf_node, manifest
from cairn.storage.reading import verify as verify_module
from cairn.storage.reading.databases import database_entries
from cairn.storage.runs.annotate import annotation_of, note_verified
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.store.clock import utc_now
from cairn.storage.store.file_checksums import read_crc32c, read_files
from tests.faults.report import trials
from tests.storage.indexes import publish_index
from tests.storage.plain_steps import as_plain_step, record_of
from tests.storage.records import attempt_file, put_record
from tests.storage.seams import direct_io, file_checksums
from tests.storage.states import abstract, assert_same, raw, state

STEP = 3
ASSETS = {"tokenizer.json": b'{"version": "1.0"}'}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Fplain of a run with one step; nobody changes it."""
    fplain = tmp_path_factory.mktemp("saved") / "run"
    with Checkpointer(fplain) as checkpointer:
        checkpointer.save(STEP, state(), meta={"step": STEP}, assets=ASSETS).wait()
    return fplain


@pytest.fixture(scope="module")
def saved_plain(saved, tmp_path_factory):
    """The same as a copy of an adopted step, which has no index."""
    fplain = tmp_path_factory.mktemp("before") / "run"
    shutil.copytree(saved, fplain)
    run = Run.open(fplain)
    as_plain_step(run, run.step(STEP))
    return fplain


@pytest.fixture
def run(saved, tmp_path):
    """A run of its own for each test."""
    shutil.copytree(saved, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.fixture
def plain(saved_plain, tmp_path):
    """A run of its own for each test, whose step has no index."""
    shutil.copytree(saved_plain, tmp_path / "plain")
    return Run.open(tmp_path / "plain")


@pytest.fixture(params=["run", "plain"])
def either(request):
    """A run whose step has an index, and one whose step has none."""
    return request.getfixturevalue(request.param)


def fplain_of(run):
    return Path(run.step_uri(run.step(STEP)).local_path)


def files_of(run):
    """Every file of the step, by name."""
    fplain = fplain_of(run)
    return {
        path.relative_to(fplain).as_posix(): path
        for path in sorted(fplain.rglob("*"))
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


def load(run):
    """All of the step, for JAX and without it.

    Raises:
        CorruptionError: something was noticed.
        AssertionError: nothing was, and something is not what was saved.
    """
    uri, expected = run.step_uri(run.step(STEP)), state()
    reader = CheckpointReader.open(uri, run.manifest(run.step(STEP)))
    for item, tree in expected.items():
        assert_same(restore_item(uri, item, abstract(tree)), tree)
        for path, leaf in flatten(tree).items():
            assert leaf is None or raw(reader.read(item, path)) == raw(leaf)
    assert read_meta(uri) == {"step": STEP}
    assert reader.meta() == {"step": STEP}


def test_a_sound_step_has_no_problems(either):
    run = either
    report = verify_step(run, STEP)
    assert report.problems == ()
    assert report.ok
    assert report.extra == ()
    assert (report.step, report.attempt) == (STEP, 1)
    manifest = run.manifest(run.step(STEP))
    assert report.loads
    contents = run.contents(run.step(STEP))
    assert report.files == len(contents.objects) == len({*files_of(run)} - {INDEX_FILE})
    assert report.nbytes == manifest.nbytes
    assert report.leaves == len(contents.leaves) == manifest.leaf_count > 5
    load(run)
    report.raise_problems("p")
    assert verify_step(run, run.step(STEP)).ok


def test_the_checksums_of_every_file_are_recorded(run):
    objects = run.contents(run.step(STEP)).objects
    names = {record.name for record in objects}
    assert names == {*files_of(run)} - {INDEX_FILE}
    assert {"commit_success.txt", "_CHECKPOINT_METADATA", "model/_METADATA"} <= names
    assert any(is_data_file(name) for name in names)
    for record in objects:
        assert record == record_of(record.name, files_of(run)[record.name].read_bytes())


DAMAGES = ["flipped", "cut", "grown", "missing", "swapped"]
EVERY = trials(short=3, long=1)
"""Of the files, which are damaged in each way: in the short run all, each in one way or two."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_names_it(plain, damage):
    """Of a step with an index: `tests/faults/test_bit_flips.py`."""
    run = plain
    others = dict.fromkeys(files_of(run).values())
    for number, (name, path) in enumerate(files_of(run).items()):
        if number % EVERY != DAMAGES.index(damage) % EVERY:
            continue
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
        if report.loads:
            load(run)
        else:
            with pytest.raises(CorruptionError):
                load(run)
        path.write_bytes(data)
    assert verify_step(run, STEP).ok


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_what_only_plain_orbax_reads_hits_no_load(run, damage):
    """It is named all the same, and the report says that the step loads."""
    unread = [
        name
        for name, path in files_of(run).items()
        if not is_data_file(name) and name not in (INDEX_FILE, "meta/data.json")
        if damage == "missing" or path.stat().st_size  # one of Orbax's files has no content
    ]
    assert {"model/_METADATA", "optimizer/manifest.ocdbt", "commit_success.txt"} < {*unread}
    for number, name in enumerate(unread):
        path = files_of(run)[name]
        if damage == "flipped":
            flip(path, 104729 * (number + 1))
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
        report = verify_step(run, STEP)
        assert name in {problem.partition(": ")[0] for problem in report.problems}
        assert report.loads
    load(run)  # all of them are damaged now
    assert {problem.partition(": ")[0] for problem in verify_step(run, STEP).problems} == {*unread}


def test_a_step_of_which_no_small_file_of_orbax_is_left_loads(run):
    for name, path in files_of(run).items():
        if not is_data_file(name) and name not in (INDEX_FILE, "meta/data.json"):
            path.unlink()
    load(run)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_what_a_load_reads_is_never_taken_for_what_was_saved(run, damage):
    """Flipped bits: `tests/faults/test_bit_flips.py`."""
    for name, path in files_of(run).items():
        if not is_data_file(name) and name != "meta/data.json":
            continue
        data = path.read_bytes()
        if damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.unlink()
        with pytest.raises(CorruptionError, match=r"meta/data\.json|(model|optimizer): "):
            load(run)
        report = verify_step(run, STEP)
        assert name in {problem.partition(": ")[0] for problem in report.problems}
        assert not report.loads
        path.write_bytes(data)
    load(run)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_to_what_leads_to_the_values_is_found_on_opening(plain, damage):
    run, step = plain, plain.step(STEP)
    manifest = run.manifest(step)
    for number, (name, path) in enumerate(files_of(run).items()):
        data = path.read_bytes()
        if not data or (damage == "flipped" and is_data_file(name)):
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


def test_a_file_of_another_step_with_the_same_crc32c_is_found(either, tmp_path):
    """Files of checksummed parts have one crc32c, whatever is in them."""
    run = either
    manifest = run.manifest(run.step(STEP))
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
        replaced.add(is_data_file(name))
        path.write_bytes(twins[0].read_bytes())
        report = verify_step(run, STEP)
        assert [problem.partition(": words-64:")[0] for problem in report.problems][:1] == [name]
        if not is_data_file(name):
            assert report.loads == (manifest.index is not None)
            if report.loads:
                load(run)
                path.write_bytes(data)
                continue
            with pytest.raises(CorruptionError, match=name):
                CheckpointReader.open(run.step_uri(run.step(STEP)), manifest)
        path.write_bytes(data)
    assert replaced == {False, True}
    assert verify_step(run, STEP).ok


def test_opening_names_all_damaged_files_in_one_error(plain):
    run = plain
    files = files_of(run)
    flip(files["model/_METADATA"], 3)
    files["optimizer/_METADATA"].unlink()
    files["commit_success.txt"].write_bytes(b"more")
    with pytest.raises(CorruptionError) as caught:
        CheckpointReader.open(run.step_uri(run.step(STEP)), run.manifest(run.step(STEP)))
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "commit_success.txt",
        "model/_METADATA",
        "optimizer/_METADATA",
    ]
    assert "optimizer/_METADATA: missing" in str(caught.value)


def test_a_damaged_value_file_does_not_keep_others_from_being_opened(either):
    """A flip there is found when the leaf is read."""
    run = either
    step, values = run.step(STEP), [name for name in files_of(run) if is_data_file(name)]
    for name in values:
        flip(files_of(run)[name], 4001)
    assert CheckpointReader.open(run.step_uri(step), run.manifest(step)).meta() == {"step": STEP}


def test_the_leaf_that_damage_hits_is_named_and_no_other(either):
    run = either
    hit = flip_in_kernel(run)
    report = verify_step(run, STEP)
    name = hit.relative_to(fplain_of(run)).as_posix()
    leaves = [problem for problem in report.problems if not problem.startswith(f"{name}: ")]
    assert [leaf.startswith("model: layers/0/kernel: ") for leaf in leaves] == [True]


def test_files_that_were_not_saved_with_the_step_are_named_and_do_no_harm(either):
    run = either
    (fplain_of(run) / "notes.txt").write_text("ours")
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


def test_a_lost_manifest_is_found_and_named(run):
    (Path(run.uri.local_path) / manifest_file(STEP, 1)).unlink()
    report = verify_step(Run.open(run.uri), STEP)
    assert not report.ok
    assert not report.loads
    assert (report.step, report.attempt) == (STEP, 1)
    (problem,) = report.problems
    assert problem.startswith(f"{manifest_file(STEP, 1)}: the manifest of a durable step is lost")


def test_a_damaged_asset_is_found_and_named(run):
    (path,) = (Path(run.uri.local_path) / "assets").iterdir()
    flip(path, 9)
    assert [problem.partition(": ")[0] for problem in verify_step(run, STEP).problems] == [
        "asset tokenizer.json"
    ]


def publish_again(run, **changes):
    """Replace the manifest by one that says other things, with a checksum that fits."""
    manifest = run.manifest(run.step(STEP))
    changed = Manifest.model_validate(manifest.model_dump(by_alias=True) | changes)
    put_record(run.objects, manifest_file(STEP, 1), changed)
    return run.manifest(run.step(STEP))


def test_leaves_that_only_the_index_or_only_orbax_knows_are_named_and_load(run):
    leaves = run.contents(run.step(STEP)).leaves
    ghost = LeafRecord(item="model", path="ghost", shape=(0,), dtype="float32")
    dropped = next(leaf for leaf in leaves if leaf.item == "optimizer")
    changed = [leaf for leaf in (*leaves, ghost) if leaf != dropped]
    publish_index(run, run.step(STEP), leaves=changed)
    report = verify_step(run, STEP)
    assert report.loads
    assert report.problems[:2] == (
        "model: ghost: only the manifest has this leaf",
        f"optimizer: {dropped.path}: only Orbax's metadata has this leaf",
    )
    assert all("optimizer/manifest.ocdbt: " in problem for problem in report.problems[2:])
    assert report.problems[2:]


def test_digests_of_chunks_that_do_not_add_up_to_the_leaf_are_found(either):
    run = either
    told = [
        leaf.model_copy(update={"digest": digest_text(5)}) if leaf.path == "norm/scale" else leaf
        for leaf in run.contents(run.step(STEP)).leaves
    ]
    if run.manifest(run.step(STEP)).index is None:
        publish_again(run, leaves=told)
    else:
        publish_index(run, run.step(STEP), leaves=told)
    report = verify_step(run, STEP)
    (problem,) = report.problems
    assert problem.startswith("model: norm/scale: its chunks add up to keyed-sum-64:")
    assert not report.loads
    with pytest.raises(CorruptionError, match=r"model: norm/scale: expected keyed-sum-64:0{15}5"):
        load(run)


@pytest.mark.parametrize("where", ["another shard", "behind the end", "another file", "nowhere"])
def test_a_database_that_leads_elsewhere_is_named(either, where):
    """Its files are as they were recorded, but what they say is not so."""
    run = either
    uri = run.step_uri(run.step(STEP)) / "model"
    entries = database_entries(uri)
    key, other = [key for key in entries if key.startswith("layers.0.kernel/c/")][:2]
    ref = entries[key]
    moved = {
        "another shard": entries[other],
        "behind the end": ref._replace(offset=ref.offset + (1 << 30)),
        "another file": ref._replace(file=f"d/{'0' * 32}"),
        "nowhere": None,
    }[where]
    changed = {one.encode(): entry for one, entry in (entries | {key: moved}).items() if entry}
    (node_file,) = (name for name in files_of(run) if name.startswith("model/b/"))
    node = leaf_node(changed)
    written = {
        node_file: node.data,
        "model/manifest.ocdbt": manifest(node, node_file.removeprefix("model/"), time_ns=1),
    }
    records = {record.name: record for record in run.contents(run.step(STEP)).objects}
    for name, data in written.items():
        files_of(run)[name].write_bytes(data)
        records[name] = record_of(name, data)
    has_index = run.manifest(run.step(STEP)).index is not None
    if has_index:
        publish_index(run, run.step(STEP), objects=list(records.values()))
    else:
        publish_again(run, objects=list(records.values()))
    report = verify_step(run, STEP)
    if has_index:
        assert {problem.partition(f": {key}")[0] for problem in report.problems} == {
            "model/manifest.ocdbt"
        }
        assert report.loads
        load(run)
        return
    with pytest.raises(CorruptionError, match="model: layers/0/kernel"):
        load(run)
    outside = where in ("behind the end", "another file")
    assert bool(report.problems) == outside
    assert report.loads != outside


def test_an_unknown_step_is_not_found(run):
    with pytest.raises(StepNotFoundError, match="step 9"):
        verify_step(run, 9)


def test_progress_goes_up_to_all_bytes_and_ends_the_work_by_raising(either):
    run = either
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


@pytest.mark.parametrize("has_index", [True, False])
def test_a_step_is_verified_on_every_store(root_uri, has_index):
    with Checkpointer(root_uri / "run") as checkpointer:
        checkpointer.save(STEP, state(), meta={}, assets=ASSETS).wait()
    run = Run.open(root_uri / "run")
    if not has_index:
        as_plain_step(run, run.step(STEP))
    report = verify_step(run, STEP)
    assert report.ok, report.problems
    fplain = run.step_uri(run.step(STEP))
    manifest = run.manifest(run.step(STEP))
    objects = run.contents(run.step(STEP)).objects
    assert all(record.crc32c for record in objects)
    files = open_files(fplain)
    value = next(record.name for record in objects if is_data_file(record.name))
    for name in (value, "model/_METADATA"):
        data = bytearray(files.read_range(name, 0, 1 << 20))
        data[len(data) // 2] ^= 4
        with files.open_write(name) as stream:
            stream.write(data)
    found = {problem.partition(": ")[0] for problem in verify_step(run, STEP).problems}
    assert {value, "model/_METADATA"} <= found
    if has_index:
        with pytest.raises(CorruptionError, match=r"(model|optimizer): "):
            load(run)
        return
    with pytest.raises(CorruptionError, match="model/_METADATA"):
        CheckpointReader.open(fplain, manifest)


def test_checksums_of_many_and_of_large_files(root_uri):
    numbers = np.random.default_rng(0)
    sizes = [
        0,
        1,
        direct_io.BUFFER_BYTES - 1,
        direct_io.BUFFER_BYTES,
        3 * direct_io.BUFFER_BYTES + 17,
        *range(20),
    ]
    contents = {f"fplain/{n}": numbers.bytes(size) for n, size in enumerate(sizes)}
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
    with pytest.raises(StorageError, match="fplain/none"):
        list(read_files(root_uri, [*contents, "fplain/none"]))


def test_a_file_that_is_read_in_parts_has_the_checksum_of_the_whole(root_uri, monkeypatch):
    part = 1 << 20
    monkeypatch.setattr(file_checksums, "PART_BYTES", part)
    content = np.random.default_rng(0).bytes(2 * part + 17)
    files = open_files(root_uri)
    with files.open_write("fplain/a") as stream:
        stream.write(content)
    for size in (len(content), part, part - 1, 0):
        told: list[int] = []
        found = read_crc32c(files, "fplain/a", size, progress=told.append)
        assert found == (size, crc32c_text(content[:size]))
        assert sum(told) == size
    longer = len(content) + part  # what is not there is not counted
    assert read_crc32c(files, "fplain/a", longer) == (len(content), crc32c_text(content))
    with pytest.raises(StorageError, match="fplain/none"):
        read_crc32c(files, "fplain/none", 1)
    with pytest.raises(ZeroDivisionError):  # what the caller raises ends the reading
        read_crc32c(files, "fplain/a", len(content), progress=lambda _: 1 / 0)


def test_memory_does_not_grow_with_the_files(tmp_path):
    for name in ("a", "b", "c"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(100 * direct_io.BUFFER_BYTES)
    tracemalloc.start()
    try:
        list(read_files(parse_uri(tmp_path), ["a", "b", "c"], threads=3))
        assert tracemalloc.get_traced_memory()[1] < 5 * direct_io.BUFFER_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("skip", [0, 1])  # when files are read, and when databases are walked
def test_a_store_that_refuses_within_a_verification_is_unavailable_and_no_damage(gcs, skip):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(STEP, {"model": {"w": np.ones(3)}}, meta={}).wait()
    asked = {"operation": r"media\.get", "name": r"model/manifest\.ocdbt"}
    gcs.faults.add("status", status=403, skip=skip, count=None, **asked)
    with pytest.raises(StoreUnavailableError):
        verify_step(Run.open(uri), STEP)


@pytest.fixture
def misread(monkeypatch):
    """Files of which the page cache has other bytes than the disk, by inode, until it drops them.

    With an errno in place of None, what the disk answers instead, however often it is asked.
    """
    hit: dict[int, int | None] = {}
    read, advise = os.preadv, os.posix_fadvise

    def preadv(descriptor, buffers, offset, flags=0):
        count = read(descriptor, buffers, offset, flags)
        inode = os.fstat(descriptor).st_ino
        if inode in hit and not flags:
            if (number := hit[inode]) is not None:
                raise OSError(number, os.strerror(number))
            memoryview(buffers[0]).cast("B")[0] ^= 1
        return count

    def posix_fadvise(descriptor, offset, length, advice):
        if advice == os.POSIX_FADV_DONTNEED:
            inode = os.fstat(descriptor).st_ino
            if hit.get(inode, 0) is None:
                del hit[inode]
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    return lambda path, number=None: hit.__setitem__(path.stat().st_ino, number)


def data_files(run):
    return [path for name, path in files_of(run).items() if is_data_file(name)]


def test_what_only_the_page_cache_has_otherwise_is_no_damage(either, misread):
    run = either
    for path in files_of(run).values():
        misread(path)
    assert verify_step(run, STEP).problems == ()


@pytest.mark.parametrize("again", [False, True], ids=["at first", "at the second read"])
def test_an_error_of_the_disk_is_no_damage_whoever_meets_it(either, misread, again):
    run = either
    hit = data_files(run)[0]
    if again:
        flip(hit, 4001)
    else:
        misread(hit, errno.EIO)
    with pytest.MonkeyPatch.context() as patch:
        if again:  # the second read drops what is cached, and fails then
            drop = verify_module.read_files

            def failing(*args, past_cache=False, **more):
                if past_cache:
                    misread(hit, errno.EIO)
                return drop(*args, past_cache=past_cache, **more)

            patch.setattr(verify_module, "read_files", failing)
        with pytest.raises(StoreUnavailableError, match="the disk failed"):
            verify_step(run, STEP)


def test_an_error_of_the_disk_that_a_leaf_meets_is_no_damage(plain, misread):
    run = plain
    hit = flip_in_kernel(run)
    reader = CheckpointReader.open(run.step_uri(run.step(STEP)), run.manifest(run.step(STEP)))
    misread(hit, errno.EIO)
    with pytest.raises(StoreUnavailableError, match="the disk failed"):
        reader.read("model", "layers/0/kernel")


def test_a_file_that_goes_while_others_are_read_is_missing(run, monkeypatch):
    gone = files_of(run)["model/_METADATA"]
    read = verify_module.read_files

    def going(fplain, names, **more):
        gone.unlink(missing_ok=True)
        return read(fplain, names, **more)

    monkeypatch.setattr(verify_module, "read_files", going)
    report = verify_step(run, STEP)
    assert [one.partition(",")[0] for one in report.problems] == ["model/_METADATA: missing"]
    assert report.files == len(files_of(run)) - 1


@pytest.mark.parametrize("fault", [{"kind": "truncate", "nbytes": 9}, {"kind": "status"}])
def test_an_answer_of_a_bucket_that_a_new_request_does_not_give_is_no_damage(gcs, fault):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(STEP, {"model": {"w": np.ones(3)}}, meta={}).wait()
    if fault["kind"] == "status":
        fault = {**fault, "status": 404}
    gcs.faults.add(**fault, operation=r"media\.get", name=r"/model/d/", count=1)
    assert verify_step(Run.open(uri), STEP).problems == ()


def test_the_leaves_that_damage_hits_are_noted(either):
    run = either
    hit = flip_in_kernel(run)
    assert verify_step(run, STEP).damaged_leaves == ("model: layers/0/kernel",)
    name = hit.relative_to(fplain_of(run)).as_posix()
    damage = verify_step(run, STEP).damage(at=utc_now(), by="me")
    assert (damage.leaves, damage.leaf_count) == (("model: layers/0/kernel",), 1)
    assert damage.problems[0].startswith(name)
    flip(files_of(run)["meta/data.json"], 3)  # which leads to no leaf, unless there is no index
    report = verify_step(run, STEP)
    every = {f"{leaf.item}: {leaf.path}" for leaf in run.contents(run.step(STEP)).leaves}
    has_index = run.manifest(run.step(STEP)).index is not None
    assert {*report.damaged_leaves} == ({"model: layers/0/kernel"} if has_index else every)
    assert not report.loads
    (Path(run.uri.local_path) / manifest_file(STEP, 1)).write_bytes(b"{}")
    report = verify_step(run, STEP)
    assert (report.ok, report.loads, report.damaged_leaves) == (False, False, ())


def test_a_verification_lifts_no_damage_that_was_noted_since_it_began(run):
    read = verify_step(run, STEP)
    flip(files_of(run)["meta/data.json"], 9)
    damage = verify_step(run, STEP).note(run, by="ann").damaged
    assert damage is not None
    assert read.note(run, by="ben").damaged == damage
    flip(files_of(run)["meta/data.json"], 9)
    assert verify_step(run, STEP).note(run).damaged is None


def test_steps_that_share_a_damaged_file_are_damaged_until_they_are_verified(tmp_path):
    frozen = np.arange(1 << 16, dtype=np.float32)
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step, kernel in ((1, frozen), (2, frozen), (3, frozen), (4, frozen + 1)):
            items = {"model": {"frozen": kernel, "step": np.full(9, step)}}
            checkpointer.save(step, items, meta={}).wait()
    run = Run.open(tmp_path / "run")
    fplain = Path(run.step_uri(run.step(1)).local_path)
    shared = max((fplain / "model" / "d").iterdir(), key=lambda path: path.stat().st_size)
    assert shared.stat().st_nlink == 3
    flip(shared, 99)
    note = verify_step(run, 2).note(run, by="ann", job="op-7")
    assert note.damaged.leaves == ("model: frozen",)
    for step in (1, 3):
        damage = annotation_of(run, run.step(step)).damaged
        assert (damage.by, damage.job, damage.loads) == ("ann", "op-7", False)
        (problem,) = damage.problems
        assert problem.startswith(f"model/d/{shared.name}: crc32c ")
        assert problem.endswith(" (the same file as that of step 2)")
    with pytest.raises(StepDamagedError, match=f"newest sound step is {run.uri}/steps/4"):
        promote_step(run, 1, "best", expect=None)
    note_verified(run, run.step(4), damage=damage)
    with pytest.raises(StepDamagedError) as none_is_sound:
        promote_step(run, 1, "best", expect=None)
    assert "newest sound" not in str(none_is_sound.value)
    assert verify_step(run, 1).note(run).damaged.leaves == ("model: frozen",)
    assert verify_step(run, 2).note(run).damaged.leaves == ("model: frozen",)
    assert annotation_of(run, run.step(1)).damaged.leaves == ("model: frozen",)  # and no less
    flip(shared, 99)
    for step in (1, 2, 3, 4):
        assert verify_step(run, step).note(run).damaged is None


def test_another_record_that_is_amiss_is_no_damage_of_the_step(run):
    """It is raised: nothing tells which attempt's step is meant."""
    (Path(run.uri.local_path) / attempt_file(2)).write_bytes(b"{}")
    with pytest.raises(StorageError, match=attempt_file(2)):
        verify_step(run, STEP)
