import os
import threading
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import (
    Annotation,
    Checkpointer,
    CheckpointRef,
    FencedError,
    InvalidURIError,
    LeaseHeldError,
    ModelInfo,
    ObjectStore,
    PolicyError,
    Run,
    RunNotFoundError,
    SaveError,
    StepExistsError,
    StepState,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    delete_step,
    find_deletable_step,
    open_files,
    parse_uri,
    promote_step,
    roll_back,
    undelete_step,
    verify_step,
)
from cairn.state.checkpointing.checkpointer import default_writer_id
from cairn.state.checkpointing.restore import read_meta, restore_item
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.retention import step_facts
from tests.faults.report import is_long
from tests.programs.program import run as run_program
from tests.state.seams import (
    StepWrite,
    attempt_file,
    begin_attempt,
    begin_step,
    deadlines,
    publish_manifest,
    writer,
)
from tests.storage.held_names import HeldNames
from tests.storage.states import abstract, assert_same, floats, put, raws, state


@pytest.fixture
def run_uri(some_root_uri):
    return some_root_uri / "run"


@pytest.fixture
def checkpointer(run_uri):
    with Checkpointer(run_uri, writer_id="job") as made:
        yield made


def save(checkpointer, step, items=None, **options):
    return checkpointer.save(step, items or state(step), meta={"step": step}, **options)


def test_a_saved_step_is_listed_once_the_handle_says_durable(checkpointer, run_uri):
    handle = save(checkpointer, 3)
    handle.wait()
    assert handle.done
    assert handle.error is None
    assert (handle.step, handle.attempt) == (3, 1)
    assert handle.uri == run_uri / "attempts/1/3"
    assert handle.blocked_seconds > 0
    run = Run.open(run_uri)
    assert [(info.step, info.state) for info in run.steps()] == [(3, StepState.LISTED)]


@pytest.mark.parametrize("raised", [ValueError, SystemExit])
def test_a_save_whose_check_raises_fails_and_leaves_nothing(checkpointer, run_uri, raised):
    def check():
        raise raised("not good enough")

    handle = save(checkpointer, 1, check=check)
    with pytest.raises(SaveError, match="not good enough"):
        handle.wait()
    assert Run.open(run_uri).steps() == []
    assert open_files(run_uri / "attempts/1").list() == []
    save(checkpointer, 1, check=lambda: None).wait()
    assert checkpointer.steps() == [1]


@pytest.mark.without_s3("plain Orbax does not read it")
def test_plain_orbax_reads_the_attempt_as_its_own_root(checkpointer, run_uri):
    """No Cairn in how it is read: the root lists the steps, each item loads bit-equal."""
    for step in (3, 6):
        save(checkpointer, step)
    checkpointer.wait_until_finished()
    root = (run_uri / "attempts/1").orbax_path()
    with ocp.training.Checkpointer(root) as plain:
        assert [found.step for found in plain.checkpoints] == [3, 6]
        assert plain.latest.step == 6
    expected = state(6)
    folder = f"{root}/6"
    model = ocp.load(folder, abstract(expected["model"]), checkpointable_name="model")
    assert_same(model, expected["model"])
    as_stored = ocp.metadata(folder, "optimizer").metadata
    assert sorted(as_stored) == ["0", "1"]  # a tuple, stored as a plain dict
    meta = ocp.load_checkpointables(folder, {"meta": None})["meta"]
    assert meta == {"step": 6}


@pytest.mark.without_s3("plain Orbax does not read it")
def test_load_pytree_without_a_target_reads_the_same_bits(checkpointer, run_uri):
    expected = {"w": floats(16, 8), "count": np.int32(3)}
    save(checkpointer, 1, {"model": expected}).wait()
    folder = (run_uri / "attempts/1/1").orbax_path()
    found = ocp.load(folder, checkpointable_name="model")
    assert raws(found) == raws(expected)


def test_four_saves_back_to_back_are_all_kept(checkpointer, run_uri):
    handles = [save(checkpointer, step) for step in range(4)]
    checkpointer.wait_until_finished()
    assert all(handle.done and handle.error is None for handle in handles)
    assert [info.step for info in Run.open(run_uri).steps()] == [0, 1, 2, 3]


