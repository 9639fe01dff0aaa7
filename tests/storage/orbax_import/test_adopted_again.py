"""Folders that were adopted before, and what their owner has done there since."""

import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cairn import (
    Checkpointer,
    CorruptionError,
    FencedError,
    ModelInfo,
    ModelMap,
    PreconditionFailedError,
    Run,
    Writer,
    adopt,
    check_run,
    load,
    repair_run,
    verify_step,
)
from cairn.storage.runs.writer import default_writer_id
from tests.plain_orbax import READABLE, manager
from tests.programs.program import Program
from tests.programs.program import run as run_program
from tests.storage.orbax_import.folders import everything
from tests.storage.seams import writer as runs_writer

ZEROS = {"w": np.ones((8, 8), np.float32), "zeros": np.zeros((8, 8), np.float32)}


def older_step_without_a_chunk(folder: Path) -> None:
    """As older releases saved zeros: not at all."""
    READABLE["older trees of small files"](folder, ZEROS)
    shutil.rmtree(folder / "checkpoint_10")
    (folder / "checkpoint_5" / "zeros" / "0.0").unlink()


def test_values_that_were_added_are_noticed_by_all_who_look(tmp_path):
    older_step_without_a_chunk(tmp_path / "old")
    run = Run.open(adopt(tmp_path / "old").run)
    assert load(run.uri, {"state": ZEROS})["state"]["zeros"].sum() == 0
    step = tmp_path / "old" / "checkpoint_5"
    shutil.copy(step / "w" / "0.0", step / "zeros" / "0.0")
    with pytest.raises(CorruptionError):
        load(run.uri, {"state": ZEROS})
    found = verify_step(run, 5)
    assert not found.loads
    assert any("zeros" in problem for problem in found.problems)
    again = adopt(tmp_path / "old")
    assert (again.kept, again.ok) == ((), False)
    assert "zeros/0.0: values that were not there" in again.problems[0]


