from datetime import timedelta

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import (
    AliasNotFoundError,
    Checkpointer,
    CheckpointRef,
    CorruptionError,
    InvalidURIError,
    PreconditionFailedError,
    Run,
    RunNotFoundError,
    StepInFlightError,
    StepNotFoundError,
    StepState,
    UnsupportedFormatError,
    list_runs,
    open_files,
    parse_ref,
    resolve_checkpoint,
)
from cairn.storage.runs.records.layout import RUN_FILE, manifest_file, step_dir, trash_file
from cairn.storage.runs.resolution import resolve_step
from tests.storage.records import AliasWriter, begin_attempt, put_record, release
from tests.storage.stored_runs import begin, publish, save, states, write_data


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


@pytest.fixture
def run(root_uri, clock):
    return Run.create(root_uri / "demo", labels={"team": "a"}, clock=clock)


def test_a_run_is_created_once_and_opened(run, root_uri, clock):
    info = Run.open(root_uri / "demo").info()
    assert (info.name, info.labels, info.lineage) == ("demo", {"team": "a"}, None)
    assert info.created == "2026-11-21T12:00:00.000000Z"
    again = Run.create(root_uri / "demo", labels={"team": "b"}, clock=clock)
    assert again.info() == info
    clock.now += timedelta(seconds=1)
    with pytest.raises(PreconditionFailedError, match="the run exists") as caught:
        Run.create(root_uri / "demo", exist_ok=False, clock=clock)
    assert caught.value.current == info


def test_lineage_is_kept(root_uri):
    lineage = {"run": "gs://b/parent", "step": 3, "attempt": 1, "manifest_digest": "sha256:1"}
    run = Run.create(root_uri / "child", lineage=lineage)
    assert run.info().lineage.model_dump() == lineage


def test_a_folder_without_a_run_is_told(root_uri):
    for action in (Run.open, resolve_checkpoint):
        with pytest.raises(RunNotFoundError, match=r"no such run.*none.*run\.json"):
            action(str(root_uri / "none"))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":"cairn.run","version":99}'])
def test_a_run_that_cannot_be_read_is_told(run, data):
    run.objects.write(RUN_FILE, data)
    with pytest.raises(UnsupportedFormatError, match=r"demo/run\.json"):
        Run.open(run.uri)


def test_a_name_that_could_not_be_listed_is_refused(root_uri):
    with pytest.raises(InvalidURIError, match="invalid run name"):
        Run.create(root_uri / "my run")


def test_an_empty_run_has_no_steps(run):
    assert run.steps() == run.all_states() == []
    assert run.latest() is None
    assert run.latest_step() is None
    with pytest.raises(StepNotFoundError, match="no complete step"):
        resolve_step(run, CheckpointRef(run.uri))
    with pytest.raises(StepNotFoundError, match="found no steps"):
        run.step(3)


def test_listed_steps_are_those_with_a_manifest(run):
    attempt = begin(run, -1)
    first, second = save(run, 3, attempt), save(run, 12, attempt)
    assert [(info.step, info.state) for info in run.steps()] == [
        (3, StepState.LISTED),
        (12, StepState.LISTED),
    ]
    info = run.steps()[0]
    assert (info.created, info.nbytes) == ("2026-11-21T12:00:00Z", 4)
    assert info.manifest_digest == first.digest()
    assert run.latest().manifest_digest == second.digest()
    assert run.latest_step() == 12
    assert run.step(3) == info
    assert run.manifest(info) == first
    assert run.step_uri(info) == run.uri / f"attempts/{attempt}/3"


def test_latest_is_the_highest_step_not_the_last_saved(run):
    attempt = begin(run, -1)
    save(run, 9, attempt)
    save(run, 3, attempt)
    assert run.latest().step == 9


def test_states_of_steps(run, clock):
    old = begin(run, -1)
    save(run, 1, old)
    save(run, 5, old)
    write_data(run, 6, old)
    write_data(run, 7, old, committed=False)
    new = begin(run, 2)
    save(run, 3, new)
    write_data(run, 4, new)
    save(run, 5, new)
    write_data(run, 6, new)
    write_data(run, 7, new, committed=False)
    write_data(run, 8, new, committed=False, suffix=".orbax-checkpoint-tmp")
    save(run, 2, new)
    run.objects.write(trash_file(2, new), b"{}")
    expected = {
        (1, old): "listed",
        (2, new): "trashed",
        (3, new): "listed",
        (4, new): "unverified",
        (5, old): "superseded",
        (5, new): "listed",
        (6, old): "superseded",
        (6, new): "in_flight",  # committed, and about to be published
        (7, old): "abandoned",
        (7, new): "in_flight",
        (8, new): "in_flight",
    }
    assert states(run) == expected
    assert run.step_attempts() == {1: old, 3: new, 5: new}
    clock.now += timedelta(hours=1)
    expected |= {(6, new): "unverified", (7, new): "abandoned", (8, new): "abandoned"}
    assert states(run) == expected


