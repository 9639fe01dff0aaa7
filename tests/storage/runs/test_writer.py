import pytest

from cairn import (
    FencedError,
    Manifest,
    NotFoundError,
    PreconditionFailedError,
    SaveError,
    StoreUnavailableError,
    Writer,
    parse_uri,
)
from cairn.storage.runs.records.layout import annotation_file, manifest_file
from cairn.storage.runs.writer import sync_folder
from tests.storage.records import put_record
from tests.storage.seams import lease
from tests.storage.stored_runs import PLAIN, begin


@pytest.fixture
def writer(run, clock):
    made = Writer(run, writer="job", clock=clock)
    yield made
    made.close()


def manifest(step, attempt):
    return Manifest(
        step=step,
        attempt=attempt,
        created="2026-11-21T12:00:00Z",
        writer="job",
        items=("model",),
        **PLAIN,
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


def test_a_manifest_that_is_there_is_never_written_over(run, writer):
    attempt = writer.claim(12)
    other = manifest(12, attempt).model_copy(update={"writer": "another"})
    put_record(run.objects, manifest_file(12, attempt), other)
    stored = run.objects.read(manifest_file(12, attempt))
    with pytest.raises(PreconditionFailedError):
        writer.publish(manifest(12, attempt))
    assert run.objects.read(manifest_file(12, attempt)) == stored


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


@pytest.fixture
def lost(monkeypatch):
    """A function of an error: the next attempt is created, and who asked for it is not told."""
    create = lease.create_attempt

    def lose_next(error):
        def lose(*args):
            monkeypatch.setattr(lease, "create_attempt", create)
            create(*args)
            raise error

        monkeypatch.setattr(lease, "create_attempt", lose)

    return lose_next


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreUnavailableError("no answer")])
def test_a_writer_whose_start_was_interrupted_goes_on(run, writer, lost, error):
    writer.publish(manifest(12, writer.claim(12)))
    for _ in range(2):
        lost(error)
        with pytest.raises(type(error)):
            writer.claim(12, overwrite=True)
    assert [one.number for one in run.attempts()] == [1, 2, 3, 4]
    attempt = writer.claim(12, overwrite=True)
    writer.publish(manifest(12, attempt))
    assert run.step_attempts() == {3: 1, 6: 1, 9: 1, 12: attempt}


def test_a_writer_interrupted_before_its_attempt_existed_goes_on(run, writer, monkeypatch):
    writer.claim(12)
    writer.drop()
    with monkeypatch.context() as patch:
        patch.setattr(lease, "create_attempt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.claim(12)
    assert writer.claim(12) == 3


@pytest.mark.parametrize("created", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_an_interrupted_writer_whose_successor_began_is_fenced(
    run, clock, writer, lost, monkeypatch, created, closed
):
    writer.claim(12)
    writer.drop()
    with monkeypatch.context() as patch:
        if created:
            lost(KeyboardInterrupt())
        else:
            patch.setattr(lease, "create_attempt", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.claim(12)
    successor = Writer(run, writer="job", clock=clock)
    successor.publish(manifest(12, successor.claim(12)))
    if closed:
        successor.close()
    for _ in range(2):
        with pytest.raises(FencedError):
            writer.claim(13)
    assert run.attempts()[-1].number == (4 if created else 3)
    successor.close()


def test_a_writer_interrupted_right_after_its_successor_closed_is_fenced(
    run, clock, writer, monkeypatch
):
    """The successor comes and goes after the look at the attempts and before the lease is taken."""
    writer.claim(12)
    writer.drop()
    look, looked = lease.ensure_newest, []

    def succeeded(objects, attempt):
        if looked:
            raise KeyboardInterrupt
        looked.append(look(objects, attempt))
        successor = Writer(run, writer="job", clock=clock)
        successor.publish(manifest(12, successor.claim(12)))
        successor.close()

    with monkeypatch.context() as patch:
        patch.setattr(lease, "ensure_newest", succeeded)
        with pytest.raises(KeyboardInterrupt):
            writer.claim(12)
    for _ in range(2):
        with pytest.raises(FencedError):
            writer.claim(13)
    assert [one.number for one in run.attempts()] == [1, 2, 3]


def interrupt(*args):
    raise KeyboardInterrupt


def test_what_another_is_writing_is_not_waited_for_nor_missed(tmp_path):
    """It may get its name between the listing and the look at it."""
    folder = tmp_path / "run/attempts/1/3"
    folder.mkdir(parents=True)
    (folder / "whole").write_bytes(b"whole")
    (folder / ".cairn-tmp-1").symlink_to(folder / "has-its-name")
    sync_folder(parse_uri(folder))
    (folder / "lost").symlink_to(folder / "nowhere")
    with pytest.raises(NotFoundError, match="lost"):
        sync_folder(parse_uri(folder))