@pytest.mark.without_s3("plain Orbax does not read it")
def test_arrays_may_be_donated_or_deleted_as_soon_as_save_returns(checkpointer, run_uri):
    first, second = put(floats(512, 256), "fsdp"), put(floats(512, 256, seed=1))
    expected = {"a": np.asarray(first).copy(), "b": np.asarray(second).copy()}
    overwrite = jax.jit(lambda leaf: leaf * 0 - 1, donate_argnums=0)
    overwrite(first).block_until_ready()  # compiled before the save, so that it runs at once
    first = put(expected["a"], "fsdp")
    host = floats(64, seed=2)
    expected["c"] = host.copy()
    handle = save(checkpointer, 1, {"model": {"a": first, "b": second, "c": host}})
    overwrite(first).block_until_ready()
    second.delete()
    host[:] = -1
    handle.wait()
    found = ocp.load(handle.uri.orbax_path(), abstract(expected), checkpointable_name="model")
    assert raws(found) == raws(expected)


@pytest.mark.without_s3("plain Orbax does not read it")
def test_a_plain_orbax_root_put_in_place_is_not_written_into(checkpointer, run_uri):
    folder = (run_uri / "attempts/1/5").orbax_path()
    ocp.save_checkpointables(folder, {"model": {"w": floats(4)}})
    handle = save(checkpointer, 5)
    handle.wait()
    assert handle.attempt == 2
    assert raws(ocp.load(folder, checkpointable_name="model")) == raws({"w": floats(4)})


def test_every_name_that_leads_to_a_durable_step_is_on_the_disk(tmp_path, monkeypatch):
    """A file survives a power failure only if each folder above it was synced after it was made."""
    after: set[str] = set()
    manifest = tmp_path / "new/root/run/manifests/1.1.json"
    fsync = os.fsync

    def watched(descriptor):
        fsync(descriptor)
        if manifest.exists():
            after.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", watched)
    with Checkpointer(tmp_path / "new/root/run", writer_id="job") as made:
        save(made, 1).wait()
        assert {str(tmp_path / name) for name in ("", "new", "new/root", "new/root/run")} <= after


def test_every_folder_that_a_run_keeps_objects_in_is_on_the_disk(tmp_path, monkeypatch):
    held = HeldNames(monkeypatch)
    folder = tmp_path / "new/root/run"
    with Checkpointer(folder, writer_id="job") as made:
        save(made, 1, metrics={"loss": 1.0}, assets={"tokenizer.json": b"{}"}).wait()
    folders = {path for path in folder.iterdir() if path.is_dir()}
    assert {"annotations", "assets", "attempts", "manifests"} <= {one.name for one in folders}
    for one in (*folders, folder / "attempts/1/1"):
        assert held.lost(one, below=tmp_path) == []


def test_manifest_and_index_name_leaves_files_assets_and_model(checkpointer, run_uri):
    large = put(np.zeros((8192, 4096), np.float32), "fsdp", None)
    items = {"model": {"w": large, "key": jax.random.key(1)}, "optimizer": {"e": jnp.zeros((0, 3))}}
    model = ModelInfo(model_type="llama", model_class="Decoder", config={"layers": 2})
    save(checkpointer, 1, items, model=model, assets={"tokenizer.json": b"{}"}).wait()
    run = Run.open(run_uri)
    manifest = run.manifest(run.step(1))
    contents = run.contents(run.step(1))
    leaves = {(leaf.item, leaf.path): leaf for leaf in contents.leaves}
    w = leaves["model", "w"]
    assert (w.shape, w.dtype, w.spec) == ((8192, 4096), "float32", ("fsdp", None))
    assert (w.shards, w.chunks) == ((2048, 4096), (1024, 1024))
    assert leaves["model", "key"].dtype == "key<fry>"
    assert leaves["optimizer", "e"].shape == (0, 3)
    assert leaves["optimizer", "e"].chunks is None
    assert manifest.items == ("meta", "model", "optimizer")
    assert manifest.model == model
    assert manifest.writer == "job"
    assert manifest.environment["packages"]["orbax-checkpoint"] == version("orbax-checkpoint")
    names = {record.name for record in contents.objects}
    assert {"_CHECKPOINT_METADATA", "commit_success.txt", "model/manifest.ocdbt"} <= names
    assert manifest.nbytes == sum(record.size for record in contents.objects) > large.nbytes
    assert (manifest.leaf_count, manifest.index.files) == (3, len(names))
    (asset,) = manifest.assets
    assert run.objects.read(f"assets/{asset.sha256}").value == b"{}"


