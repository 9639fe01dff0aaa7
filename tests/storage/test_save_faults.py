"""Saves to a store that answers with errors: they end, and what is stored stays."""

import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils

from storage import chunk_codec
from storage.checkpointer import Checkpointer
from storage.errors import SaveError, StoreFullError
from storage.run import Run
from tests.storage.states import state


@pytest.fixture
def checkpointer(gcs, monkeypatch):
    quick = {"max_retries": 4, "initial_delay": "20ms", "max_delay": "100ms"}
    monkeypatch.setattr(chunk_codec, "STORE_RETRIES", quick)
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
    gcs.faults.add("status", status=status, count=None, operation=r".*(insert|upload).*")
    with pytest.raises(error) as caught:
        save(checkpointer, 2).wait(timeout=120)
    assert str(status) in str(caught.value)
    gcs.faults.clear()
    assert listed(checkpointer) == [1]
    save(checkpointer, 3).wait()
    assert listed(checkpointer) == [1, 3]


def test_a_store_that_is_busy_for_a_while_delays_the_save_and_no_more(checkpointer, gcs):
    gcs.faults.add("status", status=503, count=3, operation=r".*(insert|upload).*")
    gcs.faults.add("status", status=429, count=3, operation=r".*(insert|upload).*")
    save(checkpointer, 1).wait()
    assert listed(checkpointer) == [1]


def test_orbax_asks_a_store_again_for_as_long_as_we_say(checkpointer):
    save(checkpointer, 1).wait()
    spec = tensorstore_utils.get_ts_context(use_ocdbt=True).spec.to_json()
    assert spec["gcs_request_retries"]["max_retries"] == 4
    assert "cache_pool#ocdbt" in spec
