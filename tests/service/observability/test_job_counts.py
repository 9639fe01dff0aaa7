"""Jobs are counted in the database that DBOS keeps, of either kind."""

import pytest
from sqlalchemy.exc import OperationalError

from cairn import Settings
from cairn.service.jobs.dbos_engine.jobs import open_jobs
from tests.service.seams import counts


@pytest.fixture
def jobs(tmp_path, database_url):
    opened = open_jobs(
        Settings(
            root=str(tmp_path / "store"),
            data_dir=tmp_path / "data",
            jobs_database_url=database_url,
        )
    )
    yield opened
    opened.close()


def test_jobs_are_counted_by_kind_and_state(jobs):
    assert jobs.counts() == {}
    started = [jobs.start("convert", {"number": number}) for number in range(3)]
    jobs.start("gc", {})
    jobs.cancel(started[0].id)
    assert jobs.counts() == {
        ("convert", "pending"): 2,
        ("convert", "cancelled"): 1,
        ("gc", "pending"): 1,
    }


def test_a_database_that_is_down_is_said_at_once():
    counted = counts.JobCounts("postgresql+psycopg://user:hunter2@127.0.0.1:1/jobs")
    with pytest.raises(OperationalError) as raised:
        counted.read(["cairn.gc"])
    assert "hunter2" not in str(raised.value)
    counted.close()
