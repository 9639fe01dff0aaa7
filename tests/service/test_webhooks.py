"""Who is told of events is told each at least once, signed, and those of a run in their order."""

import logging
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.events.sender import Sender
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.jobs import Hold, save_llama, serving, watch
from tests.service.receivers import receiving
from tests.service.seams import sender
from tests.service.stores import add_steps, make_run
from tests.service.test_errors import check_problem
from tests.service.trail import audit_trail

CREATE = {"If-None-Match": "*"}
LOOPBACK = {"webhook_networks": "127.0.0.0/8"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(sender, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(sender, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(sender, "RETRY_SECONDS", (0.05, 0.05, 0.05))


@pytest.fixture
def served(root, tmp_path):
    """A control plane with a worker, whose root was looked at while it had two runs."""
    for name in ("run", "other"):
        make_run(root / name, [3, 6])
    with serving(root, tmp_path / "data", scan_seconds=0, **LOOPBACK) as http:
        http.get("/v1/runs")
        yield http


def subscribe(http, url, **wanted):
    answer = http.post("/v1/webhooks", json={"url": url, **wanted})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    return answer.json()["details"]["id"], answer.json()["secret"]


def promote(http, step, expect=None, *, run="run", alias="production"):
    headers = CREATE if expect is None else {"If-Match": f'"{expect}"'}
    path = f"/v1/roots/default/runs/{run}/checkpoints/{step}:promote"
    answer = http.post(path, json={"alias": alias}, headers=headers)
    assert answer.status_code == 200, answer.text


def deliveries(http, webhook, **asked):
    answer = http.get(f"/v1/webhooks/{webhook}/deliveries", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["deliveries"]


def ends_of_jobs(http):
    return http.get("/v1/events", params={"kind": "job.ended"}).json()["events"]


def moves(events):
    return [(one["run"], one["detail"]["sequence"]) for one in events]


def test_event_is_delivered_signed_and_logged(served):
    with receiving() as receiver:
        webhook, secret = subscribe(served, f"{receiver.url}/hook?team=a")
        promote(served, 3)
        receiver.wait(lambda: receiver.messages)
        (message,) = receiver.messages
        assert message.is_signed(secret)
        assert not message.is_signed("whsec_" + "A" * 44)
        assert abs(message.timestamp - time.time()) < 60
        event = message.event
        assert (event["kind"], event["root"], event["run"]) == ("alias.moved", "default", "run")
        assert event["uid"] == message.uid
        assert (event["detail"]["step"], event["detail"]["before"]) == (3, None)
        receiver.wait(lambda: deliveries(served, webhook, state="delivered"))
        (logged,) = deliveries(served, webhook)
        assert logged["event"] == event == served.get("/v1/events").json()["events"][-1]
        assert [one["status"] for one in logged["tries"]] == [200]
        assert logged["tries"][0]["seconds"] < 10
        assert (logged["due"], logged["attempts"]) == (None, 1)


def test_later_events_of_a_run_wait_for_the_earlier_and_other_runs_do_not(served, monkeypatch):
    monkeypatch.setattr(sender, "RETRY_SECONDS", (0.05,) * 1000)  # however late the others come
    failing = threading.Event()

    def decide(event):
        first = (event["run"], event["detail"]["sequence"]) == ("run", 1)
        return 500 if first and not failing.is_set() else 200

    with receiving(decide) as receiver:
        subscribe(served, receiver.url)
        promote(served, 3)
        promote(served, 6, 1)
        promote(served, 3, run="other")
        receiver.wait(lambda: receiver.taken())
        assert moves(receiver.taken()) == [("other", 1)]
        failing.set()
        receiver.wait(lambda: len(receiver.taken()) == 3)
        assert moves(receiver.taken()) == [("other", 1), ("run", 1), ("run", 2)]
        failed = [one for one in receiver.messages if one.status == 500]
        assert {one.uid for one in failed} == {receiver.taken()[1]["uid"]}  # the same id each time


def test_event_that_nobody_takes_is_dead_lettered_and_the_next_is_delivered(served, caplog):
    refused = {1}
    with receiving(lambda one: 500 if one["detail"]["sequence"] in refused else 200) as receiver:
        webhook, secret = subscribe(served, f"{receiver.url}/?token=hush")
        promote(served, 3)
        promote(served, 6, 1)
        with caplog.at_level(logging.DEBUG):
            receiver.wait(lambda: moves(receiver.taken()) == [("run", 2)])
        (dead,) = deliveries(served, webhook, state="dead")
        assert [one["status"] for one in dead["tries"]] == [500] * 4
        assert "expected a status from 200 to 299, found 500" in dead["tries"][0]["error"]
        assert f"webhook {webhook}: event {dead['event']['uid']} is given up" in caplog.text
        assert secret not in caplog.text
        assert "hush" not in caplog.text
        (known,) = served.get("/v1/webhooks").json()["webhooks"]
        assert (known["pending"], known["dead"]) == (0, 1)
        refused.clear()
        path = f"/v1/webhooks/{webhook}/deliveries/{dead['id']}:redeliver"
        assert served.post(path).json()["state"] == "pending"
        receiver.wait(lambda: moves(receiver.taken()) == [("run", 2), ("run", 1)])
        receiver.wait(lambda: not deliveries(served, webhook, state="pending"))
        assert deliveries(served, webhook, state="dead") == []


def test_only_what_is_wanted_is_delivered_and_only_what_came_after(served):
    promote(served, 3, alias="old")
    with receiving() as some, receiving() as all_of_it:
        subscribe(served, some.url, kinds=["alias.deleted"], runs="ot*", roots=["default"])
        subscribe(served, all_of_it.url)
        for run in ("run", "other"):
            promote(served, 3, run=run)
            path = f"/v1/roots/default/runs/{run}/aliases/production"
            assert served.delete(path, headers={"If-Match": '"1"'}).is_success
        all_of_it.wait(lambda: len(all_of_it.messages) == 4)
        some.wait(lambda: some.messages)
        assert [(one["run"], one["kind"]) for one in some.taken()] == [("other", "alias.deleted")]


def test_a_test_is_sent_to_one_webhook_alone(served):
    with receiving() as one, receiving() as another:
        webhook, secret = subscribe(served, one.url, kinds=["index.behind"])
        subscribe(served, another.url)
        answer = served.post(f"/v1/webhooks/{webhook}:test")
        assert (answer.status_code, answer.json()["event"]["kind"]) == (202, "webhook.test")
        one.wait(lambda: one.messages)
        assert one.messages[0].is_signed(secret)
        promote(served, 3)
        another.wait(lambda: another.messages)
        assert [message.event["kind"] for message in another.messages] == ["alias.moved"]


def test_a_deleted_webhook_is_told_no_more(served):
    with receiving(lambda _: 500) as receiver:
        webhook, _ = subscribe(served, receiver.url)
        promote(served, 3)
        receiver.wait(lambda: receiver.messages)
        assert served.delete(f"/v1/webhooks/{webhook}").status_code == 204
        assert served.get("/v1/webhooks").json() == {"webhooks": []}
        assert served.delete(f"/v1/webhooks/{webhook}").status_code == 404


def test_unknown_webhook_and_delivery_are_named_with_the_command_that_lists_them(served):
    webhook, _ = subscribe(served, "https://ci.example.com/cairn")
    unknown = "/v1/webhooks/" + "a" * 12
    for method, path in (
        ("DELETE", unknown),
        ("POST", f"{unknown}:test"),
        ("GET", f"{unknown}/deliveries"),
        ("POST", f"{unknown}/deliveries/7:redeliver"),
    ):
        refused = check_problem(served.request(method, path), 404)
        assert refused["type"] == "urn:cairn:problem:webhook-not-found"
        assert f"webhook '{'a' * 12}'" in refused["detail"]
        assert "`cairn webhooks list`" in refused["detail"]
    refused = check_problem(served.post(f"/v1/webhooks/{webhook}/deliveries/7:redeliver"), 404)
    assert refused["type"] == "urn:cairn:problem:delivery-not-found"
    assert f"Webhook '{webhook}' has no delivery 7." in refused["detail"]
    assert f"`cairn webhooks deliveries {webhook}`" in refused["detail"]


def test_the_secret_is_told_once(served):
    webhook, secret = subscribe(served, "https://ci.example.com/cairn")
    told = served.get("/v1/webhooks").text + served.get(f"/v1/webhooks/{webhook}/deliveries").text
    assert secret not in told
    entries = [entry.detail for entry in audit_trail(served)]
    assert secret not in repr(entries)
    assert [one["id"] for one in entries if "url" in one] == [webhook]


@contextmanager
def raw_receiver(answer):
    """One that takes a connection and does with it what it wants."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def serve():
            server.settimeout(0.05)
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5)
                    try:
                        connection.recv(65536)
                        answer(connection, stop)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            thread.join(10)


def drip(connection, stop):
    while not stop.wait(0.05):
        connection.sendall(b"H")


def endless_head(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not stop.is_set():
        connection.sendall(b"a: " + b"b" * 60000 + b"\r\n")


def large_body(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
    while not stop.is_set():
        connection.sendall(bytes(1 << 20))


def silence(connection, stop):
    stop.wait(10)


def hang_up(connection, stop):
    """Nothing at all."""


def nonsense(connection, stop):
    connection.sendall(b"220 smtp.example.com ready\r\n")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (silence, "it took too long"),
        (drip, "it took too long"),
        (endless_head, "found none: "),
        (hang_up, "RemoteDisconnected"),
        (nonsense, "BadStatusLine"),
        (large_body, None),
    ],
)
def test_no_receiver_costs_more_than_a_moment(served, monkeypatch, answer, says):
    monkeypatch.setattr("cairn.service.events.http_post.ANSWER_SECONDS", 0.3)
    with raw_receiver(answer) as url:
        webhook, _ = subscribe(served, url)
        served.post(f"/v1/webhooks/{webhook}:test")
        until = time.monotonic() + 20
        while not (tries := deliveries(served, webhook)[0]["tries"]):
            assert time.monotonic() < until
            time.sleep(0.02)
    assert tries[0]["seconds"] < 2
    if says is None:
        assert (tries[0]["status"], tries[0]["error"]) == (200, None)
    else:
        assert says in tries[0]["error"]
        assert tries[0]["status"] is None


def test_a_redirect_is_not_followed(served):
    with receiving(lambda _: 307) as receiver:
        webhook, _ = subscribe(served, receiver.url)
        served.post(f"/v1/webhooks/{webhook}:test")
        receiver.wait(lambda: deliveries(served, webhook, state="dead"))
        assert len(receiver.messages) == 4
        assert "found 307" in deliveries(served, webhook)[0]["tries"][0]["error"]


def test_a_slow_receiver_keeps_no_other_from_being_told(served):
    with receiving(lambda _: 0) as slow, receiving() as quick:
        subscribe(served, slow.url)
        subscribe(served, quick.url)
        promote(served, 3)
        slow.wait(lambda: slow.messages)
        quick.wait(lambda: quick.messages)
        slow.closing.set()


def test_ends_of_jobs_are_events_and_damage_is_one_of_its_own(root, tmp_path):
    save_llama(root / "llama")
    with (
        receiving() as receiver,
        serving(root, tmp_path / "data", scan_seconds=0, **LOOPBACK) as http,
    ):
        http.get("/v1/runs")
        subscribe(http, receiver.url, kinds=["job.ended", "verify.failed"])
        verify = "/v1/roots/default/runs/llama/checkpoints/1:verify"
        first = watch(http, http.post(verify).json()["id"])
        receiver.wait(lambda: len(receiver.taken()) == 1)
        damaged = max((root / "llama" / "attempts").rglob("*"), key=lambda one: one.stat().st_size)
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.unlink()
        damaged.write_bytes(bytes(data))
        second = watch(http, http.post(verify).json()["id"])
        assert second["state"] == "failed"
        receiver.wait(lambda: len(receiver.taken()) == 3)
        told = [(one["kind"], one["detail"]["state"], one["run"]) for one in receiver.taken()]
        assert told == [
            ("job.ended", "succeeded", "llama"),
            ("verify.failed", "failed", "llama"),
            ("job.ended", "failed", "llama"),
        ]
        assert [one["detail"]["operation"] for one in receiver.taken()] == [
            first["id"],
            second["id"],
            second["id"],
        ]


def test_a_root_that_cannot_be_looked_at_is_told_of_once(served, root):
    with receiving() as receiver:
        subscribe(served, receiver.url)
        root.rename(root.with_name("moved"))
        plane = served.app.state.plane
        for _ in range(2):
            with pytest.raises(Exception, match="root"):
                plane.index.scan("default", plane.roots["default"])
        receiver.wait(lambda: receiver.messages)
        time.sleep(0.3)
        (event,) = receiver.taken()
        assert (event["kind"], event["root"], event["run"]) == ("index.behind", "default", "")
        assert "root" in event["detail"]["problem"]
        root.with_name("moved").rename(root)


def test_of_two_processes_one_delivers_and_the_other_goes_on_when_it_ends(served, root, tmp_path):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, **LOOPBACK)
    plane = served.app.state.plane
    other = Sender(settings, plane.catalog, plane.jobs)
    with receiving() as receiver:
        subscribe(served, receiver.url)
        other.start()
        try:
            for expect in range(5):
                promote(served, 3, expect or None)
            receiver.wait(lambda: len(receiver.messages) >= 5)
            time.sleep(0.3)
            assert moves(receiver.taken()) == [("run", number) for number in range(1, 6)]
        finally:
            other.close()


def test_clients_that_ask_again_read_on_where_they_were(served, root):
    promote(served, 3)
    promote(served, 3, run="other")
    first = served.get("/v1/events", params={"page_size": 2}).json()
    rest = served.get("/v1/events", params={"page_token": first["next_page_token"]}).json()
    everything = [*first["events"], *rest["events"]]
    assert len(first["events"]) == 2
    assert rest["next_page_token"] is None
    assert [one["id"] for one in everything] == sorted(one["id"] for one in everything)
    after = everything[-1]["id"]
    assert served.get("/v1/events", params={"after": after}).json()["events"] == []
    add_steps(make_run(root / "third"), [1])
    served.get("/v1/runs", params={"refresh": "true"})
    (new,) = served.get("/v1/events", params={"after": after}).json()["events"]
    assert (new["run"], new["kind"], new["sequence"]) == ("third", "step.durable", 1)
    asked = {"run": "other", "kind": "alias.moved", "root": "default"}
    assert moves(served.get("/v1/events", params=asked).json()["events"]) == [("other", 1)]
    assert served.get("/v1/events", params={"root": "nowhere"}).json()["events"] == []


def test_callers_of_one_root_read_its_events_alone_and_make_no_webhook(root, tmp_path):
    make_run(root / "run", [3])
    make_run(tmp_path / "b" / "run", [3])
    settings = Settings(
        root=str(root),
        roots={"b": str(tmp_path / "b")},
        data_dir=tmp_path / "data",
        scan_seconds=0,
        auth="keys",
    )
    settings.prepare()
    keys = Keys(settings.database_url)
    whole, part = keys.make("whole", "admin"), keys.make("part", "admin", roots=["b"])
    with TestClient(create_app(settings, jobs=False), ADDRESS, client=ELSEWHERE) as http:
        http.get("/v1/runs", headers=bearer(whole))

        def seen(key, **asked):
            answer = http.get("/v1/events", params=asked, headers=bearer(key))
            return answer.status_code, {one["root"] for one in answer.json().get("events", ())}

        assert seen(whole) == (200, {"default", "b"})
        assert seen(part) == (200, {"b"})
        assert seen(part, root="default")[0] == 403
        body = {"url": "https://ci.example.com/cairn"}
        assert http.post("/v1/webhooks", json=body, headers=bearer(part)).status_code == 403
        body = {**body, "roots": ["c"]}
        answer = http.post("/v1/webhooks", json=body, headers=bearer(whole))
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "body.roots")


def readings(http):
    told = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines())
    return [float(told[f"cairn_webhook_{name}"]) for name in ("dead", "wait_seconds")]


def test_metrics_tell_of_events_that_wait_and_of_those_that_were_given_up(served, monkeypatch):
    assert readings(served) == [0, 0]
    with receiving(lambda _: 500) as receiver:
        webhook, _ = subscribe(served, receiver.url)
        promote(served, 3)
        receiver.wait(lambda: deliveries(served, webhook, state="dead"))
        assert readings(served) == [1, 0]
        monkeypatch.setattr(sender, "RETRY_SECONDS", (60.0,))
        promote(served, 6, 1)
        receiver.wait(lambda: deliveries(served, webhook, state="pending"))
        dead, waits = readings(served)
        assert dead == 1
        assert 0 < waits < 30


def test_the_end_of_a_job_that_nobody_noticed_is_told_at_the_next_start_and_once(
    root, tmp_path, monkeypatch
):
    save_llama(root / "llama")
    options = {"scan_seconds": 0, **LOOPBACK}
    with monkeypatch.context() as patch, serving(root, tmp_path / "data", **options) as http:
        http.get("/v1/runs")
        patch.setattr("cairn.service.events.detector.EventDetector.jobs", lambda *_: None)
        job = http.post("/v1/roots/default/runs/llama/checkpoints/1:verify").json()["id"]
        assert watch(http, job)["state"] == "succeeded"
        assert ends_of_jobs(http) == []
    for _ in range(2):
        with receiving() as receiver, serving(root, tmp_path / "data", **options) as http:
            receiver.wait(partial(ends_of_jobs, http))
            time.sleep(0.3)
            (event,) = ends_of_jobs(http)
            assert (event["detail"]["operation"], event["sequence"]) == (job, 2)


def test_a_cancelled_job_that_was_resumed_ends_twice(root, tmp_path, monkeypatch):
    save_llama(root / "llama")
    with serving(root, tmp_path / "data", scan_seconds=0, **LOOPBACK) as http:
        hold = Hold(monkeypatch)
        path = "/v1/roots/default/runs/llama/checkpoints/1:convert"
        job = http.post(path, json={}).json()["id"]
        assert hold.reached.wait(30)
        http.post(f"/v1/operations/{job}:cancel")
        hold.opened.set()

        def ends():
            return [one["detail"]["state"] for one in ends_of_jobs(http)]

        with receiving() as receiver:
            receiver.wait(lambda: ends() == ["cancelled"])
            http.post(f"/v1/operations/{job}:resume")
            receiver.wait(lambda: ends() == ["cancelled", "succeeded"])
