"""Every operation of the OpenAPI document, asked with every kind of credential.

What an operation needs stands in `PERMISSIONS`, and one without a row fails. Who may have it done
asks for what there is not, and is told so; who may not asks for what there is, is refused whatever
else is wrong with the request, changes nothing, and reads no name of another root.
"""

import json
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from urllib.parse import unquote

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from cairn import Settings, create_app
from cairn.service.access.callers import Caller, Scope
from cairn.service.dashboard.routers import ROUTERS as PAGES
from tests.service.access.conftest import ADDRESS, Keys, bearer
from tests.service.access.issuer import AUDIENCE, running_issuer
from tests.service.stores import make_run
from tests.service.test_openapi import (
    INVALID,
    QUERIES,
    UNKNOWN,
    check_declared,
    example_body,
    routes,
)

PERMISSIONS = {
    # "": nobody needs a key. "all": the scope in all roots.
    "": "health ready",
    "read": """
        announce_checkpoint diff_checkpoints download_checkpoint_file download_export_file
        download_file get_alias get_alias_history get_artifact get_checkpoint get_export
        get_operation get_root get_run get_run_writer
        get_usage list_aliases list_all_runs list_artifacts
        list_checkpoint_files list_checkpoints list_events list_operations list_roots list_runs
        get_policy list_policies list_tensors list_workers plan_checkpoint read_tensor
        watch_operation""",
    "read all": "metrics",
    "operate": """
        adopt_folder annotate_checkpoint annotate_run apply_retention cancel_operation
        collect_run_garbage convert_checkpoint create_run delete_checkpoint gather_checkpoint
        promote_checkpoint remove_alias restore_checkpoint resume_operation try_policy
        undelete_checkpoint
        verify_checkpoint verify_run""",
    "admin": "delete_policy put_policy repair_records take_over_run",
    "admin all": """
        add_root create_key create_webhook delete_webhook list_audit_events list_deliveries
        list_keys list_webhooks redeliver remove_root revoke_key take_over_worker test_webhook""",
}
PERMISSIONS = {
    name: permission for permission, names in PERMISSIONS.items() for name in names.split()
}

OF_SEVERAL_ROOTS = {"list_all_runs", "list_events", "list_operations", "list_roots", "ready"}
OF_SEVERAL_ROOTS |= {"list_policies"}
"""Show everybody what is of their roots."""

# Of the root that requests name. Nothing that they say has these words in it.
ROOT, OTHER, GONE = "vault", "default", "gone"
CONCEALED = re.compile("concealed|unnamed")
BY_ID = re.compile("{(operation|artifact)}")
"""Paths of what is not there for who may not use its root."""
MISTAKEN = {"nothing", "admin of default", "read of all roots", "session without a page"}
"""Credentials with which mistaken requests are made too: permission comes before all else."""
NAMES = re.compile(f"{ROOT}|{OTHER}|{CONCEALED.pattern}")
STEP = "/v1/roots/default/runs/run/checkpoints/1"
PAGE = "/ui/default/run/steps/1"
PAGE_QUERY = "?item=model&path=a&other=1"
PATIENCE = 60
STORES = ("default", "concealed", "unnamed")
CHANGING = [
    text("SELECT id FROM audit_events"),
    text("SELECT id, revoked FROM keys"),
    text("SELECT id FROM webhooks"),
    text("SELECT id, attempts FROM deliveries"),
    text("SELECT name FROM added_roots"),
]
HOST = ADDRESS.partition("://")[2]
REAL = {"root": ROOT, "run": "run", "step": "1", "alias": "production", "leaf": "model/kernel"}
REAL |= {"checkpoint": "production", "kind": "retention", "policy": "weekly"}
REAL |= {
    "name": "config.json",
    "worker": "local",
    "artifact": f"{ROOT}~run~1~1~convert-0123456789ab",
}
NOTHING = UNKNOWN | {"root": ROOT, "worker": "nobody"}
NOTHING |= {"artifact": "nowhere~nothing~7~1~convert-0123456789ab"}
VARYING = re.compile(r""""request_id":"\w+"|op-\w{32}|\w+~[\w~-]+|root '\w+'""")
"""What differs in the answers to what is not there, and to what is as if it were not."""


@dataclass(frozen=True)
class Credential:
    """What a request shows.

    Attributes:
        headers: With it.
        caller: Who that is; None: nobody who counts.
        refused: Status of what only a page of the server may ask for; 0: it is such a page.
    """

    headers: dict[str, str]
    caller: Caller | None = None
    refused: int = 0

    def refused_with(self, permission, method, path):
        """Status with which something is refused; 0: it has to be done."""
        scope, _, everywhere = permission.partition(" ")
        if not scope:
            return 0
        if self.caller is None or (self.refused and method not in ("get", "head")):
            return self.refused or 401
        if not self.caller.scope.includes(Scope(scope)) or (everywhere and self.caller.roots):
            return 403
        if self.caller.sees(ROOT):
            return 0
        if BY_ID.search(path):
            return 404
        return 403 if "{root}" in path else 0


