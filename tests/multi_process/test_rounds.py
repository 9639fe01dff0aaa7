"""Processes hear of each other within a deadline; who is late, or elsewhere, is named to all."""

import pytest

JOB_SECONDS = 200
LARGE = 3 << 20

pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


@pytest.fixture(scope="module")
def talked(launch, tmp_path_factory):
    """Three processes that talk; what each was told."""
    arguments = {"large": LARGE, "folder": str(tmp_path_factory.mktemp("events"))}
    return launch("rounds.talk", arguments, count=3).results(JOB_SECONDS)


def test_a_decision_of_any_length_and_the_word_of_each_process_reach_all(talked):
    for told in talked:
        assert told["large"] == LARGE
        assert told["collected"] == [{"index": 0}, {"index": 1}, {"index": 2}]


@pytest.mark.parametrize("who", [0, 2])
def test_a_process_that_does_not_come_in_time_is_named_on_all_also_once_it_has_come(talked, who):
    for told in talked:
        error = told[f"process {who} is late"]
        assert error["kinds"][0] == "LateProcessError"
        assert "TimeoutError" in error["kinds"]
        assert "talk.<locals>.decided" in error["text"]
        assert f"process {who} missing" in error["text"]


def test_rounds_go_on_after_one_that_failed(talked):
    for told in talked:
        assert told["after that"] == told["and after that"] == [0, 1, 2]


def test_processes_that_make_different_calls_are_told_so_and_do_not_take_each_others_answer(talked):
    for told in talked:
        error = told["another call"]
        assert error["kinds"][0] == "LateProcessError"
        assert "processes 1, 2 at" in error["text"]
        assert "decided" in error["text"]


def test_a_process_that_is_interrupted_stops_the_others(talked):
    assert talked[1]["interrupted"]["kinds"][0] == "KeyboardInterrupt"
    for told in (talked[0], talked[2]):
        assert told["interrupted"]["text"].startswith("process 1: ")


def test_what_was_said_is_forgotten(talked):
    for told in talked:
        # Of the three rounds that failed and of the last two; there were ten more.
        assert told["kept"] <= 3 * 4 + 2 * 4 + 3


def test_the_log_names_who_is_waited_for_in_a_save_long_before_it_fails(talked):
    first, second, late = (told["warned"] for told in talked)
    for said in (first, second):
        assert any("'start' of a save (cairn/warned) for process 2, since" in line for line in said)
    for said in (second, late):
        assert any("for process 0, which publishes, since" in line for line in said)
    assert not any("start" in line for line in late)
