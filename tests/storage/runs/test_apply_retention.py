import json
from datetime import timedelta
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY

from cairn import (
    Annotation,
    BestSteps,
    Damage,
    Manifest,
    PolicyError,
    RetentionPolicy,
    Run,
    StepNotFoundError,
    StoreUnavailableError,
    UnsupportedFormatError,
    Writer,
    apply_retention,
    collect_garbage,
    delete_step,
    open_files,
    parse_uri,
    plan_retention,
    roll_back,
    undelete_step,
)
from cairn.state.checkpointing import background_retention
from cairn.state.checkpointing.background_retention import RunRetention
from cairn.storage.runs import retention
from cairn.storage.runs.annotate import annotation_of, note_verified
from cairn.storage.runs.records.layout import annotation_file, step_dir
from cairn.storage.runs.retention import check_names
from cairn.storage.runs.trash import read_tombstones
from tests.storage.records import AliasWriter, attempt_file, put_record
from tests.storage.stored_runs import PLAIN, begin, end, save, write_data


@pytest.fixture
def run(tmp_path, clock):
    """Steps 1 to 5 of one attempt, whose writer has ended."""
    made = Run.create(tmp_path / "run", clock=clock)
    begin(made, -1)
    for step in range(1, 6):
        save(made, step, 1)
    end(made)
    return made


def listed(run):
    return [info.step for info in run.steps()]


def annotate(run, step, **notes):
    put_record(run.objects, annotation_file(step, 1), Annotation(**notes))


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
    AliasWriter(run.objects).move("production", step=3, attempt=1, expect=None)
    policy = RetentionPolicy(
        keep_last=1, keep_labelled=["keep"], keep_best=[BestSteps(metric="loss")]
    )
    assert apply_retention(run, policy, by="job", clock=clock).deleted == ((4, 1),)
    assert listed(run) == [1, 2, 3, 5]


def test_a_step_that_is_promoted_while_retention_decides_stays(run, clock, monkeypatch):
    decide = retention.evaluate_retention

    def promoted_meanwhile(*args, **kwargs):
        decisions = decide(*args, **kwargs)
        AliasWriter(run.objects).move("production", step=1, attempt=1, expect=None)
        return decisions

    monkeypatch.setattr(retention, "evaluate_retention", promoted_meanwhile)
    outcome = apply_retention(run, RetentionPolicy(keep_last=3), by="job", clock=clock)
    assert outcome.deleted == ((2, 1),)
    assert outcome.in_use == {(1, 1): "alias production"}
    assert listed(run) == [1, 3, 4, 5]


def test_a_step_found_damaged_since_it_was_judged_stays(run, clock, monkeypatch):
    damage = Damage(at="2026-01-02T03:04:05Z")
    declare = retention.declare

    def declared_late(declaring, key, **more):
        if key == (2, 1):
            note_verified(run, run.step(2), damage=damage)
        return declare(declaring, key, **more)

    monkeypatch.setattr(retention, "declare", declared_late)
    done = apply_retention(run, RetentionPolicy(keep_last=1), by="me", clock=clock)
    assert (listed(run), done.in_use) == ([2, 5], {(2, 1): "damaged"})
    monkeypatch.undo()
    note_verified(run, run.step(5), damage=damage)
    save(run, 6, 1)
    save(run, 7, 1)
    assert apply_retention(run, RetentionPolicy(keep_last=2), by="me", clock=clock).deleted == ()
    assert listed(run) == [2, 5, 6, 7]


def test_a_kept_step_found_damaged_meanwhile_has_the_next_sound_one_kept(run, clock):
    calls = []

    def damaged_meanwhile(steps, nbytes):
        if not calls:
            note_verified(run, run.step(5), damage=Damage(at="2026-01-02T03:04:05Z"))
        calls.append(len(steps))

    policy = RetentionPolicy(keep_last=1)
    done = apply_retention(run, policy, by="me", progress=damaged_meanwhile, clock=clock)
    assert (listed(run), done.deleted) == ([4, 5], ((1, 1), (2, 1), (3, 1)))
    assert done.in_use == {(4, 1): "latest, last 1"}


def test_a_step_found_damaged_while_its_deletion_is_declared_says_so_if_it_stays(
    run, clock, monkeypatch
):
    """Its deletion is withdrawn, or its tombstone lifted."""
    damage = Damage(at="2026-01-02T03:04:05Z")
    intent = retention.declare(run, (5, 1), by="me", reason="", now=clock())
    note_verified(run, run.step(5), damage=damage)
    retention.withdraw(run, (5, 1), intent)
    assert annotation_of(run, run.step(5)).damaged == damage

    doubtful = retention.doubtful_steps

    def damaged_after(looked, keys):
        found = doubtful(looked, keys)
        note_verified(run, run.step(2), damage=damage)
        return found

    monkeypatch.setattr(retention, "doubtful_steps", damaged_after)
    done = apply_retention(run, RetentionPolicy(keep_last=1), by="me", clock=clock)
    assert (listed(run), done.in_use) == ([2, 4, 5], {(2, 1): "damaged"})


