"""Data that goes on with another number of processes: no example is lost, none is seen twice.

`CAIRN_FAULTS=long` kills more often, and iterators of both kinds; and positions lie on a disk too.
"""

import random
import time

import numpy as np
import pytest

from cairn import Checkpointer, Run
from tests.faults.report import is_long, seed
from tests.multi_process.positions import BATCH, EXAMPLES, Strided, elastic

JOB_SECONDS = 240
START_SECONDS = 120
pytestmark = pytest.mark.timeout(8 * JOB_SECONDS)

SHORT = [("grain", (2, 1))]
LONG = [(kind, (4, 4, 2, 2, 8, 4, 1, 8)) for kind in ("grain", "own")]


@pytest.mark.parametrize(("kind", "counts"), LONG if is_long() else SHORT)
def test_no_example_is_lost_or_seen_twice_over_kills(launch, tmp_path, kind, counts):
    run, draw = str(tmp_path / "run"), random.Random(seed())
    begun = [0]
    for count in counts[:-1]:
        job = launch("positions.train", {"run": run, "kind": kind, "pause": 0.03}, count=count)
        wait_for_a_step_after(begun[-1], run, job)
        time.sleep(draw.uniform(0, 0.5))
        job.kill()
        begun.append(latest(run))
    job = launch("positions.train", {"run": run, "kind": kind, "pause": 0}, count=counts[-1])
    for result in job.results(JOB_SECONDS):
        assert result == {"begun": begun[-1], "steps": EXAMPLES // BATCH, "lost": 0, "twice": 0}
    assert begun == sorted(set(begun))  # each job came further than the one before it
    assert begun[-1] < EXAMPLES // BATCH


def latest(run):
    found = Run(run)
    return (found.latest_step() or 0) if found.has_saved() else 0


def wait_for_a_step_after(step, run, job):
    deadline = time.monotonic() + START_SECONDS
    while latest(run) <= step:
        if any(process.poll() is not None for process in job.processes):
            job.results(0)
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def told(launch, tmp_path_factory):
    """What two processes say of a state's positions, and of a manager's."""
    folder = tmp_path_factory.mktemp("told")
    calls = {
        "positions.save_and_load_a_state": {"run": str(folder / "state")},
        "positions.save_with_grains_arguments": {"run": str(folder / "manager")},
    }
    return launch("in_turn", {"calls": calls}, count=2).results(JOB_SECONDS)


def test_each_process_of_a_state_gets_the_position_that_it_was_trained_to(told):
    results = [one["positions.save_and_load_a_state"] for one in told]
    for process, result in enumerate(results):
        assert (result["step"], result["at"]) == (7, 20 + process)
        kinds, texts = zip(*result["errors"], strict=True)
        assert kinds == ("ArgumentError", "IteratorMismatchError", "UnsupportedLeafError")
        assert texts[0].startswith("iterators: expected the same on every process")
        for text in texts[1:]:
            assert "OSError: the cable was pulled" in text
            assert ("process 1: " in text) == (process != 1)


def test_a_manager_restores_the_position_of_each_process_or_none(told):
    for result in (one["positions.save_with_grains_arguments"] for one in told):
        assert result["same"]
        assert result["note"] == {"at": 1}
        for kind, text in result["errors"]:
            assert kind == "UnsupportedFormatError"
            assert "expected the same on every process" in text
        assert [text[:5] for _, text in result["errors"]] == ["args:", "args:", "step:"]


UNABLE = {
    "own": "tests.multi_process.positions.Numbers has no set_states",
    "plain": "grain._src.python.dataset.",
    "shuffled": "grain._src.python.dataset.",
}


@pytest.fixture(scope="module", params=["disk", "bucket"] if is_long() else ["bucket"])
def saved(request, launch, bucket, tmp_path_factory):
    """A run whose step four processes saved with iterators, and what they say."""
    folder = tmp_path_factory.mktemp("positions")
    run = str(folder / "run") if request.param == "disk" else f"gs://{bucket}/positions"
    return run, launch("positions.save_positions", {"run": run}, count=4).results(JOB_SECONDS)


def test_each_process_gets_its_own_position_back_and_all_fail_together(saved):
    for process, result in enumerate(saved[1]):
        assert result["at"] == 10 + process
        kinds, texts = zip(*result["errors"], strict=True)
        assert kinds == (
            "SaveError",
            "UnsupportedLeafError",
            "TreeMismatchError",
            "IteratorMismatchError",
            "SaveError",
        )
        for text in (texts[0], texts[2]):
            assert text.startswith("iterators: expected the same on every process")
        for text in (texts[1], texts[3]):
            assert "OSError: the cable was pulled" in text
            assert ("process 1: " in text) == (process != 1)
        assert "iterators/own/process_1-of-4.json: expected" in texts[4]


def test_fewer_processes_go_on_with_the_data_if_their_iterators_can(saved, launch):
    run = saved[0]
    results = launch("positions.restore_positions", {"run": run}, count=2).results(JOB_SECONDS)
    for result in results:
        assert [kind for kind, _ in result["refused"]] == ["IteratorMismatchError"] * 2
        whole, exchanged = (text for _, text in result["refused"])
        for name, why in UNABLE.items():
            assert f"- {name}: saved by 4 processes, now 2: {why}" in whole
        assert whole.count("\n  - ") == len(UNABLE)
        assert "- grain: saved by 4 processes, now 2: grain._src.python.dataset." in exchanged
        assert "- plain: saved by 4 processes, now 2: the states of the 4 are not one" in exchanged
        assert result["untouched"]
    given = {name: [result["next"][name] for result in results] for name in results[0]["next"]}
    whole = Strided().order[3 * BATCH : 4 * BATCH]
    assert np.ravel(np.stack(given["strided"], axis=1)).tolist() == whole.tolist()
    alone = elastic()  # one process, which takes whole batches
    batches = [sorted(np.asarray(next(alone)).tolist()) for _ in range(4)]
    assert sorted(example for part in given["grain"] for example in part) == batches[3]
    assert sorted(-example for part in given["mapped"] for example in part) == batches[3]


def test_one_process_goes_on_with_the_data_of_four(saved):
    strided, grains = Strided(), elastic()
    target = {"model": {"w": np.ones(3, np.float32)}}
    with Checkpointer(saved[0], writer_id="tests") as checkpointer:
        checkpointer.restore(target, iterators={"strided": strided, "grain": grains})
    assert strided.state_dict() == {"base": 3 * BATCH, "taken": 0}
    assert grains.get_state() == {"global_next_index": 3 * BATCH}
