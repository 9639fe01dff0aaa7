"""What differs or fails on one process is an error on all of them, soon; nothing hangs."""

import json
import os
import signal

import numpy as np
import pytest

from cairn import Checkpointer, Run

JOB_SECONDS = 240
"""Orbax alone would wait for 300."""

pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


@pytest.fixture(scope="module")
def disagreed(launch, tmp_path_factory):
    """Two processes that make calls which differ; what each was told."""
    folder = tmp_path_factory.mktemp("disagreed")
    arguments = {"run": str(folder / "run"), "other": str(folder / "other")}
    return launch("disagree", arguments, count=2).results(JOB_SECONDS)


@pytest.mark.parametrize(
    "name",
    [
        "enable",
        "step",
        "labels",
        "extras",
        "overwrite",
        "save_optimizer",
        "float_dtype",
        "save_directory",
        "load_directory",
        "load_state",
    ],
)
def test_arguments_that_differ_raise_on_every_process(disagreed, name):
    for told in disagreed:
        error = told[name]
        assert error["kinds"][0] == "ArgumentError"
        assert error["text"].startswith(
            f"{name}: expected the same on every process; "
            "found another value on process 1 than on process 0"
        )


def test_process_that_can_not_save_stops_the_others(disagreed):
    here, there = (told["only one fails"] for told in disagreed)
    assert there["kinds"][0] == "ArgumentError"
    assert "StorageError" in here["kinds"]
    assert here["text"].startswith("process 1: extras: expected a mapping of JSON values")


def test_missing_run_and_existing_step_raise_alike_on_every_process(disagreed):
    for told in disagreed:
        assert "FileNotFoundError" in told["no such run"]["kinds"]
        assert told["same step again"]["kinds"][0] == "StepExistsError"


def test_one_device_is_refused_with_several_processes(disagreed):
    for told in disagreed:
        assert told["one device"]["kinds"][0] == "ArgumentError"
        assert told["one device"]["text"] == (
            "auto_shard_model: expected True, with 2 processes; "
            "found False: one device belongs to one process"
        )


def test_disabled_save_is_skipped_on_all_and_refused_calls_write_nothing(disagreed):
    for told in disagreed:
        assert told["skipped"] == ["SkippedSave", True, True]
        assert told["runs made"] == 0


def test_metrics_measured_by_each_process_are_those_of_process_0(disagreed):
    assert [told["metrics"] for told in disagreed] == [{"seconds": 0.0}] * 2


def test_a_check_that_refuses_on_one_process_fails_the_save_on_all(disagreed):
    for told in disagreed:
        assert "SaveError" in told["check"]["kinds"]
        assert "refused by process 1" in told["check"]["text"]
        assert told["listed"] == []


@pytest.fixture(scope="module")
def broken(launch, bucket, gcs_server, tmp_path_factory):
    """Two processes, of which the second meets one failure after the other, and is killed."""
    run = f"gs://{bucket}/run"
    shared = str(tmp_path_factory.mktemp("broken") / "run")
    faults = gcs_server.faults
    of_second = r"(ocdbt\.process_1/|cairn\.process_1\.json)"
    refused = faults.add(
        "status", status=403, operation="upload", count=None, name=f"/1/2/.*{of_second}"
    )
    held = faults.add("hold", operation="upload", count=None, name=f"/2/4/.*{of_second}")
    job = launch("fail_midway", {"run": run, "folder": shared}, count=2, heartbeat=10)
    held.wait(JOB_SECONDS)
    told = [json.loads((job.folder / f"{index}.json").read_text()) for index in (0, 1)]
    os.kill(job.processes[1].pid, signal.SIGKILL)
    ended = job.wait(60)
    faults.remove(held.id)
    assert refused.fired
    return run, told, ended


def test_upload_that_fails_on_one_process_fails_the_save_on_all(broken):
    _, told, _ = broken
    for one in told:
        assert "SaveError" in one["refused"]["kinds"]
    assert "process 1" in told[0]["refused"]["text"]


def test_next_save_after_a_failed_one_begins_another_attempt(broken):
    _, told, _ = broken
    assert [one["after"] for one in told] == [[3, 2]] * 2


def test_bit_that_flipped_in_one_processes_part_raises_on_all(broken):
    _, told, _ = broken
    for one in told:
        assert one["flipped"]["kinds"][0] == "CorruptionError"


def test_death_of_a_process_ends_the_others_and_keeps_the_last_step(broken):
    run, told, ended = broken
    assert ended[1].status == -signal.SIGKILL
    assert ended[0].status not in (0, None)
    assert ended[0].result == told[0]
    assert [info.step for info in Run.open(run).steps()] == [1, 3]


def test_run_goes_on_at_once_after_a_death_with_another_number_of_processes(broken):
    run, *_ = broken
    with Checkpointer(run, writer_id="tests") as checkpointer:
        handle = checkpointer.save(4, {"model": {"w": np.zeros(4, np.float32)}}, meta={})
        handle.wait(JOB_SECONDS)
    assert handle.attempt == 3
    assert [info.step for info in Run.open(run).steps()] == [1, 3, 4]
