"""How often a promotion waits for a store that is far away: no request of a round is answered
before all of them have been asked.
"""

from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import httpx
import pytest

from cairn import Settings, create_app
from tests.service.jobs import until
from tests.service.seams import limiters
from tests.service.servers import serve
from tests.service.stores import add_steps, make_run

PROMOTE = "/v1/roots/default/runs/run/checkpoints/{}:promote"
CREATE = {"If-None-Match": "*"}

LOOK = [
    "list attempts/",
    "list manifests/3.",
    "list trash/3.",
    "read aliases/production.json",
    "read lease.json",
    "read run.json",
]
HOLD = [
    "list attempts/",
    "read attempts/1.json",
    "read attempts/2.json",
    "read manifests/3.1.json",
    "read manifests/3.2.json",
    "read trash/3.1.json",
    "read trash/3.2.json",
    "write hold",
]
LOOK_AGAIN = [
    "read annotations/3.1.json",
    "read manifests/3.1.json",
    "read trash/3.1.intent.json",
    "read trash/3.1.json",
]
MOVE = ["write aliases/production.json"]
LET_GO = ["delete hold"]


class Rounds:
    """Holds every request to the store until those of its round have been asked."""

    def __init__(self, gcs):
        self._gcs = gcs
        self._asked = []
        self._fault = None

    def next(self, expected):
        """Answer the round before, and have the next one asked, whole."""
        asked: list[str] = []
        before, self._asked = self._fault, asked
        self._fault = self._gcs.faults.add(
            "hold",
            count=None,
            predicate=lambda request: asked.append(self._named(request)) is None,
        )
        if before is not None:
            before.count = 0
            before.release()
        return self.wait(expected)

    def wait(self, expected):
        """Until as many have been asked; those that have."""
        if expected:
            self._fault.wait(times=len(expected))
        return self._asked

    @staticmethod
    def _named(request):
        name = request.name.removeprefix("store/run/")
        if request.operation == "objects.list":
            return f"list {request.query['prefix'].removeprefix('store/run/')}"
        verb = {"GET": "read", "POST": "write", "DELETE": "delete"}[request.method]
        return f"{verb} {'hold' if name.endswith('.hold.json') else name}"


@pytest.fixture
def run(gcs, monkeypatch):
    """Step 3 of the first attempt; the second has gone on from it."""
    made = make_run(f"{gcs.bucket_uri}/store/run", [3])
    add_steps(made, [6], base_step=3)
    # As in a server that has just been started.
    monkeypatch.setattr("cairn.storage.store.objects._open_stores", WeakValueDictionary())
    return made


@pytest.fixture
def server(gcs, run, tmp_path):
    settings = Settings(root=f"{gcs.bucket_uri}/store", data_dir=tmp_path / "data", scan_seconds=0)
    with serve(create_app(settings, jobs=False)) as url:
        yield url


def test_a_promotion_waits_four_times_for_the_store_and_for_nothing_after_it(gcs, run, server):
    httpx.get(f"{server}/v1/policies").raise_for_status()  # a server with jobs reads them by itself
    rounds = Rounds(gcs)
    asked = [rounds.next([])]
    path = server + PROMOTE.format(3)
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as http:
        answer = pool.submit(http.post, path, json={"alias": "production"}, headers=CREATE)
        try:
            asked[0] = rounds.wait(LOOK)
            asked += [rounds.next(expected) for expected in (HOLD, LOOK_AGAIN, MOVE, LET_GO)]
            assert answer.result(60).status_code == 200, answer.result().text
            rounds.next([])  # the step is let go only now
        finally:
            gcs.faults.clear()
    assert [sorted(one) for one in asked] == [LOOK, HOLD, LOOK_AGAIN, MOVE, LET_GO]
    assert run.aliases.require("production").step == 3


def test_steps_that_a_silent_store_does_not_let_go_keep_nobody_waiting_for_what_needs_no_store(
    gcs, server, monkeypatch
):
    monkeypatch.setattr(limiters, "WAIT_SECONDS", 0.2)
    silence = gcs.faults.add("hold", operation="objects.delete", name=r"\.hold\.json", count=None)
    path = server + PROMOTE.format(3)
    with httpx.Client(timeout=60) as http:
        try:
            for number in range(limiters.SHARE):
                answer = http.post(path, json={"alias": f"a{number}"}, headers=CREATE)
                assert answer.status_code == 200, answer.text
            silence.wait(times=limiters.SHARE)
            assert http.get(f"{server}/healthz").is_success
            assert http.get(f"{server}/v1/runs").is_success
            refused = http.post(path, json={"alias": "one-more"}, headers=CREATE)
            assert refused.status_code == 503
        finally:
            gcs.faults.clear()
        until(lambda: gcs.names("store/run/trash/") == [])
