from datetime import timedelta

import pytest

from cairn import StorageError, parse_uri
from cairn.storage.store.clock import utc_now
from cairn.storage.store_checks.clocks import seconds_ahead
from cairn.storage.store_checks.probe import probe_now
from tests.storage.records import RECORD_FILE


@pytest.fixture(params=["file", "gcs"])
def store(request, tmp_path):
    if request.param == "file":
        return parse_uri(tmp_path)
    return parse_uri(request.getfixturevalue("gcs").bucket_uri) / "root"


def test_this_host_s_clock_is_that_of_a_store_beside_it(store):
    assert abs(seconds_ahead(store)) < 1


@pytest.mark.parametrize("seconds", [100.0, -100.0])
def test_a_clock_that_is_off_is_told_with_its_sign(store, seconds):
    told = seconds_ahead(store, clock=lambda: utc_now() + timedelta(seconds=seconds))
    assert told == pytest.approx(seconds, abs=2.5)


def test_asking_leaves_nothing_behind(tmp_path, gcs):
    seconds_ahead(parse_uri(tmp_path))
    seconds_ahead(parse_uri(gcs.bucket_uri))
    assert list(tmp_path.iterdir()) == []
    assert gcs.names() == []


def test_a_store_without_a_clock_tells_none():
    assert seconds_ahead(parse_uri("memory://clock")) is None


def test_a_probe_for_now_remembers_nothing_and_trusts_no_memory(tmp_path):
    (tmp_path / RECORD_FILE).write_text("{")
    probe_now(parse_uri(tmp_path))
    assert (tmp_path / RECORD_FILE).read_text() == "{"
    assert [path.name for path in tmp_path.iterdir()] == [RECORD_FILE]
    with pytest.raises(StorageError):
        probe_now(parse_uri("/proc/nowhere"))
