"""Labels and metrics that are noted after a save: merged, never lost, never of what is deleted."""

import threading
from concurrent.futures import ThreadPoolExecutor
from math import inf, isnan, nan

import pytest

from cairn import (
    Annotation,
    BestSteps,
    CorruptionError,
    ObjectStore,
    PolicyError,
    RetentionPolicy,
    Run,
    RunNotFoundError,
    StepChangedError,
    StepNotFoundError,
    UnsupportedFormatError,
    annotate,
    annotate_run,
    annotate_step,
    apply_retention,
    best_step,
    delete_step,
    plan_retention,
    promote_step,
    resolve_checkpoint,
)
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.records.layout import RUN_FILE, annotation_file, trash_file
from cairn.storage.runs.records.placed import read_record
from cairn.storage.runs.retention import check_names
from tests.storage.records import put_record
from tests.storage.stored_runs import begin, end, save

NAME = annotation_file(6, 1)


def noted(run, step=6):
    found = read_record(run.objects, annotation_file(step, 1), Annotation)
    return None if found is None else found[0]


def test_entries_are_set_and_removed_and_all_others_stay(run):
    put_record(run.objects, NAME, Annotation(labels={"stage": "sft"}, metrics={"loss": 0.5}))
    annotate_step(run, 6, labels={"eval": "passed"}, metrics={"acc": 0.75}, better={"acc": "max"})
    assert noted(run) == Annotation(
        labels={"stage": "sft", "eval": "passed"},
        metrics={"loss": 0.5, "acc": 0.75},
        better={"acc": "max"},
    )
    after = annotate_step(run, 6, labels={"stage": None, "none": None}, metrics={"acc": None})
    assert after == noted(run) == Annotation(labels={"eval": "passed"}, metrics={"loss": 0.5})


def test_a_step_of_which_nothing_was_noted_gets_its_first_note(run):
    after = annotate_step(run, 6, metrics={"loss": nan, "norm": inf})
    assert isnan(noted(run).metrics["loss"])
    assert noted(run).metrics["norm"] == inf
    assert after.labels == {}


def test_what_changes_nothing_writes_nothing(run):
    annotate_step(run, 6, labels={"eval": "passed"})
    before = run.objects.read(NAME)
    annotate_step(run, 6, labels={"eval": "passed", "other": None})
    assert run.objects.read(NAME) == before
    annotate_step(run, 3, labels={"none": None})
    assert noted(run, 3) is None


def test_many_at_once_lose_no_note_of_each_other(run):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: annotate_step(run, 6, labels={f"l{n}": "x"}), range(24)))
    assert noted(run).labels == {f"l{n}": "x" for n in range(24)}


def test_what_is_there_is_checked_right_before_it_is_written_over(run, monkeypatch):
    """Another's note comes in between the look and the write: it is looked at, too."""
    write, others, seen = ObjectStore.write_if, iter(["other"]), []

    def write_if(self, key, *args, **more):
        if key == NAME and next(others, None):
            annotate_step(Run.open(run.uri), 6, labels={"other": "was quicker"})
        return write(self, key, *args, **more)

    monkeypatch.setattr(ObjectStore, "write_if", write_if)
    annotate_step(run, 6, labels={"mine": "x"}, check=lambda one: seen.append(dict(one.labels)))
    assert seen == [{}, {"other": "was quicker"}]
    assert noted(run).labels == {"other": "was quicker", "mine": "x"}


def test_what_a_check_raises_leaves_the_note_as_it_was(run):
    annotate_step(run, 6, labels={"eval": "passed"})

    def refuse(_):
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"):
        annotate_step(run, 6, labels={"eval": "failed"}, check=refuse)
    assert noted(run).labels == {"eval": "passed"}


def test_what_cannot_be_kept_is_refused_whole_with_all_of_it_named(run):
    with pytest.raises(UnsupportedFormatError) as caught:
        annotate_step(
            run,
            6,
            labels={"n": 1, "good": "text"},
            metrics={"loss": "0.5", "acc": 0.5},
            better={"acc": "high"},
        )
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "labels['n']",
        "metrics['loss']",
        "better['acc']",
    ]
    assert noted(run) is None


@pytest.mark.parametrize("metrics", [None, {"loss": None}])
def test_a_direction_needs_its_metric(run, metrics):
    annotate_step(run, 6, metrics={} if metrics is None else {"loss": 1.0})
    with pytest.raises(UnsupportedFormatError, match="expected a metric of that name"):
        annotate_step(run, 6, metrics=metrics, better={"loss": "min"})


def test_records_of_saves_are_written_as_they_were(run):
    """What says nothing of directions can be read by code that knows none."""
    annotate_step(run, 6, metrics={"loss": 0.5})
    assert b"better" not in run.objects.read(NAME).value


