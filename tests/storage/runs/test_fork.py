from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    FencedError,
    Files,
    InvalidURIError,
    LeaseHeldError,
    PreconditionFailedError,
    Run,
    StepState,
    StoreFullError,
    delete_step,
    fork_run,
    open_files,
)
from cairn.storage.runs.fork import abandon_fork
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.layout import annotation_file, asset_file
from cairn.storage.store.clock import utc_now
from tests.storage.forks import LEAF, WRITER
from tests.storage.records import begin_attempt, list_attempts


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


def interrupted_fork(parent, root_uri):
    """The folder of a fork of step 3 that copied something and was interrupted."""

    def stop(done, total):
        raise KeyboardInterrupt

    child = root_uri / "child"
    with pytest.raises(KeyboardInterrupt):
        fork_run(parent, parent.step(3), child, by=WRITER, progress=stop)
    return child


def test_fork_holds_the_same_bytes_and_stands_alone(parent, root_uri):
    forked = fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    open_files(root_uri).delete_tree("parent")
    child = Run.open(root_uri / "child")
    assert child.steps() == [forked]
    manifest = child.manifest(forked)
    assert (manifest.step, manifest.attempt, manifest.writer) == (3, 1, WRITER)
    reader = CheckpointReader.open(child.step_uri(forked), manifest)
    np.testing.assert_array_equal(reader.read("model", "kernel"), LEAF * 3)
    assert reader.meta() == {"step": 3}
    assert child.objects.read(asset_file(manifest.assets[0].sha256)).value == b"{}"
    assert b'"loss":0.3333' in child.objects.read(annotation_file(3, 1)).value


def test_fork_names_its_parent(parent, root_uri):
    fork_run(parent, parent.step(6), root_uri / "child", by=WRITER)
    lineage = Run.open(root_uri / "child").info().lineage
    assert (lineage.run, lineage.step, lineage.attempt) == (str(parent.uri), 6, 1)
    assert lineage.manifest_digest == parent.step(6).manifest_digest


def test_another_writer_may_go_on_at_once(parent, root_uri):
    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    with Checkpointer(root_uri / "child", writer_id="trainer") as checkpointer:
        checkpointer.save(4, {"model": {"kernel": LEAF}}, meta={}).wait()
    child = Run.open(root_uri / "child")
    assert [(info.step, info.attempt) for info in child.steps()] == [(3, 1), (4, 2)]


@pytest.mark.without_s3("plain Orbax does not read it")
def test_plain_orbax_reads_the_fork(parent, root_uri):
    from orbax.checkpoint import v1 as ocp

    forked = fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    path = Run.open(root_uri / "child").step_uri(forked).orbax_path()
    loaded = ocp.load_checkpointables(path)
    np.testing.assert_array_equal(np.asarray(loaded["model"]["kernel"]), LEAF * 3)


def test_interrupted_fork_lists_nothing_and_is_taken_up_where_it_stopped(parent, root_uri):
    class Stop(BaseException):
        pass

    def stop_half_way(done, total):
        if done > total // 2:
            raise Stop

    child = root_uri / "child"
    with pytest.raises(Stop):
        fork_run(parent, parent.step(3), child, by=WRITER, progress=stop_half_way)
    assert Run.open(child).steps() == []
    files = open_files(child / "attempts/1")
    before = {entry.name: files.stat(entry.name).etag for entry in files.walk()}
    reports = []
    fork_run(parent, parent.step(3), child, by=WRITER, progress=lambda *n: reports.append(n))
    assert [info.step for info in Run.open(child).steps()] == [3]
    assert {name: files.stat(name).etag for name in before} == before
    assert reports[-1][0] == reports[-1][1] > 0
    assert len(list_attempts(Run.open(child).objects)) == 1


