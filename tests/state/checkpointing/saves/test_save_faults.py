"""Saves to a store that answers with errors: they end, and what is stored stays."""

import asyncio
import types

import gcsfs.retry
import pytest

from cairn import (
    Checkpointer,
    ObjectStore,
    Run,
    SaveError,
    StorageError,
    StoreFullError,
    StoreUnavailableError,
    parse_uri,
)
from cairn.state.checkpointing.restore import restore_item
from tests.state.seams import deadlines, objects
from tests.storage.states import abstract, assert_same, state

UPLOADS = r".*(insert|upload).*"


@pytest.fixture
def retries(monkeypatch):
    """Sets how often plain and patient calls ask again; with little sleep in between."""

    async def sleep(seconds):
        await asyncio.sleep(seconds / 100)

    # Orbax's own small files go by gcsfs, which sleeps for half a minute in all.
    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=sleep))

    def set_to(plain, patient):
        quick = {"initial_delay": "20ms", "max_delay": "100ms"}
        monkeypatch.setattr(objects, "_RETRIES", {**quick, "max_retries": plain})
        monkeypatch.setattr(objects, "_LONG_RETRIES", {**quick, "max_retries": patient})
        objects.store_context.cache_clear()
        objects.long_retry_context.cache_clear()

    yield set_to
    monkeypatch.undo()
    objects.store_context.cache_clear()
    objects.long_retry_context.cache_clear()


@pytest.fixture
def checkpointer(gcs, retries):
    retries(plain=4, patient=4)
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as made:
        yield made


def save(checkpointer, step):
    return checkpointer.save(step, state(step), meta={"step": step})


def listed(checkpointer):
    return [info.step for info in Run.open(checkpointer.uri).steps()]


@pytest.mark.parametrize(("status", "error"), [(507, StoreFullError), (503, SaveError)])
def test_a_store_that_refuses_for_good_fails_the_save_and_not_the_next(
    checkpointer, gcs, status, error
):
    save(checkpointer, 1).wait()
    gcs.faults.add("status", status=status, count=None, operation=UPLOADS)
    with pytest.raises(error) as caught:
        save(checkpointer, 2).wait(timeout=120)
    assert str(status) in str(caught.value)
    gcs.faults.clear()
    assert listed(checkpointer) == [1]
    save(checkpointer, 3).wait()
    assert listed(checkpointer) == [1, 3]


def test_a_store_that_is_busy_for_a_while_delays_the_save_and_no_more(checkpointer, gcs):
    gcs.faults.add("status", status=503, count=3, operation=UPLOADS)
    gcs.faults.add("status", status=429, count=3, operation=UPLOADS)
    save(checkpointer, 1).wait()
    assert listed(checkpointer) == [1]


@pytest.mark.parametrize("file", [r"model/d/", r"model/b/", r"model/manifest\.ocdbt", "_METADATA"])
def test_the_arrays_of_a_save_are_asked_for_longer_than_small_objects(gcs, retries, file):
    retries(plain=1, patient=8)
    fault = gcs.faults.add("status", status=503, count=5, operation=UPLOADS, name=file)
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        handle = save(checkpointer, 1)
        handle.wait()
    assert fault.fired == 5
    expected = state(1)["model"]
    assert_same(restore_item(handle.uri, "model", abstract(expected)), expected)


def test_a_patient_store_is_asked_again_where_another_gives_up(gcs, retries):
    retries(plain=1, patient=8)
    folder = parse_uri(gcs.bucket_uri) / "folder"
    gcs.faults.add("status", status=503, count=2, operation=UPLOADS, name="quick")
    gcs.faults.add("status", status=503, count=6, operation=UPLOADS, name="slow")
    with pytest.raises(StoreUnavailableError):
        ObjectStore(folder).write("quick", b"1")
    ObjectStore(folder, patient=True).write("slow", b"2")
    assert ObjectStore(folder).read("slow").value == b"2"


def test_saves_ask_a_store_for_more_than_a_minute_and_not_for_ever():
    spec = objects.long_retry_context().spec.to_json()
    for driver in ("gcs", "s3"):
        retries = spec[f"{driver}_request_retries"]
        first, last = (_seconds(retries[name]) for name in ("initial_delay", "max_delay"))
        waits = [min(last, first * 2**number) for number in range(retries["max_retries"])]
        assert 60 <= sum(waits) < deadlines.DEADLINE_SECONDS


def _seconds(text):
    return float(text.removesuffix("ms")) / 1000 if text.endswith("ms") else float(text[:-1])


def test_a_refused_save_raises_our_errors_only(checkpointer, gcs):
    """Forbidden is not asked again: it does not pass."""
    save(checkpointer, 1).wait()
    fault = gcs.faults.add("status", status=403, count=None, operation=UPLOADS, name="model/d/")
    with pytest.raises(StorageError, match="403"):
        save(checkpointer, 2).wait(timeout=120)
    assert fault.fired <= 2
    gcs.faults.clear()
    assert listed(checkpointer) == [1]