class Server:
    """A server of three roots, with keys of all kinds and a trusted issuer."""

    def __init__(self, http, folder, issuer, keys):
        self.http, self.folder, self.keys = http, folder, keys
        self.plane = http.app.state.plane
        self.document = http.app.openapi()
        self.credentials = dict(self._credentials(issuer))
        self._requests = 1 << 24
        all_roots = self.credentials["admin of all roots"].headers
        started = http.post(f"/v1/roots/{ROOT}/runs/run:verify", json={}, headers=all_roots)
        assert started.status_code == 202, started.text
        promoted = http.post(
            f"/v1/roots/{ROOT}/runs/run/checkpoints/1:promote",
            json={"alias": "production", "reason": "concealed"},
            headers=all_roots | {"If-None-Match": "*"},
        )
        assert promoted.status_code == 200, promoted.text
        http.get("/v1/runs?refresh=true", headers=all_roots)
        webhook = example_body("post", "/v1/webhooks") | {"runs": "nothing"}  # none is sent to it
        made = http.post("/v1/webhooks", json=webhook, headers=all_roots)
        self.real = REAL | {
            "operation": self._ended(started.json()["id"]),
            "key": http.get("/v1/keys", headers=all_roots).json()["keys"][0]["id"],
            "webhook": made.json()["details"]["id"],
            "delivery": "1",
        }

    def _ended(self, operation):
        deadline = time.monotonic() + PATIENCE
        while not self.plane.jobs.get(operation).state.final:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return operation

    def _credentials(self, issuer):
        make = self.keys.make
        revoked, expired = make("revoked", "admin"), make("expired", "admin", lifetime=timedelta(0))
        key = make("everything", "admin")
        gone = f"/v1/keys/{revoked.split('_')[1]}"
        assert self.http.delete(gone, headers=bearer(key)).status_code == 204
        yield "nothing", Credential({})
        yield "another scheme", Credential({"Authorization": f"Basic {key}"})
        yield "two keys", Credential({"Authorization": f"Bearer {key} {key}"})
        yield "unknown key", Credential(bearer(f"{key[:-3]}AAA"))
        yield "revoked key", Credential(bearer(revoked))
        yield "expired key", Credential(bearer(expired))
        yield "token without grants", Credential(bearer(issuer.token(groups=["no"])), refused=403)
        yield "expired token", Credential(bearer(issuer.token(exp=1)))
        yield "key in a cookie", Credential({"Cookie": f"__Host-cairn_session={key}"})
        reach = [(scope, root) for scope in Scope for root in ("all roots", ROOT, OTHER)]
        for scope, root in [*reach, (Scope.ADMIN, GONE)]:
            roots = None if root == "all roots" else [root]
            name = f"{scope.value} of {root}"
            limited = make(name.replace(" ", "-"), scope.value, roots=roots)
            caller = Caller("", scope, None if roots is None else frozenset(roots))
            yield name, Credential(bearer(limited), caller)
        for group, caller in (
            ("ml", Caller("", Scope.READ)),
            ("archive", Caller("", Scope.OPERATE, frozenset({OTHER}))),
        ):
            yield f"token of {group}", Credential(bearer(issuer.token(groups=[group])), caller)
        self.http.post("/sign-in", data={"key": key}, headers={"Origin": ADDRESS})
        cookie = {"Cookie": f"__Host-cairn_session={self.http.cookies['__Host-cairn_session']}"}
        page = self.http.get("/", headers=cookie).text
        csrf = {"X-CSRF-Token": re.search(r'name="csrf-token" content="(\w+)"', page)[1]}
        self.http.cookies.clear()
        for name, more, refused in (
            ("session on its page", csrf | {"Origin": ADDRESS}, 0),
            ("session on a page of others", csrf | {"Origin": "https://elsewhere.example"}, 403),
            ("session without a page", csrf, 403),
            ("session without the page's token", {"Origin": ADDRESS}, 403),
        ):
            yield name, Credential(cookie | more, Caller("", Scope.ADMIN), refused)

    def ask(self, requests):
        """Answers to (method, URL, headers, body), each asked from an address of its own."""

        async def answers():
            return [await self._ask(*request) for request in requests]

        return self.http.portal.call(answers)

    async def _ask(self, method, url, headers, body):
        """As the server would be asked by another machine; a client would take as long again."""
        path, _, query = url.partition("?")
        sent = {"Host": HOST, "If-Match": '"1"', "Content-Type": "application/json"} | headers
        self._requests += 1
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "https",
            "method": method.upper(),
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": (str(ip_address(self._requests)), 50000),  # failures are counted by address
            "server": (HOST, 443),
        }
        parts = []

        async def receive():
            return {"type": "http.request", "body": (body or "").encode(), "more_body": False}

        async def send(message):
            parts.append(message)

        await self.http.app(scope, receive, send)
        content = b"".join(part.get("body", b"") for part in parts[1:])
        return httpx.Response(parts[0]["status"], headers=parts[0]["headers"], content=content)

    def state(self):
        """Whatever a request could change: rows, jobs, and the files of the stores."""
        with self.plane.catalog.read() as session:
            rows = [session.execute(columns).all() for columns in CHANGING]
        jobs, _ = self.plane.jobs.list(limit=100)
        files = [
            (entry.path, entry.stat().st_size, entry.stat().st_mtime_ns)
            for store in STORES
            for folder, _, _ in os.walk(self.folder / store)
            for entry in os.scandir(folder)
        ]
        return rows, [(one.id, one.state) for one in jobs], files


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    make_run(folder / "concealed" / "run", [1], labels={"owner": "concealed"})
    make_run(folder / "concealed" / "concealed-run", [1])
    make_run(folder / "default" / "run", [1])
    (folder / "unnamed").mkdir()
    month = (datetime.now(UTC).month + 5) % 12 + 1  # never due while the test runs
    rule = {"root": ROOT, "run": "concealed*"}
    with running_issuer() as issuer:
        settings = Settings(
            root=str(folder / "default"),
            roots={ROOT: str(folder / "concealed"), "unnamed": str(folder / "unnamed")},
            data_dir=folder / "data",
            scan_seconds=0,
            auth="keys",
            rate_limit=0,
            oidc_issuer=issuer.url,
            oidc_audience=AUDIENCE,
            oidc_grants={
                "ml": {"scope": "read"},
                "archive": {"scope": "operate", "roots": [OTHER]},
            },
            policies=[
                rule | {"kind": kind, "name": name, "action": "verify", **fields}
                for kind, name, fields in (
                    ("schedule", "nightly", {"cron": f"0 3 1 {month} *"}),
                    ("automation", "check", {"alias": "production"}),
                )
            ],
        )
        settings.prepare()
        keys = Keys(settings.database_url)
        with TestClient(create_app(settings), base_url=ADDRESS) as http:
            yield Server(http, folder, issuer, keys)


