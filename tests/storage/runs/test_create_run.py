"""Runs that are made before their job starts: once, whole, and gone on in."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cairn import (
    Checkpointer,
    CorruptionError,
    InvalidURIError,
    NotFoundError,
    ObjectStore,
    PreconditionFailedError,
    RetentionPolicy,
    Run,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
    annotate_step,
    apply_retention,
    check_run,
    collect_garbage,
    create_run,
    delete_step,
    find_garbage,
    fork_run,
    list_runs,
    load,
    promote_step,
    repair_run,
)
from cairn.storage.runs.fork import abandon_fork
from cairn.storage.runs.records.layout import RUN_FILE, alias_file, annotation_file, trash_file
from cairn.storage.runs.usage import run_usage
from tests.plain_orbax import manager
from tests.storage.forks import WRITER
from tests.storage.records import ASSETS, LEASE_FILE, attempt_file
from tests.storage.stored_runs import begin, end, save

ALIAS, LABELS, TOMBSTONE = alias_file("production"), annotation_file(3, 1), trash_file(3, 1)


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


def steps_of(uri):
    return [info.step for info in Run.open(uri).steps()]


def test_a_job_goes_on_in_the_run_that_was_made_for_it(root_uri):
    uri = root_uri / "demo"
    made = create_run(uri, labels={"team": "nlp"}).info()
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(3, {"w": np.ones(4, np.float32)})
    now = Run.open(uri).info()
    assert now == made
    assert (now.name, now.labels) == ("demo", {"team": "nlp"})
    assert steps_of(uri) == [3]
    assert load(uri, {"w": np.zeros(4, np.float32)})["w"].tolist() == [1, 1, 1, 1]


def test_a_name_that_exists_is_refused_and_stays_as_it_is(root_uri):
    create_run(root_uri / "demo", labels={"team": "nlp"})
    with pytest.raises(PreconditionFailedError, match=r"the run exists: .*/demo: expected no run"):
        create_run(root_uri / "demo", labels={"team": "vision"})
    assert Run.open(root_uri / "demo").info().labels == {"team": "nlp"}


@pytest.mark.parametrize("record", [RUN_FILE, attempt_file(1), LEASE_FILE])
def test_what_is_left_of_a_run_keeps_its_name(tmp_path, record):
    objects = ObjectStore.open(tmp_path / "demo")
    objects.write(record, b"{")
    with pytest.raises(PreconditionFailedError, match="one that can't be read"):
        create_run(tmp_path / "demo")
    assert objects.read(record).value == b"{"
    assert (objects.read(RUN_FILE) is None) is (record != RUN_FILE)


@pytest.mark.parametrize("with_run", [True, False])
@pytest.mark.parametrize("left", [[ALIAS], [LABELS], [TOMBSTONE], [ALIAS, LABELS, TOMBSTONE]])
def test_no_job_starts_among_records_of_steps_whose_attempts_are_lost(root_uri, with_run, left):
    """It would use a number again, as where the removal of a run was interrupted."""
    run = Run.create(root_uri / "demo")
    attempt = begin(run, -1)
    for step in (3, 6):
        save(run, step, attempt)
    end(run)
    promote_step(run, 6, "production", expect=None)
    annotate_step(run, 3, labels={"kind": "good"})
    delete_step(run, run.step(3), by="me")
    for name in {*run.objects.list()} - {*left} - ({RUN_FILE} if with_run else set()):
        run.objects.delete(name)
    run.files.delete_tree("attempts")  # a disk has its folders still
    with pytest.raises(CorruptionError, match=f"lost its attempts: .*{left[0]}"):
        Run.begin(root_uri / "demo", environment={})
    assert run.objects.list() == sorted([*left, *[RUN_FILE] * with_run])


def test_a_job_starts_where_nothing_of_a_step_is_left(root_uri):
    run = Run.create(root_uri / "demo")
    run.objects.write(f"{ASSETS}{'0' * 64}", b"")
    save(run, 3, begin(Run.begin(root_uri / "demo", environment={})[0], -1))
    assert steps_of(root_uri / "demo") == [3]


def test_where_no_run_can_be_none_is_made(tmp_path):
    manager(tmp_path / "theirs", steps=(3,))
    made = create_run(tmp_path / "mine")
    for folder in (
        tmp_path / "theirs",
        tmp_path / "theirs" / "3",
        tmp_path / "mine" / "steps" / "3",
        tmp_path / "mine" / "attempts" / "1",
        tmp_path / "my run",
    ):
        with pytest.raises(InvalidURIError):
            create_run(folder)
    assert made.objects.list("") == [RUN_FILE]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        create_run(tmp_path / "file")


def test_labels_that_cannot_be_kept_are_all_told_and_nothing_is_made(tmp_path):
    with pytest.raises(UnsupportedFormatError) as caught:
        create_run(tmp_path / "demo", labels={"a": 1, "b": None})
    assert len(caught.value.problems) == 2
    assert list_runs(tmp_path) == []
    with pytest.raises(UnsupportedFormatError, match="expected a mapping"):
        create_run(tmp_path / "demo", labels=["a"])


def test_of_many_who_make_it_at_once_one_does(root_uri):
    barrier = threading.Barrier(6)

    def make(number):
        barrier.wait()
        try:
            return create_run(root_uri / "demo", labels={"by": str(number)}).info()
        except PreconditionFailedError:
            return None

    with ThreadPoolExecutor(6) as pool:
        made = [info for info in pool.map(make, range(6)) if info is not None]
    assert made == [Run.open(root_uri / "demo").info()]


def test_a_job_that_begins_at_the_same_time_saves_in_the_one_run(root_uri):
    for turn in range(4):
        uri, barrier = root_uri / f"demo-{turn}", threading.Barrier(2)

        def make(uri=uri, barrier=barrier):
            barrier.wait()
            try:
                return create_run(uri, labels={"team": "nlp"}).info()
            except PreconditionFailedError:
                return None

        with ThreadPoolExecutor(1) as pool, Checkpointer(uri) as checkpointer:
            making = pool.submit(make)
            barrier.wait()
            checkpointer.save(3, {"w": np.ones(4, np.float32)})
            made = making.result()
        assert steps_of(uri) == [3]
        assert check_run(Run.open(uri)).ok
        info = Run.open(uri).info()
        assert made in (None, info)
        assert info.labels == ({} if made is None else {"team": "nlp"})


def test_a_run_without_steps_is_whole(root_uri):
    run = create_run(root_uri / "demo")
    assert list_runs(root_uri) == ["demo"]
    report = check_run(run)
    assert (report.ok, report.records, report.unlisted) == (True, 1, ())
    assert repair_run(run, by="me", dry_run=False) == []
    assert find_garbage(run) == collect_garbage(run, by="me") == []
    assert apply_retention(run, RetentionPolicy(keep_last=1), by="me").deleted == ()
    used = run_usage(run)
    assert (used.files, used.garbage, used.steps) == (1, 0, ())
    assert run.objects.list("") == [RUN_FILE]
    with pytest.raises(StepNotFoundError, match=r"no complete step.*Wait for the first save"):
        load(run.uri, {"w": np.zeros(4, np.float32)})


def test_a_fork_does_not_take_a_run_that_was_made(parent, root_uri):
    made = create_run(root_uri / "child", labels={"team": "nlp"})
    with pytest.raises(PreconditionFailedError, match="the run exists"):
        fork_run(parent, parent.step(3), made.uri, by=WRITER)
    abandon_fork(made.uri, by=WRITER)
    assert made.info().labels == {"team": "nlp"}
    assert made.steps() == []


def test_a_run_below_a_file_or_a_dangling_link_is_refused_by_what_is_there(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for name, next_step in {"file": "whose parents are folders", "dangling": "link"}.items():
        for folder in (tmp_path / name, tmp_path / name / "run"):
            with pytest.raises(NotFoundError, match=next_step):
                Run.create(folder)
    assert not (tmp_path / "gone").exists()
