"""The soak tells memory that grows from memory that does not, and counts what steps ask."""

import json
import subprocess

import numpy as np
import pytest

from benchmarks import soak
from tests.documentation.pages import ROOT
from tests.programs.program import Program


def memory(seed, *, leak=0.0, saves=900):
    """Resident bytes after each save, as they are: in pages, and each near the one before."""
    random = np.random.default_rng(seed)
    noise = np.zeros(saves)
    for number in range(1, saves):
        noise[number] = 0.8 * noise[number - 1] + random.normal(0, 100e3)
    return list(300e6 + leak * np.arange(saves) + noise)


def test_of_a_leak_of_a_kilobyte_a_save_the_interval_does_not_include_0():
    for seed in range(20):
        found = soak.slope(memory(seed, leak=1024))
        assert 0 < found.low < found.mean < found.high


def test_of_noise_the_interval_includes_0_nineteen_times_in_twenty():
    found = [soak.slope(memory(seed)) for seed in range(200)]
    assert 180 <= sum(one.low <= 0 <= one.high for one in found) <= 199


def test_the_slope_of_a_line_is_its_own():
    found = soak.slope([5 + 3 * number for number in range(907)])
    assert found == pytest.approx((3, 3, 3))


def test_what_does_not_fill_a_batch_is_left_out_at_the_front():
    assert soak.means([100, 1, 1, 2, 2, 3, 3], 3) == [1, 2, 3]


def started(arguments, variables):
    """Forked: what sets an allocator that has begun does nothing."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return Program(arguments, cwd=ROOT, env=variables, **pipes)


@pytest.mark.timeout(600)
def test_a_short_soak_writes_its_rows_and_later_steps_ask_what_early_ones_do(tmp_path):
    """`--memory` is left out: the second row's allocator, and the last one's store."""
    output = tmp_path / "soak.json"
    options = ["--warm-up", "2", "--folder", str(tmp_path), "--json", str(output)]
    jobs = ["--local", "20", "--memory", "0", "--steps", "22"]
    assert soak.main([*jobs, *options], started) == 0
    local, settled, bucket = json.loads(output.read_text())
    assert [*tmp_path.iterdir()] == [output]
    assert [row["saves"] for row in (local, settled, bucket)] == [20, 20, 22]
    for row in (local, settled, bucket):
        assert row["resident a save"]["low"] <= row["resident a save"]["high"]
    for name in ("allocated a save", "blocks a save"):
        assert settled[name]["low"] <= settled[name]["high"]
    assert local["allocated a save"] is None, "caches of threads are none of what is held"
    assert local["requests"] is None
    assert bucket["requests"]["2"] == bucket["requests"]["22"] == bucket["most requests"]


def test_memory_of_the_soak_that_was_run_does_not_grow_nor_does_what_is_asked():
    """Of `make soak`, whose results are in the documentation."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())
    assert [row["saves"] for row in rows] == [1000, 1000, 2000, 2000]
    disk, bucket = (row for row in rows if row["allocated a save"] is not None)
    assert bucket["allocated a save"]["low"] <= 0 <= bucket["allocated a save"]["high"]
    assert disk["allocated a save"]["high"] < 16, "what fills within some hundred saves"
    for row in rows:
        assert row["objects a save"]["low"] <= 0 <= row["objects a save"]["high"]
        if row["requests"] is not None:
            assert row["requests"]["2"] == row["requests"]["2000"]
