"""What a step that is known to be damaged is refused for, by everything but a load."""

import pytest

from cairn import CorruptionError, Damage, StepDamagedError, promote_step, roll_back
from cairn.storage.runs.annotate import annotation_of, note_verified
from cairn.storage.runs.records.layout import annotation_file

DAMAGE = Damage(
    at="2026-01-02T03:04:05Z",
    by="verify",
    job="op-7",
    leaves=("model: a/kernel", "model: b"),
    leaf_count=2,
    problems=("model/d/1: crc32c 0, 1 expected",),
    problem_count=1,
)


def damage(run, step):
    note_verified(run, run.step(step), damage=DAMAGE, by="verify")


def promote(run, step, **more):
    return promote_step(run, step, "production", by="ann", expect=None, **more)


def test_a_damaged_step_is_never_promoted_and_the_refusal_says_what_to_take_instead(run):
    damage(run, 9)
    with pytest.raises(StepDamagedError) as refused:
        promote(run, 9)
    for text in ("2026-01-02T03:04:05Z", "verify", "op-7", "model: a/kernel", "model/d/1"):
        assert text in str(refused.value)
    assert f"{run.uri}/steps/9" in str(refused.value)
    assert f"The newest sound step is {run.uri}/steps/6." in str(refused.value)
    assert "despite_damage" not in str(refused.value)
    assert run.aliases.list() == []
    assert not [name for name in run.objects.list("trash/") if name.endswith(".hold.json")]
    note_verified(run, run.step(9))
    assert promote(run, 9).step == 9


def test_damage_that_is_noted_while_a_step_is_promoted_is_seen(run):
    """Up to the last look before the alias moves: the promotion holds the step by then."""
    gather, rounds = run.objects.gather, []

    def noting(*calls):
        rounds.append(len(calls))
        if len(rounds) == 3:  # the look at a held step; before it nothing is noted
            monkeypatch.undo()
            damage(run, 9)
        return gather(*calls)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(run.objects, "gather", noting)
    with pytest.raises(StepDamagedError):
        promote(run, 9)
    assert run.aliases.list() == []


def test_a_step_of_which_the_note_cannot_be_read_is_not_promoted(run):
    damage(run, 9)
    written = run.objects.read(annotation_file(9, 1)).value
    run.objects.write(annotation_file(9, 1), written.replace(b"op-7", b"op-8"))
    with pytest.raises(CorruptionError, match=annotation_file(9, 1)):
        promote(run, 9)
    assert run.aliases.list() == []


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_a_run_goes_back_to_a_damaged_step_only_for_a_reason(run, reason):
    damage(run, 3)
    with pytest.raises(StepDamagedError, match=r"give despite_damage= a reason"):
        roll_back(run, 3, by="ann", despite_damage=reason)
    assert [info.step for info in run.steps()] == [3, 6, 9]
    assert roll_back(run, 3, by="ann", despite_damage="only leaf b, which is frozen").step == 3
    assert annotation_of(run, run.step(3)).damaged == DAMAGE