def test_what_is_given_may_change_as_soon_as_save_returns(checkpointer, run_uri, monkeypatch):
    go_on = threading.Event()
    write = StepWrite._write
    monkeypatch.setattr(StepWrite, "_write", lambda *args: go_on.wait(60) and write(*args))
    given = {"rope": {"theta": 10000}}
    extras, notes, files = {"rope": {"theta": 1}}, {"stage": "warmup"}, {"a.json": b"{}"}
    handle = checkpointer.save(
        1, state(1), meta=extras, model=ModelInfo(config=given), labels=notes, assets=files
    )
    for one in (given, extras):
        one["rope"]["theta"] = 666
    notes["stage"] = files["b.json"] = b"changed"
    go_on.set()
    handle.wait()
    run = Run.open(run_uri)
    manifest = run.manifest(run.step(1))
    assert manifest.model.config == {"rope": {"theta": 10000}}
    assert read_meta(handle.uri) == {"rope": {"theta": 1}}
    assert step_facts(run)[0].labels == {"stage": "warmup"}
    assert [asset.name for asset in manifest.assets] == ["a.json"]


def test_labels_and_metrics_are_kept_even_if_the_loss_is_not_a_number(checkpointer, run_uri):
    metrics = {"loss": jnp.float32(np.nan), "accuracy": np.float32(0.5)}
    better = {"accuracy": "max"}
    save(checkpointer, 1, metrics=metrics, better=better, labels={"phase": "warm"}).wait()
    found = Run.open(run_uri).objects.read("annotations/1.1.json")
    annotation = Annotation.parse(found.value, "annotation")
    assert annotation.labels == {"phase": "warm"}
    assert annotation.metrics["accuracy"] == 0.5
    assert np.isnan(annotation.metrics["loss"])
    assert annotation.better == better
    with pytest.raises(UnsupportedFormatError, match="expected a metric of that name"):
        save(checkpointer, 2, better={"loss": "min"})


def test_a_step_that_exists_is_refused_before_anything_is_written(checkpointer, run_uri):
    save(checkpointer, 5).wait()
    before = ObjectStore.open(run_uri).list()
    for step in (5, 4):
        with pytest.raises(StepExistsError, match="above 5, the latest"):
            save(checkpointer, step)
    assert ObjectStore.open(run_uri).list() == before
    save(checkpointer, 6).wait()


@pytest.mark.without_s3("plain Orbax does not read it")
def test_overwrite_replaces_the_step_and_sets_later_ones_aside(checkpointer, run_uri):
    for step in (3, 6, 9):
        save(checkpointer, step)
    handle = save(checkpointer, 6, state(60), overwrite=True)
    handle.wait()
    assert handle.attempt == 2
    run = Run.open(run_uri)
    assert [(info.step, info.attempt) for info in run.steps()] == [(3, 1), (6, 2)]
    assert {info.step for info in run.all_states() if info.state is StepState.SUPERSEDED} == {6, 9}
    expected = state(60)["model"]
    found = ocp.load(handle.uri.orbax_path(), abstract(expected), checkpointable_name="model")
    assert_same(found, expected)
    save(checkpointer, 7).wait()
    assert [(info.step, info.attempt) for info in run.steps()] == [(3, 1), (6, 2), (7, 2)]


def test_until_an_overwrite_is_durable_what_it_replaces_stays_listed(
    checkpointer, run_uri, monkeypatch
):
    for step in (3, 6, 9):
        save(checkpointer, step)
    checkpointer.wait_until_finished()

    def fail(objects, manifest, fence):
        assert [info.step for info in Run.open(run_uri).steps()] == [3, 6, 9]
        raise StoreUnavailableError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr("cairn.storage.runs.writer.publish_manifest", fail)
        with pytest.raises(SaveError, match="does not answer"):
            save(checkpointer, 6, state(60), overwrite=True).wait()
    held = [(info.step, info.attempt) for info in Run.open(run_uri).steps()]
    assert held == [(3, 1), (6, 1), (9, 1)]
    save(checkpointer, 10).wait()
    assert Run.open(run_uri).latest_step() == 10


def test_an_overwrite_of_a_writer_that_was_replaced_counts_from_its_manifest_on(
    run_uri, monkeypatch
):
    """Its successor begins right after the manifest, and from that."""
    paused, resume = threading.Event(), threading.Event()

    def pause(objects, manifest, fence):
        generation = publish_manifest(objects, manifest, fence)
        if manifest.attempt == 2:
            paused.set()
            assert resume.wait(60)
        return generation

    monkeypatch.setattr("cairn.storage.runs.writer.publish_manifest", pause)
    old = Checkpointer(run_uri, writer_id="job")
    for step in (1, 2, 3):
        save(old, step)
    handle = save(old, 2, state(20), overwrite=True)
    assert paused.wait(60)
    with Checkpointer(run_uri, writer_id="job") as new:
        save(new, 4).wait()
        resume.set()
        handle.wait()
        held = [(info.step, info.attempt) for info in Run.open(run_uri).steps()]
        assert held == [(1, 1), (2, 2), (4, 3)]
        with pytest.raises(FencedError, match="replaced"):
            save(old, 6).wait()
        old.close()
        save(new, 5).wait()