def test_a_released_lease_means_nothing_is_in_flight(run, clock):
    attempt = begin_attempt(run.objects, writer="w", base_step=-1, clock=clock)
    write_data(run, 1, attempt.number, committed=False)
    assert states(run) == {(1, 1): "in_flight"}
    release(run.objects, attempt, clock=clock)
    assert states(run) == {(1, 1): "abandoned"}


def test_a_plain_orbax_root_put_in_place_is_unverified(run):
    write_data(run, 7, 1)
    assert states(run) == {(7, 1): "unverified"}
    assert run.steps() == []


def test_foreign_folders_and_files_are_ignored(run):
    begin(run, -1)
    files = open_files(run.uri)
    for rel in ("attempts/x/1/data", "attempts/1/notes/x", "attempts/1/007/x", "attempts/1/file"):
        with files.open_write(rel) as stream:
            stream.write(b"1")
    run.objects.write("manifests/notes.json", b"1")
    assert run.all_states() == run.steps() == []


def test_rollback_and_its_undo(run):
    first = begin(run, -1)
    for step in (3, 6, 9):
        save(run, step, first)
    second = begin(run, 3)
    assert [info.step for info in run.steps()] == [3]
    save(run, 6, second)
    assert run.step_attempts() == {3: first, 6: second}
    assert states(run)[(6, first)] == "superseded"


def test_a_step_in_flight_is_told_as_such(run):
    attempt = begin(run, -1)
    write_data(run, 3, attempt, committed=False)
    with pytest.raises(StepInFlightError, match="the step is being saved"):
        run.step(3)
    with pytest.raises(StepInFlightError):
        resolve_step(run, parse_ref(f"{run.uri}/steps/3"))