def addressed(path, values):
    url = path + QUERIES.get(verb(path), "")
    for name, value in values.items():
        url = url.replace("{" + name + "}", value)
    return url


def verb(path):
    return path.rpartition(":")[2].rpartition("/")[2]


def permission_of(described):
    """Of an operation of the document or a route, as `PERMISSIONS` has it."""
    permission = described.get("x-cairn-permission")
    return "" if permission is None else permission["scope"] + " all" * permission["all_roots"]


def test_every_operation_has_a_row_and_says_in_the_document_what_it_needs(server):
    permissions = {}
    for path, item in server.document["paths"].items():
        for operation in item.values():
            permissions[operation["operationId"]] = permission = permission_of(operation)
            assert bool(operation["security"]) is path.startswith("/v1/") is bool(permission)
    assert permissions == PERMISSIONS | {"metrics": ""}  # which a setting opens


@pytest.mark.parametrize(("method", "path"), routes())
def test_operation_is_done_for_those_who_may_and_for_nobody_else(server, method, path):
    operation = server.document["paths"][path][method]
    has_body = "requestBody" in operation
    valid = json.dumps(example_body(method, path)) if has_body else None
    mistaken = addressed(path, INVALID | {"root": ROOT, "worker": "-"}) + "?odd=%00&page_size=x"
    real, nothing = addressed(path, server.real), addressed(path, NOTHING)
    refused, permitted = [], []
    for name, credential in server.credentials.items():
        status = credential.refused_with(PERMISSIONS[operation["operationId"]], method, path)
        if not status:
            permitted.append((name, 0, nothing, "{" if has_body else None))
            continue
        refused.append((name, status, real, valid))
        if status == 404:
            refused.append((name, status, nothing, valid))
        elif name in MISTAKEN and not BY_ID.search(path):
            refused.append((name, status, mistaken, "{"))
    before = server.state()
    wrong, not_there = [], set()
    for cells in (refused, permitted):
        requests = [
            (method, url, server.credentials[name].headers, body) for name, _, url, body in cells
        ]
        for cell, answer in zip(cells, server.ask(requests), strict=True):
            name, status, *_ = cell
            if status == 404:
                not_there.add(VARYING.sub("", answer.text))
            if status:
                check_declared(server.document, method, path, answer)
                is_right = answer.status_code == status
            else:
                is_right = answer.status_code not in (401, 403) and answer.status_code < 500
            caller = server.credentials[name].caller
            sees_root = not status and caller is not None and caller.sees(ROOT)
            if not is_right or not (sees_root or CONCEALED.search(answer.text) is None):
                wrong.append((*cell, answer.status_code, answer.text))
        if cells is refused:
            assert server.state() == before
    assert wrong == []
    assert len(not_there) <= 1, not_there


