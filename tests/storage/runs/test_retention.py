import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import BestSteps, PolicyError, RetentionPolicy, StepFacts, evaluate_retention

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def facts(step, *, age=0.0, attempt=1, needs=(), labels=None, **metrics):
    created = NOW - timedelta(seconds=age)
    return StepFacts(step, attempt, created, metrics, labels or {}, frozenset(needs))


def kept(steps, policy, *, aliases=None, in_use=()):
    decisions = evaluate_retention(steps, policy, now=NOW, aliases=aliases or {}, in_use=in_use)
    return [one.step for one in decisions if one.keep]


TEN = [facts(step) for step in range(1, 11)]


def test_a_policy_without_rules_deletes_nothing():
    assert kept(TEN, RetentionPolicy()) == list(range(1, 11))


def test_the_last_n_stay():
    assert kept(TEN, RetentionPolicy(keep_last=3)) == [8, 9, 10]


def test_every_kth_stays_and_the_latest_with_them():
    assert kept(TEN, RetentionPolicy(keep_every=4)) == [4, 8, 10]


def test_steps_saved_within_some_seconds_stay():
    steps = [facts(1, age=100), facts(2, age=60), facts(3, age=59), facts(4, age=0)]
    assert kept(steps, RetentionPolicy(keep_within=60)) == [2, 3, 4]


def test_the_best_by_a_metric_stay_and_nan_is_never_best():
    steps = [
        facts(1, loss=0.5),
        facts(2, loss=math.nan),
        facts(3, loss=0.1),
        facts(4),
        facts(5, loss=0.5),
        facts(6, loss=-math.inf),
        facts(7, loss=9.0),
    ]
    policy = RetentionPolicy(keep_best=[BestSteps(metric="loss", count=3)])
    assert kept(steps, policy) == [3, 5, 6, 7]  # of the two 0.5 the later; 7 is the latest
    highest = RetentionPolicy(keep_best=[BestSteps(metric="loss", mode="max")])
    assert kept([*steps[:3], facts(9)], highest) == [1, 9]


def test_labelled_steps_stay_by_name_or_by_value():
    steps = [
        facts(1, labels={"keep": ""}),
        facts(2, labels={"stage": "eval"}),
        facts(3, labels={"stage": "warmup"}),
        facts(4),
    ]
    assert kept(steps, RetentionPolicy(keep_labelled=["keep", "stage=eval"])) == [1, 2, 4]


def test_aliased_and_held_steps_stay_whatever_the_policy_says():
    policy = RetentionPolicy(keep_last=1)
    assert kept(TEN, policy, aliases={"production": (2, 1)}, in_use={(5, 1)}) == [2, 5, 10]
    assert kept(TEN, policy, aliases={"production": (2, 7)}) == [10]  # of another attempt


def damaged(step, **more):
    return replace(facts(step, **more), damaged=True)


@pytest.mark.parametrize(
    "policy",
    [
        RetentionPolicy(keep_last=3),
        RetentionPolicy(keep_every=3, keep_last=1),
        RetentionPolicy(keep_best=[BestSteps(metric="loss", count=2)]),
        RetentionPolicy(keep_labelled=["good"]),
        RetentionPolicy(keep_within=60),
    ],
)
@pytest.mark.parametrize("broken", [{10}, {9}, {3, 6}, {1, 10}, set(range(1, 11))])
def test_damaged_steps_stay_and_stand_for_none_of_those_that_a_rule_keeps(policy, broken):
    """The sound ones are kept as if the others were not there."""
    told = {"loss": 0.1, "labels": {"good": ""}}
    steps = [
        replace(facts(step, age=100.0 - step, **told), damaged=step in broken)
        for step in range(1, 11)
    ]
    decisions = evaluate_retention(steps, policy, now=NOW, aliases={}, in_use=())
    for one in decisions:
        assert (one.reasons == ("damaged",)) == (one.step in broken)
    assert [one for one in decisions if one.step not in broken] == evaluate_retention(
        [one for one in steps if not one.damaged], policy, now=NOW, aliases={}, in_use=()
    )


def test_the_latest_sound_step_stays_as_the_latest_and_a_metric_of_a_damaged_one_is_known():
    steps = [facts(1), facts(2), damaged(3, loss=0.1)]
    assert kept(steps, RetentionPolicy(keep_best=[BestSteps(metric="loss")])) == [2, 3]


def test_what_a_kept_step_refers_to_stays_with_it():
    steps = [
        facts(1),
        facts(2, needs={(1, 1)}),
        facts(3, needs={(2, 1)}),
        facts(4),
        facts(5, needs={(3, 1)}),
    ]
    decisions = evaluate_retention(steps, RetentionPolicy(keep_last=1), now=NOW, aliases={})
    assert [one.step for one in decisions if one.keep] == [1, 2, 3, 5]
    assert decisions[0].reasons == ("holds bytes of step 2.1",)


