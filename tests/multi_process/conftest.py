"""Jobs of several processes, and a store that all of them reach."""

import itertools

import pytest

from tests.multi_process.launcher import start

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def launch(gcs_server, tmp_path_factory):
    """Starts jobs; those that still run when the module's tests are over are killed."""
    jobs = []
    root = tmp_path_factory.mktemp("jobs")

    def start_job(scenario, arguments, *, count, devices=1, heartbeat=100):
        job = start(
            root / f"{len(jobs)}-{scenario}",
            scenario,
            arguments,
            count=count,
            devices=devices,
            environment={"CAIRN_WRITER_ID": "tests", "TEST_HEARTBEAT_SECONDS": str(heartbeat)},
        )
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def bucket(gcs_server):
    """A bucket of the module's own, by name."""
    name = f"many-{next(_NUMBERS)}"
    gcs_server.store.create_bucket(name)
    yield name
    gcs_server.faults.clear()
    gcs_server.store.delete_bucket(name, force=True)