def test_steps_that_are_not_listed_take_no_notes(run):
    delete_step(run, run.step(6), by="ann", grace=60)
    for step in (6, 7):
        with pytest.raises(StepNotFoundError):
            annotate_step(run, step, labels={"eval": "passed"})
    assert noted(run) is None


def test_note_of_an_alias_is_of_what_it_names_though_its_step_was_saved_anew(run):
    promote_step(run, 6, "candidate", expect=None)
    again = begin(run, -1)
    save(run, 6, again)
    end(run)
    annotate(f"{run.uri}@candidate", labels={"eval": "passed"})
    assert noted(run).labels == {"eval": "passed"}
    assert run.step(6).attempt == again
    assert annotation_of(run, run.step(6)).labels == {}
    annotate(f"{run.uri}/steps/6", labels={"eval": "failed"})
    assert annotation_of(run, run.step(6)).labels == {"eval": "failed"}
    assert noted(run).labels == {"eval": "passed"}


def test_a_deletion_and_a_note_at_once_see_each_other(run, monkeypatch):
    """The deletion comes between the look at the step and the note: nothing is noted."""
    look = Run.step

    def step(self, number):
        info = look(self, number)
        if run.objects.read(trash_file(6, 1)) is None:
            delete_step(Run.open(run.uri), info, by="ann", grace=60)
        return info

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(StepChangedError):
        annotate_step(run, 6, labels={"eval": "passed"})
    assert noted(run) is None


def test_labels_of_a_run_change_and_all_else_it_says_stays(run):
    before = run.info()
    annotate_run(run, {"team": "nlp", "owner": "ann"})
    after = annotate_run(run, {"owner": None})
    now = Run.open(run.uri).info()
    assert now == after
    assert now.labels == {"team": "nlp"}
    assert (now.id, now.name, now.created) == (before.id, before.name, before.created)
    attempt = begin(run, 9)  # and saves go on
    save(run, 12, attempt)
    end(run)
    assert [info.step for info in Run.open(run.uri).steps()] == [3, 6, 9, 12]


def test_many_at_once_lose_no_label_of_a_run(run):
    barrier = threading.Barrier(8)

    def label(number):
        barrier.wait()
        annotate_run(run, {f"l{number}": "x"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(label, range(8)))
    assert run.info().labels == {f"l{n}": "x" for n in range(8)}


def test_labels_of_a_run_that_is_not_there_are_refused(run):
    with pytest.raises(RunNotFoundError):
        annotate_run(Run(run.uri.parent / "none"), {"team": "nlp"})
    run.objects.delete(RUN_FILE)
    with pytest.raises(CorruptionError, match="lost its record"):
        annotate_run(run, {"team": "nlp"})
    with pytest.raises(UnsupportedFormatError, match="labels"):
        annotate_run(run, {"team": 1})


def test_the_best_is_what_steps_say_is_better(run):
    for step, value in ((3, 1.0), (6, 2.0), (9, 1.5)):
        annotate_step(run, step, metrics={"acc": value, "loss": value})
    with pytest.raises(PolicyError, match="is not said"):
        best_step(run, "acc", None)
    annotate_step(run, 9, better={"acc": "max", "loss": "min"})
    assert best_step(run, "acc", None).step == best_step(run, "acc", "max").step == 6
    assert best_step(run, "loss", None).step == 3
    with pytest.raises(PolicyError, match="steps say otherwise"):
        best_step(run, "acc", "min")
    assert resolve_checkpoint(f"{run.uri}@best:acc")[1].step == 6
    assert resolve_checkpoint(f"{run.uri}@best:loss:min")[1].step == 3
    annotate_step(run, 3, better={"acc": "min"})
    with pytest.raises(PolicyError, match="'max' and 'min'"):
        best_step(run, "acc", None)


def test_a_policy_that_contradicts_what_steps_say_deletes_nothing(run):
    for step, value in ((3, 1.0), (6, 2.0), (9, 1.5)):
        annotate_step(run, step, metrics={"acc": value}, better={"acc": "max"})
    wrong = RetentionPolicy(keep_best=[BestSteps(metric="acc", mode="min")])
    for refused in (
        lambda: plan_retention(run, wrong, now=run.clock()),
        lambda: apply_retention(run, wrong, by="ann", clock=run.clock),
        lambda: check_names(run, wrong, for_later=True),
    ):
        with pytest.raises(PolicyError) as caught:
            refused()
        assert caught.value.problems == (
            "of the metric 'acc' steps say that 'max' is better, and the policy has 'min'",
        )
    assert [info.step for info in run.steps()] == [3, 6, 9]
    right = RetentionPolicy(keep_best=[BestSteps(metric="acc", mode="max")])
    apply_retention(run, right, by="ann", clock=run.clock)
    assert [info.step for info in run.steps()] == [6, 9]