def test_a_missing_step_names_those_that_exist(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    with pytest.raises(StepNotFoundError, match=r"expected step 4, found steps 3, 6"):
        run.step(4)
    write_data(run, 5, attempt)
    with pytest.raises(StepNotFoundError, match=r"found step 5 unverified.*Listed: steps 3, 6"):
        run.step(5)


def test_references_resolve(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    six = save(run, 6, attempt)
    AliasWriter(run.objects).move(
        "production", step=3, attempt=attempt, manifest_digest=run.step(3).manifest_digest,
        expect=None,
    )  # fmt: skip
    for text, step in ((f"{run.uri}", 6), (f"{run.uri}@production", 3), (f"{run.uri}/steps/6", 6)):
        opened, info = resolve_checkpoint(text)
        assert opened.uri == run.uri
        assert info.step == step
    assert resolve_checkpoint(f"{run.uri}@latest")[1].manifest_digest == six.digest()
    with pytest.raises(AliasNotFoundError, match=r"'best'.*aliases: production"):
        resolve_checkpoint(f"{run.uri}@best")


def test_an_alias_keeps_its_step_after_a_rollback(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    save(run, 6, attempt)
    AliasWriter(run.objects).move("production", step=6, attempt=attempt, expect=None)
    begin(run, 3)
    info = resolve_checkpoint(f"{run.uri}@production")[1]
    assert (info.step, info.attempt, info.state) == (6, attempt, StepState.SUPERSEDED)
    assert run.manifest(info).step == 6


def test_an_alias_to_a_deleted_step_is_told(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    AliasWriter(run.objects).move("production", step=3, attempt=attempt, expect=None)
    run.objects.delete(manifest_file(3, attempt))
    with pytest.raises(StepNotFoundError, match="the step is gone"):
        resolve_checkpoint(f"{run.uri}@production")


def test_an_alias_with_another_digest_is_corrupt(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    AliasWriter(run.objects).move(
        "production", step=3, attempt=attempt, manifest_digest="sha256:0", expect=None
    )
    with pytest.raises(CorruptionError, match="another manifest"):
        resolve_checkpoint(f"{run.uri}@production")


def test_a_manifest_that_changed_or_moved_is_corrupt(run):
    attempt = begin(run, -1)
    save(run, 3, attempt)
    info = run.step(3)
    other = save(run, 6, attempt)
    run.objects.write(manifest_file(3, attempt), other.to_bytes())
    with pytest.raises(CorruptionError, match="the manifest of another place"):
        run.manifest(info)
    put_record(run.objects, manifest_file(3, attempt), other)
    with pytest.raises(CorruptionError, match="under another's name"):
        run.manifest(info)
    changed = other.model_copy(update={"step": 3, "writer": "someone else"})
    put_record(run.objects, manifest_file(3, attempt), changed)
    with pytest.raises(CorruptionError, match="the manifest changed"):
        run.manifest(info)


def test_a_step_without_manifest_has_none_to_read(run):
    write_data(run, 7, 1)
    with pytest.raises(StepNotFoundError, match="unverified"):
        run.manifest(run.all_states()[0])


def test_listing_follows_the_store_and_reads_each_manifest_once(run):
    attempt = begin(run, -1)
    for step in range(5):
        save(run, step, attempt)
    assert len(run.steps()) == len(Run.open(run.uri).steps()) == 5
    run.objects.delete(manifest_file(2, attempt))
    assert [info.step for info in run.steps()] == [0, 1, 3, 4]


def test_steps_are_listed_from_small_objects_alone(gcs):
    run = Run.create(f"{gcs.bucket_uri}/demo")
    attempt = begin(run, -1)
    for step in range(3):
        save(run, step, attempt)
    run.steps()
    asked = gcs.faults.add("slow", count=None, predicate=lambda request: True)
    data = gcs.faults.add("slow", count=None, name=r"attempts/\d+/")
    assert len(run.steps()) == 3
    assert data.fired == 0
    lists = 3
    lease_attempts_and_manifests = 1 + 1 + 3
    assert asked.fired == lists + lease_attempts_and_manifests


def test_runs_are_listed_by_name(root_uri):
    assert list_runs(root_uri) == []
    for name in ("b", "a", "a.1"):
        Run.create(root_uri / name)
    files = open_files(root_uri)
    for rel in ("no-run/x", "my run/run.json", ".hidden/run.json", "file"):
        with files.open_write(rel) as stream:
            stream.write(b"1")
    assert list_runs(root_uri) == ["a", "a.1", "b"]


@pytest.mark.parametrize("inner", ["steps/2", "steps/7"])
def test_no_run_begins_at_the_address_of_a_step(root_uri, inner):
    run = Run.create(root_uri / "demo")
    save(run, 2, begin(run, -1))
    for create in (Run.create, lambda uri: Checkpointer(uri).begin()):
        with pytest.raises(InvalidURIError, match=f"address of step {inner[-1]} of {run.uri}"):
            create(run.uri / inner)
    assert resolve_checkpoint(run.uri / "steps/2")[0].uri == run.uri
    assert {entry.name for entry in open_files(run.uri).list()} == {
        "run.json",
        "lease.json",
        "attempts",
        "manifests",
    }


@pytest.mark.parametrize("inner", ["attempts", "attempts/1", "trash", "manifests", "exports/2.1/x"])
def test_no_run_begins_in_a_folder_of_another(root_uri, inner):
    run = Run.create(root_uri / "demo")
    with pytest.raises(InvalidURIError, match=f"found a folder of the run {run.uri}"):
        Run.create(run.uri / inner)
    assert list_runs(run.uri) == []
    assert list_runs(root_uri) == ["demo"]


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "_METADATA"])
def test_no_run_begins_in_the_folder_of_a_plain_checkpoint(root_uri, name):
    with open_files(root_uri).open_write(f"plain/{name}") as stream:
        stream.write(b"{}")
    with pytest.raises(InvalidURIError, match="found the folder of a checkpoint"):
        Run.create(root_uri / "plain")
    assert list_runs(root_uri) == []


def test_a_folder_of_such_a_name_that_is_in_no_run_holds_runs(root_uri):
    Run.create(root_uri / "exports/demo")
    assert list_runs(root_uri / "exports") == ["demo"]


def test_creating_a_run_asks_no_more_for_where_it_lies(gcs):
    asked = gcs.faults.add("slow", count=None, predicate=lambda request: True)
    Run.create(f"{gcs.bucket_uri}/some/folder/demo")
    metadata_of_a_checkpoint, run_file, other_records, folders_of_others = 2, 2, 3, 1
    assert asked.fired <= metadata_of_a_checkpoint + run_file + other_records + folders_of_others


def test_a_run_works_in_memory():
    run = Run.create("memory://test-run/demo")
    attempt = begin(run, -1)
    publish(run, 3, attempt)
    assert run.latest().step == 3
    assert states(run) == {(3, attempt): "listed"}


def test_a_step_saved_by_plain_orbax_is_unverified(tmp_path):
    run = Run.create(tmp_path / "demo")
    ocp.save(tmp_path / "demo" / step_dir(1, 5), {"a": np.arange(4.0)})
    assert states(run) == {(5, 1): "unverified"}


def test_a_damaged_manifest_that_does_not_count_harms_no_step(tmp_path):
    run = Run.create(tmp_path / "run")
    first = begin(run, -1)
    save(run, 3, first)
    second = begin(run, 2)
    save(run, 3, second)
    run.objects.write(manifest_file(3, first), b"{")
    assert run.step(3).attempt == second


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("runs/frist", "runs/first"), ("rnus/first", "runs"), ("runs/firts@best", "runs/first")],
)
def test_a_run_that_is_not_there_is_told_with_the_nearest_that_is(tmp_path, asked, nearest):
    Run.create(tmp_path / "runs" / "first")
    Run.create(tmp_path / "runs" / "second")
    with pytest.raises(RunNotFoundError) as caught:
        resolve_checkpoint(tmp_path / asked)
    assert caught.value.path == f"file://{tmp_path}/{asked.partition('@')[0]}"
    assert f"The nearest name that exists is file://{tmp_path}/{nearest}." in str(caught.value)


def test_of_names_that_are_not_alike_none_is_the_nearest(tmp_path):
    Run.create(tmp_path / "runs" / "first")
    with pytest.raises(RunNotFoundError) as caught:
        Run.open(tmp_path / "runs" / "quite-other")
    assert "nearest" not in str(caught.value)