def test_a_restart_of_the_same_writer_goes_on_at_once(run_uri):
    first = Checkpointer(run_uri, writer_id="job")
    save(first, 1).wait()
    with Checkpointer(run_uri, writer_id="job") as restarted:
        handle = save(restarted, 2)
        handle.wait()
        assert handle.attempt == 2
    first.close()
    assert [info.step for info in Run.open(run_uri).steps()] == [1, 2]


def test_another_writer_must_wait_until_the_run_is_given_back(run_uri):
    first, second = Checkpointer(run_uri, writer_id="a"), Checkpointer(run_uri, writer_id="b")
    save(first, 1).wait()
    with pytest.raises(LeaseHeldError, match=r"found a \(attempt 1\)"):
        save(second, 2)
    first.close()
    save(second, 2).wait()
    second.close()
    assert read_lease(ObjectStore.open(run_uri)).released


def test_a_run_that_was_begun_is_this_writer_s_and_its_first_save_asks_nothing(gcs):
    uri = f"{gcs.bucket_uri}/begun"
    with Checkpointer(uri, writer_id="job") as checkpointer:
        save(checkpointer, 1).wait()
    with Checkpointer(uri, writer_id="job") as checkpointer:
        checkpointer.begin()
        checkpointer.begin()
        assert [attempt.base_step for attempt in Run.open(uri).attempts()] == [-1, 1]
        with Checkpointer(uri, writer_id="other") as other, pytest.raises(LeaseHeldError):
            other.begin()
        with pytest.raises(StepExistsError):
            save(checkpointer, 1)
        gcs.faults.add("hold", count=None)
        handle = save(checkpointer, 2)  # the store answers nobody
        assert not handle.done
        gcs.faults.clear()
        handle.wait()
    assert [info.step for info in Run.open(uri).steps()] == [1, 2]
    with pytest.raises(SaveError, match="closed"):
        checkpointer.begin()


def test_a_step_to_go_back_to_begins_another_attempt_after_begin(run_uri):
    with Checkpointer(run_uri, writer_id="job") as checkpointer:
        save(checkpointer, 5).wait()
    with Checkpointer(run_uri, writer_id="job") as checkpointer:
        checkpointer.begin()
        handle = save(checkpointer, 3, overwrite=True)
        handle.wait()
    assert handle.attempt == 3
    assert [info.step for info in Run.open(run_uri).steps()] == [3]


def test_a_writer_that_was_replaced_publishes_nothing(run_uri, monkeypatch):
    paused, resume = threading.Event(), threading.Event()

    def pause(objects, manifest, fence):
        if manifest.writer == "job" and manifest.attempt == 1 and manifest.step == 2:
            paused.set()
            assert resume.wait(60)
        publish_manifest(objects, manifest, fence)

    monkeypatch.setattr("cairn.storage.runs.writer.publish_manifest", pause)
    old = Checkpointer(run_uri, writer_id="job")
    save(old, 1).wait()
    handle = save(old, 2)
    assert paused.wait(60)
    with Checkpointer(run_uri, writer_id="job") as new:
        save(new, 2, state(20)).wait()
        resume.set()
        with pytest.raises(FencedError, match="replaced"):
            handle.wait()
        with pytest.raises(FencedError):
            save(old, 3)
        assert [(i.step, i.attempt) for i in Run.open(run_uri).steps()] == [(1, 1), (2, 2)]
        old.close()
        save(new, 3).wait()


def test_a_save_into_a_run_that_was_removed_is_never_called_durable(run_uri):
    checkpointer = Checkpointer(run_uri, writer_id="job")
    save(checkpointer, 1).wait()
    open_files(run_uri.parent).delete_tree("run")
    handle = save(checkpointer, 2)
    with pytest.raises(FencedError, match=r"the run was removed.*attempts/1\.json"):
        handle.wait()
    checkpointer.close()
    with pytest.raises(RunNotFoundError):
        Run.open(run_uri)


