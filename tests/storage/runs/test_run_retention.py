from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from cairn.storage.errors import StoreUnavailableError, UnsupportedFormatError
from cairn.storage.runs import run_retention
from cairn.storage.runs.annotations import Annotation
from cairn.storage.runs.layout import annotation_file, step_dir
from cairn.storage.runs.retention import BestSteps, RetentionPolicy
from cairn.storage.runs.run import Run
from cairn.storage.runs.run_retention import apply_retention
from cairn.storage.runs.trash import delete_step, read_tombstones, undelete_step
from cairn.storage.store.open_files import open_files
from cairn.storage.training import background_retention
from cairn.storage.training.background_retention import RunRetention
from tests.storage.stored_runs import SetClock, begin, save, write_data


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def run(tmp_path, clock):
    """Steps 1 to 5 of one attempt."""
    made = Run.create(tmp_path / "run", clock=clock)
    begin(made, -1)
    for step in range(1, 6):
        save(made, step, 1)
    return made


def listed(run):
    return [info.step for info in run.steps()]


def annotate(run, step, **notes):
    run.objects.write(annotation_file(step, 1), Annotation(**notes).to_bytes())


def counted(name):
    return REGISTRY.get_sample_value(name) or 0.0


def test_what_no_rule_keeps_goes_to_the_trash_and_can_be_had_back(run, clock):
    outcome = apply_retention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    assert outcome.deleted == ((1, 1), (2, 1), (3, 1))
    assert listed(run) == [4, 5]
    tombstone = read_tombstones(run.objects)[2, 1]
    assert (tombstone.by, tombstone.reason) == ("job", "retention policy")
    undelete_step(run, 2, 1)
    assert listed(run) == [2, 4, 5]


def test_labels_metrics_and_aliases_keep_their_steps(run, clock):
    annotate(run, 1, labels={"keep": ""})
    annotate(run, 2, metrics={"loss": 0.1})
    annotate(run, 3, metrics={"loss": 0.2})
    run.aliases.move("production", step=3, attempt=1, expect=None)
    policy = RetentionPolicy(
        keep_last=1, keep_labelled=["keep"], keep_best=[BestSteps(metric="loss")]
    )
    assert apply_retention(run, policy, by="job", clock=clock).deleted == ((4, 1),)
    assert listed(run) == [1, 2, 3, 5]


def test_a_step_that_is_promoted_while_retention_decides_stays(run, clock, monkeypatch):
    decide = run_retention.decide

    def promoted_meanwhile(*args, **kwargs):
        decisions = decide(*args, **kwargs)
        run.aliases.move("production", step=1, attempt=1, expect=None)
        return decisions

    monkeypatch.setattr(run_retention, "decide", promoted_meanwhile)
    outcome = apply_retention(run, RetentionPolicy(keep_last=3), by="job", clock=clock)
    assert (outcome.deleted, outcome.in_use) == (((2, 1),), ((1, 1),))
    assert listed(run) == [1, 3, 4, 5]


def test_a_save_under_way_is_none_of_its_business(run, clock):
    write_data(run, 6, 1, committed=False)
    apply_retention(run, RetentionPolicy(keep_last=1), by="job", clock=clock)
    assert listed(run) == [5]
    assert open_files(run.uri).walk(step_dir(1, 6))


def test_a_step_whose_labels_cannot_be_read_keeps_everything(run, clock):
    run.objects.write(annotation_file(1, 1), b"not JSON")
    with pytest.raises(UnsupportedFormatError):
        apply_retention(run, RetentionPolicy(keep_last=1), by="job", clock=clock)
    assert listed(run) == [1, 2, 3, 4, 5]


def test_one_step_that_cannot_be_deleted_does_not_keep_the_others(run, clock, monkeypatch):
    delete_step = run_retention.delete_step

    def refused(run, info, **options):
        if info.step == 2:
            raise StoreUnavailableError("the store does not answer")
        return delete_step(run, info, **options)

    monkeypatch.setattr(run_retention, "delete_step", refused)
    outcome = apply_retention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    assert outcome.deleted == ((1, 1), (3, 1))
    assert "does not answer" in str(outcome.errors[0])


def test_in_the_background_deleted_steps_give_their_space_back_after_the_grace_time(run, clock):
    retention = RunRetention(run, RetentionPolicy(keep_last=2), by="job", grace=60, clock=clock)
    before = counted("cairn_retention_deleted_steps_total")
    retention.start()
    retention.close()
    assert counted("cairn_retention_deleted_steps_total") == before + 3
    assert open_files(run.uri).walk(step_dir(1, 1))
    clock.now += timedelta(seconds=61)
    retention.start()
    retention.close()
    assert open_files(run.uri).walk(step_dir(1, 1)) == []
    assert read_tombstones(run.objects) == {}
    assert listed(run) == [4, 5]


def test_a_failure_in_the_background_is_logged_and_counted_and_the_next_pass_works(
    run, clock, monkeypatch, caplog
):
    retention = RunRetention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    before = counted("cairn_retention_failures_total")
    with monkeypatch.context() as patch:

        def down(self):
            raise StoreUnavailableError("the store does not answer")

        patch.setattr(Run, "steps", down)
        retention.start()
        retention.close()
    assert counted("cairn_retention_failures_total") == before + 1
    assert "retention=failed" in caplog.text
    assert listed(run) == [1, 2, 3, 4, 5]
    retention.start()
    retention.close()
    assert listed(run) == [4, 5]


def test_what_is_asked_for_during_a_pass_is_done_in_one_more(run, clock, monkeypatch):
    retention = RunRetention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    passes = []
    apply = run_retention.apply_retention

    def counting(*args, **kwargs):
        passes.append(None)
        if len(passes) == 1:
            save(run, 6, 1)
            retention.start()
            retention.start()
        return apply(*args, **kwargs)

    monkeypatch.setattr(background_retention, "apply_retention", counting)
    retention.start()
    retention.close()
    assert len(passes) == 2
    assert listed(run) == [5, 6]


def test_a_step_that_became_the_latest_since_it_was_judged_stays(run, clock, monkeypatch):
    """A writer goes back, or somebody deletes the latest, while old steps are being deleted."""
    judged = run_retention.decide

    def then_the_latest_goes(*args, **options):
        decisions = list(judged(*args, **options))
        delete_step(run, run.step(5), by="user", reason="diverged", clock=clock)
        return decisions

    monkeypatch.setattr(run_retention, "decide", then_the_latest_goes)
    outcome = apply_retention(run, RetentionPolicy(keep_last=1), by="test", clock=clock)
    assert listed(run) == [4]
    assert outcome.deleted == ((1, 1), (2, 1), (3, 1))
    assert outcome.in_use == ((4, 1),)
