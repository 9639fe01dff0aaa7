"""What an alias asks of the steps that it moves to."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fastapi.testclient import TestClient

from cairn import Damage, Settings, SettingsError, annotate_step, create_app
from cairn.service.jobs.kinds.convert import RULE_VERSION, requested_options
from cairn.service.schemas import ConvertRequest
from cairn.service.settings import load_settings
from cairn.storage.runs.annotate import note_verified
from cairn.storage.runs.records.exports import ExportFile, ExportKey, ExportManifest, publish_export
from cairn.storage.runs.records.layout import annotation_file
from cairn.storage.store.clock import rfc3339, utc_now
from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
PRODUCTION = {"alias": "production"}


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6])


@pytest.fixture
def gated(root, tmp_path):
    """Starts a control plane with gates."""

    @contextmanager
    def started(*gates):
        policies = [
            {"kind": "gate", "name": f"gate-{number}", **gate} for number, gate in enumerate(gates)
        ]
        settings = Settings(
            root=str(root), data_dir=tmp_path / "data", scan_seconds=0, policies=policies
        )
        app = create_app(settings, jobs=False)
        with TestClient(app, base_url=BASE_URL, client=PEER) as http:
            yield http

    return started


def promote(http, step=3, alias="production", name="run"):
    path = f"{RUN.removesuffix('run')}{name}/checkpoints/{step}:promote"
    return http.post(path, json={"alias": alias}, headers={"If-None-Match": "*"})


def refused(answer):
    """Of a refusal, which gates it names."""
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (409, "urn:cairn:problem:gate-refused")
    for one in problem["gates"]:
        assert one["detail"] in problem["detail"]
    return [one["gate"] for one in problem["gates"]]


def test_a_step_is_refused_with_every_reason(run, gated):
    annotate_step(run, 3, labels={"eval": "failed"}, metrics={"loss": 3.0, "acc": float("nan")})
    bounds = {"loss": {"max": 2}, "acc": {"min": 0.5}, "bleu": {"min": 1}}
    wanted = {"labels": {"eval": "passed", "owner": "*"}, "metrics": bounds}
    with gated(PRODUCTION | wanted | {"verified": True, "exported": True}) as http:
        answer = promote(http)
        assert refused(answer) == [
            "verified",
            "labels.eval",
            "labels.owner",
            "metrics.loss",
            "metrics.acc",
            "metrics.bleu",
            "exported",
        ]
        assert "metric loss must be at most 2, it is 3" in answer.json()["detail"]
        assert "label owner must be set, it is not set" in answer.json()["detail"]
        assert run.aliases.get("production") is None


@pytest.mark.parametrize("bound", [{"max": 2}, {"min": 2}])
@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_metric_is_within_no_bounds(run, gated, bound, value):
    annotate_step(run, 3, metrics={"loss": value})
    with gated(PRODUCTION | {"metrics": {"loss": bound}}) as http:
        assert refused(promote(http)) == ["metrics.loss"]


def test_a_step_that_passes_every_gate_is_promoted(run, gated):
    annotate_step(run, 3, labels={"eval": "passed"}, metrics={"loss": 2.0})
    note_verified(run, run.step(3))
    export(run, 3)
    wanted = {"labels": {"eval": "passed"}, "metrics": {"loss": {"min": 0, "max": 2}}}
    with gated(PRODUCTION | wanted | {"verified": True, "exported": True}) as http:
        assert promote(http).status_code == 200
        assert refused(move(http, 6))
    assert run.aliases.get("production").step == 3


def move(http, step):
    path = f"{RUN}/checkpoints/{step}:promote"
    return http.post(path, json={"alias": "production"}, headers={"If-Match": '"1"'})


def export(run, step, source=None, rules=RULE_VERSION, options=None):
    info = run.step(step)
    identity = {
        "step": step,
        "attempt": info.attempt,
        "kind": "convert",
        "source": source or info.manifest_digest,
        "options": options or requested_options(ConvertRequest()),
        "rule_version": rules,
    }
    manifest = ExportManifest(
        **identity,
        folder="op-1",
        created=rfc3339(utc_now()),
        files=(ExportFile(name="config.json", size=1, crc32c="00000000"),),
    )
    publish_export(run.objects, ExportKey.of(**identity), manifest)


def test_an_export_of_another_step_or_by_earlier_rules_does_not_count(run, gated):
    export(run, 6)
    export(run, 3, source="sha256:" + "0" * 64)
    export(run, 3, rules=RULE_VERSION - 1)
    gguf = ConvertRequest(format="gguf", dtype="q8_0")
    export(run, 3, options=requested_options(gguf))
    with gated(PRODUCTION | {"exported": True}) as http:
        assert refused(promote(http)) == ["exported"]
        assert promote(http, 6).status_code == 200
    with gated(PRODUCTION | {"exported": {"format": "gguf", "dtype": "q8_0"}}) as http:
        assert refused(move(http, 6)) == ["exported"]
        assert move(http, 3).status_code == 200


def test_damage_found_later_refuses_the_step_whatever_the_gates_are(run, gated):
    note_verified(run, run.step(3))
    note_verified(run, run.step(3), damage=Damage(at="2026-01-02T03:04:05Z"))
    with gated(PRODUCTION | {"verified": True}) as http:
        answer = promote(http)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:step-damaged")


def test_gates_are_for_the_aliases_runs_and_roots_that_they_name(root, run, gated):
    make_run(root / "llama-1", [3])
    rule = {"alias": "prod*", "run": "llama-*", "root": "def*", "labels": {"eval": "passed"}}
    with gated(rule, PRODUCTION | {"root": "other", "verified": True}) as http:
        assert promote(http).status_code == 200
        assert promote(http, name="llama-1", alias="staging").status_code == 200
        assert refused(promote(http, name="llama-1")) == ["labels.eval"]


def test_labels_that_can_not_be_read_promote_nothing(run, gated):
    annotate_step(run, 3, labels={"eval": "passed"})
    name = annotation_file(3, 1)
    stored = run.objects.read(name)
    run.objects.write(name, stored.value.replace(b"passed", b"Passed"))
    with gated(PRODUCTION | {"labels": {"eval": "*"}}) as http:
        assert promote(http).status_code == 409
    assert run.aliases.get("production") is None


def test_a_refusal_is_in_the_audit_trail(run, gated):
    with gated(PRODUCTION | {"verified": True}) as http:
        promote(http)
        (entry,) = audit_trail(http)
    assert entry.outcome == "refused"
    assert entry.detail["problem"].endswith("gate-refused")


@contextmanager
def webhook(answer):
    """A gate's webhook; what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(json.loads(body))
            answer(self)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/gate", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def says(status=200, body=b'{"allow": true}', **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_webhook_is_told_of_the_step_and_decides(run, gated):
    annotate_step(run, 3, metrics={"loss": 1.5}, labels={"eval": "passed"})
    with webhook(says()) as (url, asked), gated(PRODUCTION | {"webhook": url}) as http:
        assert promote(http).status_code == 200
    (told,) = asked
    assert (told["root"], told["run"], told["step"], told["alias"]) == (
        "default",
        "run",
        3,
        "production",
    )
    assert (told["metrics"], told["labels"]["eval"]) == ({"loss": 1.5}, "passed")
    assert told["by"] == "loopback"
    assert told["manifest_digest"] == run.step(3).manifest_digest