def test_a_damaged_step_is_deleted_by_hand(run, clock):
    note_verified(run, run.step(2), damage=Damage(at="2026-01-02T03:04:05Z"))
    delete_step(run, run.step(2), by="ann", clock=clock)
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
    lay_tombstone = retention.lay_tombstone

    def refused(run, key, tombstone):
        if key == (2, 1):
            raise StoreUnavailableError("the store does not answer")
        return lay_tombstone(run, key, tombstone)

    monkeypatch.setattr(retention, "lay_tombstone", refused)
    outcome = apply_retention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    assert outcome.deleted == ((1, 1), (3, 1))
    assert "does not answer" in str(outcome.errors[0])


def test_in_the_background_deleted_steps_give_their_space_back_after_the_grace_time(run, clock):
    background = RunRetention(run, RetentionPolicy(keep_last=2), by="job", grace=60, clock=clock)
    before = counted("cairn_retention_deleted_steps_total")
    background.start()
    background.close()
    assert counted("cairn_retention_deleted_steps_total") == before + 3
    assert open_files(run.uri).walk(step_dir(1, 1))
    clock.now += timedelta(seconds=61)
    background.start()
    background.close()
    assert open_files(run.uri).walk(step_dir(1, 1)) == []
    assert read_tombstones(run.objects) == {}
    assert listed(run) == [4, 5]


def test_a_failure_in_the_background_is_logged_and_counted_and_the_next_pass_works(
    run, clock, monkeypatch, caplog
):
    background = RunRetention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    before = counted("cairn_retention_failures_total")
    with monkeypatch.context() as patch:

        def down(self):
            raise StoreUnavailableError("the store does not answer")

        patch.setattr(Run, "attempts", down)
        background.start()
        background.close()
    assert counted("cairn_retention_failures_total") == before + 1
    assert "retention=failed" in caplog.text
    assert listed(run) == [1, 2, 3, 4, 5]
    background.start()
    background.close()
    assert listed(run) == [4, 5]


def test_what_is_asked_for_during_a_pass_is_done_in_one_more(run, clock, monkeypatch):
    background = RunRetention(run, RetentionPolicy(keep_last=2), by="job", clock=clock)
    passes = []
    apply = retention.apply_retention

    def counting(*args, **kwargs):
        passes.append(None)
        if len(passes) == 1:
            save(run, 6, 1)
            background.start()
            background.start()
        return apply(*args, **kwargs)

    monkeypatch.setattr(background_retention, "apply_retention", counting)
    background.start()
    background.close()
    assert len(passes) == 2
    assert listed(run) == [5, 6]


def test_a_step_that_became_the_latest_since_it_was_judged_stays(run, clock, monkeypatch):
    """A writer goes back, or somebody deletes the latest, while old steps are being deleted."""
    judged = retention.evaluate_retention

    def then_the_latest_goes(*args, **options):
        decisions = list(judged(*args, **options))
        if 5 in listed(run):
            delete_step(run, run.step(5), by="user", reason="diverged", clock=clock)
        return decisions

    monkeypatch.setattr(retention, "evaluate_retention", then_the_latest_goes)
    outcome = apply_retention(run, RetentionPolicy(keep_last=1), by="test", clock=clock)
    assert listed(run) == [4]
    assert outcome.deleted == ((1, 1), (2, 1), (3, 1))
    assert outcome.in_use.keys() == {(4, 1)}


@pytest.fixture
def goes_back(run, monkeypatch):
    """Somebody rolls the run back to step 2 once it was judged, before anything is deleted."""
    judged = retention.evaluate_retention
    calls = []

    def then_the_run_goes_back(*args, **options):
        decisions = list(judged(*args, **options))
        if not calls:
            calls.append(roll_back(run, 2, by="somebody"))
        return decisions

    monkeypatch.setattr(retention, "evaluate_retention", then_the_run_goes_back)
    return calls


def test_a_rollback_since_it_was_judged_keeps_what_the_policy_keeps_now(run, clock, goes_back):
    outcome = apply_retention(run, RetentionPolicy(keep_last=1), by="test", clock=clock)
    assert goes_back[0].superseded == (3, 4, 5)
    assert listed(run) == [2]
    assert outcome.in_use == {(2, 1): "latest, last 1"}
    assert (1, 1) in outcome.deleted


