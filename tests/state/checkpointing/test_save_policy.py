import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import BestSteps, DueReason, PolicyError, SavePolicy
from cairn.state.checkpointing.save_policy import BestSoFar, SaveFacts


def saved(policy, steps, **options):
    """The steps of a sequence that a policy saves, looked at one after the other."""
    due, previous = [], None
    for step in steps:
        if policy.due(SaveFacts(step=step, previous=previous, **options)) is not None:
            due.append(step)
        previous = step
    return due


def test_every_n_steps_saves_at_multiples():
    assert saved(SavePolicy(every_steps=5), range(1, 17)) == [5, 10, 15]


def test_a_multiple_that_no_step_has_is_made_up_for_by_the_next_step():
    assert saved(SavePolicy(every_steps=10), [7, 14, 19, 21, 43]) == [14, 21, 43]
    assert saved(SavePolicy(at_steps=[3, 8, 9]), [1, 4, 5, 12, 13]) == [4, 12]
    assert saved(SavePolicy(at_steps=np.array([3, 8, 9])), [1, 4, 5, 12, 13]) == [4, 12]


def test_a_job_that_goes_on_owes_nothing_for_the_steps_before_its_first():
    assert saved(SavePolicy(every_steps=10, at_steps=[3]), [27, 28, 30]) == [30]


def test_minutes_count_from_when_the_last_save_began():
    policy = SavePolicy(every_minutes=2)
    assert policy.due(SaveFacts(step=1, seconds=119.9)) is None
    assert policy.due(SaveFacts(step=1, seconds=120.0)) is DueReason.EVERY_MINUTES


@pytest.mark.parametrize(
    ("mode", "value", "due"),
    [
        ("min", 0.29, True),
        ("min", 0.3, False),  # as good as the worst of the best is not better
        ("min", math.nan, False),
        ("max", 0.11, True),
        ("max", 0.1, False),
        ("max", math.inf, True),
    ],
)
def test_a_step_is_saved_if_it_is_better_than_the_worst_of_the_best(mode, value, due):
    policy = SavePolicy(best=BestSteps(metric="loss", count=2, mode=mode))
    best = (0.1, 0.3) if mode == "min" else (0.3, 0.1)
    facts = SaveFacts(step=3, metrics={"loss": value}, best=best)
    assert policy.due(facts) is (DueReason.BEST if due else None)


def test_a_step_without_the_metric_is_never_among_the_best():
    policy = SavePolicy(best=BestSteps(metric="loss"))
    assert policy.due(SaveFacts(step=1, metrics={"accuracy": 1.0})) is None


def test_preemption_comes_before_every_other_reason_if_the_policy_answers_it():
    facts = SaveFacts(step=10, preempted=True)
    assert SavePolicy(every_steps=5).due(facts) is DueReason.PREEMPTION
    deaf = SavePolicy(every_steps=5, on_preemption=False)
    assert deaf.due(facts) is DueReason.EVERY_STEPS


@pytest.mark.parametrize(
    "rule",
    [
        {"every_steps": True},
        {"every_steps": "5"},
        {"every_minutes": True},
        {"every_minutes": "5"},
        {"deadline_seconds": "25"},
        {"at_steps": 5},
        {"at_steps": "12"},
        {"best": "loss"},
    ],
)
def test_a_rule_of_another_type_is_refused_and_named(rule):
    with pytest.raises(PolicyError, match=next(iter(rule))):
        SavePolicy(**rule)


def test_a_policy_that_cannot_act_is_refused_with_all_that_is_wrong():
    with pytest.raises(PolicyError) as caught:
        SavePolicy(
            every_steps=0,
            every_minutes=math.nan,
            at_steps=[-1],
            best=BestSteps(metric="", count=0, mode="best"),  # type: ignore[arg-type]
            deadline_seconds=0,
            when_busy="skip",  # type: ignore[arg-type]
        )
    for word in (
        "every_steps",
        "every_minutes",
        "at_steps",
        "best.count",
        "without a name",
        "'best'",
        "deadline_seconds",
        "'skip'",
    ):
        assert word in str(caught.value)
    with pytest.raises(PolicyError, match="no rule ever saves"):
        SavePolicy(on_preemption=False)


rising = st.lists(st.integers(1, 12), min_size=1, max_size=40).map(
    lambda gaps: [sum(gaps[: i + 1]) for i in range(len(gaps))]
)


@given(rising, st.integers(1, 20))
def test_every_multiple_is_followed_by_exactly_one_save_at_the_first_step_seen(steps, every):
    expected = []
    for multiple in range(every, steps[-1] + 1, every):
        first = next(step for step in steps if step >= multiple)
        if multiple >= steps[0] and first not in expected:
            expected.append(first)
    assert saved(SavePolicy(every_steps=every), steps) == expected


@given(rising, st.frozensets(st.integers(1, 200), min_size=1, max_size=8))
def test_every_named_step_is_followed_by_a_save_at_the_first_step_seen(steps, named):
    expected = {
        next(step for step in steps if step >= one) for one in named if steps[0] <= one <= steps[-1]
    }
    assert saved(SavePolicy(at_steps=named), steps) == sorted(expected)


@given(st.lists(st.floats(0.01, 200), min_size=1, max_size=60), st.floats(0.1, 5))
def test_no_step_is_later_than_t_minutes_after_the_last_save_without_being_saved(gaps, minutes):
    policy = SavePolicy(every_minutes=minutes)
    since = 0.0
    for step, gap in enumerate(gaps, start=1):
        since += gap
        due = policy.due(SaveFacts(step=step, previous=step - 1, seconds=since))
        assert (due is not None) == (since >= minutes * 60)
        if due is not None:
            since = 0.0


@given(
    st.lists(st.floats(), max_size=40),
    st.integers(1, 4),
    st.sampled_from(["min", "max"]),
)
def test_the_best_values_of_all_steps_are_always_among_those_saved(values, count, mode):
    rule = BestSteps(metric="score", count=count, mode=mode)
    policy, best, kept = SavePolicy(best=rule), BestSoFar(rule), []
    for step, value in enumerate(values, start=1):
        facts = SaveFacts(step=step, metrics={"score": value}, best=best.values)
        if policy.due(facts) is not None:
            best.add(facts.metrics)
            kept.append(value)
    numbers = sorted((v for v in values if not math.isnan(v)), reverse=mode == "max")
    assert sorted(kept, reverse=mode == "max")[:count] == numbers[:count]
    assert not any(math.isnan(value) for value in kept)
    assert list(best.values) == numbers[:count]


@given(rising, st.integers(1, 20), st.integers(1, 20))
def test_more_rules_never_save_less(steps, every, other):
    few = saved(SavePolicy(every_steps=every), steps)
    many = saved(SavePolicy(every_steps=every, at_steps=[other]), steps)
    assert set(few) <= set(many)
