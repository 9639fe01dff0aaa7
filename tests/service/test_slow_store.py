"""A store that is slow, silent or gone holds up what needs it, and nothing else."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

from cairn import ObjectStore, StoreUnavailableError
from cairn.storage.store.deadlines import deadline_seconds_left
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/run"
CREATE = {"If-None-Match": "*"}
REQUESTS = 60


@pytest.fixture
def silent(http, root, monkeypatch):
    """A store that answers nothing from now on, until the test is over."""
    make_run(root / "run", [1])
    assert http.get("/v1/runs").is_success
    monkeypatch.setattr("cairn.service.http.limiters.WAIT_SECONDS", 0.2)
    over, asked = threading.Event(), threading.Semaphore(0)

    def wait(self, *_args, **_more):
        asked.release()
        over.wait(60)
        raise StoreUnavailableError("the store does not answer", path=self.uri)

    for name in ("read", "read_many", "parse_many", "list", "children", "folders", "etags"):
        monkeypatch.setattr(ObjectStore, name, wait)
    yield asked, over
    over.set()


@pytest.mark.parametrize(
    "ask",
    [
        lambda http, number: http.post(
            f"{RUN}/checkpoints/1:promote", json={"alias": f"a{number}"}, headers=CREATE
        ),
        lambda http, number: http.get(f"{RUN}/checkpoints", params={"refresh": True}),
        lambda http, number: http.get(f"/v1/roots/default/runs/unknown-{number}"),
        lambda http, number: http.get(f"{RUN}/aliases/best/history"),
    ],
    ids=["promote", "refresh", "unknown", "history"],
)
def test_a_silent_store_keeps_no_list_and_no_health_check_waiting(http, silent, ask):
    asked, over = silent
    with ThreadPoolExecutor(REQUESTS) as pool:
        waiting = [pool.submit(ask, http, number) for number in range(REQUESTS)]
        assert asked.acquire(timeout=30)
        refused = next(as_completed(waiting, timeout=30)).result()
        assert http.get("/healthz").is_success
        assert [run["name"] for run in http.get("/v1/runs").json()["runs"]] == ["run"]
        assert http.get(f"{RUN}/checkpoints").json()["checkpoints"][0]["step"] == 1
        over.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


def test_what_a_request_asks_of_the_store_has_a_deadline(http, root, monkeypatch):
    run = make_run(root / "run", [1])
    left = []
    read = ObjectStore.read

    def noted(self, key):
        if self.uri == run.uri:  # and not one that a thread of another test still holds
            left.append(deadline_seconds_left())
        return read(self, key)

    monkeypatch.setattr(ObjectStore, "read", noted)
    promoted = http.post(f"{RUN}/checkpoints/1:promote", json={"alias": "best"}, headers=CREATE)
    assert promoted.is_success
    assert left
    assert all(seconds is not None and seconds <= 30 for seconds in left)
    assert deadline_seconds_left() is None
