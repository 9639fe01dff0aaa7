"""A fork copies nothing that is not what was saved, and says what it has checked."""

import contextlib
import gc
from dataclasses import replace
from datetime import timedelta

import pytest

from cairn import (
    CopyReport,
    CorruptionError,
    Damage,
    ObjectStore,
    Run,
    RunNotFoundError,
    StepDamagedError,
    StepNotFoundError,
    StorageError,
    StoreFullError,
    collect_garbage,
    delete_step,
    fork_run,
    open_files,
    verify_step,
)
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.runs.annotate import annotation_of, note_verified
from cairn.storage.runs.records.layout import INDEX_FILE, annotation_file, asset_file, manifest_file
from cairn.storage.runs.trash import GRACE_SECONDS
from cairn.storage.store.clock import utc_now
from tests.faults.full_disk_job import filled
from tests.faults.report import trials
from tests.storage.forks import WRITER, contents, flipped, put, twins
from tests.storage.plain_steps import as_plain_step, write_manifest


@pytest.fixture
def root_uri(some_root_uri):
    """An empty folder in one kind of store: what is copied is the same in all."""
    return some_root_uri


@pytest.fixture(autouse=True)
def _settled():
    """What a thread of a copy that failed still holds goes here, not inside the next test."""
    yield
    gc.collect()


def fork(parent, root_uri, step=3, **options):
    return fork_run(parent, parent.step(step), root_uri / "child", by=WRITER, **options)


def damaged_copies(parent, root_uri):
    """The folder of a fork that was interrupted once all was copied; each copy is then damaged."""

    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork(parent, root_uri, progress=stop)
    folder = root_uri / "child/attempts/1/3"
    for name, data in contents(folder).items():
        put(folder, name, flipped(data))
    return folder


def assert_same(parent, child, step=3):
    """The child's step is the parent's, byte for byte."""
    of_parent, of_child = (run.step_uri(run.step(step)) for run in (parent, child))
    assert contents(of_child) == contents(of_parent)
    report = verify_step(child, step)
    assert (report.ok, report.extra) == (True, ())


def test_a_bit_that_changed_in_any_file_is_not_forked(parent, root_uri):
    folder = parent.step_uri(parent.step(3))
    for number, (name, data) in enumerate(contents(folder).items()):
        root = root_uri / f"{number}"
        put(folder, name, flipped(data))
        damaged = contents(folder)
        with pytest.raises(CorruptionError, match="cairn verify") as caught:
            fork(parent, root)
        assert [line.partition(": ")[0] for line in caught.value.problems] == [name]
        assert Run.open(root / "child").steps() == []
        assert contents(folder) == damaged
        put(folder, name, data)
    fork(parent, root)
    assert_same(parent, Run.open(root / "child"))


def test_a_step_whose_index_is_damaged_lost_or_of_another_step_is_not_forked(parent, root_uri):
    folder = parent.step_uri(parent.step(3))
    objects = ObjectStore.open(folder)
    data = objects.read(INDEX_FILE).value
    other = ObjectStore.open(parent.step_uri(parent.step(6))).read(INDEX_FILE).value
    wrong = [flipped(data, at) for at in range(0, len(data), trials(short=151, long=7))]
    wrong += [flipped(data, len(data) - 1), data[:-1], other, b"", None]
    for changed in wrong:
        objects.delete(INDEX_FILE)
        if changed is not None:
            objects.write(INDEX_FILE, changed)
        with pytest.raises(CorruptionError, match=INDEX_FILE):
            fork(parent, root_uri)
    assert not open_files(root_uri).exists("child/run.json")
    objects.write(INDEX_FILE, data)
    fork(parent, root_uri)
    assert_same(parent, Run.open(root_uri / "child"))


def test_every_damaged_file_is_named(parent, root_uri):
    folder = parent.step_uri(parent.step(3))
    before = contents(folder)
    values = next(name for name in before if is_data_file(name))
    put(folder, values, flipped(before[values]))
    put(folder, "commit_success.txt", b"more")
    put(folder, "meta/commit_success.txt", flipped(before["meta/commit_success.txt"]))
    open_files(folder).delete_tree("model/_METADATA")
    with pytest.raises(CorruptionError, match="4 that are not") as caught:
        fork(parent, root_uri)
    assert [line.partition(": ")[0] for line in caught.value.problems] == sorted(
        [values, "commit_success.txt", "meta/commit_success.txt", "model/_METADATA"]
    )


