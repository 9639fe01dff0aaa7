"""Several forks to one name at once, and names in which no fork may begin."""

import itertools
import threading
from datetime import timedelta

import pytest

from cairn import (
    Checkpointer,
    FencedError,
    InvalidURIError,
    LeaseHeldError,
    PreconditionFailedError,
    Run,
    StepInfo,
    check_run,
    fork_run,
    parse_uri,
    verify_step,
)
from cairn.storage.runs.fork import abandon_fork
from cairn.storage.runs.lease import LEASE_TTL_SECONDS, read_lease
from cairn.storage.runs.records.layout import manifest_file
from cairn.storage.store.clock import utc_now
from tests.storage.forks import LEAF, WRITER, contents, save_parent
from tests.storage.records import begin_attempt
from tests.storage.seams import writer

RIVAL = "fork/other"
REFUSALS = (PreconditionFailedError, LeaseHeldError, FencedError)


@pytest.fixture
def root_uri(some_root_uri):
    """The run protocol is the same in every store."""
    return some_root_uri


def before_the_attempt(act):
    """A clock by which `act` is done once it has been looked whether the run is free."""
    calls = itertools.count(1)

    def clock():
        if next(calls) == 2:
            act()
        return utc_now()

    return clock


@pytest.mark.parametrize("by", [WRITER, RIVAL])
def test_a_fork_that_another_call_finished_meanwhile_stays_as_it_is(parent, root_uri, by):
    child = root_uri / "child"

    def rival():
        fork_run(parent, parent.step(3), child, by=by)

    with pytest.raises(PreconditionFailedError, match="taken meanwhile"):
        fork_run(parent, parent.step(3), child, by=WRITER, clock=before_the_attempt(rival))
    run = Run.open(child)
    assert run.step_attempts() == {3: 1}
    assert read_lease(run.objects).released
    abandon_fork(child, by=WRITER)
    assert verify_step(run, 3).ok


def test_a_run_that_a_job_has_saved_in_meanwhile_stays_as_it_is(parent, root_uri):
    child = root_uri / "child"

    def job():
        with Checkpointer(child, writer_id="trainer") as checkpointer:
            checkpointer.save(9, {"model": {"kernel": LEAF}}, meta={}).wait()

    with pytest.raises(PreconditionFailedError, match="taken meanwhile"):
        fork_run(parent, parent.step(3), child, by=WRITER, clock=before_the_attempt(job))
    assert Run.open(child).step_attempts() == {9: 1}


def test_an_interrupted_fork_in_which_a_job_of_its_id_has_begun_is_refused(parent, root_uri):
    """It was killed before its attempt, and the first attempt is a job's."""
    child = root_uri / "child"

    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork_run(parent, parent.step(3), child, by=WRITER, clock=before_the_attempt(killed))
    with Checkpointer(child, writer_id=WRITER) as checkpointer:
        checkpointer.begin()
        with pytest.raises(PreconditionFailedError, match="the run exists"):
            fork_run(parent, parent.step(3), child, by=WRITER)
        checkpointer.save(5, {"model": {"kernel": LEAF}}, meta={}).wait()
    assert Run.open(child).step_attempts() == {5: 1}


def test_a_fork_whose_lease_another_call_of_it_took_and_lost_goes_on(parent, root_uri):
    """Two calls began at once, each was in the other's way, and both were killed."""
    child = root_uri / "child"

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fork_run(parent, parent.step(3), child, by=WRITER, progress=stop)
    begin_attempt(Run.open(child).objects, writer=WRITER, base_step=-1)
    with pytest.raises(KeyboardInterrupt):
        fork_run(parent, parent.step(3), child, by=WRITER, progress=stop)
    forked = fork_run(parent, parent.step(3), child, by=WRITER)
    run = Run.open(child)
    assert (forked.attempt, run.step_attempts()) == (2, {3: 2})
    assert verify_step(run, 3).ok


