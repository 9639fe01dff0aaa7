"""Servers are killed at any moment and a receiver fails as it likes: no event is lost.

`make faults` promotes a thousand times, over either database.
"""

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from cairn import Client, Run
from tests.faults.report import is_long, seed, tell, trials
from tests.programs.program import Program
from tests.service.impatient_server import TRIES
from tests.service.receivers import receiving
from tests.service.stores import make_run

RUNS = ("a", "b", "c")
STEPS = (3, 6, 9)
NEVER_TAKEN = 11  # every so manyth move of an alias
PATIENCE = 120.0


class Servers:
    """Two control planes of one catalog, either of which may be killed and started again."""

    def __init__(self, environment):
        self._environment = environment
        self._ports = [free_port(), free_port()]
        self._processes = [self._start(number) for number in range(2)]
        self._stop = threading.Event()
        self._killer = threading.Thread(target=self._kill_again_and_again)
        self._http = httpx.Client()  # one: to make it takes longer than to ask
        self.kills = 0

    def _start(self, number):
        variables = {**self._environment, "CAIRN_EXECUTOR_ID": f"server-{number}"}
        arguments = ["-m", "tests.service.impatient_server", str(self._ports[number])]
        return Program(arguments, env={**os.environ, **variables})

    def url(self, number):
        return f"http://127.0.0.1:{self._ports[number]}"

    @contextmanager
    def killed(self):
        """One or the other, whatever it is doing, and again once it answers."""
        self._killer.start()
        try:
            yield
        finally:
            self._stop.set()
            self._killer.join(PATIENCE)

    def _kill_again_and_again(self):
        chance = random.Random(seed())
        while not self._stop.wait(chance.uniform(0.05, 0.8)):
            number = chance.randrange(2)
            self._processes[number].send_signal(signal.SIGKILL)
            self._processes[number].wait(PATIENCE)
            self._processes[number] = self._start(number)
            self.kills += 1
            if chance.random() < 0.8:  # else it may be killed while it starts
                self._await(number)

    def _await(self, number):
        until(partial(self._answers, number))

    def _answers(self, number):
        try:
            return self._http.get(f"{self.url(number)}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self):
        for number in range(2):
            self._await(number)

    def close(self):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(PATIENCE)
        self._http.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(reached):
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, f"nothing happened within {PATIENCE} s"
        time.sleep(0.05)


def promote(http, url, run, step):
    """Move the run's alias once, from wherever it is; whether that was answered."""
    place = f"{url}/v1/roots/default/runs/{run}"
    try:
        seen = http.get(f"{place}/aliases/live", params={"refresh": "true"})
        headers = {"If-None-Match": "*"}
        if seen.status_code == 200:
            headers = {"If-Match": seen.headers["ETag"]}
        path = f"{place}/checkpoints/{step}:promote"
        return http.post(path, json={"alias": "live"}, headers=headers).status_code == 200
    except httpx.TransportError:
        return False


def promote_often(servers, run, wanted):
    """At whichever server answers; how many promotions were answered, and how many were not."""
    chance = random.Random(f"{seed()} {run}")
    answered = 0
    with httpx.Client(timeout=60) as http:
        while answered < wanted or not servers.kills:  # a quick machine answers all before one
            if promote(http, servers.url(chance.randrange(2)), run, chance.choice(STEPS)):
                answered += 1
            else:
                time.sleep(0.01)
    return answered


@contextmanager
def serving(root, data, database_url):
    data.mkdir()
    servers = Servers(
        {
            "CAIRN_ROOT": str(root),
            "CAIRN_DATA_DIR": str(data),
            "CAIRN_DATABASE_URL": database_url,
            "CAIRN_AUTO_UPGRADE": "true",
            "CAIRN_SCAN_SECONDS": "0.2",
            "CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8",
        }
    )
    try:
        servers.wait()
        yield servers
    finally:
        servers.close()


@pytest.mark.timeout(3600 if is_long() else 300)
def test_every_event_is_delivered_in_its_runs_order_or_visibly_given_up(
    root, tmp_path, some_database_url
):
    chance = random.Random(seed())
    made = {run: make_run(root / run, STEPS) for run in RUNS}

    def decide(event):
        if event["detail"]["sequence"] % NEVER_TAKEN == 0:
            return 500
        return chance.choice((200, 200, 200, 500, 503))

    with ExitStack() as stack:
        servers = stack.enter_context(serving(root, tmp_path / "data", some_database_url))
        receiver = stack.enter_context(receiving(decide))
        with Client(servers.url(0)) as client:
            kinds = ["alias.moved"]
            webhook = client.create_webhook(receiver.url, kinds=kinds).details.id
        wanted = trials(short=36, long=1000)
        with servers.killed(), ThreadPoolExecutor(len(RUNS)) as promoters:
            asked = [promoters.submit(promote_often, servers, run, wanted // 3) for run in RUNS]
            assert all(one.result() for one in asked)
        servers.wait()
        with Client(servers.url(1)) as client:
            for run in RUNS:
                client.run(run, refresh=True)
            until(lambda: client.webhooks()[0].pending == 0)
            events = [*client.events(kind="alias.moved")]
            deliveries = {one.event.uid: one for one in client.deliveries(webhook)}

    aliases = {run: Run.open(found.uri).aliases.require("live") for run, found in made.items()}
    moves = {run: alias.sequence for run, alias in aliases.items()}
    assert Counter(event.run for event in events) == moves  # one for each move that was made
    for run in RUNS:
        of_run = [event for event in events if event.run == run]
        assert [one.detail["sequence"] for one in of_run] == [*range(1, moves[run] + 1)]
        assert [one.sequence for one in of_run] == sorted(one.sequence for one in of_run)
    assert deliveries.keys() == {event.uid for event in events}
    taken = list(dict.fromkeys(event["uid"] for event in receiver.taken()))
    states = {uid: one.state for uid, one in deliveries.items()}
    assert {uid for uid, state in states.items() if state == "delivered"} <= {*taken}
    given_up = {uid for uid, state in states.items() if state == "dead"}
    assert {*states} == {*taken} | given_up
    assert given_up >= {e.uid for e in events if e.detail["sequence"] % NEVER_TAKEN == 0}
    assert all(len(deliveries[uid].tries) == TRIES for uid in given_up)
    order = {event.uid: (event.run, event.sequence) for event in events}
    for run in RUNS:
        came = [order[uid][1] for uid in taken if order[uid][0] == run]
        assert came == sorted(came)
    assert servers.kills > 0
    tell(
        f"events: {servers.kills} SIGKILLs, {len(events)} moves of {3 * (wanted // 3)} that were "
        f"answered, {len(receiver.messages)} messages, {len(given_up)} given up"
    )
