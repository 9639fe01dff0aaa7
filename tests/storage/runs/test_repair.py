"""What is told of a run's records, and what becomes of them when they are mended."""

import itertools
import json
import threading
from datetime import timedelta

import pytest

from cairn import (
    Annotation,
    CorruptionError,
    FencedError,
    LeaseHeldError,
    ObjectStore,
    PreconditionFailedError,
    RecordNotLostError,
    Run,
    UnsupportedFormatError,
    Writer,
    check_run,
    delete_step,
    find_deletable_step,
    parse_uri,
    promote_step,
    repair_run,
    roll_back,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.exports import ExportFile, ExportKey, ExportManifest, publish_export
from cairn.storage.runs.records.layout import (
    RUN_FILE,
    alias_file,
    annotation_file,
    manifest_file,
    trash_file,
)
from tests.faults.report import is_long
from tests.storage.records import (
    LEASE_FILE,
    Hold,
    Intent,
    attempt_file,
    hold_file,
    intent_file,
    put_record,
)
from tests.storage.runs.test_history import flip, job, lose, saved, swap
from tests.storage.seams import repair
from tests.storage.stored_runs import write_data

DIGEST = "0" * 32


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


@pytest.fixture
def run(root_uri, copies):
    """One record of every kind; steps 10 (deleted), 20, 30, the last superseded, then 40."""
    copies.put(make_run, root_uri / "my-run")
    return Run.open(root_uri / "my-run")


@pytest.fixture
def on_disk(tmp_path, copies):
    """The same on a disk, for what is the same everywhere."""
    uri = parse_uri(tmp_path / "root/my-run")
    copies.put(make_run, uri)
    return Run.open(uri)


def make_run(uri):
    made = Run.create(uri)
    job(made, 10, 20, 30)
    roll_back(made, 20, by="me")
    job(made, 40)
    promote_step(made, 20, "production", expect=None)
    promote_step(made, 40, "candidate", expect=None)
    delete_step(made, find_deletable_step(made, 10), by="me")
    put_record(made.objects, annotation_file(40, 3), Annotation(metrics={"loss": 1.0}))
    at = "2026-11-21T12:00:00Z"
    put_record(made.objects, intent_file(20, 1), Intent(at=at, by="me", token="0" * 16))
    put_record(made.objects, hold_file(20, 1, "1" * 16), Hold(at=at, by="me", token="1" * 16))
    publish_export(made.objects, *export(made))


def export(run):
    source = run.step(20).manifest_digest
    key = ExportKey.of(
        step=20, attempt=1, kind="convert", source=source, options={}, rule_version=1
    )
    with run.files.open_write(f"{key.try_folder('a')}/config.json") as stream:
        stream.write(b"{}")
    return key, ExportManifest(
        kind="convert",
        step=20,
        attempt=1,
        source=source,
        options={},
        rule_version=1,
        folder="a",
        created="2026-11-21T12:00:00Z",
        files=(ExportFile(name="config.json", size=2, crc32c="0" * 8),),
    )


def history(run):
    steps = {(info.step, info.attempt): info.state.value for info in run.all_states()}
    return steps, {one.alias: one.step for one in run.aliases.list()}


def repaired(run, name, **options):
    """What became of one record."""
    (found,) = (
        one for one in repair_run(run, by="me", dry_run=False, **options) if one.name == name
    )
    return found


def records(run):
    return [
        name
        for name in run.objects.list()
        if name.endswith(".json") and not name.endswith("config.json")
    ]


REBUILT = [
    RUN_FILE,
    LEASE_FILE,
    *map(attempt_file, (1, 2, 3)),
    trash_file(10, 1),
    intent_file(20, 1),
    hold_file(20, 1, "1" * 16),
]
LOST = [
    manifest_file(20, 1),
    manifest_file(40, 3),
    alias_file("production"),
    annotation_file(40, 3),
]


def test_a_run_as_it_was_written_has_nothing_to_repair(run):
    report = check_run(run)
    assert report.ok, report.problems
    assert report.records == len(records(run))
    assert repair_run(run, by="me") == []


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for number, name in enumerate(REBUILT)
        # Of what lay in the trash, nothing tells that it was there.
        for damage in ((flip,) if name.startswith("trash/") else (flip, lose))
        if is_long() or damage is flip or number % 2 == 0
    ],
)
def test_a_record_that_others_tell_is_rebuilt(run, name, damage):
    before = history(run)
    damaged = None
    damage(run, name)
    if damage is flip:
        damaged = run.objects.read(name).value
    stored = run.objects.list()
    (plan,) = repair_run(run, by="me")
    assert (plan.name, plan.done) == (name, False)
    assert plan.action
    assert run.objects.list() == stored
    (done,) = repair_run(run, by="me", dry_run=False)
    assert done.done
    assert check_run(run).ok, check_run(run).problems
    assert history(run) == before
    kept = [key for key in run.objects.list() if key.startswith(f"damaged/{name}.")]
    assert [run.objects.read(key).value for key in kept] == ([damaged] if damaged else [])


