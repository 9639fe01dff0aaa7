"""What a manager does about steps that are known to be damaged."""

import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cairn import CheckpointManager, Damage, PolicyError, Run, StepDamagedError
from cairn.storage.runs.annotate import note_verified

DAMAGE = Damage(at="2026-01-02T03:04:05Z", by="verify", leaves=("default: w",), leaf_count=1)
TARGET = ocp.args.StandardRestore({"w": np.zeros(4, np.float32)})


def state(step):
    return ocp.args.StandardSave({"w": jnp.full(4, step, jnp.float32)})


def damage(run, *steps):
    for step in steps:
        note_verified(run, run.step(step), damage=DAMAGE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 to 4, of which 3 and 4 are damaged."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(folder) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, args=state(step), metrics={"loss": 1 / step})
    damage(Run.open(folder), 3, 4)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def test_the_latest_and_the_best_step_are_refused_if_they_are_damaged(folder):
    options = ocp.CheckpointManagerOptions(best_fn=lambda one: one["loss"], best_mode="min")
    with CheckpointManager(folder, options=options) as manager:
        for ask in (
            manager.latest_step,
            manager.best_step,
            lambda: manager.restore(None, args=TARGET),
        ):
            with pytest.raises(StepDamagedError, match=r"/steps/4: .*verify.* step is .*2"):
                ask()
        assert manager.all_steps() == [1, 2, 3, 4]
        assert manager.restore(4, args=TARGET)["w"][0] == 4
    with pytest.raises(PolicyError, match="'refuse' or 'skip'"):
        CheckpointManager(folder, damaged="take")


def test_damage_that_is_found_once_the_manager_is_there_is_seen_by_a_restore(folder):
    run = Run.open(folder)
    for step in (3, 4):
        note_verified(run, run.step(step))
    with CheckpointManager(folder, damaged="skip") as manager:
        damage(run, 4)
        assert manager.restore(None, args=TARGET)["w"][0] == 3
        manager.save(5, args=state(5))
    assert [info.step for info in run.steps()] == [1, 2, 3, 5]


def test_what_a_loop_skipped_is_superseded_though_it_was_found_sound_meanwhile(folder):
    run = Run.open(folder)
    with CheckpointManager(folder, damaged="skip") as manager:
        assert manager.restore(None, args=TARGET)["w"][0] == 2
        for step in (3, 4):
            note_verified(run, run.step(step))
        manager.save(5, args=state(5))
    assert [info.step for info in run.steps()] == [1, 2, 5]


def test_a_loop_that_skips_goes_on_from_the_newest_sound_step(folder):
    with CheckpointManager(folder, damaged="skip") as manager:
        assert manager.latest_step() == 2
        assert manager.restore(None, args=TARGET)["w"][0] == 2
        for step in (3, 4):
            assert manager.save(step, args=state(10 * step))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 4]
        assert manager.restore(3, args=TARGET)["w"][0] == 30
    assert [(one.step, one.attempt) for one in Run.open(folder).steps()] == [
        (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip


def test_what_the_options_keep_are_sound_steps_and_damaged_ones_stay(folder):
    run = Run.open(folder)
    with CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        manager.save(5, args=state(5))
        manager.save(6, args=state(6))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5, 6]
        damage(run, 5)  # nobody has told the manager
        manager.save(7, args=state(7))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5, 6, 7]
        manager.save(8, args=state(8))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5, 7, 8]
        manager.delete(3)  # by hand
        manager.wait_until_finished()
    assert [info.step for info in run.steps()] == [4, 5, 7, 8]