def test_a_fork_that_is_superseded_as_it_is_published_is_not_told_as_done(
    parent, root_uri, monkeypatch
):
    """Another call had taken the lease, saw nothing to keep, and began its attempt right after."""
    child = root_uri / "child"

    def published(objects, manifest, fence):
        def keep():
            writer.publish_manifest(objects, manifest, fence)
            return -1

        begin_attempt(objects, writer=WRITER, base_step=keep)

    with monkeypatch.context() as patch:
        patch.setattr("cairn.storage.runs.fork.publish_manifest", published)
        with pytest.raises(FencedError, match="being replaced"):
            fork_run(parent, parent.step(3), child, by=WRITER)
    assert Run.open(child).steps() == []
    forked = fork_run(parent, parent.step(3), child, by=WRITER)
    run = Run.open(child)
    assert (run.steps(), run.step_attempts()) == ([forked], {3: 2})
    assert fork_run(parent, parent.step(3), child, by=WRITER) == forked


def test_the_lease_tells_of_the_step_if_its_manifest_is_lost(parent, root_uri):
    child = Run(root_uri / "child")
    forked = fork_run(parent, parent.step(3), child.uri, by=WRITER)
    child.objects.delete(manifest_file(3, forked.attempt))
    assert any(manifest_file(3, 1) in problem for problem in check_run(child).problems)


@pytest.mark.parametrize("writers", [(WRITER, WRITER), (WRITER, RIVAL, "fork/third")])
def test_forks_to_one_name_at_once_leave_one_whole_run(parent, root_uri, writers):
    for number in range(4):
        child = root_uri / f"child-{number}"
        gate, ended = threading.Barrier(len(writers)), []

        def run_one(by, child=child, gate=gate, ended=ended):
            gate.wait()
            try:
                ended.append(fork_run(parent, parent.step(3), child, by=by))
            except Exception as error:
                ended.append(error)

        threads = [threading.Thread(target=run_one, args=(by,)) for by in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [one for one in ended if isinstance(one, StepInfo)]
        refused = [one for one in ended if isinstance(one, REFUSALS)]
        assert len(told) + len(refused) == len(writers), ended
        run = Run.open(child)
        for step in told:  # whoever was told that it is done, it is
            assert run.steps() == [step]
        for by in writers:  # whoever lost may ask again, and give up: nothing is harmed
            if not told:
                told.append(fork_run(parent, parent.step(3), child, by=by))
            abandon_fork(child, by=by)
        assert run.steps() == told[:1]
        assert verify_step(run, 3).ok
        assert contents(run.step_uri(told[0])) == contents(parent.step_uri(parent.step(3)))


def test_the_lease_is_kept_while_one_file_takes_long(gcs):
    parent = save_parent(parse_uri(gcs.bucket_uri) / "parent")
    child = parse_uri(gcs.bucket_uri) / "child"
    held = gcs.faults.add("hold", operation="objects.rewrite", name="parent/.*/d/", count=1)
    ticks = itertools.count(1)
    alive, later = [], [timedelta()]

    def clock():
        return utc_now() + later[0]

    def tick(done, total):
        if not held.fired or done == total:
            return
        alive.append(read_lease(Run(child).objects).is_alive(clock()))
        later[0] += timedelta(seconds=LEASE_TTL_SECONDS / 2)
        if next(ticks) == 3:
            held.release()

    fork_run(parent, parent.step(3), child, by=WRITER, progress=tick, clock=clock)
    assert len(alive) >= 3
    assert all(alive)


def test_a_run_is_not_forked_to_itself(parent):
    before = parent.step_attempts()
    with pytest.raises(PreconditionFailedError, match="the run exists"):
        fork_run(parent, parent.step(3), parent.uri, by=WRITER)
    abandon_fork(parent.uri, by=WRITER)
    assert parent.step_attempts() == before


@pytest.mark.parametrize("inner", ["child", "children/first"])
def test_a_fork_does_not_begin_in_the_run_that_it_is_to_outlive(parent, inner):
    with pytest.raises(InvalidURIError, match="a name beside the run"):
        fork_run(parent, parent.step(3), parent.uri / inner, by=WRITER)
    assert not parent.files.exists(inner)


def test_a_link_leads_no_fork_into_its_source(on_disk, tmp_path):
    (tmp_path / "link").symlink_to(on_disk.uri.local_path)
    for name in ("link", "link/child"):
        with pytest.raises((InvalidURIError, PreconditionFailedError)):
            fork_run(on_disk, on_disk.step(3), parse_uri(tmp_path / name), by=WRITER)
    assert not on_disk.files.exists("child")
    assert sorted(on_disk.step_attempts()) == [3, 6]