def test_a_rebuilt_run_file_has_the_id_that_all_records_have(run):
    known = run.info().id
    lose(run, RUN_FILE)
    repair_run(Run(run.uri), by="me", dry_run=False)
    assert run.info().id == known
    assert run.info().name == "my-run"
    job(run, 50)


def test_a_rebuilt_lease_names_what_was_reported_durable(run):
    before = read_lease(run.objects)
    lose(run, LEASE_FILE)
    repair_run(run, by="me", dry_run=False)
    lease = read_lease(run.objects)
    assert (lease.durable, lease.begun) == (before.durable, before.begun) == ((40, 3), (3, 20))
    assert not lease.released  # its writer may live: another has to wait
    job(run, 50)  # the same one need not


def test_a_lease_that_the_store_gives_as_it_was_once_is_rebuilt(run):
    old = run.objects.read(LEASE_FILE).value
    job(run, 50)
    run.objects.write(LEASE_FILE, old)
    (done,) = repair_run(run, by="me", dry_run=False)
    assert (done.name, done.done) == (LEASE_FILE, True)
    lease = read_lease(run.objects)
    assert (lease.attempt, lease.durable, lease.begun) == (4, (50, 4), (4, 40))
    assert check_run(run).ok


def test_what_is_whole_and_does_not_fit_is_said_to_be_left(run):
    lose(run, manifest_file(10, 1))
    lose(run, manifest_file(20, 1))
    before = sorted(run.objects.list())
    for dry_run in (True, False):
        left = {one.name: one for one in repair_run(run, by="me", dry_run=dry_run)}
        assert alias_file("production") in left
        assert trash_file(10, 1) in left
        assert all(one.action is None for one in left.values())
        assert f"points to {manifest_file(20, 1)}" in left[alias_file("production")].hint
    assert sorted(run.objects.list()) == before


def test_records_in_each_others_place_are_rebuilt(run):
    before = history(run)
    swap(run, attempt_file(1), attempt_file(3))
    assert {one.name for one in repair_run(run, by="me")} == {attempt_file(1), attempt_file(3)}
    repair_run(run, by="me", dry_run=False)
    assert check_run(run).ok
    assert history(run) == before


@pytest.mark.parametrize("name", LOST)
def test_a_record_that_no_other_tells_is_forgotten_only_when_asked(run, name):
    flip(run, name)
    damaged = run.objects.read(name).value
    found = repaired(run, name)
    assert found.action is None
    assert "backup" in found.hint
    assert run.objects.read(name).value == damaged
    done = repaired(run, name, forget=[name])
    assert done.done
    assert run.objects.read(name) is None
    kept = [key for key in run.objects.list() if key.startswith(f"damaged/{name}.")]
    assert [run.objects.read(key).value for key in kept] == [damaged]


def test_a_lost_manifest_is_forgotten_and_the_run_goes_on_before_it(run):
    lose(run, manifest_file(40, 3))
    with pytest.raises(CorruptionError, match="is lost"):
        run.latest_step()
    repair_run(run, by="me", dry_run=False, forget=[manifest_file(40, 3)])
    assert run.latest_step() == 20
    job(run, 50)
    assert run.latest_step() == 50


def test_what_is_sound_is_not_forgotten(run):
    for names in ([alias_file("candidate")], [LEASE_FILE], ["typo"]):
        with pytest.raises(RecordNotLostError, match="not to be forgotten"):
            repair_run(run, by="me", dry_run=False, forget=names)
    assert history(run)[1] == {"candidate": 40, "production": 20}


