"""Policies that roots have: set, tried and deleted by every door, and followed by every server."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from cairn import Client, Run, Settings, StoreUnavailableError, create_app
from cairn.service.actions import root_policies
from cairn.service.actions.automations import follow_moves
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import in_force
from cairn.service.actions.schedules import Scheduler
from cairn.service.policies import Gate, Retention
from cairn.storage.store.clock import utc_now
from cairn.storage.store.records import canonical_json, sha256_of
from tests.service.commands import cairn_here
from tests.service.servers import serve
from tests.service.stores import make_run

FEBRUARY = datetime(2028, 2, 29, tzinfo=UTC)
NEVER = "0 0 29 2 *"
WEEKLY = {"kind": "retention", "name": "weekly", "run": "scratch*", "cron": NEVER, "keep_last": 1}
CHECKED = {"kind": "gate", "name": "checked", "alias": "production", "labels": {"eval": "passed"}}
VERIFY = {"kind": "automation", "name": "verify", "alias": "production", "action": "verify"}
FIXED = {"kind": "schedule", "name": "fixed", "cron": NEVER, "action": "verify"}
FIXED |= {"root": "def*", "run": "nothing"}
CREATE = {"If-None-Match": "*"}
ROOT = "/v1/roots/default"


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    make_run(folder / "store" / "scratch-1", range(4))
    make_run(folder / "store" / "scratch-2", range(3))
    make_run(folder / "store" / "kept", range(2))
    make_run(folder / "store" / "tried", range(2))
    (folder / "far").mkdir()
    return create_app(
        Settings(
            root=str(folder / "store"),
            roots={"far": str(folder / "far")},
            data_dir=folder / "data",
            scan_seconds=0,
            policies=[FIXED],
        )
    )


@pytest.fixture(scope="module")
def url(app):
    with serve(app) as url:
        httpx.get(f"{url}/v1/runs", params={"refresh": True}).raise_for_status()
        yield url


@pytest.fixture
def http(app, url):
    """Each test begins and ends without a policy in a root."""
    with httpx.Client(base_url=url, timeout=60, headers={"Origin": url}) as http:
        yield http
    for root in ("default", "far"):
        shutil.rmtree(folder_of(app, root), ignore_errors=True)
        app.state.plane.policies.expire(root, app.state.plane.roots[root])


def folder_of(app, root="default"):
    return Path(app.state.plane.roots[root].local_path) / ".cairn"


def address(policy, root="default"):
    return f"/v1/roots/{root}/policies/{policy['kind']}/{policy['name']}"


def put(http, policy, headers=CREATE, root="default"):
    return http.put(address(policy, root), json={"policy": policy}, headers=headers)


def listed(http):
    return {
        (one["root"], one["name"]): one
        for one in http.get("/v1/policies").json()["policies"]
        if one["source"] == "root"
    }


def content(app):
    """Every file of the root, with its bytes."""
    store = Path(app.state.plane.roots["default"].local_path)
    return {file: file.read_bytes() for file in store.rglob("*") if file.is_file()}


def test_policy_goes_through_every_door(app, http, url, tmp_path):
    made = put(http, WEEKLY)
    assert (made.status_code, made.headers["ETag"]) == (201, '"1"')
    (tmp_path / "weekly.json").write_text(json.dumps(WEEKLY | {"keep_last": 2}))
    done = cairn_here("policies", "set", str(tmp_path / "weekly.json"), url=url)
    assert "retention/weekly changed in root default" in done.stdout
    shown = cairn_here("policies", "show", "retention/weekly", url=url)
    assert json.loads(shown.stdout) == WEEKLY | {"keep_last": 2}
    with Client(url) as client:
        state = client.policy("retention", "weekly")
        assert (state.sequence, state.source, state.set_by) == (2, "root", "loopback")
        assert client.put_policy(WEEKLY, expect=2).sequence == 3
    page = http.get("/policies", params={"root": "default", "kind": "retention", "name": "weekly"})
    assert "Deletes the steps of scratch* except the last 1" in page.text
    form = {"kind": "retention", "name": "weekly", "expect": "3", "HX-Request": "true"}
    form["policy"] = json.dumps(WEEKLY | {"keep_last": 5})
    saved = http.post("/policies/default/set", data=form)
    assert saved.headers["HX-Redirect"] == "/policies"
    rows = cairn_here("policies", "list", url=url).stdout.splitlines()
    assert any("except the last 5" in row for row in rows)
    done = cairn_here("policies", "delete", "retention/weekly", url=url)
    assert (done.returncode, listed(http)) == (0, {})
    assert http.get(address(WEEKLY)).status_code == 404
    trail = http.get("/v1/audit-events", params={"filter": "action = policy.put"}).json()
    assert len(trail["audit_events"]) == 4
    # Who has seen the first policy of that name changes no later one.
    assert put(http, WEEKLY).headers["ETag"] == '"6"'


def test_one_of_two_writers_wins_and_the_other_is_told_who(http):
    def write(number):
        return put(http, WEEKLY | {"keep_last": number})

    with ThreadPoolExecutor(2) as pool:
        answers = sorted(pool.map(write, (1, 2)), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [201, 412]
    won, lost = (answer.json() for answer in answers)
    assert lost["current"]["policy"]["keep_last"] == won["policy"]["keep_last"]
    assert lost["current"]["set_by"] == "loopback"
    assert "sequence 1, set by loopback at" in lost["detail"]
    assert put(http, WEEKLY, {}).status_code == 428
    assert put(http, WEEKLY, {"If-Match": '"7"'}).status_code == 412
    assert http.delete(address(WEEKLY), headers={"If-Match": '"7"'}).status_code == 412


def test_environment_wins_and_is_read_only(app, http):
    refused = put(http, FIXED | {"root": "*"})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:cairn:problem:policy-fixed")
    assert http.delete(address(FIXED), headers={"If-Match": '"1"'}).status_code == 409
    # Of another root, which the environment's is not for; and one that was there before it.
    mine = FIXED | {"root": "*", "action": "collect_garbage"}
    assert put(http, mine, root="far").status_code == 201
    shutil.copytree(folder_of(app, "far"), folder_of(app))
    states = listed(http)
    assert [states[root, "fixed"]["overridden"] for root in ("default", "far")] == [True, False]
    assert http.get(address(FIXED)).json()["policy"] == FIXED
    assert http.delete(address(FIXED), headers={"If-Match": '"1"'}).status_code == 204
    assert http.get(address(FIXED)).json()["source"] == "environment"


def test_two_servers_run_what_is_due_once(app, http):
    def other_server():
        """One that has read nothing of the roots yet."""
        plane = app.state.plane
        same = ControlPlane(plane.settings, plane.roots, plane.index, plane.engine)
        return Scheduler(same, clock=lambda: FEBRUARY)

    assert put(http, WEEKLY).status_code == 201
    servers = [other_server() for _ in range(3)]
    assert [server.look() for server in servers for _ in range(2)] == [2, 0, 0, 0, 0, 0]
    with Client(str(http.base_url)) as client:
        ended = [client.wait(one.id) for one in client.operations()]
        assert [(one.kind, one.state) for one in ended] == [("retention", "succeeded")] * 2
        assert client.policy("retention", "weekly").last.operation in {one.id for one in ended}
    store = app.state.plane.roots["default"]
    assert [info.step for info in Run.open(store / "scratch-1").steps()] == [3]
    assert [info.step for info in Run.open(store / "kept").steps()] == [0, 1]


def test_a_root_that_is_away_keeps_the_policies_of_others_in_force(app, http, monkeypatch):
    assert put(http, WEEKLY, root="far").status_code == 201
    read = root_policies.read_policies

    def away(root, uri):
        if root == "default":
            raise StoreUnavailableError("no answer", path=uri)
        return read(root, uri)

    with monkeypatch.context() as silent:
        silent.setattr(root_policies, "read_policies", away)
        plane = app.state.plane
        same = ControlPlane(plane.settings, plane.roots, plane.index, plane.engine)
        assert [one.stored.root for one in in_force(same, Retention)] == ["far"]
        answer = http.get("/v1/policies").json()
        assert {("far", "weekly")} == {*listed(http)}
        assert [(one["root"], one["name"]) for one in answer["problems"]] == [("default", "")]
        promote = f"{ROOT}/runs/kept/checkpoints/1:promote"
        plane.policies.expire("default", plane.roots["default"])
        # A gate that can't be asked lets nothing pass.
        refused = http.post(promote, json={"alias": "silent"}, headers=CREATE)
        assert refused.status_code == 503


def test_what_was_due_before_a_policy_was_set_is_left_alone(app, http):
    minute = (utc_now() - timedelta(minutes=2)).minute
    assert put(http, WEEKLY | {"cron": f"{minute} * * * *"}).status_code == 201
    plane = app.state.plane
    same = ControlPlane(plane.settings, plane.roots, plane.index, plane.engine)
    assert Scheduler(same, clock=utc_now).look() == 0


def test_gate_of_a_root_refuses_and_the_page_says_so_before(app, http):
    put(http, CHECKED)
    part = http.get("/ui/default/kept/steps/1/gates").text
    assert "production: label eval must be &#34;passed&#34;, it is not set" in part
    assert 'hx-get="/ui/default/kept/steps/1/gates"' in http.get("/ui/default/kept/steps/1").text
    promote = f"{ROOT}/runs/kept/checkpoints/1:promote"
    refused = http.post(promote, json={"alias": "production"}, headers=CREATE)
    assert refused.json()["gates"] == [
        {"gate": "labels.eval", "detail": 'label eval must be "passed", it is not set'}
    ]
    assert http.post(promote, json={"alias": "staging"}, headers=CREATE).status_code == 200


def test_automation_of_a_root_follows_the_moves_after_it_was_set(app, http):
    promote = f"{ROOT}/runs/kept/checkpoints/{{}}:promote"
    assert http.post(promote.format(0), json={"alias": "production"}, headers=CREATE).is_success
    tried = http.post(f"{ROOT}/policies:try", json={"policy": VERIFY}).json()
    assert [(one["step"], one["alias"]) for one in tried["effects"]] == [(0, "production")]
    assert put(http, VERIFY).status_code == 201
    again = {"If-Match": '"1"'}
    assert http.post(promote.format(1), json={"alias": "production"}, headers=again).is_success
    plane = app.state.plane
    follow_moves(ControlPlane(plane.settings, plane.roots, plane.index, plane.engine))
    with Client(str(http.base_url)) as client:
        started = client.policy("automation", "verify").last.operation
        assert client.operation(started).request["step"] == 1


def forged(kind, name, **fields):
    """A record with a good checksum, by who may write the root."""
    body = {
        "format": "cairn.policy",
        "version": 1,
        "kind": kind,
        "name": name,
        "fields": fields,
        "by": "stranger",
        "at": "2026-01-02T03:04:05Z",
        "sequence": 1,
        "id": "0" * 16,
        "deleted": False,
        "token": "",
        "run": "",
        "key": f".cairn/policies/{kind}.{name}.json",
    }
    return body


def stored(body):
    return canonical_json(body | {"checksum": sha256_of(canonical_json(body))})


def test_forged_records_are_refused_by_name_and_end_nothing(app, http):
    assert put(http, WEEKLY).status_code == 201
    good = forged("schedule", "good", cron=NEVER, action="verify")
    forgeries = {
        "schedule.large": (b"{" * 70_000, "larger than any policy"),
        "schedule.kind": (stored(good | {"kind": "gate", "name": "kind"}), "of another place"),
        "virus.odd": (stored(forged("virus", "odd")), "unknown kind 'virus'"),
        "schedule.newer": (stored(good | {"version": 2}), "Upgrade Cairn"),
        "schedule.other": (
            stored(forged("schedule", "other", cron=NEVER, action="verify", root="far")),
            "root: expected none",
        ),
        "schedule.often": (
            stored(forged("schedule", "often", cron="* * * * *", action="verify")),
            "cron: expected one number as the minute",
        ),
        "automation.hook": (
            stored(forged("automation", "hook", alias="*", action="convert", path="/etc")),
            "Extra inputs are not permitted",
        ),
        "gate.hook": (
            stored(forged("gate", "hook", alias="x", webhook="http://169.254.169.254/")),
            "webhook: expected none",
        ),
    }
    for name, (data, _) in forgeries.items():
        (folder_of(app) / "policies" / f"{name}.json").write_bytes(data)
    (folder_of(app) / "policies" / "schedule.good.json").write_bytes(stored(good))
    answer = http.get("/v1/policies").json()
    problems = {f"{one['kind']}.{one['name']}": one["detail"] for one in answer["problems"]}
    assert problems.keys() == forgeries.keys()
    for name, (_, text) in forgeries.items():
        assert text in problems[name], (name, problems[name])
    assert {("default", "weekly"), ("default", "good")} == {*listed(http)}
    assert [one.policy.name for one in in_force(app.state.plane, Retention)] == ["weekly"]
    assert "169.254.169.254" not in str(in_force(app.state.plane, Gate))
    # What may be a gate and can't be judged refuses, until somebody deletes it.
    promote = f"{ROOT}/runs/scratch-2/checkpoints/2:promote"
    refused = http.post(promote, json={"alias": "x"}, headers=CREATE)
    assert [one["gate"] for one in refused.json()["gates"]] == ["policy"]
    for name in ("gate.hook", "schedule.large"):
        path = f"{ROOT}/policies/{name.replace('.', '/')}"
        assert http.delete(path, headers={"If-Match": '"0"'}).status_code == 204
    assert http.post(promote, json={"alias": "x"}, headers=CREATE).status_code == 200


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (WEEKLY | {"run": "tried"}, "Would delete 1 step, 64 B, of 1 run."),
        (FIXED | {"root": "*", "run": "tried"}, "Would verify 1 run."),
        (CHECKED | {"run": "tried"}, "Would refuse 1 promotion today, of 1 run."),
        (VERIFY, "Would have started"),
    ],
)
def test_dry_run_changes_nothing(app, http, policy, sentence):
    before = content(app)
    tried = http.post(f"{ROOT}/policies:try", json={"policy": policy})
    assert tried.json()["sentence"].startswith(sentence)
    assert len(tried.json()["due"]) == (3 if "cron" in policy else 0)
    assert content(app) == before


def test_command_tries_a_policy(http, url, tmp_path):
    (tmp_path / "weekly.json").write_text(json.dumps(WEEKLY | {"run": "tried"}))
    tried = cairn_here("policies", "try", str(tmp_path / "weekly.json"), url=url)
    first, *due = tried.stdout.splitlines()[:4]
    assert first == "Would delete 1 step, 64 B, of 1 run."
    assert all(line.startswith("next: 20") for line in due)
    assert "Would verify 0 runs." in cairn_here("policies", "try", "schedule/fixed", url=url).stdout
    for text, status in (("{", 2), ('{"kind": "gate"}', 2), ('{"kind": "x", "name": "y"}', 2)):
        (tmp_path / "odd.json").write_text(text)
        assert (
            cairn_here("policies", "set", str(tmp_path / "odd.json"), url=url).returncode == status
        )


def test_forms_of_the_page_try_and_delete(http):
    form = {"policy": json.dumps(WEEKLY | {"run": "tried"})}
    assert "Would delete 1 step, 64 B" in http.post("/policies/default/try", data=form).text
    refused = http.post(
        "/policies/default/set", data={"policy": json.dumps(WEEKLY | {"cron": "x"})}
    )
    assert refused.status_code == 422
    assert "expected five fields" in refused.text
    assert http.post("/policies/default/set", data={"policy": "{"}).status_code == 422
    assert put(http, WEEKLY).status_code == 201
    page = http.get("/policies").text
    assert "/policies/default/retention/weekly/delete" in page
    deleted = http.post("/policies/default/retention/weekly/delete", data={"expect": "1"})
    assert (deleted.headers["HX-Redirect"], listed(http)) == ("/policies", {})