def test_files_that_were_added_are_named_and_change_nothing(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    READABLE["older trees of small files"](tmp_path / "small", ZEROS)
    for folder in ("old", "small"):
        adopt(tmp_path / folder)
    (tmp_path / "old" / "5" / "notes.txt").write_text("mine")
    (tmp_path / "small" / "checkpoint_5" / "manifest.ocdbt").write_text("not a manifest")
    again = adopt(tmp_path / "old")
    assert (again.kept, again.ok) == ((5,), True)
    assert again.left == ("5: added since it was adopted: notes.txt",)
    run = Run.open(tmp_path / "small.cairn")
    assert load(run.uri, {"state": ZEROS}, step=5)["state"]["w"].sum() == 64
    found = verify_step(run, 5)
    assert (found.ok, found.extra) == (True, ("manifest.ocdbt",))


def test_two_adoptions_at_once_list_each_step_once(tmp_path):
    manager(tmp_path / "old", steps=tuple(range(1, 9)))
    program = "import sys; from cairn import adopt; print(adopt(sys.argv[1]).ok)"
    started = [
        Program(
            ["-c", program, str(tmp_path / "old")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    told = [process.communicate() for process in started]
    for process, (out, err) in zip(started, told, strict=True):
        left_to_another = "FencedError" in err or "LeaseHeldError" in err
        assert left_to_another or (process.returncode, out) == (0, "True\n"), err
    last = adopt(tmp_path / "old")
    assert (last.ok, last.adopted + last.kept) == (True, tuple(range(1, 9)))
    assert [info.step for info in Run.open(last.run).steps()] == [*range(1, 9)]


def test_one_checkpoint_is_not_listed_as_two_steps(tmp_path):
    READABLE["one tree"](tmp_path / "best")
    assert adopt(tmp_path / "best", step=4000).adopted == (4000,)
    again = adopt(tmp_path / "best", step=5000)
    assert (again.adopted, again.kept) == ((), (4000,))
    assert again.problems == ("best: adopted as step 4000, not 5000; adopt it into another run",)


def test_a_run_whose_record_was_begun_anew_still_adopts_its_folder_and_no_other(tmp_path):
    manager(tmp_path / "old", steps=(5,))
    manager(tmp_path / "other", steps=(5,))
    run = Run.open(adopt(tmp_path / "old").run)
    before = everything(tmp_path / "old")
    (tmp_path / "old.cairn" / "run.json").unlink()
    (repair,) = repair_run(Run(run.uri), by="me", dry_run=False)
    assert "the folder it adopts are lost" in repair.action
    manager(tmp_path / "old", steps=(10,))
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept) == ((10,), (5,))
    with pytest.raises(PreconditionFailedError, match="one that adopts nothing"):
        adopt(tmp_path / "other", run.uri)
    after = everything(tmp_path / "old")
    assert {name: after[name] for name in before if name != "."} == {
        name: told for name, told in before.items() if name != "."
    }


def test_a_run_of_a_job_is_never_taken_for_an_adoption(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": ZEROS}).wait()
    manager(tmp_path / "old", steps=(5,))
    with pytest.raises(PreconditionFailedError, match="one that adopts nothing"):
        adopt(tmp_path / "old", tmp_path / "run")


def test_a_killed_adoption_is_repeated_and_every_file_of_the_owner_stays(tmp_path):
    manager(tmp_path / "old", ZEROS, steps=(1, 2, 3))
    before = everything(tmp_path / "old")
    program = f"""
import os, signal
from cairn import adopt
from cairn.storage.orbax_import import step_reading

def digest(*arguments, known=step_reading.digest_chunks, seen=[]):
    seen.append(arguments)
    if len(seen) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return known(*arguments)

step_reading.digest_chunks = digest
adopt({str(tmp_path / "old")!r})
"""
    assert run_program(["-c", program]).returncode == -signal.SIGKILL
    assert [info.step for info in Run.open(tmp_path / "old.cairn").steps()] == [1]
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept) == ((2, 3), (1,))
    run = Run.open(again.run)
    assert all(verify_step(run, info).ok for info in run.steps())
    assert check_run(run).ok
    assert everything(tmp_path / "old") == before


def test_a_step_that_another_adoption_has_begun_before_is_adopted_after_all(tmp_path, monkeypatch):
    manager(tmp_path / "old", ZEROS, steps=(1, 2))
    publish = runs_writer.publish_manifest

    def overtaken(objects, manifest, fence):
        """The other begins when all was looked at, and nothing is written yet."""

        def look():
            fence()
            if manifest.step == 2:
                other = Writer(Run(objects.uri), writer=f"adopt:{default_writer_id()}")
                other.begin()
                other.close()

        publish(objects, manifest, look)

    monkeypatch.setattr(runs_writer, "publish_manifest", overtaken)
    with pytest.raises(FencedError):
        adopt(tmp_path / "old")
    monkeypatch.undo()
    again = adopt(tmp_path / "old")
    assert (again.adopted, again.kept, again.left) == ((2,), (1,), ())
    run = Run.open(again.run)
    assert [info.step for info in run.steps()] == [1, 2]
    assert check_run(run).ok


def test_adopted_steps_that_were_moved_and_linked_are_as_they_were(tmp_path):
    manager(tmp_path / "old", ZEROS)
    adopt(tmp_path / "old")
    for step in (5, 10):
        shutil.move(tmp_path / "old" / f"{step}", tmp_path / f"cold_{step}")
        (tmp_path / "old" / f"{step}").symlink_to(tmp_path / f"cold_{step}")
        again = adopt(tmp_path / "old")
        assert (again.kept, again.ok) == ((5, 10), True), again.problems
    run = Run.open(again.run)
    assert load(run.uri, {"state": ZEROS})["state"]["w"].sum() == 64
    assert verify_step(run, 5).ok


def test_a_link_that_was_added_to_a_mapped_step_is_the_problem_of_that_step(tmp_path):
    manager(tmp_path / "old", ZEROS)
    model = ModelMap(ModelInfo(model_type="tiny"), {"w": (8, 8)}, {"state/w": "w"})
    adopt(tmp_path / "old", model=model)
    (tmp_path / "old" / "5" / "ema").symlink_to("default")
    again = adopt(tmp_path / "old", model=model)
    assert again.kept == (10,)
    assert again.problems[0].startswith("5: a checkpoint with links")
