"""A run is taken from a writer that lives: what was listed stays, and it lists nothing more."""

from dataclasses import astuple

import pytest

from cairn import FencedError, LeaseHeldError, PreconditionFailedError, Writer
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.rollback import take_over
from tests.storage.runs.test_writer import manifest
from tests.storage.seams import writer as writing
from tests.storage.stored_runs import begin, states


@pytest.fixture
def writer(run, clock):
    made = Writer(run, writer="job", clock=clock)
    made.publish(manifest(12, made.claim(12)))
    yield made
    made.close()


def test_another_begins_at_once_and_goes_on_from_the_latest_step(run, clock, writer):
    with pytest.raises(LeaseHeldError, match="An administrator may take the run over"):
        begin(run, 12, writer="other")
    assert astuple(take_over(run, 2, by="ann")) == ("job", 2, 3, 12)
    assert read_lease(run.objects).released
    assert run.attempts()[-1].writer.startswith("ann/")
    other = Writer(run, writer="other", clock=clock)
    other.publish(manifest(15, other.claim(15)))
    other.close()
    assert list(run.step_attempts()) == [3, 6, 9, 12, 15]


def test_the_writer_that_lives_lists_nothing_more(run, writer):
    take_over(run, 2, by="ann")
    attempt = writer.claim(15)
    with pytest.raises(FencedError, match="attempt 3"):
        writer.publish(manifest(15, attempt))
    with pytest.raises(FencedError):
        writer.claim(16)
    assert list(run.step_attempts()) == [3, 6, 9, 12]


def test_a_step_that_is_published_meanwhile_is_kept_or_its_writer_is_told(run, writer, monkeypatch):
    real = writing.write_record

    def late(*args, **options):
        monkeypatch.setattr(writing, "write_record", real)
        take_over(run, 2, by="ann")
        return real(*args, **options)

    attempt = writer.claim(15)
    monkeypatch.setattr(writing, "write_record", late)
    with pytest.raises(FencedError):
        writer.publish(manifest(15, attempt))
    assert states(run)[15, 2] == "superseded"


def test_a_step_that_was_published_just_before_is_kept(run, writer, monkeypatch):
    real = writing.note_durable

    def late(*args, **options):
        assert take_over(run, 2, by="ann").latest_step == 15
        return real(*args, **options)

    attempt = writer.claim(15)
    monkeypatch.setattr(writing, "note_durable", late)
    writer.publish(manifest(15, attempt))
    assert states(run)[15, 2] == "listed"


def test_only_what_was_seen_is_taken(run, clock, writer):
    with pytest.raises(PreconditionFailedError, match="by attempt 7, found job, by attempt 2"):
        take_over(run, 7, by="ann")
    writer.close()
    with pytest.raises(PreconditionFailedError, match="found none"):
        take_over(run, 2, by="ann")
    assert len(run.attempts()) == 2


def test_run_that_another_takes_just_now_stays_its(run, clock, writer, monkeypatch):
    seen = read_lease(run.objects)
    writer.close()
    begin(run, 12, writer="other")
    monkeypatch.setattr("cairn.storage.runs.rollback.read_lease", lambda objects: seen)
    with pytest.raises(LeaseHeldError, match="other"):
        take_over(run, 2, by="ann")
    assert read_lease(run.objects).writer == "other"