def publish_with(parent, step, **sums):
    """The manifest again, with other checksums of files: what a function makes of their bytes."""
    info = parent.step(step)
    manifest, stored = as_plain_step(parent, info), contents(parent.step_uri(info))
    objects = tuple(
        record.model_copy(update={name: take(stored[record.name]) for name, take in sums.items()})
        for record in manifest.inline_objects
    )
    write_manifest(parent, manifest.model_copy(update={"inline_objects": objects}))


def test_a_file_whose_crc32c_is_that_of_another_is_not_forked(parent, root_uri):
    """Files of checksummed parts have one crc32c. In a bucket no values are read to tell them."""
    folder = parent.step_uri(parent.step(3))
    wrong = [
        (name, other)
        for name, other in twins(parent, 3, 6)
        if root_uri.scheme == "file" or not is_data_file(name)
    ]
    assert len(wrong) == (3 if root_uri.scheme == "file" else 2)
    before = contents(folder)
    for number, (name, other) in enumerate(wrong):
        put(folder, name, other)
        with pytest.raises(CorruptionError, match=name):
            fork(parent, root_uri / f"{number}")
        assert Run.open(root_uri / f"{number}/child").steps() == []
        put(folder, name, before[name])
    forked = fork(parent, root_uri)
    if root_uri.scheme == "gs":
        assert forked.copied.how == "the store's crc32c of the copy; small files read"


def test_what_an_interrupted_fork_copied_is_checked_before_it_counts(parent, root_uri):
    damaged_copies(parent, root_uri)
    (asset,) = parent.manifest(parent.step(3)).assets
    Run.open(root_uri / "child").objects.write(asset_file(asset.sha256), b"[]")
    fork(parent, root_uri)
    child = Run.open(root_uri / "child")
    assert_same(parent, child)
    assert child.objects.read(asset_file(asset.sha256)).value == b"{}"


def test_files_that_were_not_saved_stay_behind(parent, root_uri):
    folder = parent.step_uri(parent.step(3))
    put(folder, "notes.txt", b"mine")
    put(folder, "model/d/0123", b"of another tool")
    fork(parent, root_uri)
    child = Run.open(root_uri / "child")
    names = {record.name for record in parent.contents(parent.step(3)).objects}
    assert set(contents(child.step_uri(child.step(3)))) == names
    assert contents(folder)["notes.txt"] == b"mine"


def test_a_fork_says_what_it_checked_whenever_it_is_asked(parent, root_uri):
    manifest = parent.manifest(parent.step(3))
    files, nbytes = manifest.index.files, manifest.nbytes
    how = {
        "file": "crc32c and content sum of the copied bytes",
        "gs": "the store's crc32c of the copy; small files read",
        "s3": "crc32c and content sum of the copied bytes",
    }[root_uri.scheme]
    forked = fork(parent, root_uri)
    assert forked.copied == CopyReport(files, nbytes, how)
    assert fork(parent, root_uri).copied == forked.copied
    child = Run.open(root_uri / "child")
    assert child.manifest(forked).environment["copied"]["how"] == how
    again = fork_run(child, child.step(3), root_uri / "grandchild", by=WRITER)
    assert again.copied == forked.copied
    assert child.step(3).copied is None
    assert CopyReport.of({"copied": "by hand"}) is None


@pytest.mark.parametrize("damage", ["flipped", "of another step"])
def test_labels_that_are_damaged_or_of_another_step_are_not_forked(parent, root_uri, damage):
    name, other = annotation_file(3, 1), annotation_file(6, 1)
    stored = parent.objects.read(name).value
    wrong = flipped(stored) if damage == "flipped" else parent.objects.read(other).value
    parent.objects.write(name, wrong)
    with pytest.raises(CorruptionError, match=name):
        fork(parent, root_uri)
    with pytest.raises(RunNotFoundError):  # they would tell whether the step is damaged
        Run.open(root_uri / "child")
    assert open_files(root_uri / "child/attempts/1").walk() == []  # told before anything is copied


def test_a_damaged_manifest_is_not_forked(parent, root_uri):
    step = parent.step(3)
    name = manifest_file(3, 1)
    parent.objects.write(name, flipped(parent.objects.read(name).value))
    for asked in (step, replace(step, manifest_digest=None)):
        with pytest.raises(StorageError, match=name):
            fork_run(parent, asked, root_uri / "child", by=WRITER)
    assert open_files(root_uri / "child").walk() == []