def test_a_policy_that_cannot_act_is_refused_with_all_that_is_wrong():
    with pytest.raises(PolicyError) as caught:
        RetentionPolicy(
            keep_last=0,
            keep_every=-2,
            keep_within=math.nan,
            keep_best=[BestSteps(metric="", count=0, mode="best")],  # type: ignore[arg-type]
            keep_labelled=["=x"],
        )
    for word in ("keep_last", "keep_every", "keep_within", "keep_best", "'best'", "keep_labelled"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "rule",
    [
        {"keep_labelled": "final"},
        {"keep_labelled": b"final"},
        {"keep_labelled": {"final": "yes"}},
        {"keep_labelled": 1},
        {"keep_labelled": [1]},
        {"keep_labelled": [("final", "yes")]},
        {"keep_best": BestSteps(metric="loss")},
        {"keep_best": "loss"},
        {"keep_best": ["loss"]},
        {"keep_best": [{"metric": "loss"}]},
        {"keep_best": [BestSteps(metric=3)]},  # type: ignore[arg-type]
        {"keep_best": [BestSteps(metric="loss", count=True)]},
        {"keep_last": True},
        {"keep_last": "3"},
        {"keep_every": 2.0},
        {"keep_within": True},
        {"keep_within": "5"},
        {"keep_within": timedelta(days=1)},
    ],
)
def test_a_rule_of_another_type_is_refused_and_named(rule):
    with pytest.raises(PolicyError) as caught:
        RetentionPolicy(**rule)
    (name,) = rule
    assert name in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("in_use", [[2], ["2.1"], [(2,)], [("2", 1)], [[2, 1]], 2, "21"])
def test_steps_in_use_that_are_no_pairs_are_refused_for_they_would_protect_nothing(in_use):
    with pytest.raises(PolicyError, match="in_use"):
        kept(TEN, RetentionPolicy(keep_last=1), in_use=in_use)


numbers = st.integers(1, 12)
keys = st.tuples(st.integers(0, 40), st.integers(1, 3))
step_sets = st.dictionaries(
    st.integers(0, 40),
    st.tuples(
        st.integers(1, 3),
        st.floats(0, 1000),
        st.dictionaries(st.sampled_from(["loss", "score"]), st.floats()),
        st.dictionaries(st.sampled_from(["keep", "stage"]), st.sampled_from(["", "eval"])),
        st.frozensets(keys, max_size=3),
    ),
    max_size=12,
).map(
    lambda found: [
        StepFacts(step, attempt, NOW - timedelta(seconds=age), metrics, labels, needs)
        for step, (attempt, age, metrics, labels, needs) in found.items()
    ]
)
policies = st.builds(
    RetentionPolicy,
    keep_last=st.none() | numbers,
    keep_every=st.none() | numbers,
    keep_within=st.none() | st.floats(1, 900),
    keep_best=st.lists(
        st.builds(
            BestSteps,
            metric=st.sampled_from(["loss", "score"]),
            count=numbers,
            mode=st.sampled_from(["min", "max"]),
        ),
        max_size=2,
    ),
    keep_labelled=st.lists(st.sampled_from(["keep", "stage=eval"]), max_size=2),
)
alias_maps = st.dictionaries(st.sampled_from(["production", "best"]), keys)


@given(step_sets, policies, alias_maps, st.frozensets(keys, max_size=3), st.randoms())
def test_no_policy_deletes_what_must_stay(steps, policy, aliases, in_use, random):
    decisions = evaluate_retention(steps, policy, now=NOW, aliases=aliases, in_use=in_use)
    by_key = {(one.step, one.attempt): one for one in decisions}
    assert sorted(by_key) == sorted(one.key for one in steps)
    if steps:
        assert by_key[max(one.key for one in steps)].keep
    assert all(by_key[key].keep for key in [*aliases.values(), *in_use] if key in by_key)
    for one in steps:
        if by_key[one.key].keep:
            assert all(by_key[key].keep for key in one.needs if key in by_key)
    random.shuffle(steps)
    again = evaluate_retention(steps, policy, now=NOW, aliases=aliases, in_use=in_use)
    assert again == decisions


@given(step_sets, policies, policies)
def test_more_rules_never_delete_more(steps, policy, more):
    both = RetentionPolicy(
        keep_last=max(policy.keep_last or 0, more.keep_last or 0) or None,
        keep_every=policy.keep_every,
        keep_within=policy.keep_within,
        keep_best=[*policy.keep_best, *more.keep_best],
        keep_labelled=[*policy.keep_labelled, *more.keep_labelled],
    )
    if policy.deletes:
        assert set(kept(steps, policy)) <= set(kept(steps, both))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"keep_best": [BestSteps(metric="los")]}, "no step carries the metric 'los'"),
        ({"keep_best": [BestSteps(metric="diverged")]}, "no step carries the metric 'diverged'"),
        ({"keep_labelled": ["finl"]}, "no step carries the label 'finl'"),
        ({"keep_labelled": ["stage=last"]}, "no step carries the label 'stage=last'"),
    ],
)
def test_a_metric_or_label_that_no_step_carries_deletes_nothing(rule, reason):
    steps = [facts(1, labels={"final": "", "stage": "first"}, loss=0.1, diverged=math.nan), *TEN]
    decisions = evaluate_retention(steps, RetentionPolicy(keep_last=1, **rule), now=NOW, aliases={})
    assert all(reason in one.reasons for one in decisions)


def test_a_metric_that_some_steps_carry_is_known():
    steps = [facts(1), facts(2, loss=0.1), facts(3, loss=math.nan), facts(4)]
    assert kept(steps, RetentionPolicy(keep_best=[BestSteps(metric="loss")])) == [2, 4]