def test_a_step_is_not_called_durable_while_another_start_may_set_it_aside(run_uri, monkeypatch):
    """The rival has taken the lease and looked at the steps, but its attempt is not there yet."""
    looked, go_on = threading.Event(), threading.Event()
    objects = ObjectStore.open(run_uri)

    def latest_step():
        latest = Run(run_uri).latest_step()
        looked.set()
        assert go_on.wait(60)
        return -1 if latest is None else latest

    def overtaken(objects, manifest, fence):
        fence()
        rival.start()
        assert looked.wait(60)
        publish_manifest(objects, manifest, lambda: None)

    rival = threading.Thread(
        target=begin_attempt, args=(objects,), kwargs={"writer": "job", "base_step": latest_step}
    )
    with Checkpointer(run_uri, writer_id="job") as made:
        save(made, 1).wait()
        monkeypatch.setattr("cairn.storage.runs.writer.publish_manifest", overtaken)
        handle = save(made, 2)
        with pytest.raises(FencedError, match="being replaced"):
            handle.wait()
        go_on.set()
        rival.join()
    assert [info.step for info in Run.open(run_uri).steps()] == [1]


def test_a_start_that_fails_is_made_up_for_by_the_next_save(run_uri, monkeypatch):
    write_if = ObjectStore.write_if

    def down(self, key, value, **options):
        if key == attempt_file(2):
            raise StoreUnavailableError("the store does not answer")
        return write_if(self, key, value, **options)

    with Checkpointer(run_uri, writer_id="job") as made:
        save(made, 1).wait()
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "write_if", down)
            with pytest.raises(StoreUnavailableError):
                save(made, 1, overwrite=True)
        assert [info.step for info in Run.open(run_uri).steps()] == [1]
        save(made, 2).wait()
        lease = read_lease(ObjectStore.open(run_uri))
        assert (lease.attempt, lease.released) == (2, False)
    assert read_lease(ObjectStore.open(run_uri)).released


def test_a_lease_that_cannot_be_given_back_takes_nothing_from_what_is_durable(run_uri, monkeypatch):
    def down(*args, **options):
        raise StoreUnavailableError("the store does not answer")

    made = Checkpointer(run_uri, writer_id="job")
    save(made, 1)
    monkeypatch.setattr("cairn.storage.runs.writer.release", down)
    made.close()
    assert [info.step for info in Run.open(run_uri).steps()] == [1]


