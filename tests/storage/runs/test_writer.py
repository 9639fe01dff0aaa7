import pytest

from cairn.storage.errors import FencedError, SaveError
from cairn.storage.runs.layout import annotation_file
from cairn.storage.runs.manifest import Manifest
from cairn.storage.runs.writer import Writer
from tests.storage.stored_runs import begin


@pytest.fixture
def writer(run, clock):
    made = Writer(run, writer="job", clock=clock)
    yield made
    made.close()


def manifest(step, attempt):
    return Manifest(
        step=step, attempt=attempt, created="2026-11-21T12:00:00Z", writer="job", items=("model",)
    )


@pytest.mark.parametrize("key", [(6, 2), (12, 1), (20, 99), (11, 2)])
def test_what_was_not_claimed_is_not_published(run, writer, key):
    assert writer.claim(12) == 2
    published = run.published()
    with pytest.raises(SaveError, match="found that of step 12 in attempt 2"):
        writer.publish(manifest(*key), b"{}")
    assert run.published() == published
    assert run.objects.read(annotation_file(*key)) is None
    writer.publish(manifest(12, 2))
    assert run.step_attempts() == {3: 1, 6: 1, 9: 1, 12: 2}


def test_a_claim_is_good_for_one_step(run, writer):
    attempt = writer.claim(12)
    writer.publish(manifest(12, attempt))
    with pytest.raises(SaveError, match="not claimed"):
        writer.publish(manifest(13, attempt))


def test_a_claim_that_was_given_up_publishes_nothing(run, writer):
    first = writer.claim(12)
    writer.drop()
    second = writer.claim(12)
    with pytest.raises(SaveError, match=f"found that of step 12 in attempt {second}"):
        writer.publish(manifest(12, first))
    writer.publish(manifest(12, second))
    assert run.step_attempts()[12] == second


def test_a_claimed_step_of_a_writer_that_was_replaced_is_not_published(run, writer):
    attempt = writer.claim(12)
    begin(run, 9, writer="job")
    with pytest.raises(FencedError):
        writer.publish(manifest(12, attempt))