def test_a_rollback_since_it_was_judged_brings_back_all_that_the_policy_keeps(
    run, clock, goes_back
):
    apply_retention(run, RetentionPolicy(keep_last=3), by="test", clock=clock)
    assert listed(run) == [1, 2]


def test_in_the_background_a_rollback_costs_no_step_that_the_policy_keeps(run, clock, goes_back):
    background = RunRetention(run, RetentionPolicy(keep_last=1), by="job", clock=clock)
    background.start()
    background.close()
    assert goes_back
    assert listed(run) == [2]


def test_a_pass_that_was_killed_after_its_tombstones_costs_no_bytes_of_what_is_kept(
    run, clock, monkeypatch
):
    """Then the run goes back to a step that has one, and the collector comes."""

    class KilledError(BaseException):
        pass

    def killed(*args):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(retention._Pass, "_look_back", killed)
        with pytest.raises(KilledError):
            apply_retention(run, RetentionPolicy(keep_last=2), by="t", grace=0, clock=clock)
    assert listed(run) == [4, 5]
    with pytest.raises(StepNotFoundError):
        roll_back(run, 3, by="somebody")
    roll_back(run, 4, by="somebody")
    collect_garbage(run, by="gc", clock=clock)
    assert listed(run) == [3, 4]  # 3 is among the last two now: its tombstone was lifted
    assert not open_files(run.uri).walk(step_dir(1, 2))


def test_an_overwrite_since_it_was_judged_costs_no_bytes_of_what_the_policy_keeps_now(run, clock):
    """It was begun before, so that no attempt tells: its manifest does."""
    writer = Writer(run, writer="job", clock=clock)
    attempt = writer.claim(4, overwrite=True)
    apply_retention(run, RetentionPolicy(keep_last=2), by="t", grace=0, clock=clock)
    assert listed(run) == [4, 5]
    write_data(run, 4, attempt)
    created = "2026-11-21T12:00:00Z"
    writer.publish(
        Manifest(step=4, attempt=attempt, created=created, writer="job", items=("model",), **PLAIN)
    )
    assert listed(run) == [4]
    writer.close()
    collect_garbage(run, by="gc", clock=clock)
    assert listed(run) == [3, 4]


def test_a_step_that_a_rollback_is_about_to_need_stays(run, clock):
    """It holds the step, has the lease, and was paused before its attempt."""
    outcome = []
    write_if = type(run.objects).write_if

    def retention_first(self, key, value, **options):
        if key == attempt_file(2):
            clock.now += timedelta(seconds=500)  # past the lease
            outcome.append(apply_retention(run, RetentionPolicy(keep_last=1), by="t", clock=clock))
        return write_if(self, key, value, **options)

    with patch.object(type(run.objects), "write_if", retention_first):
        roll_back(run, 2, by="paused")
    assert outcome[0].in_use == {(2, 1): "paused, who is to roll back to it"}
    assert listed(run) == [2]


def test_a_policy_is_told_as_json_and_back():
    policy = RetentionPolicy(
        keep_last=3,
        keep_within=60.0,
        keep_best=[BestSteps(metric="loss", count=2), BestSteps(metric="acc", mode="max")],
        keep_labelled=["keep", "a=b"],
    )
    assert RetentionPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    assert RetentionPolicy().to_json() == {}
    with pytest.raises(PolicyError, match="keep_luckiest"):
        RetentionPolicy.from_json({"keep_luckiest": 1})


def best(metric):
    return RetentionPolicy(keep_last=1, keep_best=[BestSteps(metric=metric)])


def labelled(label):
    return RetentionPolicy(keep_last=1, keep_labelled=[label])


@pytest.fixture
def measured(run):
    """Its first step is the best, and has labels; the others have neither."""
    annotate(
        run,
        1,
        labels={"final": "", "stage": "1", "eval": "passed"},
        metrics={"loss": 0.1, "eval/top5": 0.9, "odd": float("nan")},
    )
    return run


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (best("los"), "the metric 'los': the nearest known is 'loss'"),
        (best("LOSS"), "the metric 'LOSS': the nearest known is 'loss'"),
        (best("loss:mx"), "the metric 'loss:mx': the nearest known is 'loss'"),
        (best("perplexity"), "the metric 'perplexity': known are 'eval/top5', 'loss', 'odd'"),
        (best("odd"), "the metric 'odd': it is NaN wherever there is one"),
        (labelled("fnal"), "the label 'fnal': the nearest known is 'final'"),
        (labelled("evl=passed"), "the label 'evl': the nearest known is 'eval'"),
        (labelled("eval=pased"), "the label 'eval=pased': the nearest known is 'eval=passed'"),
    ],
)
def test_a_policy_that_names_what_no_step_carries_is_refused_with_the_nearest(
    measured, clock, policy, said
):
    for judge in (
        lambda: apply_retention(measured, policy, by="job", clock=clock),
        lambda: plan_retention(measured, policy, now=clock()),
        lambda: check_names(measured, policy),
    ):
        with pytest.raises(PolicyError) as caught:
            judge()
        assert caught.value.problems == (f"no step carries {said}",)
    assert listed(measured) == [1, 2, 3, 4, 5]