def test_lists_show_of_several_roots_what_their_caller_may_use(server):
    callers = [
        server.credentials[f"admin of {roots}"].headers for roots in ("all roots", ROOT, OTHER)
    ]
    paths = {
        operation["operationId"]: path
        for path, item in server.document["paths"].items()
        for operation in item.values()
    }
    for name in OF_SEVERAL_ROOTS:
        answers = server.ask([("get", paths[name], headers, None) for headers in callers])
        of_all, of_one, of_other = (answer.text for answer in answers)
        assert ROOT in of_all, name
        assert ROOT in of_one, name
        assert ROOT not in of_other, name
        assert OTHER not in of_one, name


@pytest.mark.parametrize(
    ("method", "url", "body", "status"),
    [
        ("get", f"/v1/events?root={ROOT}", None, 403),
        ("get", f"{STEP}:diff?other=1&other_root={ROOT}", None, 403),
        ("get", f"{STEP}:diff?other=1&other_root={ROOT}&other_run=nothing", None, 403),
        ("get", f"{PAGE}/compare?other=1&other_root={ROOT}", None, 403),
        ("get", f"/compare?root={ROOT}&run=run&step=production&other=1", None, 403),
        ("post", "/v1/roots/default/runs:adopt", {"run": "new", "folder": "{store}/run"}, 409),
        ("post", "/v1/roots/default/runs:adopt", {"run": "new", "folder": "{store}/nothing"}, 409),
    ],
)
def test_request_of_one_root_reaches_no_other_by_what_it_names(server, method, url, body, status):
    sent = body and json.dumps(body).replace("{store}", str(server.folder / "concealed"))
    headers = server.credentials[f"admin of {OTHER}"].headers
    (answer,) = server.ask([(method, url, headers, sent)])
    assert answer.status_code == status, answer.text
    assert not re.search("owner|unnamed|concealed-run", answer.text)
    if body is not None:
        assert answer.json()["type"] == "urn:cairn:problem:source-refused"


def test_root_that_is_gone_is_one_that_never_was_and_names_no_other(server):
    """Its keys stay: nothing of the server is theirs any more."""
    headers = server.credentials[f"admin of {GONE}"].headers
    requests = []
    for path, item in server.document["paths"].items():
        for method, operation in item.items():
            if "all" not in PERMISSIONS[operation["operationId"]]:
                example = example_body(method, path)
                body = json.dumps(example) if "requestBody" in operation else None
                requests.append((path, method, body))
    requests += [
        (route.path + PAGE_QUERY, "get", None)
        for router in PAGES
        for route in router.routes
        if route.methods == {"GET"} and "all" not in permission_of(route.openapi_extra)
    ]
    values = server.real | {"root": GONE, "artifact": REAL["artifact"].replace(ROOT, GONE)}
    answers = server.ask(
        [(method, addressed(path, values), headers, body) for path, method, body in requests]
    )
    wrong = []
    for request, answer in zip(requests, answers, strict=True):
        if answer.status_code != (404 if "{" in request[0] else 200) or NAMES.search(answer.text):
            wrong.append((*request, answer.status_code, answer.text))
    assert wrong == []


@pytest.mark.parametrize("name", ["nothing", "read of default", "admin of default"])
def test_page_is_shown_to_those_who_may_and_to_nobody_else(server, name):
    credential = server.credentials[name]
    requests, statuses = [], []
    for route in (route for router in PAGES for route in router.routes):
        for method in map(str.lower, route.methods):
            permission = permission_of(route.openapi_extra)
            statuses.append(credential.refused_with(permission, method, route.path) or 200)
            url = addressed(route.path, server.real)
            requests.append((method, url, credential.headers, None))
    before, wrong = server.state(), []
    for request, status, answer in zip(requests, statuses, server.ask(requests), strict=True):
        if answer.status_code != status or CONCEALED.search(answer.text):
            wrong.append((*request[:2], status, answer.status_code, answer.text))
    assert wrong == []
    assert server.state() == before
