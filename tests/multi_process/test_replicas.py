"""What several processes hold is read from the store once, and is what was saved in all of them."""

import shutil
from contextlib import ExitStack

import pytest

from tests.faults.report import is_long
from tests.gcs.server import GcsServer
from tests.multi_process.loading import VALUES
from tests.multi_process.replicas import BUCKET, leaves, stored_bytes

JOB_SECONDS = 240
pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


@pytest.fixture(scope="module")
def saved(launch, tmp_path_factory):
    """The folder of a store with a step."""
    folder = tmp_path_factory.mktemp("replicas")
    with GcsServer(folder / "saved") as server:
        server.store.create_bucket(BUCKET)
        launch("replicas.save", {"url": server.url}, count=1).results(JOB_SECONDS)
    return folder / "saved"


@pytest.fixture
def served(saved, tmp_path):
    """Starts stores that hold the step, one for each process."""
    with ExitStack() as stack:

        def serve(count):
            for number in range(count):
                shutil.copytree(saved, tmp_path / str(number))
            folders = [tmp_path / str(number) for number in range(count)]
            return [stack.enter_context(GcsServer(folder)) for folder in folders]

        yield serve


def values_of(server):
    """Bytes of values that a store has been asked for."""
    return sum(one.answered for one in [*server.requests] if VALUES.search(one.name))


SHORT = {"four, two halves": (4, 1, 2)}
LONG = {"one": (1, 1, 1), "two": (2, 1, 1), "four": (4, 1, 1), "two by two": (2, 2, 2), **SHORT}
CASES = LONG if is_long() else SHORT


@pytest.mark.parametrize(("count", "devices", "split"), CASES.values(), ids=CASES)
def test_replicas_read_each_byte_once_together(launch, served, count, devices, split):
    servers = served(count)
    arguments = {"urls": [one.url for one in servers], "split": split, "once": "1"}
    job = launch("replicas.load", arguments, count=count, devices=devices)
    assert job.results(JOB_SECONDS) == [len(leaves())] * count
    read = [values_of(server) for server in servers]
    assert sum(read) <= 1.02 * stored_bytes()
    if count > 1:
        assert max(read) < 0.8 * stored_bytes()


@pytest.mark.parametrize(
    "once", [["0", "0"], ["1", "0"]] if is_long() else [["1", "0"]], ids="".join
)
def test_processes_that_do_not_all_want_it_read_all_that_they_hold(launch, served, once):
    servers = served(2)
    arguments = {"urls": [one.url for one in servers], "once": once}
    job = launch("replicas.load_otherwise", arguments, count=2)
    assert job.results(JOB_SECONDS) == [sorted(leaves())] * 2
    for server in servers:
        assert values_of(server) >= stored_bytes()


def test_a_process_that_stops_before_an_exchange_is_named_within_the_deadline(launch, served):
    """The exchange itself has none: the network of devices waits for who does not come."""
    servers = served(2)
    job = launch("replicas.stop", {"urls": [one.url for one in servers]}, count=2)
    here, there = job.results(JOB_SECONDS)
    for told in (here, there):
        assert told["stops"]["kinds"][0] == "LateProcessError"
        assert "process 1 missing" in told["stops"]["text"]
        assert told["after that"] == len(leaves())


def test_a_read_that_fails_on_one_fails_on_all_by_name_and_a_late_one_is_named(
    launch, served, tmp_path
):
    arguments = {"urls": [one.url for one in served(2)], "folder": str(tmp_path)}
    job = launch("replicas.fail", arguments, count=2)
    here, there = job.results(JOB_SECONDS)
    for told in (here, there):
        assert told["fails"]["kinds"][0] == "StoreUnavailableError"
        assert "the disk of this process is gone" in told["fails"]["text"]
        assert told["late"]["kinds"][0] == "LateProcessError"
        assert "process 1 missing" in told["late"]["text"]
        assert told["after that"] == len(leaves())
    assert here["fails"]["text"].startswith("process 1: ")