def test_copied_item_has_its_marker_only_once_it_is_whole(parent, root_uri):
    expected = {entry.name for entry in open_files(parent.step_uri(parent.step(3))).walk()}
    whole, seen = {}, []

    def look(done, total):
        found = {entry.name for entry in open_files(root_uri / "child/attempts/1/3").walk()}
        for marker in [name for name in found if name.endswith("/commit_success.txt")]:
            item, _, _ = marker.partition("/")
            own = {name for name in expected if name.startswith(f"{item}/")}
            whole[item] = whole.get(item, True) and own <= found
        seen.append(set(whole))

    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER, progress=look)
    assert whole == {"meta": True, "model": True}
    assert set() in seen


def test_finished_fork_is_found_again(parent, root_uri):
    once = fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    assert fork_run(parent, parent.step(3), root_uri / "child", by=WRITER) == once


def contents(uri):
    files = open_files(uri)
    return {entry.name: files.stat(entry.name).etag for entry in files.walk()}


@pytest.mark.parametrize("writer", [WRITER, "job"])
def test_finished_fork_is_told_again_and_the_run_that_has_gone_on_stays(parent, root_uri, writer):
    child = root_uri / "child"
    fork_run(parent, parent.step(3), child, by=WRITER)
    with Checkpointer(child, writer_id=writer) as checkpointer:
        items = {"model": {"kernel": LEAF * 9}}
        checkpointer.save(3, items, meta={}, overwrite=True).wait()
        before = contents(child)
        again = fork_run(parent, parent.step(3), child, by=WRITER)
        assert (again.attempt, again.state) == (1, StepState.SUPERSEDED)
        assert contents(child) == before
        assert Run.open(child).step_attempts() == {3: 2}
        checkpointer.save(4, items, meta={}).wait()


def test_finished_fork_whose_step_was_deleted_is_told_as_deleted(parent, root_uri):
    child = Run(root_uri / "child")
    forked = fork_run(parent, parent.step(3), child.uri, by=WRITER)
    delete_step(child, forked, by="me")
    assert fork_run(parent, parent.step(3), child.uri, by=WRITER) == replace(
        forked, state=StepState.TRASHED
    )


def test_fork_that_was_killed_before_it_gave_the_lease_back_gives_it_back(
    parent, root_uri, monkeypatch
):
    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cairn.storage.runs.fork.release", killed)
        with pytest.raises(KeyboardInterrupt):
            fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    assert read_lease(Run.open(root_uri / "child").objects).released


def test_interrupted_fork_whose_run_a_job_has_taken_is_refused(parent, root_uri):
    child = interrupted_fork(parent, root_uri)
    with Checkpointer(child, writer_id=WRITER) as checkpointer:
        checkpointer.begin()
        with pytest.raises(PreconditionFailedError, match="the run exists"):
            fork_run(parent, parent.step(3), child, by=WRITER)
        checkpointer.save(5, {"model": {"kernel": LEAF}}, meta={}).wait()
    assert Run.open(child).step_attempts() == {5: 2}


def test_name_of_another_run_is_refused_and_that_run_stays(parent, root_uri):
    with Checkpointer(root_uri / "other") as checkpointer:
        checkpointer.save(1, {"model": {"kernel": LEAF}}, meta={}).wait()
    with pytest.raises(PreconditionFailedError, match="the run exists"):
        fork_run(parent, parent.step(3), root_uri / "other", by=WRITER)
    abandon_fork(root_uri / "other", by=WRITER)
    assert [info.step for info in Run.open(root_uri / "other").steps()] == [1]


def test_same_fork_by_another_is_refused(parent, root_uri):
    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    with pytest.raises(PreconditionFailedError, match="the run exists"):
        fork_run(parent, parent.step(3), root_uri / "child", by="fork/other")


def test_fork_that_another_is_making_is_left_to_it(parent, root_uri):
    def rival(done, total):
        with pytest.raises((LeaseHeldError, PreconditionFailedError)):
            fork_run(parent, parent.step(3), root_uri / "child", by="fork/other")
        abandon_fork(root_uri / "child", by="fork/other")

    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER, progress=rival)
    assert [info.step for info in Run.open(root_uri / "child").steps()] == [3]


