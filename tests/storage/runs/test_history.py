"""Records that are lost, damaged or in another's place change no history unnoticed."""

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from cairn import (
    AliasNotFoundError,
    CorruptionError,
    FencedError,
    InvalidURIError,
    Manifest,
    ObjectStore,
    PreconditionFailedError,
    RetentionPolicy,
    Run,
    RunNotFoundError,
    StepNotFoundError,
    UnsupportedFormatError,
    Writer,
    annotate_step,
    apply_retention,
    check_run,
    collect_garbage,
    delete_step,
    find_deletable_step,
    find_garbage,
    list_runs,
    parse_ref,
    parse_uri,
    promote_step,
    repair_run,
    roll_back,
    undelete_step,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.layout import (
    RUN_FILE,
    alias_file,
    annotation_file,
    manifest_file,
    trash_file,
)
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.retention import step_facts
from tests.storage.records import (
    LEASE_FILE,
    AttemptRecord,
    attempt_file,
    free_number,
    list_attempts,
    parse_manifest_file,
    saved_steps,
)
from tests.storage.stored_runs import PLAIN, write_data

UNREADABLE = (CorruptionError, UnsupportedFormatError)


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


@pytest.fixture
def run(root_uri):
    return Run.create(root_uri / "my-run")


def saved(writer, run, step, *, overwrite=False):
    attempt = writer.claim(step, overwrite=overwrite)
    write_data(run, step, attempt)
    writer.publish(
        Manifest(
            step=step,
            attempt=attempt,
            created="2026-11-21T12:00:00Z",
            writer="job",
            items=("model",),
            **PLAIN,
        )
    )


def job(run, *steps, writer="job"):
    """A job that saves these steps, and ends."""
    made = Writer(run, writer=writer)
    for step in steps:
        saved(made, run, step)
    made.close()


def overwrite(run, step):
    """A job that overwrites a step, and ends."""
    writer = Writer(run, writer="job")
    saved(writer, run, step, overwrite=True)
    writer.close()


def lose(run, name):
    run.objects.delete(name)


def remove(run):
    for name in run.objects.list():
        run.objects.delete(name)


def flip(run, name):
    data = bytearray(run.objects.read(name).value)
    data[len(data) // 2] ^= 1
    run.objects.write(name, bytes(data))


def swap(run, first, second):
    one, other = run.objects.read(first).value, run.objects.read(second).value
    run.objects.write(first, other)
    run.objects.write(second, one)


def nothing_is_deleted(run, name):
    """Retention and the collector refuse, and name the record."""
    before = sorted(run.objects.list())
    for act in (
        lambda: apply_retention(run, RetentionPolicy(keep_last=1), by="me", grace=0),
        lambda: collect_garbage(run, by="me"),
        lambda: find_garbage(run),
    ):
        with pytest.raises(UNREADABLE, match=name.replace(".", r"\.")):
            act()
    assert sorted(run.objects.list()) == before


def test_a_record_says_where_it_belongs(run):
    job(run, 1)
    names = [name for name in run.objects.list() if name.endswith(".json")]
    assert {RUN_FILE, LEASE_FILE, attempt_file(1), manifest_file(1, 1)} == set(names)
    for name in names:
        body = json.loads(run.objects.read(name).value)
        assert (body["key"], body["run"]) == (name, run.info().id)


def test_the_newest_manifest_lost_is_named_and_the_step_before_it_is_not_the_latest(run):
    job(run, 10, 20, 30)
    lose(run, manifest_file(30, 1))
    for act in (run.latest, run.latest_step, lambda: run.step(30)):
        with pytest.raises(CorruptionError, match=r"manifests/30\.1\.json: .*`cairn repair`"):
            act()
    assert run.step(20).step == 20
    assert [info.step for info in run.steps()] == [10, 20]
    nothing_is_deleted(run, manifest_file(30, 1))


def test_a_job_does_not_go_on_from_before_a_lost_manifest(run):
    job(run, 10, 20, 30)
    lose(run, manifest_file(30, 1))
    with pytest.raises(CorruptionError, match=r"manifests/30\.1\.json"):
        job(run, 40)
    assert roll_back(run, 20, by="me").step == 20
    assert run.latest_step() == 20
    job(run, 40)
    assert [info.step for info in run.steps()] == [10, 20, 40]


def test_an_overwritten_step_does_not_come_back_when_its_successor_is_lost(run):
    job(run, 10, 20, 30)
    overwrite(run, 30)
    assert run.step(30).attempt == 2
    lose(run, manifest_file(30, 2))
    for act in (run.latest, lambda: run.step(30)):
        with pytest.raises(CorruptionError, match=r"manifests/30\.2\.json"):
            act()


@pytest.mark.parametrize(("step", "later"), [(20, []), (20, [50]), (30, [40]), (30, [])])
def test_the_lost_manifest_of_an_overwrite_does_not_give_its_place_back(run, step, later):
    job(run, 10, 20, 30)
    writer = Writer(run, writer="job")
    saved(writer, run, step, overwrite=True)
    for one in later:
        saved(writer, run, one)
    writer.close()
    job(run, 60)
    lose(run, manifest_file(step, 2))
    with pytest.raises(CorruptionError, match=rf"manifests/{step}\.2\.json.*`cairn repair`"):
        run.step(step)
    assert step not in {info.step for info in run.steps()}
    assert run.latest_step() == 60
    assert manifest_file(step, 2) in check_run(run).unreadable
    nothing_is_deleted(run, manifest_file(step, 2))


@pytest.mark.parametrize(("step", "attempt"), [(20, 2), (20, 3), (30, 2)])
def test_an_overwrite_that_is_lost_with_an_attempt_gives_its_place_to_nobody(run, step, attempt):
    """Nor once the attempt is mended, which is rebuilt from the others."""
    job(run, 10, 20, 30)
    writer = Writer(run, writer="job")
    saved(writer, run, step, overwrite=True)
    saved(writer, run, 40)
    writer.close()
    job(run, 50)
    lose(run, manifest_file(step, 2))
    lose(run, attempt_file(attempt))
    listed = [one for one in (10, 20, 40, 50) if one < step or one > 30]
    for mended in (False, True):
        with pytest.raises(CorruptionError, match=rf"manifests/{step}\.2\.json"):
            run.step(step)
        assert [info.step for info in run.steps()] == listed
        if not mended:
            done = repair_run(run, by="me", dry_run=False)
            assert [one.name for one in done if one.done] == [attempt_file(attempt)]


def test_an_overwrite_without_a_manifest_of_its_own_and_an_attempt_brings_nothing_back(run):
    """Step 40 was replaced by the start that had overwritten step 20."""
    job(run, 20, 40)
    writer = Writer(run, writer="job")
    saved(writer, run, 20, overwrite=True)
    saved(writer, run, 50)
    writer.close()
    job(run, 60)
    listed = {20: 2, 50: 2, 60: 3}
    assert run.step_attempts() == listed
    run.objects.write(manifest_file(20, 2), run.objects.read(manifest_file(20, 1)).value)
    lose(run, attempt_file(2))
    assert run.step_attempts().items() <= listed.items()
    with pytest.raises(CorruptionError, match="record of an attempt is lost"):
        run.step(40)
    assert attempt_file(2) in check_run(run).unreadable
    assert run.latest_step() == 60
    nothing_is_deleted(run, attempt_file(2))


def test_a_tombstone_of_another_place_does_not_stand_for_a_lost_manifest(run):
    job(run, 10, 20, 30)
    delete_step(run, find_deletable_step(run, 10), by="me")
    run.objects.write(trash_file(30, 1), run.objects.read(trash_file(10, 1)).value)
    lose(run, manifest_file(30, 1))
    with pytest.raises(CorruptionError, match=r"manifests/30\.1\.json"):
        run.latest_step()


def test_an_overwrite_that_was_removed_with_what_it_had_overwritten_is_not_lost(run):
    job(run, 10, 20, 30)
    writer = Writer(run, writer="job")
    saved(writer, run, 20, overwrite=True)
    saved(writer, run, 40)
    writer.close()
    job(run, 50)
    for key in ((20, 2), (20, 1), (30, 1)):
        delete_step(run, find_deletable_step(run, *key), by="me", grace=0)
        collect_garbage(run, by="me")
        assert check_run(run).ok, check_run(run).problems
        with pytest.raises(StepNotFoundError):
            run.step(20)
    collect_garbage(run, by="me")
    assert not run.trashed()
    assert check_run(run).ok, check_run(run).problems
    assert [info.step for info in run.steps()] == [10, 40, 50]


def test_an_overwrite_whose_attempt_is_lost_is_one_event_all_the_same(run):
    """Its manifest tells what the attempt was begun for; so does the attempt that is rebuilt."""
    job(run, 10, 20, 30)
    overwrite(run, 20)
    before = AttemptRecord.parse(run.objects.read(attempt_file(2)).value, "").of_number(2)
    lose(run, attempt_file(2))
    for mended in (False, True):
        assert {info.step: info.attempt for info in run.steps()} == {10: 1, 20: 2}
        assert run.latest_step() == 20
        if not mended:
            repair_run(run, by="me", dry_run=False)
    (again,) = (one for one in run.attempts() if one.number == 2)
    for one in (before, again):
        assert (one.base_step, one.base_attempt, one.overwrites) == (30, 1, 20)


def test_what_was_overwritten_stays_aside_when_its_successor_is_deleted_and_removed(run):
    job(run, 10, 20, 30)
    overwrite(run, 20)
    delete_step(run, run.step(20), by="me", grace=0)
    for _ in range(3):
        assert [info.step for info in run.steps()] == [10]
        assert check_run(run).ok, check_run(run).problems
        collect_garbage(run, by="me")
    job(run, 40)
    assert [info.step for info in run.steps()] == [10, 40]


def test_a_promotion_of_what_was_overwritten_with_an_earlier_step_is_refused(run):
    job(run, 10, 20, 30)
    writer = Writer(run, writer="job")
    writer.claim(20, overwrite=True)
    assert promote_step(run, 30, "production", expect=None).attempt == 1  # it is not published yet
    saved(writer, run, 20, overwrite=True)
    writer.close()
    for act in (lambda: run.step(30), lambda: promote_step(run, 30, "candidate", expect=None)):
        with pytest.raises(StepNotFoundError, match="step 30 superseded"):
            act()
    assert promote_step(run, 20, "candidate", expect=None).attempt == 3


STRAYS = {
    "a manifest": (manifest_file(3, 3), manifest_file(3, 9)),
    "a tombstone": (trash_file(1, 1), trash_file(3, 9)),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_no_start_goes_on_beside_what_an_attempt_without_a_record_has_saved(run, stray):
    for step in (1, 2, 3):
        job(run, step)
    delete_step(run, find_deletable_step(run, 1), by="me")
    source, name = STRAYS[stray]
    run.objects.write(name, run.objects.read(source).value)
    for act in (
        lambda: job(run, 4),
        lambda: roll_back(run, 2, by="me"),
        lambda: collect_garbage(run, by="me"),
    ):
        with pytest.raises(CorruptionError, match=r"attempts/9\.json") as refused:
            act()
    assert "cairn repair" in str(refused.value)
    assert [one.number for one in run.attempts()] == [1, 2, 3]
    (hint,) = (one.hint for one in repair_run(run, by="me") if one.name == attempt_file(9))
    assert name in hint
    lose(run, name)
    job(run, 4)
    assert [info.step for info in run.steps()] == [2, 3, 4]
    assert check_run(run).ok, check_run(run).problems


def test_a_stray_manifest_can_be_forgotten(run):
    for step in (1, 2, 3):
        job(run, step)
    name = manifest_file(3, 9)
    run.objects.write(name, run.objects.read(manifest_file(3, 3)).value)
    repair_run(run, by="me", dry_run=False, forget=[name])
    assert check_run(run).ok, check_run(run).problems
    job(run, 4)
    assert run.latest_step() == 4


@pytest.mark.parametrize("kept", [manifest_file(3, 3), trash_file(3, 3)])
def test_the_number_of_an_attempt_that_has_saved_is_not_used_again(run, kept):
    for step in (1, 2, 3):
        job(run, step)
    run.objects.write(kept, run.objects.read(manifest_file(3, 3)).value)
    for name in run.objects.list():
        if (name.startswith("attempts/3") or ".3.json" in name or name == LEASE_FILE) and (
            name != kept
        ):
            lose(run, name)
    assert free_number(run.objects, saved_steps(run.objects)) == 4
    with pytest.raises(CorruptionError, match=r"attempts/3\.json"):
        job(run, 4)


def versions_of(run, seen):
    """Notes what records are, beside what they were."""
    for name in run.objects.list():
        if name.endswith(".json"):
            seen.setdefault(name, {})[run.objects.read(name).value] = None


@pytest.fixture
def long_run(tmp_path):
    """A run with a way back, an overwrite and an alias; all that its records have been, by name."""
    run, seen = Run.create(tmp_path / "runs/template"), {}
    writer = Writer(run, writer="job")
    acts = [
        lambda: saved(writer, run, 10),
        lambda: saved(writer, run, 20),
        lambda: promote_step(run, 10, "production", expect=None),
        lambda: saved(writer, run, 30),
        writer.close,
        lambda: roll_back(run, 20, by="me"),
        lambda: job(run, 30, 40),
        lambda: overwrite(run, 30),
        lambda: promote_step(run, 30, "production", expect=1),
        lambda: job(run, 50),
    ]
    for act in acts:
        act()
        versions_of(run, seen)
    return run, seen


def test_no_start_makes_a_history_of_a_record_that_is_lost_or_as_it_was(long_run):
    """Each record alone: the start is refused and names one, or goes on from what was written."""
    template, seen = long_run
    right = template.step_attempts()
    assert right == {10: 1, 20: 1, 30: 4, 50: 5}
    outcomes = {}
    for name, versions in seen.items():
        for number, value in enumerate([None, *list(versions)[:-1]]):
            path = f"{template.uri.local_path}-{name.replace('/', '-')}-{number}"
            shutil.copytree(template.uri.local_path, path)
            run = Run(parse_uri(path))
            if value is None:
                lose(run, name)
            else:
                run.objects.write(name, value)
            try:
                run, look = Run.begin(run.uri, environment={})
                writer = Writer(run, writer="job")
                number = writer.claim(60, listing=look)
                writer.close()
                job(run, 60)
            except CorruptionError:
                outcomes[name, value is None] = "refused"
                continue
            outcomes[name, value is None] = "goes on"
            listed = run.step_attempts()
            assert listed.pop(60) > number > 5
            gone = dict([parse_manifest_file(name)] if name.startswith("manifests/") else [])
            assert listed == {step: one for step, one in right.items() if gone.get(step) != one}
    lost = {
        name for (name, is_lost), outcome in outcomes.items() if is_lost and outcome == "refused"
    }
    told = {RUN_FILE, manifest_file(50, 5), *(attempt_file(number) for number in range(1, 6))}
    assert lost >= told
    assert outcomes[LEASE_FILE, False] == "goes on"


def moved_before(run, monkeypatch, number):
    """Has the run renamed right before its n-th write from now on; where it is then, if it was."""
    put, target, count = ObjectStore._put, f"{run.uri.local_path}-moved", itertools.count(1)

    def moving(self, *args):
        if self is run.objects and next(count) == number:
            os.rename(run.uri.local_path, target)
        return put(self, *args)

    monkeypatch.setattr(ObjectStore, "_put", moving)
    return Path(target)


VERBS = {
    "a save": (lambda run, writer: saved(writer, run, 30), lambda run: run.latest_step() == 30),
    "an overwrite": (
        lambda run, writer: saved(writer, run, 10, overwrite=True),
        lambda run: run.step_attempts() == {10: 2},
    ),
    "a promotion": (
        lambda run, _: promote_step(run, 20, "production", expect=None),
        lambda run: run.aliases.require("production").step == 20,
    ),
    "a deletion": (
        lambda run, _: delete_step(run, find_deletable_step(run, 10), by="me"),
        lambda run: run.trashed() == {(10, 1)},
    ),
    "a rollback": (lambda run, _: roll_back(run, 10, by="me"), lambda run: run.latest_step() == 10),
    "labels": (
        lambda run, _: annotate_step(run, 10, labels={"a": "b"}),
        lambda run: step_facts(run)[0].labels == {"a": "b"},
    ),
}
"""What is done, and whether it was."""


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_done_in_a_run_that_was_renamed_meanwhile(tmp_path, monkeypatch, verb):
    """At any write: done is what the run shows where it is, and another can begin where it was."""
    do, is_shown = VERBS[verb]
    outcomes = []
    for number in itertools.count(1):
        run = Run.create(tmp_path / f"run-{number}")
        job(run, 10, 20)
        writer = Writer(run, writer="job")
        with monkeypatch.context() as patch:
            target = moved_before(run, patch, number)
            try:
                do(run, writer)
                outcomes.append("done")
            except (FencedError, RunNotFoundError, PreconditionFailedError):
                outcomes.append("refused")
        writer.close()
        if not target.exists():
            break
        moved = Run.open(target)
        assert outcomes[-1] == "refused" or is_shown(moved)
        assert check_run(moved).ok, check_run(moved).problems
        job(Run.create(run.uri), 1)
        assert Run.open(run.uri).latest_step() == 1
    assert "refused" in outcomes
    assert outcomes[-1] == "done"


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_can_not_tell_where_the_run_is_takes_nothing_back(run, monkeypatch, verb):
    """A lease that was taken back so left a run that nobody could begin."""
    do, is_shown = VERBS[verb]
    job(run, 10, 20)
    look = os.lstat

    def failing(path, **options):
        if str(path).endswith(("run.json", "lease.json")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path, **options)

    writer = Writer(run, writer="job")
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", failing)
        do(run, writer)
    writer.close()
    assert is_shown(run)
    assert check_run(run).ok


def test_a_run_that_is_removed_right_before_a_manifest_has_no_durable_step(run, monkeypatch):
    writer = Writer(run, writer="job")
    saved(writer, run, 10)
    put = ObjectStore._put

    def removing(self, key, *args):
        if key == manifest_file(20, 1):
            remove(run)
        return put(self, key, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "_put", removing)
        with pytest.raises(FencedError, match="the run was removed"):
            saved(writer, run, 20)
    writer.close()
    assert run.objects.read(manifest_file(20, 1)) is None
    assert Run.create(run.uri).latest_step() is None


def test_an_overwrite_that_failed_and_was_not_given_up_is_not_missed(run):
    """The step that comes then is saved in an attempt of its own."""
    job(run, 10, 20, 30)
    writer = Writer(run, writer="job")
    writer.claim(30, overwrite=True)
    saved(writer, run, 40)
    writer.close()
    job(run, 50)
    assert {info.step: info.attempt for info in run.steps()} == {10: 1, 20: 1, 30: 1, 40: 3, 50: 4}
    assert check_run(run).ok, check_run(run).problems


def test_a_step_that_was_deleted_and_removed_is_not_lost(run):
    job(run, 10, 20, 30)
    delete_step(run, find_deletable_step(run, 30), by="me", grace=0)
    assert run.latest_step() == 20
    assert [one.step for one in collect_garbage(run, by="me")] == [30]
    assert run.objects.read(trash_file(30, 1)) is None
    assert run.latest_step() == 20
    job(run, 40)
    assert run.latest_step() == 40


def test_the_newest_attempt_lost_does_not_undo_a_rollback(run):
    job(run, 10, 20, 30)
    roll_back(run, 10, by="me")
    lose(run, attempt_file(2))
    assert run.latest_step() == 10
    with pytest.raises(StepNotFoundError):
        run.step(30)
    with pytest.raises(CorruptionError, match=r"attempts/2\.json.*`cairn repair`"):
        job(run, 40)
    with pytest.raises(CorruptionError, match=r"attempts/2\.json"):
        run.attempts()
    nothing_is_deleted(run, attempt_file(2))


def test_an_attempt_lost_between_others_is_known_by_the_one_after_it(run):
    job(run, 10, 20, 30)
    roll_back(run, 10, by="me")
    job(run, 20)
    lose(run, attempt_file(2))
    assert {info.step: info.attempt for info in run.steps()} == {10: 1, 20: 3}
    with pytest.raises(CorruptionError, match=r"attempts/2\.json"):
        job(run, 40)
    nothing_is_deleted(run, attempt_file(2))


def test_two_attempts_lost_in_a_row_bring_nothing_back(run):
    """The first of them set steps aside; only its manifests tell that it was."""
    job(run, 10, 20, 30)
    roll_back(run, 10, by="me")
    job(run, 15, 40)
    job(run, 50)
    job(run, 60)
    for number in (2, 3, 4):
        lose(run, attempt_file(number))
    assert run.latest_step() == 60
    for step in (20, 30):
        with pytest.raises(CorruptionError, match=r"attempts/3\.json"):
            run.step(step)
    assert [info.step for info in run.steps()] == [15, 40, 50, 60]
    assert attempt_file(3) in check_run(run).unreadable
    nothing_is_deleted(run, r"attempts/3.json|attempts/4.json")


def test_an_attempt_in_the_place_of_another_is_named_and_changes_nothing(run):
    job(run, 10, 20)
    job(run, 30)
    job(run, 40)
    run.objects.write(attempt_file(3), run.objects.read(attempt_file(1)).value)
    assert [info.step for info in run.steps()] == [10, 20, 30, 40]
    with pytest.raises(CorruptionError, match=r"attempts/3\.json: expected the record attempts/3"):
        job(run, 50)
    nothing_is_deleted(run, attempt_file(3))


@pytest.mark.parametrize("damage", [flip, lose])
def test_damage_to_an_old_attempt_blocks_no_load(run, damage):
    job(run, 10)
    job(run, 20)
    damage(run, attempt_file(1))
    assert run.latest_step() == 20
    assert run.step(10).attempt == 1
    nothing_is_deleted(run, attempt_file(1))


def test_a_flipped_bit_in_one_manifest_hides_no_other_step(run):
    job(run, 10, 20, 30)
    flip(run, manifest_file(10, 1))
    steps = run.steps()
    assert [info.step for info in steps] == [10, 20, 30]
    assert [info.problem is not None for info in steps] == [True, False, False]
    assert "manifests/10.1.json" in steps[0].problem
    assert run.latest().step == 30
    with pytest.raises(UNREADABLE, match=r"manifests/10\.1\.json"):
        run.step(10)
    with pytest.raises(CorruptionError, match=r"manifests/10\.1\.json"):
        apply_retention(run, RetentionPolicy(keep_last=1), by="me", grace=0)
    assert not run.trashed()


def test_a_flipped_bit_in_the_lease_blocks_no_load(run):
    job(run, 10, 20)
    flip(run, LEASE_FILE)
    assert run.latest_step() == 20
    assert [info.step for info in run.steps()] == [10, 20]
    with pytest.raises(UNREADABLE, match=r"lease\.json"):
        job(run, 30)
    nothing_is_deleted(run, LEASE_FILE)


def test_a_manifest_in_the_place_of_another_is_refused(run):
    job(run, 10, 20)
    swap(run, manifest_file(10, 1), manifest_file(20, 1))
    for step in (10, 20):
        with pytest.raises(CorruptionError, match="the manifest of another place"):
            run.step(step)


def test_aliases_in_each_others_place_are_refused_and_hide_no_other(run):
    job(run, 10, 20)
    for alias, step in (("production", 10), ("candidate", 20), ("best", 20)):
        promote_step(run, step, alias, expect=None)
    swap(run, alias_file("production"), alias_file("candidate"))
    for alias in ("production", "candidate"):
        with pytest.raises(CorruptionError, match="the alias of another place"):
            resolve_step(run, parse_ref(f"{run.uri}@{alias}"))
    found, problems = run.aliases.judge()
    assert [one.alias for one in found] == ["best"]
    assert sorted(problems) == [alias_file("candidate"), alias_file("production")]
    with pytest.raises(AliasNotFoundError, match="best"):
        resolve_step(run, parse_ref(f"{run.uri}@other"))


@pytest.mark.parametrize(
    "name",
    [LEASE_FILE, attempt_file(1), manifest_file(10, 1), alias_file("production")],
)
def test_a_record_of_another_run_is_refused(run, root_uri, name):
    other = Run.create(root_uri / "other-run")
    for one in (run, other):
        job(one, 10)
        promote_step(one, 10, "production", expect=None)
    run.objects.write(name, other.objects.read(name).value)
    looks = [
        lambda: read_lease(run.objects),
        lambda: list_attempts(run.objects),
        lambda: run.step(10),
        lambda: run.aliases.require("production"),
    ]
    refused = []
    for look in looks:
        try:
            look()
        except CorruptionError as exc:
            refused.append(str(exc))
    assert refused
    assert all("of another run" in text for text in refused)


def test_a_tombstone_in_the_place_of_another_deletes_nothing(run):
    job(run, 10, 20, 30)
    delete_step(run, find_deletable_step(run, 10), by="me", grace=0)
    run.objects.write(trash_file(20, 1), run.objects.read(trash_file(10, 1)).value)
    with pytest.raises(CorruptionError, match="the tombstone of another place"):
        collect_garbage(run, by="me")
    with pytest.raises(CorruptionError, match="the tombstone of another place"):
        undelete_step(run, 20, 1)
    assert run.objects.read(manifest_file(20, 1)) is not None


def test_a_run_that_has_lost_its_record_is_listed_and_says_so(run):
    job(run, 10)
    Run(run.uri.parent / "no-run").objects.write("notes.json", b"{}")
    lose(run, RUN_FILE)
    assert list_runs(run.uri.parent) == ["my-run"]
    with pytest.raises(CorruptionError, match=r"my-run/run\.json: .*attempts/1\.json.*repair"):
        Run.open(run.uri)
    repair_run(run, by="me", dry_run=False)
    assert Run.open(run.uri).latest_step() == 10


@pytest.mark.parametrize("stray", [30, 20])
def test_a_tombstone_in_the_place_of_another_does_not_hide_a_step(run, stray):
    job(run, 10, 20, 30)
    delete_step(run, find_deletable_step(run, 10), by="me")
    run.objects.write(trash_file(stray, 1), run.objects.read(trash_file(10, 1)).value)
    with pytest.raises(CorruptionError, match=rf"trash/{stray}\.1\.json.*the record trash/10"):
        run.step(stray)
    if stray == 30:
        for act in (run.latest, run.latest_step):
            with pytest.raises(CorruptionError, match=r"trash/30\.1\.json"):
                act()
    else:
        assert run.latest_step() == 30
    assert trash_file(stray, 1) in check_run(run).unreadable


def test_the_damaged_tombstone_of_the_last_step_blocks_no_load(run):
    """Its name says that the step was deleted."""
    job(run, 10, 20)
    writer = Writer(run, writer="job")
    saved(writer, run, 30)
    writer.close()
    delete_step(run, find_deletable_step(run, 30), by="me")
    flip(run, trash_file(30, 2))
    assert run.latest_step() == 20


@pytest.mark.parametrize("base_step", [-1, 90])
@pytest.mark.parametrize("headless", [False, True])
def test_an_attempt_of_an_older_run_changes_no_history(run, base_step, headless):
    job(run, 10, 20, 30)
    roll_back(run, 10, by="me")
    job(run, 40)
    old = AttemptRecord(base_step=base_step, writer="job", at="2026-01-01T00:00:00Z")
    run.objects.write(attempt_file(2), old.to_bytes())
    if headless:
        lose(run, RUN_FILE)
    again = Run(run.uri, objects=ObjectStore(run.uri))
    assert {info.step: info.attempt for info in again.steps()} == {10: 1, 40: 3}
    assert again.history().problems.keys() == {attempt_file(2)}


def test_what_is_written_without_a_run_file_is_of_the_run_that_the_lease_names(run):
    job(run, 10)
    known = run.info().id
    run_file = run.objects.read(RUN_FILE).value
    lose(run, RUN_FILE)
    again = Run(run.uri, objects=ObjectStore(run.uri))
    promote_step(again, 10, "production", expect=None)
    run.objects.write(RUN_FILE, run_file)
    assert run.aliases.require("production").location.run == known
    assert check_run(run).ok


def test_a_run_that_was_removed_below_its_writer_publishes_nothing(run):
    writer = Writer(run, writer="job")
    saved(writer, run, 10)
    remove(run)
    with pytest.raises(FencedError, match="the run was removed"):
        saved(writer, run, 20)
    writer.close()


def test_a_run_that_was_removed_and_begun_anew_is_not_written_by_its_old_writer(run):
    writer = Writer(run, writer="job")
    saved(writer, run, 10)
    remove(run)
    anew = Run.create(run.uri)
    job(anew, 1)
    with pytest.raises(FencedError):
        saved(writer, run, 20)
    writer.close()
    assert [info.step for info in anew.steps()] == [1]


def test_a_run_begun_anew_in_one_process_has_the_records_of_one_run(run):
    job(run, 10)
    remove(run)
    anew = Run.create(run.uri)
    job(anew, 1)
    other_process = Run(run.uri, objects=ObjectStore(run.uri))
    assert other_process.info().id == anew.info().id
    assert other_process.latest_step() == 1
    assert check_run(other_process).ok


@pytest.mark.parametrize("kept", [[RUN_FILE], [attempt_file(1)], [LEASE_FILE]])
def test_a_save_needs_the_records_that_the_run_begins_with(run, kept):
    writer = Writer(run, writer="job")
    saved(writer, run, 10)
    for name in (RUN_FILE, attempt_file(1)):
        if name not in kept:
            lose(run, name)
    with pytest.raises(FencedError, match="the run was removed"):
        saved(writer, run, 20)
    writer.close()


def test_no_run_begins_where_one_has_lost_its_record(run):
    job(run, 10)
    lose(run, RUN_FILE)
    for act in (lambda: Run.create(run.uri), Run(run.uri).has_saved):
        with pytest.raises(CorruptionError, match=r"run\.json.*attempts/1\.json"):
            act()
    assert run.objects.read(RUN_FILE) is None


def test_a_job_begins_anew_only_where_nothing_was_saved(root_uri):
    run = Run(root_uri / "a-run")
    assert not run.has_saved()
    Run.create(run.uri)
    assert not run.has_saved()
    writer = Writer(run, writer="job")
    attempt = writer.claim(10)
    assert not run.has_saved()
    write_data(run, 10, attempt)  # killed before the manifest: nobody was told
    assert not run.has_saved()
    saved(writer, run, 10)
    assert run.has_saved()
    writer.close()
    lose(run, manifest_file(10, 1))
    lose(run, LEASE_FILE)
    with pytest.raises(CorruptionError, match=r"lost its records.*attempts/1/10"):
        run.has_saved()


@pytest.mark.parametrize("marker", ["_CHECKPOINT_METADATA", "_METADATA", "default/_METADATA"])
def test_a_job_does_not_begin_among_checkpoints_of_others(tmp_path, marker):
    file = tmp_path / "runs" / "100" / marker
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(InvalidURIError, match="checkpoints that no run lists: 100"):
        Run(Run.create(tmp_path / "other").uri.parent / "runs").has_saved()


def test_a_damaged_record_of_labels_keeps_retention_from_deleting(run):
    job(run, 10, 20)
    run.objects.write(annotation_file(10, 1), b"{")
    with pytest.raises(UnsupportedFormatError, match=r"annotations/10\.1\.json"):
        apply_retention(run, RetentionPolicy(keep_last=1), by="me", grace=0)
    assert not run.trashed()


def test_a_run_can_be_moved_and_copied_whole(tmp_path):
    run = Run.create(tmp_path / "first")
    job(run, 10)
    promote_step(run, 10, "production", expect=None)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shutil.move(tmp_path / "first", tmp_path / "third")
    for name in ("second", "third"):
        moved = Run.open(tmp_path / name)
        assert moved.latest_step() == 10
        job(moved, 20)
        assert moved.aliases.require("production").step == 10


def test_a_record_that_was_cut_on_its_way_is_read_anew(gcs):
    run = Run.create(f"{gcs.bucket_uri}/my-run")
    job(run, 10)
    objects = ObjectStore(run.uri)
    fault = gcs.faults.add("truncate", operation=r"media\.get", name=r".*attempts/1\.json")
    with pytest.raises(UnsupportedFormatError, match=r"attempts/1\.json"):
        list_attempts(objects)
    assert fault.fired == 1
    assert [attempt.number for attempt in list_attempts(objects)] == [1]
