"""What the comparison says of clicks in the dashboard is what they are: some of its tasks.

`test_clicks_of_all_tasks`, which `make proofs` runs, counts the others too.
"""

import json

import pytest

from benchmarks.clicks import cairn_pages, mlflow_pages
from benchmarks.clicks.__main__ import RESULTS, table
from benchmarks.clicks.hand import count
from tests.service.dashboard.conftest import opened
from tests.service.planes import running_plane

WRITTEN = json.loads(RESULTS.read_text(encoding="utf-8"))
SOME = (
    "find the latest checkpoint of a run",
    "promote a checkpoint, with a reason",
    "get PyTorch files: two, downloaded",
)


@pytest.fixture(scope="module")
def tasks():
    return {task: cairn_pages.JOURNEYS[task] for task in SOME}


@pytest.fixture(scope="module")
def counted(browser, tasks, tmp_path_factory):
    root = tmp_path_factory.mktemp("clicks")
    cairn_pages.make_store(root)
    with (
        running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _),
        opened(browser, url) as page,
    ):
        return count(page, tasks)


def test_each_task_takes_the_clicks_that_are_written(counted, tasks):
    again = "python -m benchmarks.clicks writes them anew"
    written = {row["row"]: row["cairn"] for row in WRITTEN["rows"] if row["row"] in tasks}
    assert counted == written, again


def test_the_other_page_has_the_same_tasks_in_the_same_order():
    assert list(mlflow_pages.JOURNEYS) == list(cairn_pages.JOURNEYS)
    told = {task: one for task, one in mlflow_pages.JOURNEYS.items() if isinstance(one, str)}
    assert told == {r["row"]: r["mlflow"] for r in WRITTEN["rows"] if isinstance(r["mlflow"], str)}


def test_what_is_not_counted_anew_stays_as_it_was(counted):
    one = {"version": "1", "date": "2026-11-25"}
    counts = {"cairn": one | {"tasks": counted}, "mlflow": one | {"tasks": {}}}
    found = table(counts)
    assert found["of"] == ["cairn", "mlflow"]
    assert [row["row"] for row in found["rows"]] == list(cairn_pages.JOURNEYS)
    assert {row["row"]: row["cairn"] for row in found["rows"] if row["cairn"]} == counted
    assert {row["mlflow"] for row in found["rows"]} == {None}