def test_fork_that_was_overtaken_publishes_nothing(parent, root_uri):
    def overtake(done, total):
        if done == total:
            objects = Run.open(root_uri / "child").objects
            later = utc_now() + timedelta(hours=1)
            begin_attempt(objects, writer="trainer", base_step=-1, clock=lambda: later)

    with pytest.raises(FencedError):
        fork_run(parent, parent.step(3), root_uri / "child", by=WRITER, progress=overtake)
    assert Run.open(root_uri / "child").steps() == []


def test_abandoned_fork_leaves_nothing_but_a_finished_one_stays(parent, root_uri):
    child = interrupted_fork(parent, root_uri)
    abandon_fork(child, by=WRITER)
    assert open_files(child).walk() == []
    fork_run(parent, parent.step(3), child, by=WRITER)
    abandon_fork(child, by=WRITER)
    assert [info.step for info in Run.open(child).steps()] == [3]


def test_run_that_is_no_fork_is_not_abandoned(root_uri):
    with Checkpointer(root_uri / "job", writer_id=WRITER) as checkpointer:
        checkpointer.begin()
        abandon_fork(root_uri / "job", by=WRITER)
    abandon_fork(root_uri / "job", by=WRITER)
    assert len(Run.open(root_uri / "job").attempts()) == 1
    abandon_fork(root_uri / "none", by=WRITER)


def test_interrupted_fork_that_a_job_of_the_same_id_holds_is_not_abandoned(parent, root_uri):
    child = interrupted_fork(parent, root_uri)
    with Checkpointer(child, writer_id=WRITER) as checkpointer:
        checkpointer.begin()
        abandon_fork(child, by=WRITER)
        checkpointer.save(1, {"model": {"kernel": LEAF}}, meta={}).wait()
    assert Run.open(child).latest_step() == 1


def test_damaged_step_is_not_forked(parent, root_uri):
    step = parent.step(3)
    record = max(parent.contents(step).objects, key=lambda one: one.size)
    with open_files(parent.step_uri(step)).open_write(record.name) as sink:
        sink.write(b"short")
    with pytest.raises(CorruptionError, match=f"{record.name}: 5 bytes, {record.size} expected"):
        fork_run(parent, step, root_uri / "child", by=WRITER)
    assert Run.open(root_uri / "child").steps() == []


def test_damaged_asset_is_not_forked(parent, root_uri):
    step = parent.step(3)
    (asset,) = parent.manifest(step).assets
    parent.objects.write(asset_file(asset.sha256), b"[]")
    with pytest.raises(CorruptionError, match=r"tokenizer\.json"):
        fork_run(parent, step, root_uri / "child", by=WRITER)
    assert Run.open(root_uri / "child").steps() == []


def test_lease_is_given_back(parent, root_uri):
    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    assert read_lease(Run.open(root_uri / "child").objects).released


def test_full_store_is_told_as_such(parent, root_uri, monkeypatch):
    def full(*_):
        raise StoreFullError("the store is full", path=root_uri)

    monkeypatch.setattr(Files, "copy", full)
    with pytest.raises(StoreFullError):
        fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)
    monkeypatch.undo()
    assert Run.open(root_uri / "child").steps() == []
    fork_run(parent, parent.step(3), root_uri / "child", by=WRITER)


@pytest.mark.parametrize("inner", ["steps/9", "attempts", "trash/x"])
def test_fork_into_a_run_is_refused(parent, inner):
    with pytest.raises(InvalidURIError, match="Give the run"):
        fork_run(parent, parent.step(3), parent.uri / inner, by=WRITER)


def test_folder_of_something_else_is_neither_forked_into_nor_removed(parent, root_uri):
    child = root_uri / "child"
    with open_files(child).open_write("notes/today.txt") as sink:
        sink.write(b"mine")
    with pytest.raises(PreconditionFailedError, match="notes"):
        fork_run(parent, parent.step(3), child, by=WRITER)
    abandon_fork(child, by=WRITER)
    assert [entry.name for entry in open_files(child).walk()] == ["notes/today.txt"]