def test_all_names_that_no_step_carries_are_listed_at_once(run, clock):
    policy = RetentionPolicy(
        keep_best=[BestSteps(metric="loss"), BestSteps(metric="acc")], keep_labelled=["final"]
    )
    with pytest.raises(PolicyError) as caught:
        apply_retention(run, policy, by="job", clock=clock)
    assert caught.value.problems == (
        "no step carries the metric 'loss': no step has any metric",
        "no step carries the metric 'acc': no step has any metric",
        "no step carries the label 'final': no step has any label",
    )


def test_a_run_without_steps_takes_any_policy(tmp_path, clock):
    made = Run.create(tmp_path / "empty", clock=clock)
    assert apply_retention(made, best("loss"), by="job", clock=clock).deleted == ()


def test_what_only_deleted_steps_carry_is_not_known(measured, clock):
    delete_step(measured, measured.step(1), by="user", reason="by hand", clock=clock)
    with pytest.raises(PolicyError, match="no step has any metric"):
        apply_retention(measured, best("loss"), by="job", clock=clock)
    assert listed(measured) == [2, 3, 4, 5]


def test_a_rollback_to_before_the_metric_brings_all_back_that_was_deleted_for_it(
    run, clock, monkeypatch
):
    annotate(run, 5, metrics={"loss": 0.1})
    judged = retention.evaluate_retention

    def then_the_run_goes_back(*args, **options):
        decisions = list(judged(*args, **options))
        if 5 in listed(run):
            roll_back(run, 3, by="somebody")
        return decisions

    monkeypatch.setattr(retention, "evaluate_retention", then_the_run_goes_back)
    apply_retention(run, best("loss"), by="job", clock=clock)
    assert listed(run) == [1, 2, 3]


def test_garbage_that_a_policy_made_stays_once_no_step_carries_its_metric(run, clock):
    annotate(run, 5, metrics={"loss": 0.1})
    policy = RetentionPolicy(keep_last=2, keep_best=[BestSteps(metric="loss")])
    outcome = apply_retention(run, policy, by="job", grace=0, clock=clock)
    assert outcome.deleted == ((1, 1), (2, 1), (3, 1))
    roll_back(run, 4, by="somebody")
    collect_garbage(run, by="gc", clock=clock)
    assert listed(run) == [1, 2, 3, 4]


def test_in_the_background_nothing_goes_until_a_step_carries_the_metric_and_the_log_says_so_once(
    run, clock, caplog
):
    background = RunRetention(run, best("loss"), by="job", clock=clock)
    failures = counted("cairn_retention_failures_total")
    for _ in range(2):
        background.start()
        background.close()
    assert listed(run) == [1, 2, 3, 4, 5]
    assert caplog.text.count("retention=withheld") == 1
    assert "no step carries the metric 'loss'" in caplog.text
    assert isinstance(background.error, PolicyError)
    assert counted("cairn_retention_failures_total") == failures
    annotate(run, 2, metrics={"loss": 0.1})
    background.start()
    background.close()
    assert listed(run) == [2, 5]
    assert background.error is None


@pytest.mark.parametrize(
    "policy", [best("los"), best("losss"), best("eval/top_5"), labelled("fnal"), labelled("Final")]
)
def test_a_name_that_is_a_misspelt_one_of_the_run_is_refused_for_steps_to_come(measured, policy):
    with pytest.raises(PolicyError, match="the nearest known is"):
        check_names(measured, policy, for_later=True)


@pytest.mark.parametrize(
    "policy",
    [
        best("loss"),
        best("eval/loss"),
        best("eval/top1"),
        best("odd"),
        best("accuracy"),
        labelled("keep"),
        labelled("stage=2"),
        labelled("eval=failed"),
        RetentionPolicy(keep_last=1),
    ],
)
def test_a_name_that_a_later_step_may_bring_is_not(measured, policy):
    check_names(measured, policy, for_later=True)


def test_a_policy_may_be_made_known_to_a_run_that_is_yet_to_begin(tmp_path):
    check_names(Run(parse_uri(tmp_path / "none")), best("loss"), for_later=True)
