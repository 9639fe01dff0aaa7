"""Data that goes on with another number of processes: no example is lost, none is seen twice.

`CAIRN_FAULTS=long` kills more often, and iterators of both kinds.
"""

import random
import time

import numpy as np
import pytest

from cairn.storage.runs.run import Run
from cairn.storage.training.checkpointer import Checkpointer
from tests.faults.report import is_long
from tests.multi_process.positions import BATCH, EXAMPLES, Strided, elastic

JOB_SECONDS = 240
START_SECONDS = 120
pytestmark = pytest.mark.timeout(8 * JOB_SECONDS)

SHORT = [("grain", (4, 2, 8))]
LONG = [(kind, (4, 4, 2, 2, 8, 4, 1, 8)) for kind in ("grain", "own")]


@pytest.mark.parametrize(("kind", "counts"), LONG if is_long() else SHORT)
def test_no_example_is_lost_or_seen_twice_over_kills(launch, tmp_path, kind, counts):
    run, draw = str(tmp_path / "run"), random.Random(3)
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


@pytest.fixture(scope="module", params=["disk", "bucket"])
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
        )
        for text in (texts[0], texts[2]):
            assert text.startswith("iterators: expected the same on every process")
        for text in (texts[1], texts[3]):
            assert "OSError: the cable was pulled" in text
            assert ("process 1: " in text) == (process != 1)


def test_fewer_processes_go_on_with_the_data_if_their_iterators_can(saved, launch):
    run = saved[0]
    results = launch("positions.restore_positions", {"run": run}, count=2).results(JOB_SECONDS)
    for result in results:
        kind, text = result["refused"]
        assert kind == "IteratorMismatchError"
        assert "own: saved by 4 processes, now 2: tests.multi_process.positions.Numbers" in text
        assert "plain: saved by 4 processes, now 2: " in text
        assert "is not of an ElasticIterator" in text
        assert "strided:" not in text
        assert "grain:" not in text
        assert result["untouched"] == [0, 0, 0]
    whole = Strided().order[3 * BATCH : 4 * BATCH]
    parts = [result["strided"] for result in results]
    assert np.ravel(np.stack(parts, axis=1)).tolist() == whole.tolist()
    alone = elastic()  # one process, which takes whole batches
    batches = [np.asarray(next(alone)).tolist() for _ in range(4)]
    parts = [example for result in results for example in result["grain"]]
    assert sorted(parts) == sorted(batches[3])


def test_one_process_goes_on_with_the_data_of_four(saved):
    strided, grains = Strided(), elastic()
    target = {"model": {"w": np.ones(3, np.float32)}}
    with Checkpointer(saved[0], writer_id="tests") as checkpointer:
        checkpointer.restore(target, iterators={"strided": strided, "grain": grains})
    assert strided.state_dict() == {"base": 3 * BATCH, "taken": 0}
    assert grains.get_state() == {"global_next_index": 3 * BATCH}
