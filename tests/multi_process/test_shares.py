"""Arrays that several processes hold are written once, each process its share of them."""

import math

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import Run, open_files, verify_step
from cairn.state.checkpointing.restore import restore_item
from tests.faults.report import is_long
from tests.multi_process.shares import advanced, changed_by_process_one, host_items, numbers
from tests.storage.states import assert_same

JOB_SECONDS = 240
pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


TWO, FOUR = (2, 2, (2, 2), (4, 1)), (4, 1, (1, 4), (2, 2))


@pytest.fixture(scope="module", params=[TWO, FOUR] if is_long() else [TWO])
def saved(request, launch, bucket, tmp_path_factory):
    """(processes, runs) after a job of that many processes; two save in every way."""
    count, devices, axes, other = request.param
    folder = tmp_path_factory.mktemp("shared")
    names = ("run", "kept", "waves") if count == 2 else ("run",)
    runs = [f"gs://{bucket}/run-{count}", *(str(folder / name) for name in names)]
    arguments = {"runs": runs, "axes": axes, "other": other}
    job = launch("shares.save_and_read", arguments, count=count, devices=devices)
    leaves = sum(len(one) for one in host_items().values())
    assert job.results(JOB_SECONDS) == [2 * len(runs) * leaves] * count
    return count, runs


def test_one_process_reads_what_all_have_written(saved):
    for uri in saved[1]:
        run = Run.open(uri)
        for info in run.steps():
            for item, leaves in host_items().items():
                expected = {name: advanced(host, info.step - 1) for name, host in leaves.items()}
                target = {name: np.empty_like(host) for name, host in expected.items()}
                assert_same(restore_item(run.step_uri(info), item, target), expected)
        assert [info.step for info in run.steps()] == [1, 2]


def test_plain_orbax_reads_what_all_have_written(saved):
    for uri in saved[1]:
        run = Run.open(uri)
        folder = run.step_uri(run.step(1)).orbax_path()
        for item, leaves in host_items().items():
            target = {name: np.empty_like(host) for name, host in leaves.items()}
            assert_same(ocp.load(folder, target, checkpointable_name=item), leaves)


def test_each_process_writes_its_share_and_nothing_is_written_twice(saved):
    count, runs = saved
    for uri in runs:
        run = Run.open(uri)
        files = open_files(run.step_uri(run.step(1)))
        sizes = {entry.name: entry.size for entry in files.walk()}
        for item, leaves in host_items().items():
            data = sum(host.nbytes for host in leaves.values())
            written = [
                sum(size for name, size in sizes.items()
                    if name.startswith(f"{item}/ocdbt.process_{index}/d/"))
                for index in range(count)
            ]  # fmt: skip
            # Checksums and indexes take 20 bytes for each chunk.
            assert data < sum(written) < 1.01 * data
            if item == "model":  # replicated everywhere, and easily divided
                assert max(written) < 1.01 * math.ceil(data / count)


def test_a_step_of_several_processes_verifies(saved):
    for uri in saved[1]:
        report = verify_step(Run.open(uri), 2)
        assert not report.problems


OVER_DAMAGE = "shares.save_over_damage"
FROZEN_BASE = "shares.save_a_base_that_steps_give_back"
BEGUN_AGAIN = "shares.save_where_a_run_was_deleted"


@pytest.fixture(scope="module", params=["file", "gcs"] if is_long() else ["gcs"])
def in_turn(request, launch, bucket, tmp_path_factory):
    """Runs that two processes save one after the other, and what each says of them, by scenario."""
    folder = tmp_path_factory.mktemp("in-turn")
    damaged = str(folder / "damaged") if request.param == "file" else f"gs://{bucket}/damaged"
    begun_again = [str(folder / "begun-again"), f"gs://{bucket}/begun-again-{request.param}"]
    calls = {
        OVER_DAMAGE: {"run": damaged, "axes": (2, 2)},
        FROZEN_BASE: {"run": str(folder / "frozen"), "axes": (1, 4)},
        BEGUN_AGAIN: {"runs": begun_again},
    }
    told = launch("in_turn", {"calls": calls}, count=2, devices=2).results(JOB_SECONDS)
    return {name: (calls[name], [one[name] for one in told]) for name in calls}


def test_each_process_writes_anew_what_is_damaged_of_its_own(in_turn):
    arguments, ((name,), _) = in_turn[OVER_DAMAGE]
    stored = Run.open(arguments["run"])
    for step in (2, 3):
        assert verify_step(stored, step).ok
        for item, leaves in host_items().items():
            target = {leaf: np.empty_like(host) for leaf, host in leaves.items()}
            assert_same(restore_item(stored.step_uri(stored.step(step)), item, target), leaves)
    by_step = {one.step: one.files for one in stored.contents(stored.step(3)).shared_files}
    assert sorted(by_step) == [1, 2]
    assert name not in by_step[1]
    assert all("ocdbt.process_1/" in file for file in by_step[2])
    for process in (0, 1):
        assert any(f"ocdbt.process_{process}/" in file for file in by_step[1])


def test_each_process_leaves_its_part_of_a_frozen_base_on_its_devices(in_turn):
    arguments, told = in_turn[FROZEN_BASE]
    stored = Run.open(arguments["run"])
    whole = numbers(0, (64, 1024))
    for step in range(1, 9):
        assert verify_step(stored, step).ok
        expected = {"base": whole if step < 7 else changed_by_process_one(whole)}
        target = {"base": np.empty_like(whole)}
        assert_same(restore_item(stored.step_uri(stored.step(step)), "model", target), expected)
    assert [copied[:6] for copied in told] == [["ba", "ba", "ba", "a", "a", "a"]] * 2
    assert sorted(copied[6] for copied in told) == ["a", "ba"]


def test_a_run_that_was_deleted_can_be_begun_again_by_the_same_job(in_turn):
    """Its steps lie where others lay, of which the processes have told each other before."""
    arguments, told = in_turn[BEGUN_AGAIN]
    assert told == [[[1, 1]] * len(arguments["runs"])] * 2
    for uri in arguments["runs"]:
        run = Run.open(uri)
        assert verify_step(run, 1).ok
        expected = {"w": numbers(1, (64, 32))}
        target = {"w": np.empty_like(expected["w"])}
        assert_same(restore_item(run.step_uri(run.step(1)), "model", target), expected)
