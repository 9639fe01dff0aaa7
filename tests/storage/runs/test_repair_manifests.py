"""A manifest that is damaged or lost is made of its step's index, to the last bit."""

from datetime import timedelta

import numpy as np
import pytest

from cairn import (
    CheckpointReader,
    ObjectStore,
    PreconditionFailedError,
    RecordNotLostError,
    Run,
    check_run,
    delete_step,
    fork_run,
    promote_step,
    repair_run,
    verify_step,
)
from cairn.storage.runs.records.layout import INDEX_FILE, alias_file, manifest_file, trash_file
from cairn.storage.store.clock import utc_now
from tests.storage.forks import LEAF, WRITER, flipped, save_parent
from tests.storage.records import LEASE_FILE, attempt_file, begin_removal, parse_index
from tests.storage.seams import repair
from tests.storage.stored_runs import begin, end, save


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


@pytest.fixture
def run(root_uri, copies):
    """Steps 3, which "production" names, and 6, the latest."""
    copies.put(make_run, root_uri / "run")
    return Run.open(root_uri / "run")


def make_run(uri):
    promote_step(save_parent(uri), 3, "production", expect=None)


def damage(run, name, how):
    """What is there then."""
    data = run.objects.read(name).value
    if how == "lost":
        run.objects.delete(name)
    elif how == "flipped":
        run.objects.write(name, flipped(data))
    else:
        other = manifest_file({3: 6, 6: 3}[int(name.split("/")[1].split(".")[0])], 1)
        run.objects.write(name, run.objects.read(other).value)
    return data


@pytest.mark.parametrize(
    ("step", "how"), [(3, "flipped"), (3, "swapped"), (6, "flipped"), (6, "swapped"), (6, "lost")]
)
def test_a_manifest_is_rebuilt_to_the_last_bit(run, step, how):
    name = manifest_file(step, 1)
    before = damage(run, name, how)
    assert not check_run(run).ok
    (told,) = repair_run(run, by="me")
    assert (told.name, told.done) == (name, False)
    assert f"attempts/1/{step}/{INDEX_FILE}" in told.action
    assert repair_run(run, by="me", dry_run=False)[0].done
    assert run.objects.read(name).value == before
    assert check_run(run).ok
    assert verify_step(run, step).ok
    assert run.aliases.get("production").manifest_digest == run.step(3).manifest_digest
    assert run.latest_step() == 6


def test_the_alias_of_a_rebuilt_step_loads_it(run):
    damage(run, manifest_file(3, 1), "flipped")
    repair_run(run, by="me", dry_run=False)
    info = Run.open(run.uri).step(3)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    np.testing.assert_array_equal(reader.read("model", "kernel"), LEAF * 3)


def test_the_manifest_of_a_fork_is_rebuilt_too(run, root_uri):
    fork_run(run, run.step(3), root_uri / "child", by=WRITER)
    child = Run.open(root_uri / "child")
    before = damage(child, manifest_file(3, 1), "lost")
    repair_run(child, by="me", dry_run=False)
    assert child.objects.read(manifest_file(3, 1)).value == before
    assert check_run(child).ok


@pytest.mark.parametrize("index", ["damaged", "gone", "of another step", "of another run"])
def test_nothing_is_made_of_an_index_that_is_not_the_steps(run, root_uri, index):
    name, objects = manifest_file(6, 1), ObjectStore.open(run.step_uri(run.step(6)))
    data = objects.read(INDEX_FILE).value
    if index == "of another run":
        other = save_parent(root_uri / "other")
    source = other if index == "of another run" else run
    step = 3 if index == "of another step" else 6
    foreign = ObjectStore.open(source.step_uri(source.step(step))).read(INDEX_FILE).value
    damage(run, name, "flipped")
    match index:
        case "damaged":
            objects.write(INDEX_FILE, flipped(data, 20))
        case "gone":
            objects.delete(INDEX_FILE)
        case _:
            objects.write(INDEX_FILE, foreign)
    (told,) = repair_run(run, by="me", dry_run=False)
    assert (told.name, told.action, told.done) == (name, None, False)
    assert not check_run(run).ok


def test_a_manifest_can_be_forgotten_instead(run):
    name = manifest_file(3, 1)
    damage(run, name, "flipped")
    run.objects.delete(alias_file("production"))
    (told,) = repair_run(run, by="me", dry_run=False, forget=[name])
    assert told.done
    assert [info.step for info in run.steps()] == [6]


def test_an_attempt_that_nothing_tells_of_is_gone_on_without(run):
    """Its record is lost with the lease, and none came after it: nothing tells its base step."""
    attempt = begin(run, 3)
    for step in (4, 5):
        save(run, step, attempt)
    end(run)
    delete_step(run, run.step(4), by="me")
    run.objects.delete(attempt_file(attempt))
    run.objects.delete(LEASE_FILE)
    names = [manifest_file(4, attempt), manifest_file(5, attempt), trash_file(4, attempt)]
    hints = {one.name: one.hint for one in repair_run(run, by="me")}
    assert f"have {', '.join(names)} forgotten" in hints[attempt_file(attempt)]
    with pytest.raises(RecordNotLostError):
        repair_run(run, by="me", forget=[manifest_file(6, 1)])
    done = repair_run(run, by="me", dry_run=False, forget=names)
    assert [one.name for one in done if one.done] == [*names, LEASE_FILE]
    assert check_run(run).ok
    assert run.step_attempts() == {3: 1, 6: 1}
    later = Run.open(run.uri, clock=lambda: utc_now() + timedelta(hours=1))
    assert begin(later, 6) == attempt + 1


def begin_to_remove(run, step):
    """As a collector of garbage does, which is killed before it comes to the step's files."""
    later = utc_now() + timedelta(days=1)
    assert begin_removal(run, (step, 1), now=later, keeps=lambda _: False)
    run.objects.delete(manifest_file(step, 1))


def test_a_step_that_is_removed_while_records_are_mended_stays_removed(run, monkeypatch):
    run.objects.delete(alias_file("production"))
    delete_step(run, run.step(3), by="me", grace=0)
    damage(run, manifest_file(3, 1), "flipped")

    def check_and_remove(checked):
        report = check_run(checked)
        if report.unreadable == (manifest_file(3, 1),):
            begin_to_remove(run, 3)
        return report

    monkeypatch.setattr(repair, "check_run", check_and_remove)
    (told,) = repair_run(run, by="me", dry_run=False)
    assert (told.action, told.done) == (None, False)
    assert "deleted meanwhile" in told.hint
    assert run.objects.read(manifest_file(3, 1)) is None


def test_a_manifest_that_is_removed_after_it_was_read_is_not_written_again(run, monkeypatch):
    run.objects.delete(alias_file("production"))
    delete_step(run, run.step(3), by="me", grace=0)
    damage(run, manifest_file(3, 1), "flipped")
    parsed = []

    def parse_and_remove(*given):
        parsed.append(given)
        if len(parsed) == 2:  # once to tell what can be done, once to do it
            begin_to_remove(run, 3)
        return parse_index(*given)

    monkeypatch.setattr(repair, "parse_index", parse_and_remove)
    with pytest.raises(PreconditionFailedError):
        repair_run(run, by="me", dry_run=False)
    assert len(parsed) == 2
    assert run.objects.read(manifest_file(3, 1)) is None