def test_a_damaged_export_is_made_anew(run):
    key, manifest = export(run)
    flip(run, key.manifest)
    (done,) = repair_run(run, by="me", dry_run=False)
    assert done.done
    assert run.objects.read(key.manifest) is None
    assert publish_export(run.objects, key, manifest) == manifest


def test_nothing_is_mended_below_a_live_writer(run):
    writer = Writer(run, writer="job")
    saved(writer, run, 50)
    flip(run, attempt_file(1))
    assert [one.name for one in repair_run(run, by="me")] == [attempt_file(1)]
    with pytest.raises(LeaseHeldError, match="a writer holds the run"):
        repair_run(run, by="me", dry_run=False)
    writer.close()
    repair_run(run, by="me", dry_run=False)
    assert check_run(run).ok


def test_what_does_not_fit_together_is_told(run):
    key, _ = export(run)
    write_data(run, 35, 1)  # committed, and nobody lists it
    other = run.objects.read(manifest_file(30, 1)).value
    run.objects.write(manifest_file(20, 1), other.replace(b'"step":30', b'"step":20'))
    lose(run, "attempts/3/40/commit_success.txt")
    with run.files.open_write(f"{key.try_folder('a')}/config.json") as stream:
        stream.write(b"{ }")
    delete_step_by_hand(run, 40, 3)
    report = check_run(run)
    told = "\n".join(report.problems)
    assert f"{manifest_file(20, 1)}: " in told
    assert f"{alias_file('production')}: points to another {manifest_file(20, 1)}" in told
    assert f"{alias_file('candidate')}: points to a step that is deleted" in told
    assert "config.json has 2 bytes, found 3" in told
    assert report.unlisted == ("attempts/1/35",)


def delete_step_by_hand(run, step, attempt):
    name = trash_file(step, attempt)
    stone = json.loads(run.objects.read(trash_file(10, 1)).value)
    for key in ("checksum", "key", "run"):
        del stone[key]
    run.objects.write(name, json.dumps(stone | {"version": 1}).encode())


def test_the_run_file_of_another_run_is_replaced_and_nothing_else(run, root_uri):
    before, known = history(run), run.info().id
    other = Run.create(root_uri / "other-run")
    stored = {name: run.objects.read(name).value for name in records(run)}
    run.objects.write(RUN_FILE, other.objects.read(RUN_FILE).value)
    again = Run(run.uri)
    assert check_run(again).unreadable == (RUN_FILE,)
    (plan,) = repair_run(again, by="me")
    assert (plan.name, plan.done) == (RUN_FILE, False)
    assert known in plan.action
    (done,) = repair_run(again, by="me", dry_run=False)
    assert done.done
    assert again.info().id == known
    del stored[RUN_FILE]
    assert {name: run.objects.read(name).value for name in stored} == stored
    assert history(again) == before
    assert check_run(again).ok, check_run(again).problems


def test_of_as_many_records_of_one_run_as_of_another_none_is_believed(root_uri):
    run, other = (Run.create(root_uri / name) for name in ("one", "other"))
    for made in (run, other):
        Writer(made, writer="job").begin()
    run.objects.write(LEASE_FILE, other.objects.read(LEASE_FILE).value)
    lose(run, RUN_FILE)
    later = clock_after(run, hours=1)
    repairs = {one.name: one for one in repair_run(run, by="me", dry_run=False, clock=later)}
    assert repairs[RUN_FILE].action is None
    assert run.objects.read(RUN_FILE) is None


def clock_after(run, *, hours):
    return lambda: run.clock() + timedelta(hours=hours)


def test_a_record_that_somebody_else_has_mended_meanwhile_stays_as_it_is(run, monkeypatch):
    """Two repairs of a lease: a job has begun behind the first one's back, and been told so."""
    flip(run, LEASE_FILE)
    look, writer, looks = repair.read_history, Writer(run, writer="job"), itertools.count()

    def overtaken(objects):
        found = look(objects)
        if next(looks) == 1:  # after the plan
            repair_run(run, by="another", dry_run=False)
            saved(writer, run, 50)
        return found

    monkeypatch.setattr(repair, "read_history", overtaken)
    with pytest.raises(PreconditionFailedError):
        repair_run(run, by="me", dry_run=False)
    saved(writer, run, 60)
    writer.close()
    assert run.latest_step() == 60
    assert check_run(run).ok, check_run(run).problems