def weeks_later():
    return utc_now() + timedelta(seconds=2 * GRACE_SECONDS)


def test_a_step_that_is_deleted_meanwhile_is_forked_while_its_bytes_are_there(parent, root_uri):
    def delete(done, total):
        if parent.step_attempts().get(3):
            delete_step(parent, parent.step(3), by="me")

    fork(parent, root_uri, progress=delete)
    child = Run.open(root_uri / "child")
    assert verify_step(child, 3).ok
    assert sorted(parent.step_attempts()) == [6]


def test_a_step_whose_bytes_are_removed_meanwhile_is_told_as_gone(parent, root_uri):
    step = parent.step(3)

    def remove(done, total):
        if parent.step_attempts().get(3):
            delete_step(parent, step, by="me")
            collect_garbage(Run(parent.uri, clock=weeks_later), by="gc", clock=weeks_later)

    child = root_uri / "child"
    with pytest.raises(StepNotFoundError, match=manifest_file(3, 1)):
        fork_run(parent, step, child, by=WRITER, progress=remove)
    assert Run.open(child).steps() == []


def test_what_a_killed_fork_left_is_in_nobodys_way_and_goes(on_disk, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    root, child = on_disk.uri.parent, tmp_path / "root/child"
    with pytest.raises(KeyboardInterrupt):
        fork(on_disk, root, progress=stop)
    halves = [child / "attempts/1/3/.cairn-tmp-1", child / "attempts/1/3/model/d/.cairn-tmp-2"]
    for path in halves:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    for name in ("run.json", "lease.json", ".cairn-store.json", "attempts/1.json"):
        (child / f"{name}.__lock").write_bytes(b"longer than what is written" * 99)
    (child / "damaged").mkdir()
    fork(on_disk, root)
    assert_same(on_disk, Run.open(root / "child"))
    assert not [path for path in halves if path.exists()]


def test_a_full_disk_is_told_and_the_fork_goes_on_once_there_is_room(on_disk, tmp_path):
    root = on_disk.uri.parent
    sizes = {record.size for record in on_disk.contents(on_disk.step(3)).objects}
    for number, size in enumerate([0, 100, *sorted(sizes)]):
        child = root / f"child-{number}"
        with filled(tmp_path, "limit", max(0, size - 1)), pytest.raises(StoreFullError) as caught:
            fork_run(on_disk, on_disk.step(3), child, by=WRITER)
        assert str(child) in str(caught.value)
        with contextlib.suppress(RunNotFoundError):  # where not even its record had room
            assert Run.open(child).steps() == []
        fork_run(on_disk, on_disk.step(3), child, by=WRITER)
        assert_same(on_disk, Run.open(child))


def test_a_damaged_step_is_forked_only_for_a_reason_which_the_copy_keeps(parent, root_uri):
    damage = Damage(at="2026-01-02T03:04:05Z", by="verify", problems=("a: 1",), problem_count=1)
    before = fork_run(parent, parent.step(3), root_uri / "earlier", by=WRITER)
    note_verified(parent, parent.step(3), damage=damage)
    with pytest.raises(StepDamagedError, match=f"newest sound step is {parent.uri}/steps/6"):
        fork(parent, root_uri)
    with pytest.raises(RunNotFoundError):
        Run.open(root_uri / "child")
    # Told again: it was finished before anything was known.
    assert fork_run(parent, parent.step(3), root_uri / "earlier", by=WRITER) == before
    child = Run.open(fork(parent, root_uri, despite_damage="files are back") and root_uri / "child")
    made = child.step(3)
    assert child.manifest(made).environment["despite_damage"] == "files are back"
    assert annotation_of(child, made).damaged == damage
    note_verified(child, made, damage=verify_step(child, made).damage(at=utc_now()))
    assert annotation_of(child, made).damaged is None


def test_no_reason_has_files_copied_that_are_not_what_was_saved(parent, root_uri):
    folder = parent.step_uri(parent.step(3))
    name = next(name for name in contents(folder) if is_data_file(name))
    put(folder, name, flipped(contents(folder)[name]))
    report = verify_step(parent, 3)
    note_verified(parent, parent.step(3), damage=report.damage(at=utc_now()))
    with pytest.raises(CorruptionError, match="the step is damaged"):
        fork(parent, root_uri, despite_damage="try it")
    assert Run.open(root_uri / "child").steps() == []
