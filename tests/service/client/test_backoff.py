"""How long the clients ask a server that does not answer."""

import httpx
import pytest

from cairn.service.errors import ProblemResponseError
from tests.service.seams import backoff

GONE = httpx.ConnectError("refused")


def problem(status):
    return ProblemResponseError({}, status)


def test_each_pause_is_twice_the_last_up_to_two_seconds_until_something_comes():
    patience = backoff.Backoff(30)
    assert [patience.pause() for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    patience.begin_again()
    assert patience.pause() == 0.1
    patience.begin_again(1.5)
    assert [patience.pause() for _ in range(2)] == [1.5, 2.0]


def test_it_ends_once_nothing_was_answered_for_so_long():
    now = [0.0]
    patience = backoff.Backoff(5, clock=lambda: now[0])
    found = []
    for now[0] in (0, 4, 5, 6):
        found.append(patience.failed(GONE))
    assert found == [False, False, True, True]
    patience.answered()
    now[0] = 10
    assert not patience.failed(problem(503))


@pytest.mark.parametrize(
    ("status", "final"),
    [(429, False), (502, False), (503, False), (504, False), (404, True), (500, True)],
)
def test_a_problem_that_stays_is_not_waited_for(status, final):
    assert backoff.Backoff(30).failed(problem(status)) is final