@pytest.mark.parametrize("place", ["Transfers.wait", "SaveJob", "begin_step"])
def test_an_interrupt_in_the_middle_of_a_save_leaves_the_step_free_to_be_saved(
    checkpointer, run_uri, monkeypatch, place
):
    """Whether the arrays are on their way, or held, or Orbax has begun to write them."""

    def interrupted(*args, **kwargs):
        if place == "begin_step":
            begin_step(*args).begin()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        module = "saves.host_arrays" if place == "Transfers.wait" else "checkpointer"
        patch.setattr(f"cairn.state.checkpointing.{module}.{place}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(checkpointer, 1, state(7))
    handle = save(checkpointer, 1)
    handle.wait()
    assert handle.attempt == 2
    model = restore_item(handle.uri, "model", abstract(state(1)["model"]))
    assert_same(model, state(1)["model"])


def test_the_lease_is_renewed_while_the_checkpointer_is_open(tmp_path):
    renewed = threading.Event()
    with pytest.MonkeyPatch.context() as patch:

        def renew(*args, **kwargs):
            renew_in_store(*args, **kwargs)
            renewed.set()

        renew_in_store = writer.renew
        patch.setattr(writer, "renew", renew)
        with Checkpointer(tmp_path / "run", writer_id="job", lease_ttl=0.15) as made:
            save(made, 1).wait()
            before = read_lease(ObjectStore.open(made.uri)).expires
            for _ in range(2):  # the first may have been under way
                renewed.clear()
                assert renewed.wait(30)
            assert read_lease(ObjectStore.open(made.uri)).expires > before


def test_a_background_failure_is_raised_by_wait_and_the_next_save_works(
    checkpointer, run_uri, monkeypatch
):
    save(checkpointer, 1).wait()
    with monkeypatch.context() as patch:
        patch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
        handle = save(checkpointer, 2)
        for _ in range(2):
            with pytest.raises(SaveError, match="the disk is on fire"):
                handle.wait()
    again = save(checkpointer, 2)
    again.wait()
    assert again.attempt == 2
    assert [info.step for info in Run.open(run_uri).steps()] == [1, 2]


@pytest.mark.parametrize(
    ("some_root_uri", "there"),
    [("file", "before"), ("file", "while it is written"), ("gcs", "before")],
    indirect=["some_root_uri"],
)
def test_a_step_that_orbax_saved_into_the_attempt_survives_a_save_of_the_same_step(
    checkpointer, run_uri, monkeypatch, there
):
    save(checkpointer, 1).wait()
    folder = run_uri / "attempts" / "1" / "7"
    theirs = []

    def orbax_saves():
        ocp.save_checkpointables(folder.orbax_path(), {"mine": {"w": jnp.full(4, 42.0)}})
        theirs.extend(open_files(folder).walk())

    if there == "before":
        orbax_saves()
    else:  # in a bucket Orbax writes to the very names that we do
        write = StepWrite._write

        def late(self, made):
            write(self, made)
            orbax_saves()

        monkeypatch.setattr(StepWrite, "_write", late)
    with pytest.raises(SaveError) as caught:
        save(checkpointer, 7).wait()
    assert "attempts/1/7" in str(caught.value)
    if there == "before":
        assert "which this save did not write" in str(caught.value)
    assert theirs
    assert open_files(folder).walk() == theirs
    monkeypatch.undo()
    again = save(checkpointer, 7)
    again.wait()
    assert again.attempt == 2


def test_a_background_failure_nobody_waited_for_is_raised_by_the_next_save(
    checkpointer, run_uri, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
        save(checkpointer, 1)
        with pytest.raises(SaveError, match="the disk is on fire"):
            save(checkpointer, 2)
    save(checkpointer, 2).wait()
    assert [info.step for info in Run.open(run_uri).steps()] == [2]


def test_a_background_failure_nobody_waited_for_is_raised_by_close(run_uri, monkeypatch):
    monkeypatch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", broken)
    made = Checkpointer(run_uri)
    save(made, 1)
    with pytest.raises(SaveError, match="the disk is on fire"):
        made.close()
    made.close()
    with pytest.raises(SaveError, match="closed"):
        save(made, 2)


def broken(folder):
    raise OSError(5, "the disk is on fire", str(folder))


def test_wait_gives_up_after_its_timeout_and_the_save_goes_on(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(
        "cairn.state.checkpointing.saves.save_job.sync_folder", lambda folder: release.wait(60)
    )
    with Checkpointer(tmp_path / "run") as made:
        handle = save(made, 1)
        with pytest.raises(TimeoutError, match="still being saved"):
            handle.wait(0.01)
        assert not handle.done
        release.set()
        handle.wait()


@pytest.fixture
def endless(monkeypatch):
    """Whoever waits for the store's own deadline waits for ever."""
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 3600.0)


def test_a_save_waits_for_the_one_before_no_longer_than_its_deadline(gcs, endless):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as made:
        made.begin()
        held = gcs.faults.add("hold", operation="upload", count=None)
        first = save(made, 1)
        with pytest.raises(SaveError, match=r"begin within the deadline.*save of step 1 still"):
            save(made, 2, deadline=0.3)
        assert not first.done
        held.release()
        first.wait()
        save(made, 3, deadline=60).wait()
        assert [info.step for info in Run.open(made.uri).steps()] == [1, 3]


@pytest.mark.parametrize("skip", [0, 1, 3, 6, 9, 12] if is_long() else [0, 6])
def test_a_save_waits_for_a_silent_store_no_longer_than_its_deadline(gcs, endless, skip):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as made:
        hung = gcs.faults.add("hang", skip=skip, count=None)
        with pytest.raises(StoreUnavailableError, match=r"does not answer: gs://"):
            save(made, 1, deadline=0.5)
        assert hung.fired
        gcs.faults.clear()
        save(made, 1, deadline=60).wait()
        assert [info.step for info in Run.open(made.uri).steps()] == [1]


def test_a_renewal_that_hangs_does_not_hold_the_next_save_nor_replace_the_writer(gcs):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri, writer_id="job", lease_ttl=0.6) as made:
        save(made, 2).wait()
        hung = gcs.faults.add("hang", operation=r"media\.get", name="/lease", count=1)
        hung.wait()
        save(made, 1, overwrite=True).wait()  # begins an attempt
        gcs.faults.clear()
        save(made, 2).wait()
        assert [info.step for info in Run.open(uri).steps()] == [1, 2]


@pytest.mark.parametrize("deadline", [0, -1, "5", float("nan"), True])
def test_a_deadline_that_is_no_time_is_refused(checkpointer, deadline):
    with pytest.raises(PolicyError, match="deadline"):
        save(checkpointer, 1, deadline=deadline)


def test_a_step_that_failed_while_it_was_published_does_not_come_back(gcs, monkeypatch):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri, writer_id="job") as made:
        save(made, 1).wait()
        monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.5)
        held = gcs.faults.add("hold", operation="upload", name="manifests/2", count=None)
        with pytest.raises(SaveError, match="does not answer"):
            save(made, 2).wait()
        monkeypatch.undo()
        held.release()
        while "run/manifests/2.1.json" not in gcs.names():  # the store did it after all
            time.sleep(0.01)
        gcs.faults.clear()
        save(made, 2).wait()
        info = Run.open(uri).step(2)
        assert info.attempt == 2


