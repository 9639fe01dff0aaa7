"""Ranges of objects arrive in the memory that was given, or are left to TensorStore."""

from contextlib import closing
from http.client import HTTPException

import pytest

from cairn import ObjectStore, parse_uri
from cairn.storage.store.gcs_ranges import _MAX_FAILURES, GcsRanges
from tests.storage.seams import deadlines

CONTENT = bytes(range(256)) * 2000
NAME = "d/a b+ü"
READS = "media.get"


@pytest.fixture
def ranges(gcs):
    folder = parse_uri(f"{gcs.bucket_uri}/run")
    ObjectStore.open(folder).write(NAME, CONTENT)
    gcs.server.requests.clear()
    with closing(GcsRanges(folder)) as found:
        yield found


def read(ranges, start, stop):
    memory = bytearray(stop - start)
    with closing(ranges.open(NAME, start, stop)) as stream:
        half = len(memory) // 2
        count = stream.read_into(memoryview(memory)[:half])
        count += stream.read_into(memoryview(memory)[half:])
    return bytes(memory[:count])


def refused(ranges, start=0, stop=10, name=NAME):
    with pytest.raises((OSError, HTTPException)):
        ranges.open(name, start, stop)


def reads(gcs):
    return [one for one in gcs.server.requests if one.operation == READS]


def test_a_range_arrives_part_by_part_in_the_memory_given(gcs, ranges):
    assert read(ranges, 5, 300_000) == CONTENT[5:300_000]
    assert read(ranges, 0, len(CONTENT)) == CONTENT
    assert len(reads(gcs)) == 2


def test_a_connection_serves_one_range_after_another(ranges):
    with closing(ranges.open(NAME, 0, 10)) as first:
        first.read_into(memoryview(bytearray(10)))
    used = ranges._idle[-1]
    read(ranges, 0, 1000)
    assert ranges._idle == [used]


def test_a_connection_with_an_answer_left_in_it_serves_no_other(ranges):
    ranges.open(NAME, 0, 100_000).close()
    assert ranges._idle == []
    assert read(ranges, 0, 100) == CONTENT[:100]


def test_what_is_not_the_whole_range_is_left_to_another(gcs, ranges):
    refused(ranges, len(CONTENT) - 5, len(CONTENT) + 5)
    refused(ranges, len(CONTENT), len(CONTENT) + 5)
    refused(ranges, name="none")
    for kind, more in (("status", {"status": 503}), ("truncate", {"nbytes": 4})):
        gcs.faults.add(kind, operation=READS, **more)
        refused(ranges)
    assert read(ranges, 0, 100) == CONTENT[:100]


def test_of_an_answer_that_is_cut_off_the_beginning_is_there(gcs, ranges):
    gcs.faults.add("cut_download", operation=READS, nbytes=70_000)
    assert read(ranges, 0, 100_000) == CONTENT[:70_000]


def test_a_server_that_falls_silent_is_not_waited_for_long(gcs, ranges, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.4)
    held = gcs.faults.add("stall_download", operation=READS, nbytes=70_000)
    found = read(ranges, 0, 100_000)
    assert 50_000 <= len(found) <= 70_000
    assert CONTENT.startswith(found)
    held.release()


def test_after_some_failures_nothing_more_is_asked(gcs, ranges):
    gcs.faults.add("status", operation=READS, status=403, count=None)
    for _ in range(_MAX_FAILURES):
        refused(ranges)
    assert ranges.open(NAME, 0, 10) is None
    assert len(reads(gcs)) == _MAX_FAILURES


def test_a_proxy_is_left_to_tensorstore(gcs, ranges, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert GcsRanges(parse_uri(f"{gcs.bucket_uri}/run")).open(NAME, 0, 10) is None
    assert reads(gcs) == []
