"""What goes on behind a loop: which steps are listed meanwhile, and who is told of what fails."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from cairn import Checkpointer, CheckpointManager, Run, SaveError, delete_step, promote_step

Options = ocp.CheckpointManagerOptions


def save(manager: Any, step: int, **more: Any) -> None:
    manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(2, step)}), **more)


def steps(manager: Any) -> list[int]:
    return [*manager.all_steps()]


def test_steps_that_go_are_not_listed_from_the_save_on_as_with_orbax(tmp_path: Path) -> None:
    found = []
    for kind in (ocp.CheckpointManager, CheckpointManager):
        options = Options(max_to_keep=2, keep_period=4)
        with kind(tmp_path / kind.__module__, options=options) as manager:
            seen = []
            for step in range(1, 9):
                save(manager, step)
                seen.append([steps(manager), manager.latest_step()])
        found.append(seen)
    assert found[0] == found[1]


def test_a_step_that_has_to_stay_is_listed_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        promote_step(Run.open(tmp_path / "run"), 1, alias="production", by="me", expect=None)
        save(manager, 2)
        manager.wait_until_finished()
        assert steps(manager) == [1, 2]


def test_a_save_blocks_for_as_long_as_the_call_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow:
        def __index__(self) -> int:
            time.sleep(0.2)  # at least so long is to be told
            return 1

    caplog.set_level("INFO", "cairn.save")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(Slow(), args=ocp.args.StandardSave({"x": jnp.ones(2)}))
    (told,) = (text for text in caplog.messages if "outcome=durable" in text)
    assert float(told.partition("blocked_seconds=")[2].split()[0]) >= 0.2


def test_a_save_that_fails_deletes_nothing_and_all_before_it_are_listed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        (tmp_path / "run/attempts/1/2").mkdir()  # somebody else's
        save(manager, 2)
        with pytest.raises(SaveError):
            manager.wait_until_finished()
        assert steps(manager) == [1]
        assert manager.restore(1)["x"].tolist() == [1, 1]


def test_a_failed_save_is_told_by_check_for_errors_too(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        (tmp_path / "run/attempts/1/2").mkdir()
        save(manager, 2)
        while manager.is_saving_in_progress():
            time.sleep(0.01)
        with pytest.raises(SaveError):
            manager.check_for_errors()
        assert steps(manager) == [1]
        manager.wait_until_finished()


def test_all_threads_and_the_next_save_hear_of_a_save_that_failed(tmp_path: Path) -> None:
    heard: list[str] = []

    def wait() -> None:
        try:
            manager.wait_until_finished()
        except SaveError as exc:
            heard.append(str(exc))

    with CheckpointManager(tmp_path / "run") as manager:
        save(manager, 1)
        manager.wait_until_finished()
        (tmp_path / "run/attempts/1/2").mkdir()
        save(manager, 2)
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 2
        with pytest.raises(SaveError):
            save(manager, 3)
        save(manager, 3)
        manager.wait_until_finished()
        assert steps(manager) == [1, 3]


def test_an_error_of_the_callback_reaches_the_loop_and_deletes_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no copy was made")

    given = ocp.options.AsyncOptions(post_finalization_callback=fail)
    options = Options(max_to_keep=1, async_options=given)
    manager = CheckpointManager(tmp_path / "run", options=options)
    save(manager, 1)
    with pytest.raises(OSError, match="no copy was made"):
        manager.wait_until_finished()
    manager.check_for_errors()
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="no copy was made"):
        pool.submit(manager.wait_until_finished).result()
    save(manager, 2)
    with pytest.raises(OSError, match="no copy was made"):
        save(manager, 3)
    assert steps(manager) == [1, 2]
    manager.close()
    assert [info.step for info in Run.open(tmp_path / "run").steps()] == [1, 2]


def test_the_callback_runs_once_for_each_step_that_is_durable(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    run = Run(Checkpointer(tmp_path / "run").uri)
    given = ocp.options.AsyncOptions(
        post_finalization_callback=lambda: seen.append([info.step for info in run.steps()])
    )
    with CheckpointManager(tmp_path / "run", options=Options(async_options=given)) as manager:
        for step in (1, 2):
            save(manager, step)
    assert seen == [[1], [1, 2]]


def test_a_step_that_goes_while_the_run_is_looked_at_is_not_listed_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        look, delete = manager._stored_steps, manager._delete
        looked = threading.Event()

        def delete_later(step: Any) -> None:
            looked.wait()
            delete(step)

        def look_first() -> list[Any]:
            found = look()
            looked.set()
            manager._retention.close()
            return found

        monkeypatch.setattr(manager, "_stored_steps", look_first)
        monkeypatch.setattr(manager, "_delete", delete_later)
        save(manager, 2)
        manager._checkpointer.wait_until_finished()
        manager.reload()
        manager.wait_until_finished()
        assert steps(manager) == [2]


def test_a_latest_step_that_is_damaged_does_not_keep_the_next_from_being_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path / "run", metadata={"version": 1}) as manager:
        save(manager, 1)
    for file in (tmp_path / "run/attempts/1/1/meta").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with CheckpointManager(tmp_path / "run", metadata={"version": 1}) as again:
        save(again, 2)
        again.wait_until_finished()
        assert "metadata of the run can't be read" in caplog.text
        assert again.metadata().custom_metadata == {"version": 1}


@pytest.mark.parametrize("grace", [0.0, 3600.0])
def test_the_bytes_of_a_step_that_the_loop_deletes_go_too(tmp_path: Path, grace: float) -> None:
    with CheckpointManager(tmp_path / "run", grace_seconds=grace) as manager:
        for step in (1, 2):
            save(manager, step)
        manager.delete(1)
        manager.wait_until_finished()
        assert steps(manager) == [2]
        assert (tmp_path / "run/attempts/1/1").exists() is (grace > 0)


def test_what_another_process_deletes_is_listed_until_the_run_is_looked_at(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            save(manager, step)
        manager.wait_until_finished()
        run = Run.open(tmp_path / "run")
        delete_step(run, next(info for info in run.steps() if info.step == 1), by="another")
        assert steps(manager) == [1, 2]
        with pytest.raises(FileNotFoundError):
            manager.restore(1)
        manager.reload()
        assert steps(manager) == [2]


@pytest.mark.parametrize("behind", [False, True])
def test_a_step_that_another_job_has_saved_anew_is_not_deleted(
    tmp_path: Path, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(max_to_keep=1 if behind else None)
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        save(manager, 1)
        manager.wait_until_finished()
        delete = manager._delete

        def save_anew() -> None:
            with Checkpointer(tmp_path / "run") as other:
                other.save(1, {"x": jnp.full(2, 7)}, overwrite=True)
                other.save(2, {"x": jnp.full(2, 8)})

        def delete_late(step: Any) -> None:
            save_anew()
            delete(step)

        if behind:
            monkeypatch.setattr(manager, "_delete", delete_late)
            save(manager, 2)
            manager.wait_until_finished()
        else:
            save_anew()
            with pytest.raises(FileNotFoundError, match="saved anew"):
                manager.delete(1)
        manager.reload()
        assert steps(manager) == [1, 2]
        assert manager.restore(1).state["x"].tolist() == [7, 7]


def test_metrics_are_numbers_from_the_save_on_not_arrays_that_may_go(tmp_path: Path) -> None:
    loss = jnp.float32(0.5)
    options = Options(max_to_keep=1, best_fn=lambda found: found["loss"], best_mode="min")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        save(manager, 1, metrics={"loss": loss})
        loss.delete()
        save(manager, 2, metrics={"loss": 0.75})
        assert manager.best_step() == 1
        before = manager.metrics(1), manager.metrics(2)
        manager.wait_until_finished()
        manager.reload()
        assert before == (manager.metrics(1), manager.metrics(2)) == ({"loss": 0.5}, {"loss": 0.75})


def test_a_runs_metadata_is_what_it_was_given_first_as_with_orbax(tmp_path: Path) -> None:
    found = []
    for kind in (ocp.CheckpointManager, CheckpointManager):
        folder, seen = tmp_path / kind.__module__, []
        for step, given in enumerate([{"version": 1}, None, {"version": 2}, None], 1):
            with kind(folder, metadata=given) as manager:
                seen.append(dict(manager.metadata().custom_metadata))
                save(manager, step)
                seen.append(dict(manager.metadata().custom_metadata))
        with kind(folder, metadata={"version": 3}, options=Options(read_only=True)) as manager:
            seen.append(dict(manager.metadata().custom_metadata))
        found.append(seen)
    assert found[0] == found[1] == [{"version": 1}] * 9
