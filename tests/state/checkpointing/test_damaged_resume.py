"""A job that starts again on a run whose latest steps are known to be damaged."""

import logging
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from cairn import (
    Checkpointer,
    Damage,
    PolicyError,
    Run,
    StepDamagedError,
    StepExistsError,
    annotate,
    annotate_step,
    best_step,
    load,
    promote_step,
    resolve_checkpoint,
)
from cairn.storage.runs.annotate import note_verified
from cairn.storage.runs.records.layout import annotation_file

DAMAGE = Damage(at="2026-01-02T03:04:05Z", by="verify", leaves=("state: w",), leaf_count=1)
TARGET = {"w": np.zeros(4, np.float32)}


def state(step):
    return {"w": jnp.full(4, step, jnp.float32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 10 to 40, of which 30 and 40 are damaged."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Checkpointer(folder) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(step, state(step), metrics={"loss": 1 / step}).wait()
    made = Run.open(folder)
    for step in (30, 40):
        note_verified(made, made.step(step), damage=DAMAGE)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return Run.open(shutil.copytree(saved, tmp_path / "run"))


def listed(run):
    return [info.step for info in run.steps()]


@pytest.mark.parametrize("reference", ["{}", "{}@latest"])
def test_the_latest_step_is_refused_if_it_is_damaged_and_the_newest_sound_one_named(run, reference):
    reference = reference.format(run.uri)
    for find in (resolve_checkpoint, lambda text: load(text, TARGET)):
        with pytest.raises(StepDamagedError) as refused:
            find(reference)
        assert f"{run.uri}/steps/40" in str(refused.value)
        assert DAMAGE.text() in str(refused.value)
        assert f"The newest sound step is {run.uri}/steps/20: load that" in str(refused.value)
    assert load(reference, TARGET, damaged="skip")["w"][0] == 20
    assert resolve_checkpoint(reference, damaged=None)[1].step == 40
    with pytest.raises(PolicyError, match="'refuse' or 'skip'"):
        load(reference, TARGET, damaged="take")


def test_a_step_that_is_named_is_loaded_and_of_an_alias_the_log_tells_the_damage(run, caplog):
    note_verified(run, run.step(30))
    promote_step(run, 30, "production", expect=None)
    note_verified(run, run.step(30), damage=DAMAGE)
    assert load(f"{run.uri}/steps/40", TARGET)["w"][0] == 40
    assert load(run.uri, TARGET, step=40)["w"][0] == 40
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert load(f"{run.uri}@production", TARGET)["w"][0] == 30
    assert [DAMAGE.text() in one.getMessage() for one in caplog.records] == [True]


def test_the_best_step_is_refused_if_it_is_damaged_and_the_best_sound_one_named(run):
    with pytest.raises(
        StepDamagedError, match=rf"/steps/40: .*best sound step .*{run.uri}/steps/20"
    ):
        load(f"{run.uri}@best:loss:min", TARGET)
    assert load(run.uri, TARGET, step="best:loss:min", damaged="skip")["w"][0] == 20
    assert best_step(run, "loss", "max").step == 10
    assert best_step(run, "loss", "min", damaged=None).step == 40


def test_a_run_without_a_sound_step_says_so_even_if_damaged_ones_are_skipped(run):
    for step in (10, 20):
        note_verified(run, run.step(step), damage=DAMAGE)
    for how in ("refuse", "skip"):
        with pytest.raises(StepDamagedError, match="No other step is sound"):
            load(run.uri, TARGET, damaged=how)
        with pytest.raises(StepDamagedError, match="No other step is sound"):
            load(f"{run.uri}@best:loss:min", TARGET, damaged=how)


def test_a_note_that_cannot_be_read_keeps_no_job_from_starting_and_the_log_tells_it(run, caplog):
    run.objects.write(annotation_file(40, 1), b"{")
    for damaged in ("refuse", "skip"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load(run.uri, TARGET, damaged=damaged)["w"][0] == 40  # its digests are checked
        assert annotation_file(40, 1) in caplog.text
    with Checkpointer(run.uri) as checkpointer:
        checkpointer.save(41, state(41)).wait()
    assert listed(run) == [10, 20, 30, 40, 41]  # what was loaded is not superseded


def test_labels_of_a_damaged_latest_step_can_be_set(run):
    assert annotate(run.uri, labels={"why": "disk 3"}).damaged == DAMAGE
    assert annotate_step(run, 40, labels={"why": None}).damaged == DAMAGE


@pytest.mark.parametrize("step", [21, 40, 50])
def test_what_is_saved_after_a_skip_goes_on_from_the_newest_sound_step(run, step):
    with Checkpointer(run.uri) as checkpointer:
        restored = checkpointer.restore(TARGET, damaged="skip")
        assert listed(run) == [10, 20, 30, 40]  # a load only reads
        checkpointer.save(step, {"w": restored["w"] + 1}).wait()
        checkpointer.save(step + 1, {"w": restored["w"] + 2}).wait()
    assert listed(run) == [10, 20, step, step + 1]
    assert run.attempts()[-1].base_step == 20
    assert run.state_of(40, 1).value == "superseded"


def test_a_run_that_is_begun_before_the_load_goes_on_from_the_newest_sound_step_too(run):
    with Checkpointer(run.uri) as checkpointer:
        checkpointer.begin()
        load(run.uri, TARGET, damaged="skip")
        checkpointer.save(21, state(21)).wait()
        with pytest.raises(StepExistsError):
            checkpointer.save(21, state(21))
    assert listed(run) == [10, 20, 21]


def test_a_skip_stays_in_force_if_the_job_ends_before_it_saves(run):
    load(run.uri, TARGET, damaged="skip")
    with Checkpointer(run.uri) as checkpointer:
        checkpointer.begin()
    with Checkpointer(run.uri) as again:
        again.begin()
    assert [one.base_step for one in run.attempts()] == [-1, 20, 20]
    assert load(run.uri, TARGET)["w"][0] == 20


def test_what_was_skipped_is_superseded_though_it_was_found_sound_meanwhile(run):
    with Checkpointer(run.uri) as checkpointer:
        restored = checkpointer.restore(TARGET, damaged="skip")
        for step in (30, 40):
            note_verified(run, run.step(step))
        checkpointer.save(41, {"w": restored["w"] + 1}).wait()
    assert listed(run) == [10, 20, 41]  # it comes from 20, not from 40
    assert load(run.uri, TARGET)["w"][0] == 21


def test_a_sound_step_that_was_saved_meanwhile_is_never_superseded(run):
    load(run.uri, TARGET, damaged="skip")
    with Checkpointer(run.uri) as other:
        other.begin()
        other.save(60, state(60)).wait()
    assert listed(run) == [10, 20, 60]  # a skip is good for one start
    load(run.uri, TARGET, damaged="skip")
    with Checkpointer(run.uri) as checkpointer, pytest.raises(StepExistsError, match="above 60"):
        checkpointer.save(21, state(21))
    assert listed(run) == [10, 20, 60]


def test_without_a_skip_a_damaged_step_is_in_the_way_as_any_other(run):
    load(run.uri, TARGET, step=20)
    with Checkpointer(run.uri) as checkpointer:
        with pytest.raises(StepExistsError):
            checkpointer.save(21, state(21))
        checkpointer.save(50, state(50)).wait()
    assert listed(run) == [10, 20, 30, 40, 50]
