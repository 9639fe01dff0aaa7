"""A bucket that does what it is asked and whose answer is lost: asked again, it refuses."""

import pytest

from cairn import Run, Writer, parse_uri, roll_back
from tests.gcs.impatience import impatient
from tests.storage.runs.test_writer import manifest


@pytest.fixture
def run(gcs):
    """Steps 1, 2 and 3 of attempt 1."""
    with impatient():
        run = Run.create(parse_uri(gcs.bucket_uri) / "root/run")
        saver = Writer(run, writer="job")
        for step in (1, 2, 3):
            saver.publish(manifest(step, saver.claim(step)))
        saver.close()
        yield run


def lose(gcs, name):
    """Have the answer to the creation of an object be lost."""
    return gcs.faults.add(
        "lost_response", predicate=lambda one: one.query.get("name", "").endswith(name)
    )


@pytest.fixture
def lost(gcs, run):
    return lose(gcs, "attempts/2.json")


def test_a_rollback_whose_attempt_was_begun_unheard_tells_what_it_superseded(run, lost):
    done = roll_back(run, 2, by="me")
    assert lost.fired == 1
    assert (done.attempt, done.superseded) == (2, (3,))
    assert len(run.attempts()) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_writer_whose_attempt_was_begun_unheard_goes_on_in_it(run, lost, overwrite):
    writer = Writer(run, writer="job")
    step = 2 if overwrite else 4
    writer.publish(manifest(step, writer.claim(step, overwrite=overwrite)))
    writer.close()
    assert lost.fired == 1
    assert run.step_attempts() == ({1: 1, 2: 2} if overwrite else {1: 1, 2: 1, 3: 1, 4: 2})


def test_a_writer_is_not_fenced_by_an_attempt_of_its_own(run, gcs):
    writer = Writer(run, writer="job")
    writer.begin()
    lose(gcs, "attempts/3.json")
    writer.publish(manifest(2, writer.claim(2, overwrite=True)))
    writer.close()
    assert run.step_attempts() == {1: 1, 2: 3}
