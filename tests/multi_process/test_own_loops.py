"""A loop of one's own in several processes: all get the same step, or all the same error."""

import pytest

from tests.faults.report import is_long

JOB_SECONDS = 240
pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


@pytest.fixture(scope="module", params=["disk", "bucket"] if is_long() else ["bucket"])
def told(request, launch, bucket, tmp_path_factory):
    """What two processes say of each loop, one after the other."""
    folder = tmp_path_factory.mktemp("own-loops")
    first = str(folder / "first") if request.param == "disk" else f"gs://{bucket}/own-loop"
    calls = {
        "own_loops.go_on": {"run": first},
        "own_loops.call_orbax_names": {"run": str(folder / "run")},
        "orbax_names.differ": {"run": str(folder / "differ")},
    }
    return launch("in_turn", {"calls": calls}, count=2, devices=2).results(JOB_SECONDS)


def test_all_processes_restore_the_same_step_and_fail_together(told):
    for result in (process["own_loops.go_on"] for process in told):
        assert result["fresh"] == [None, []]
        assert result["steps"] == [1, 2]
        for step, (epoch, count, tied, parts) in zip([2, 1, 1], result["found"], strict=True):
            assert (epoch, count, tied) == (step, step, True)
            assert parts == [[[step, step + 1, step + 2, step + 3]] * 2] * 2
        kinds, texts = zip(*result["errors"], strict=True)
        assert kinds == ("InvalidURIError", *["TreeMismatchError"] * 2)
        assert texts[0].startswith("step: expected the same on every process")
        assert texts[1].startswith("target: expected the same on every process")
        assert "model/kernel: expected shape (16, 4), stored (8, 4)" in texts[2]
        mapped = result["mapped"]
        assert mapped["is_whole"]
        assert mapped["sizes"] == [8 * 4] * 3, "half of each layer"
        assert mapped["error"][0] == "TreeMismatchError"
        assert mapped["error"][1].startswith("map: expected the same on every process")


def test_all_processes_see_the_same_steps_through_orbax_names(told):
    first, second = (process["own_loops.call_orbax_names"] for process in told)
    assert first == second
    assert first["saved"] == [step % 2 == 0 for step in range(10)]
    assert first["steps"] == [[2, 4], [6, 8]]
    assert first["found"] == [4, 8 * (4 + 5 + 6 + 7)]
    assert first["best"] == 8


def test_what_one_process_does_otherwise_is_agreed_on_or_fails_on_all(told):
    first, second = (process["orbax_names.differ"] for process in told)
    kinds = ["KeyError", "SaveError"]
    kinds += ["StepInUseError", "UnsupportedFormatError"]
    assert [one for one in first["seen"] if isinstance(one, str)] == kinds
    differ = [(a, b) for a, b in zip(first["seen"], second["seen"], strict=True) if a != b]
    assert differ == [("KeyError", "StorageError")]
    assert first["seen"][3] == [[1, 2, 4], 4, 1]
    assert first["seen"][-5:-2] == [[[1], 1, 1], [[1, 2], 2, 2], [[3], 3, 3]]
    assert first["seen"][-2:] == [[[2], 2, 2], [[4], 4, 4]]
    assert first["errors"] == ["OSError", "StorageError", "SaveError", "SaveError"]
    assert second["errors"] == ["StorageError", "OSError", "SaveError"]