def test_a_step_that_failed_while_it_was_published_is_superseded_at_the_end(gcs, monkeypatch):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri, writer_id="job") as made:
        save(made, 1).wait()
        monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.5)
        gcs.faults.add("mute", operation="upload", name="manifests/2", count=1)
        with pytest.raises(SaveError, match="does not answer"):
            save(made, 2).wait()
        gcs.faults.clear()
        monkeypatch.undo()
    assert [info.step for info in Run.open(uri).steps()] == [1]
    with Checkpointer(uri, writer_id="another") as other:
        other.begin()


def test_a_full_remote_store_leaves_what_was_there_and_the_next_save_works(gcs):
    uri = f"{gcs.bucket_uri}/run"
    with Checkpointer(uri, writer_id="job") as made:
        save(made, 1).wait()
        gcs.set_quota(1 << 20)
        items = {"model": {"w": put(floats(1024, 1024), "fsdp")}}
        handle = save(made, 2, items)
        with pytest.raises(StoreFullError, match="full"):
            handle.wait()
        assert [info.step for info in Run.open(uri).all_states()] == [1]
        gcs.set_quota(None)
        save(made, 2, items).wait()
    assert [info.step for info in Run.open(uri).steps()] == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        *("meta", "metrics", "_x", "_CHECKPOINT_METADATA", "a/b", "..", ""),
        *("commit_success.txt", "orbax.checkpoint", "cairn.index"),
    ],
)
def test_a_reserved_or_unsafe_item_name_is_refused(checkpointer, name):
    with pytest.raises(InvalidURIError):
        save(checkpointer, 1, {name: {"a": floats(2)}})


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 10**18, np.True_, np.float32(2)])
def test_a_step_that_is_no_step_is_refused(checkpointer, step):
    with pytest.raises(InvalidURIError, match="invalid step"):
        save(checkpointer, step, {"model": {"a": floats(2)}})


def test_a_step_may_be_an_integer_of_numpy_or_jax(tmp_path):
    kinds = [np.int64, np.uint16, jnp.int32, np.asarray]
    run = Run(parse_uri(tmp_path / "run"))
    with Checkpointer(run.uri) as checkpointer:
        for step, kind in enumerate(kinds, 1):
            handle = checkpointer.save(kind(step), {"model": {"a": floats(4)}}, meta={})
            handle.wait()
            assert (handle.step, type(handle.step)) == (step, int)
            assert type(run.step(kind(step)).step) is int
        assert [info.step for info in run.steps()] == [1, 2, 3, 4]
        assert verify_step(run, np.asarray(4)).problems == ()
        with pytest.raises(StepExistsError, match="step 4"):
            checkpointer.save(np.uint16(4), {"model": {"a": floats(4)}}, meta={})
    alias = promote_step(run, np.int64(2), "best", expect=None)
    assert resolve_step(run, CheckpointRef(run.uri, alias="best")).step == alias.step == 2
    assert resolve_step(run, CheckpointRef(run.uri, step=jnp.int32(3))).step == 3
    deleted = find_deletable_step(run, np.uint16(3), np.int64(1))
    assert (deleted.step, deleted.attempt, type(deleted.step)) == (3, 1, int)
    delete_step(run, deleted, by="me")
    undelete_step(run, np.asarray(3), jnp.int32(1))
    done = roll_back(run, jnp.int32(3), by="me")
    assert (done.step, done.superseded, type(done.step)) == (3, (4,), int)


