"""What the comparison says of clicks in the dashboard is what they are: all of its tasks."""

import pytest

from benchmarks.clicks import cairn_pages
from tests.service.dashboard.test_clicks import (
    WRITTEN,
    counted,
    test_each_task_takes_the_clicks_that_are_written,
)

__all__ = ["counted", "test_each_task_takes_the_clicks_that_are_written"]


@pytest.fixture(scope="module")
def tasks():
    return cairn_pages.JOURNEYS


def test_every_task_of_the_comparison_is_counted(counted):
    assert list(counted) == [row["row"] for row in WRITTEN["rows"]]
