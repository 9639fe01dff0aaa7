"""Verbs of a run on a disk that fails for a moment, at each sync and each rename in turn.

What they tell is so, and the same caller goes on at once.
"""

import shutil

import pytest

from cairn import (
    RetentionPolicy,
    Run,
    StorageError,
    annotate_step,
    apply_retention,
    delete_alias,
    delete_step,
    parse_uri,
    promote_step,
    roll_back,
    safe_join,
    undelete_step,
)
from tests.storage.failing_disk import FailingDisk
from tests.storage.stored_runs import SetClock, begin, end, save


@pytest.fixture
def made(tmp_path):
    """Steps 3, 6 and 9, the first in the trash; the alias names the last."""
    run = Run.create(tmp_path / "made", clock=SetClock())
    attempt = begin(run, -1)
    for step in (3, 6, 9):
        save(run, step, attempt)
    end(run)
    delete_step(run, run.step(3), by="me")
    promote_step(run, 9, "candidate", expect=None)
    return tmp_path / "made"


def delete(run):
    delete_step(run, run.step(6), by="me")


def undelete(run):
    undelete_step(run, 3, 1)


def promote(run):
    promote_step(run, 6, "production", expect=None)


def unpromote(run):
    delete_alias(run, "candidate", expect=1)


def annotate(run):
    annotate_step(run, 6, labels={"kind": "good"})


def go_back(run):
    roll_back(run, 6, by="me")


def prune(run):
    outcome = apply_retention(run, RetentionPolicy(keep_last=1), by="me")
    for error in outcome.errors:
        raise error


def history(run):
    aliases = {one.alias: one.step for one in run.aliases.list()}
    noted = run.objects.read("annotations/6.1.json") is not None
    return run.latest_step(), [info.step for info in run.steps()], aliases, noted


@pytest.mark.parametrize(
    "verb",
    [delete, undelete, promote, unpromote, annotate, go_back, prune],
    ids=lambda one: one.__name__,
)
def test_a_verb_is_done_or_says_why_not_wherever_the_disk_fails_for_a_moment(
    made, tmp_path, monkeypatch, verb
):
    def tried(at):
        shutil.copytree(made, tmp_path / f"root/{at}")
        run = Run(safe_join(parse_uri(tmp_path / "root"), f"{at}"), clock=SetClock())
        before, error = history(run), None
        with FailingDisk(monkeypatch, range(at, at + 1)) as disk:
            try:
                verb(run)
            except StorageError as exc:
                error = exc
        return run, before, error, disk.calls

    run, before, error, calls = tried(10_000)
    done = history(run)
    assert (error, done != before) == (None, True)
    tries = [at for at, call in enumerate(calls) if call in ("fsync", "replace")]
    assert tries
    for at in tries:
        run, before, error, _ = tried(at)
        is_done = error is None or "the run has gone back" in str(error)
        if verb is not prune or is_done:  # which deletes one after another
            assert history(run) == (done if is_done else before), (at, error)
        if not is_done:
            verb(run)
            assert history(run) == done, at
