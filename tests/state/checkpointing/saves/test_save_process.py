"""What a whole process does: how it exits, what it leaves behind when it is killed or runs full."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cairn import Checkpointer, Run, StepState
from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.restore import restore_item
from tests.faults.report import is_long
from tests.programs.interpreter import FINALIZED
from tests.programs.program import Program
from tests.storage.states import abstract, assert_same, state

ROOT = Path(__file__).parents[3]
PRELUDE = """
import os, resource, sys
import numpy as np
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.storage.errors import SaveError, StoreFullError
from cairn.storage.runs.run import Run
from tests.storage.states import floats, put, state
uri = sys.argv[1]
def save(step, items=None):
    made = Checkpointer.for_run(uri)
    return made.save(step, items or state(step), meta={"step": step})
"""


def environment(**extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CAIRN_WRITER_ID": "job",
        "PYTHONUNBUFFERED": "1",
        FINALIZED: "1",
        **extra,
    }


def start(script: str, uri: object, **extra: str) -> Program:
    return Program(
        ["-c", PRELUDE + script, str(uri)],
        env=environment(**extra),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(script: str, uri: object, **extra: str) -> tuple[int, str, str]:
    process = start(script, uri, **extra)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def listed(uri: object) -> list[int]:
    return [info.step for info in Run.open(uri).steps()]


def test_a_script_whose_last_line_is_a_save_exits_once_durable(some_root_uri):
    uri = some_root_uri / "run"
    status, _, err = run("save(1); save(2)", uri)
    assert status == 0, err
    assert listed(uri) == [1, 2]


@pytest.mark.parametrize("last", ["", "sys.exit(0)"])
def test_a_script_whose_last_save_fails_exits_with_a_failure(tmp_path, last):
    script = f"""
import atexit
atexit.register(print, "other exit handlers run too", flush=True)
import cairn.state.checkpointing.saves.save_job
def broken(folder):
    raise OSError(5, "the disk is on fire")
save(1).wait()
cairn.state.checkpointing.saves.save_job.sync_folder = broken
save(2)
{last}
"""
    status, out, err = run(script, tmp_path / "run")
    assert status == 1, err
    assert "the disk is on fire" in err
    assert "other exit handlers run too" in out
    assert listed(tmp_path / "run") == [1]


def test_a_failure_that_was_told_does_not_change_the_exit_status(tmp_path):
    script = """
import cairn.state.checkpointing.saves.save_job
def broken(folder):
    raise OSError(5, "the disk is on fire")
cairn.state.checkpointing.saves.save_job.sync_folder = broken
try:
    save(1).wait()
except SaveError as error:
    print("told:", error)
"""
    status, out, err = run(script, tmp_path / "run")
    assert status == 0, err
    assert "told: the save failed" in out


HUNG = """
from cairn.storage.store import deadlines
deadlines.DEADLINE_SECONDS = 1.0
save(1).wait()
handle = save(2)
"""
TOLD = """
try:
    handle.wait()
except SaveError as error:
    print("told:", error, flush=True)
"""


def never_answered(gcs, operation, **options):
    """Requests about the second step that the store takes and leaves at that."""
    return gcs.faults.add(
        "hang", operation=operation, predicate=lambda r: "/1/2" in f"{r.name} {r.query}", **options
    )


OPERATIONS = {
    "ours": r"objects\.list",
    "Orbax's": r"objects\.get",  # whether the folder is there
    "arrays": "upload",
}


@pytest.mark.parametrize("name", OPERATIONS if is_long() else ["ours"])
def test_a_script_whose_store_never_answers_its_last_save_ends_with_a_failure(gcs, name):
    uri = f"{gcs.bucket_uri}/run"
    hung = never_answered(gcs, OPERATIONS[name], count=None)
    status, _, err = run(HUNG, uri)
    assert hung.fired
    assert status == exit_guard.FAILED_STATUS, err
    assert "does not answer" in err
    gcs.faults.clear()
    assert listed(uri) == [1]


def test_what_was_given_up_and_still_hangs_does_not_hold_the_process(gcs):
    uri = f"{gcs.bucket_uri}/run"
    never_answered(gcs, r"objects\.get", count=None)
    status, out, err = run(HUNG + TOLD + "save(3).wait(); print('the next is durable')", uri)
    assert "told: " in out
    assert "the next is durable" in out
    assert status == exit_guard.FAILED_STATUS, err
    assert "does not wait for it" in err
    assert listed(uri) == [1, 3]


def test_a_thread_of_an_event_loop_that_asks_a_silent_store_does_not_hold_the_process(gcs):
    """Versions of Orbax leave such threads behind, where what began them has failed already."""
    uri = f"{gcs.bucket_uri}/run"
    never_answered(gcs, "upload", count=None)
    asks = """