def test_a_damaged_lease_is_mended_below_a_live_writer_and_its_next_start_goes_on(run):
    writer = Writer(run, writer="job")
    saved(writer, run, 50)
    flip(run, LEASE_FILE)
    with pytest.raises((CorruptionError, UnsupportedFormatError), match=r"lease\.json"):
        saved(writer, run, 60)  # which may or may not be there
    (done,) = repair_run(run, by="me", dry_run=False)
    assert done.name == LEASE_FILE
    with pytest.raises(LeaseHeldError):
        Writer(run, writer="other").begin()
    writer.drop()
    with pytest.raises(FencedError, match="of another process"):
        saved(writer, run, 70)
    writer.close()
    job(run, 70)
    assert [info.step for info in run.steps()] == [20, 40, 50, 60, 70]
    assert check_run(run).ok, check_run(run).problems


def test_a_repair_that_is_killed_at_any_moment_is_just_repeated(on_disk, monkeypatch):
    run = on_disk
    before = history(run)
    names = [RUN_FILE, LEASE_FILE, attempt_file(2), trash_file(10, 1)]
    hours = itertools.count(1)
    put = ObjectStore._put

    def killed(self, key, value, condition):
        here = threading.current_thread() is threading.main_thread()  # not another test's lease
        if here and next(calls) == 0:
            raise KeyboardInterrupt
        return put(self, key, value, condition)

    for moment in range(2 * len(names)):  # each keeps what it replaces, then writes
        for name in names:
            flip(run, name)
        calls = itertools.count(-moment)
        monkeypatch.setattr(ObjectStore, "_put", killed)
        with pytest.raises(KeyboardInterrupt):
            repair_run(run, by="me", dry_run=False, clock=clock_after(run, hours=next(hours)))
        monkeypatch.setattr(ObjectStore, "_put", put)
        repair_run(run, by="me", dry_run=False, clock=clock_after(run, hours=next(hours)))
        assert check_run(run).ok, check_run(run).problems
        assert history(run) == before
        later = clock_after(run, hours=next(hours))
        assert repair_run(run, by="me", dry_run=False, clock=later) == []


def test_a_tombstone_of_another_place_deletes_nothing_that_was_not_deleted(run):
    name = trash_file(40, 3)
    run.objects.write(name, run.objects.read(trash_file(10, 1)).value)
    found = repaired(run, name)
    assert found.action is None
    assert "whether step 40 of attempt 3 was deleted" in found.hint
    assert repaired(run, name, forget=[name]).done
    assert run.latest_step() == 40
    assert check_run(run).ok, check_run(run).problems


def test_a_damaged_tombstone_is_rebuilt_and_not_forgotten(run):
    flip(run, trash_file(10, 1))
    with pytest.raises(RecordNotLostError, match="not to be forgotten"):
        repair_run(run, by="me", dry_run=False, forget=[trash_file(10, 1)])
    assert run.trashed() == {(10, 1)}


def test_attempts_lost_in_a_row_are_not_rebuilt_as_if_the_first_had_never_been(run):
    job(run, 50)
    job(run, 60)
    before = history(run)
    for number in (3, 4):
        lose(run, attempt_file(number))
    repairs = {one.name: one for one in repair_run(run, by="me", dry_run=False)}
    assert repairs[attempt_file(3)].action is None
    assert repairs[attempt_file(4)].hint == "Restore attempts/3.json first."
    assert 30 not in {info.step for info in run.steps()}
    assert before != history(run)
    assert repair_run(run, by="me", dry_run=False) == list(repairs.values())


def test_a_forgotten_overwrite_gives_its_place_back_for_good(run):
    writer = Writer(run, writer="job")
    saved(writer, run, 40, overwrite=True)
    saved(writer, run, 50)
    writer.close()
    job(run, 60)
    lose(run, manifest_file(40, 4))
    with pytest.raises(CorruptionError, match=r"manifests/40\.4\.json"):
        run.step(40)
    (done,) = repair_run(run, by="me", dry_run=False, forget=[manifest_file(40, 4)])
    assert done.done
    assert run.step(40).attempt == 3
    assert [info.step for info in run.steps()] == [20, 40, 50, 60]
    assert check_run(run).ok, check_run(run).problems