def test_a_webhook_that_refuses_gives_its_reason(run, gated):
    body = b'{"allow": false, "reason": "the release is frozen"}'
    with webhook(says(body=body)) as (url, _), gated(PRODUCTION | {"webhook": url}) as http:
        answer = promote(http)
    assert refused(answer) == ["webhook"]
    assert "the release is frozen" in answer.json()["detail"]


@pytest.mark.parametrize(
    "answer",
    [
        says(status=500),
        says(status=302, Location="/elsewhere"),
        says(status=204, body=b""),
        says(body=b"yes"),
        says(body=b"[true]"),
        says(body=b"{}"),
        says(body=b'{"allow": "true"}'),
        says(body=b'{"allow": true, "x": "' + b"x" * 100_000 + b'"}'),
        says(body=b"[" * 50_000),
        lambda handler: handler.connection.close(),
    ],
)
def test_a_webhook_that_gives_no_answer_that_counts_refuses(run, gated, answer):
    with webhook(answer) as (url, _), gated(PRODUCTION | {"webhook": url}) as http:
        assert refused(promote(http)) == ["webhook"]
    assert run.aliases.get("production") is None


def test_a_webhook_that_is_down_or_silent_refuses(run, gated, monkeypatch):
    with gated(PRODUCTION | {"webhook": "http://127.0.0.1:9/gate"}) as http:
        assert refused(promote(http)) == ["webhook"]
    monkeypatch.setattr("cairn.service.actions.gates.WEBHOOK_SECONDS", 0.2)
    ended = threading.Event()
    with (
        webhook(lambda handler: ended.wait(10)) as (url, _),
        gated(PRODUCTION | {"webhook": url}) as http,
    ):
        assert refused(promote(http)) == ["webhook"]
        ended.set()


def test_a_webhook_whose_headers_drip_holds_nobody(run, gated, monkeypatch):
    monkeypatch.setattr("cairn.service.actions.gates.WEBHOOK_SECONDS", 0.5)
    gone = threading.Event()

    def drip(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            try:
                handler.wfile.write(b"X-More: 1\r\n")
            except OSError:
                gone.set()
                return
            time.sleep(0.1)

    with webhook(drip) as (url, _), gated(PRODUCTION | {"webhook": url}) as http:
        assert refused(promote(http)) == ["webhook"]
        assert gone.wait(9)


def test_a_webhook_is_asked_only_about_what_passes_all_else(run, gated):
    rule = PRODUCTION | {"verified": True}
    with webhook(says()) as (url, asked), gated(rule | {"webhook": url}) as http:
        assert refused(promote(http)) == ["verified"]
    assert asked == []


@pytest.mark.parametrize(
    "gates",
    [
        '{"alias": "production"}',
        '[{"run": "x"}]',
        '[{"alias": "production", "metric": {}}]',
        '[{"alias": "production", "metrics": {"loss": {}}}]',
        '[{"alias": "production", "metrics": {"loss": {"min": 2, "max": 1}}}]',
        '[{"alias": "production", "metrics": {"loss": {"max": "NaN"}}}]',
        '[{"alias": "production", "webhook": "ftp://x"}]',
        '[{"alias": "production", "exported": {"dtype": "q8_0"}}]',
        '[{"alias": "production", "exported": {"format": "gguf", "lora": "keep"}}]',
        '[{"alias": "production", "exported": {"max_shard_size": "much"}}]',
        "[",
    ],
)
def test_gates_that_can_not_be_are_refused_at_the_start(monkeypatch, gates):
    named = gates.replace('{"', '{"kind": "gate", "name": "gate", "', 1)
    monkeypatch.setenv("CAIRN_POLICIES", named)
    with pytest.raises(SettingsError, match="CAIRN_POLICIES"):
        load_settings()