def test_everything_wrong_with_the_leaves_is_said_before_anything_is_written(checkpointer, run_uri):
    gone = put(floats(4))
    gone.delete()
    items = {"model": {"a": b"bytes", "b": "text", "c": gone, "d": 2**70, "e": object()}}
    with pytest.raises(UnsupportedLeafError) as caught:
        save(checkpointer, 1, items)
    for path in ("a: bytes", "b: str", "c: its buffer was deleted", "d: an integer", "e: object"):
        assert path in str(caught.value)
    with pytest.raises(UnsupportedFormatError, match="not JSON"):
        checkpointer.save(1, {"model": {"a": floats(2)}}, meta={"x": object()})
    assert ObjectStore.open(run_uri).list() == []


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"model": ModelInfo(config={"eps": float("nan")})}, UnsupportedFormatError),
        ({"assets": {"../tokenizer.json": b"{}"}}, InvalidURIError),
        ({"assets": {"tokenizer.json": "{}"}}, UnsupportedLeafError),
    ],
)
def test_what_the_manifest_could_not_say_is_refused_before_anything_is_written(
    checkpointer, run_uri, options, kind
):
    with pytest.raises(kind):
        save(checkpointer, 1, **options)
    assert ObjectStore.open(run_uri).list() == []


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("items", jnp.ones(2)),
        ("items", {1: {"w": jnp.ones(2)}}),
        ("items", {"\ud800": {"w": jnp.ones(2)}}),
        ("meta", None),
        ("meta", [("a", 1)]),
        ("model", {"model_type": "llama"}),
        ("assets", ["tokenizer.json"]),
        ("labels", {"a": 1}),
        ("labels", {1: "a"}),
        ("labels", {"a": "\ud800"}),
        ("labels", ["final"]),
        ("labels", "final"),
        ("metrics", {"a": None}),
        ("metrics", {"a": "0.5"}),
        ("metrics", {"a": 10**400}),
        ("metrics", {"a": 1 + 2j}),
        ("metrics", {"a": jnp.ones(2)}),
        ("metrics", {1: 2.0}),
        ("metrics", 0.5),
    ],
)
def test_an_argument_of_another_type_is_refused_and_named(tmp_path, argument, given):
    call = {"items": {"model": {"w": jnp.ones(2)}}, "meta": {}, argument: given}
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises((UnsupportedFormatError, InvalidURIError)) as caught:
            checkpointer.save(1, call.pop("items"), **call)
        for part in (argument, "expected", "found"):
            assert part in str(caught.value)
        assert caught.value.next_step
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_and_jax_are_metrics(checkpointer, run_uri):
    metrics = {"a": np.float32(0.5), "b": jnp.float32(0.5), "c": np.array(0.5), "d": True, "e": 1}
    save(checkpointer, 1, metrics=metrics, labels={}).wait()
    (facts,) = step_facts(Run.open(run_uri))
    assert facts.metrics == {"a": 0.5, "b": 0.5, "c": 0.5, "d": 1.0, "e": 1.0}


def test_an_item_without_leaves_is_kept(checkpointer, run_uri):
    save(checkpointer, 1, {"model": {"a": floats(2)}, "optimizer": ({}, None)}).wait()
    run = Run.open(run_uri)
    assert run.manifest(run.step(1)).items == ("meta", "model", "optimizer")


@pytest.mark.parametrize("uri", ["memory://runs/run"])
def test_a_store_that_orbax_does_not_write_is_refused(uri):
    with pytest.raises(InvalidURIError, match="gs:// or s3://"):
        Checkpointer(uri)


@pytest.mark.parametrize("ttl", [0, -5.0, float("nan"), float("inf"), True, "60"])
def test_a_lease_that_is_always_over_is_refused(tmp_path, ttl):
    with pytest.raises(PolicyError, match="lease_ttl"):
        Checkpointer(tmp_path / "run", lease_ttl=ttl)


def test_overwriting_is_asked_for_with_a_bool(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        save(checkpointer, 1).wait()
        with pytest.raises(UnsupportedFormatError, match="overwrite"):
            save(checkpointer, 1, overwrite="false")
        save(checkpointer, 1, overwrite=np.True_).wait()


def test_one_checkpointer_per_run_and_process(run_uri):
    first = Checkpointer.for_run(run_uri)
    assert Checkpointer.for_run(str(run_uri)) is first
    first.close()
    second = Checkpointer.for_run(run_uri)
    assert second is not first
    second.close()


def test_the_writer_id_is_the_same_over_restarts(monkeypatch):
    assert default_writer_id() == default_writer_id()
    monkeypatch.setenv("CAIRN_WRITER_ID", "job-7")
    assert default_writer_id() == "job-7"


FIRST_AT_ONCE = """
import sys
import threading

from cairn import Checkpointer

sys.setswitchinterval(1e-6)
errors, ready = [], threading.Barrier(8)


def make(number):
    ready.wait()
    try:
        Checkpointer(f"{sys.argv[1]}/run{number}")
    except BaseException as error:
        errors.append(error)


threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*errors, sep="\\n")
"""


def test_many_threads_make_the_first_checkpointers_of_a_process_at_once(tmp_path):
    told = run_program(["-c", FIRST_AT_ONCE, str(tmp_path)])
    assert (told.stdout.strip(), told.returncode) == ("", 0), told.stderr
