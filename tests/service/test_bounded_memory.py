"""What somebody wrote into a store takes no more of a server's memory than the docs say."""

import json

import pytest

from cairn.storage.store.bounds import bound_of
from tests.faults.report import is_long
from tests.programs.program import REPOSITORY, run
from tests.service.bounded_memory import HUGE, RECORDS
from tests.service.seams import limiters

FEW = 64 << 20
"""What a process takes anyway, when it does something for the first time."""

REQUESTS, MANIFESTS, ROWS = (12, 8, 1024) if is_long() else (2, 2, 64)
SIZES = [str(size) for size in (REQUESTS, MANIFESTS, ROWS)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounded")
    ended = run(["-m", "tests.service.bounded_memory", folder, *SIZES], cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", RECORDS)
def test_a_huge_record_is_named_and_takes_no_memory(measured, name):
    found = measured[name]
    assert found["taken"] < FEW
    if name.startswith("attempts/"):  # the catalog lists what the others tell
        assert found["statuses"] == [200]
        return
    assert found["statuses"] == [409]
    told = json.loads(found["said"])
    assert told["type"] == "urn:cairn:problem:corrupt"
    assert f"/{name}: expected at most {bound_of(name).max_bytes} bytes" in told["detail"]
    assert f"found {HUGE} bytes" in told["detail"]


def test_runs_with_huge_records_hide_no_others(measured):
    assert {"chunk", "index", "larger", "aliases"} < set(measured["list"]["said"])


def test_many_large_records_are_read_one_after_another(measured):
    assert measured["list"]["statuses"] == [200]
    most = bound_of("manifests/1.1.json").max_bytes
    assert measured["list"]["taken"] < FEW + max(4, MANIFESTS / 2) * most


def test_a_directory_is_not_inflated_beyond_what_its_manifest_needs(measured):
    assert measured["index"]["taken"] < FEW
    assert "a directory of at most" in measured["index"]["said"]


def test_a_chunk_above_the_bound_is_refused_in_every_form(measured):
    assert set(measured["larger"]["statuses"]) == {422}
    assert measured["larger"]["taken"] < FEW
    assert "expected chunks of at most 268435456 bytes" in measured["larger"]["said"]


def test_values_of_the_largest_chunks_take_what_the_docs_say_together(measured):
    assert set(measured["chunk"]["statuses"]) == {200}
    assert ROWS << 18 < measured["chunk"]["taken"] < limiters.VALUE_BYTES