import asyncio, threading, time
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
loop.call_soon_threadsafe(loop.run_in_executor, None, time.sleep, 600)
"""
    status, out, err = run(HUNG + TOLD + asks, uri)
    assert "told: " in out
    assert status == exit_guard.FAILED_STATUS, err
    assert "does not wait for it" in err


def test_an_unhandled_error_after_a_save_still_leaves_the_save_durable(tmp_path):
    status, _, err = run("save(1); raise ValueError('the training broke')", tmp_path / "run")
    assert status == 1
    assert "the training broke" in err
    assert listed(tmp_path / "run") == [1]


FORKED = """
import multiprocessing
import cairn.state.checkpointing.saves.save_job
def broken(folder):
    raise OSError(5, "the disk is on fire")
def child(fails):
    if fails:
        cairn.state.checkpointing.saves.save_job.sync_folder = broken
    save(1, {"model": {"w": np.zeros((1024, 1024), np.float32)}})
for fails in (False, True):
    uri = f"{sys.argv[1]}-{fails}"
    process = multiprocessing.get_context("fork").Process(target=child, args=(fails,))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_forked_child_too_exits_once_durable_or_with_a_failure(tmp_path):
    status, out, err = run(FORKED, tmp_path / "run")
    assert status == 0, err
    assert out.split() == ["0", "1"], err
    assert "the disk is on fire" in err
    assert listed(tmp_path / "run-False") == [1]


KILLED_AFTER_COMMIT = """
import cairn.storage.runs.writer, threading
save(3).wait()
def stuck(*args):
    print("saving", flush=True)
    threading.Event().wait()
cairn.storage.runs.writer.publish_manifest = stuck
save(6)
sys.stdin.read()
"""


def test_a_kill_between_commit_and_manifest_leaves_the_previous_step_latest(tmp_path):
    uri = tmp_path / "run"
    process = start(KILLED_AFTER_COMMIT, uri)
    assert process.stdout.readline() == "saving\n", process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    found = Run.open(uri)
    assert found.latest().step == 3
    left = {info.state for info in found.all_states() if info.step == 6}
    assert left <= {StepState.IN_FLIGHT, StepState.UNVERIFIED}
    expected = state(3)["model"]
    assert_same(restore_item(found.step_uri(found.latest()), "model", abstract(expected)), expected)

    with Checkpointer(uri, writer_id="job") as restarted:
        restarted.save(6, state(6), meta={"step": 6}).wait()
    assert listed(uri) == [3, 6]
    assert found.step(6).attempt == 2
    expected = state(6)["model"]
    assert_same(restore_item(found.step_uri(found.step(6)), "model", abstract(expected)), expected)


def test_a_full_disk_leaves_the_previous_step_and_the_next_save_works(tmp_path):
    """RLIMIT_FSIZE makes every write beyond it fail with EFBIG, as a quota would."""
    script = """
save(3).wait()
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
big = {"model": {"w": put(floats(2048, 1024), "fsdp")}}
try:
    save(6, big).wait()
except StoreFullError as error:
    print("full:", error)
found = Run.open(uri)
print([(info.step, info.state.value) for info in found.all_states()])
print(sorted(os.listdir(f"{uri}/attempts/1")))
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
save(6, big).wait()
print([info.step for info in found.steps()])
"""
    uri = tmp_path / "run"
    status, out, err = run(script, uri)
    assert status == 0, err
    full, states, folders, after = out.splitlines()
    assert "the store is full" in full
    assert "Free space" in full
    assert states == "[(3, 'listed')]"
    assert folders == "['3']"
    assert after == "[3, 6]"
    expected = state(3)["model"]
    found = Run.open(uri)
    assert_same(restore_item(found.step_uri(found.step(3)), "model", abstract(expected)), expected)


def test_a_save_to_gs_needs_no_writable_local_disk(gcs):
    """RLIMIT_FSIZE of 0: not one byte can be written to any file."""
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
save(1).wait()
print("durable")
"""
    uri = f"{gcs.bucket_uri}/run"
    status, out, err = run(script, uri, TMPDIR="/nonexistent", HOME="/nonexistent", **gcs.env)
    assert status == 0, err
    assert "durable" in out
    assert listed(uri) == [1]
