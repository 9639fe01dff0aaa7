"""Roots that are added and removed while servers run."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from anyio.to_thread import current_default_thread_limiter
from fastapi.testclient import TestClient
from sqlalchemy import event, select

from cairn import Settings, create_app, parse_uri
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AddedRootRow
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.roots import Roots
from cairn.service.catalog.scanner import Scanner
from cairn.service.errors import RootTakenError
from cairn.service.http.limiters import AT_ONCE, STREAMS_AT_ONCE
from cairn.storage.store.clock import utc_now
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.commands import cairn_here
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import done, save_llama, serving, until
from tests.service.seams import models
from tests.service.stores import make_run
from tests.service.test_create_run import check_problem
from tests.service.test_workers import started, working

ROOTS = "/v1/roots"


@pytest.fixture
def more(tmp_path):
    """A folder beside the root `default`, with a run."""
    make_run(tmp_path / "more" / "run", [3])
    return tmp_path / "more"


@pytest.fixture
def http(root, tmp_path_factory):
    with serving(root, tmp_path_factory.mktemp("data"), scan_seconds=0) as client:
        yield client


@pytest.fixture
def catalog(settings):
    settings.prepare()
    with closing(Catalog.open(settings.database_url)) as opened:
        yield opened


def add(http, folder, name="more"):
    return http.post(ROOTS, json={"name": name, "uri": str(folder)})


def names(http):
    return [one["name"] for one in http.get(ROOTS).json()["roots"]]


def runs(http):
    return [(one["root"], one["name"]) for one in http.get("/v1/runs").json()["runs"]]


def test_a_root_that_is_added_is_served_like_others(http, root, more):
    make_run(root / "own", [1])
    before = sorted(os.walk(more))
    made = add(http, more)
    assert (made.status_code, made.headers["Location"]) == (201, f"{ROOTS}/more")
    body = {"name": "more", "uri": f"file://{more}", "source": "catalog", "adopt_from": []}
    assert made.json() == body
    found = http.get(made.headers["Location"])
    assert (found.json(), found.headers["ETag"]) == (body, made.headers["ETag"])
    own = {**body, "name": "default", "uri": f"file://{root}", "source": "settings"}
    assert http.get(ROOTS).json()["roots"] == [own, body]
    assert runs(http) == [("default", "own"), ("more", "run")]
    assert sorted(os.walk(more)) == before
    assert http.post(f"{ROOTS}/more/runs", json={"name": "new"}).status_code == 201
    create = {"If-None-Match": "*"}
    promoted = http.post(
        f"{ROOTS}/more/runs/run/checkpoints/3:promote", json={"alias": "good"}, headers=create
    )
    assert promoted.status_code == 200


def test_a_root_is_there_after_the_next_start(settings, more):
    for turn in range(2):
        with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as http:
            if turn == 0:
                add(http, more)
            assert runs(http) == [("more", "run")]


def test_every_server_of_a_catalog_knows_of_it_at_once(database_url, settings, more, root):
    given = settings.model_copy(update={"database_url": database_url})
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(TestClient(create_app(given, jobs=False), BASE_URL, client=PEER))
            for _ in range(2)
        )
        assert names(two) == ["default"]
        add(one, more)
        assert two.get(f"{ROOTS}/more/runs/run").status_code == 200
        assert names(two) == ["default", "more"]
        assert one.get(f"{ROOTS}/more").status_code == 200


def test_one_that_was_removed_is_unknown_and_its_store_is_as_it_was(http, more, root):
    add(http, more)
    assert runs(http) == [("more", "run")]
    with http.app.state.plane.catalog.read() as session:
        assert session.scalars(select(models.RunRow.root)).all() == ["more"]
    before = sorted(os.walk(more))
    assert http.delete(f"{ROOTS}/more").status_code == 204
    assert names(http) == ["default"]
    assert runs(http) == []
    check_problem(http.get(f"{ROOTS}/more/runs/run"), 404, "root-not-found")
    check_problem(http.delete(f"{ROOTS}/more"), 404, "root-not-found")
    with http.app.state.plane.catalog.read() as session:
        assert session.scalars(select(models.RunRow.root)).all() == []
        assert "more" not in session.scalars(select(models.RootRow.name)).all()
    assert sorted(os.walk(more)) == before
    assert add(http, more).status_code == 201
    assert runs(http) == [("more", "run")]


def test_other_servers_know_of_a_removal_a_moment_later(settings, more):
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(TestClient(create_app(settings, jobs=jobs), BASE_URL, client=PEER))
            for jobs in (True, False)
        )
        add(one, more)
        assert two.get(f"{ROOTS}/more/runs/run").status_code == 200
        one.delete(f"{ROOTS}/more")
        until(lambda: two.get(f"{ROOTS}/more/runs/run").status_code == 404)
        assert names(two) == ["default"]


def test_a_name_that_is_unknown_costs_one_short_query_and_none_of_the_settings(catalog, settings):
    asked = []
    event.listen(catalog.engine, "before_cursor_execute", lambda *of: asked.append(of[2]))
    roots = Roots(catalog, settings.root_uris)
    for _ in range(3):
        assert roots["default"]
        assert list(roots) == ["default"]
    assert len(asked) <= 2  # with BEGIN
    asked.clear()
    for number in range(5):
        assert f"none-{number}" not in roots
    assert [text for text in asked if text != "BEGIN"] == [asked[-1]] * 5
    assert "FROM added_roots" in asked[-1]
    assert len(roots) == 1


def test_names_that_are_taken_are_refused(http, more, tmp_path):
    refused = check_problem(add(http, more, "default"), 409, "root-taken")
    assert "already, in the settings" in refused["detail"]
    add(http, more)
    (tmp_path / "other").mkdir()
    refused = check_problem(add(http, tmp_path / "other"), 409, "root-taken")
    assert f"file://{more}" in refused["detail"]


def test_a_place_in_another_root_or_around_one_is_refused_and_which_is_told(http, root, more):
    (root / "inner").mkdir()
    (more / "inner").mkdir()
    link = more.parent / "link"
    link.symlink_to(root)
    add(http, more)
    for folder, told in (
        (root, "where root 'default' is"),
        (link, "where root 'default' is"),
        (root / "inner", f"in root 'default', file://{root}"),
        (link / "inner", f"in root 'default', file://{root}"),
        (more / "inner", f"in root 'more', file://{more}"),
        (root.parent, f"around root 'default', file://{root}"),
    ):
        refused = check_problem(add(http, folder, "new"), 409, "root-taken")
        assert told in refused["detail"]
    beside = root.with_name(f"{root.name}-2")
    beside.mkdir()
    assert add(http, beside, "new").status_code == 201


def test_where_no_root_can_be_none_is_added(http, tmp_path):
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "run", [1])
    for uri, status, kind, told in (
        (tmp_path / "none", 422, "root-refused", "does not exist on the server"),
        (tmp_path / "file", 422, "root-refused", "is a file"),
        (tmp_path / "run", 422, "root-refused", "is a run"),
        ("some/folder", 422, "root-refused", "is a relative path"),
        ("memory://x", 422, "root-refused", "this process's memory"),
        ("http://127.0.0.1/x", 422, "invalid-uri", "foreign URI"),
        ("/a/../b", 422, "invalid-uri", "'..'"),
        ("gs://b", 422, "invalid-uri", "bucket name"),
        ("file://host/path", 422, "invalid-uri", "file:///absolute/path"),
        ("", 422, "invalid-request", "body.uri"),
        ("/x\0", 422, "invalid-request", "NUL"),
    ):
        refused = check_problem(add(http, uri, "new"), status, kind)
        assert told in refused["detail"]
    for name in ("../x", "", "x" * 129, ".x"):
        check_problem(add(http, tmp_path, name), 422, "invalid-request")
    assert names(http) == ["default"]


def test_a_bucket_that_is_there_is_taken_and_another_is_not(http, gcs):
    assert add(http, f"{gcs.bucket_uri}/teams/vision", "bucket").status_code == 201
    make_run(parse_uri(f"{gcs.bucket_uri}/teams/vision/run"), [1])
    assert http.get(f"{ROOTS}/bucket/runs/run").json()["latest_step"] == 1
    refused = check_problem(add(http, f"{gcs.bucket_uri}/teams", "around"), 409, "root-taken")
    assert "around root 'bucket'" in refused["detail"]
    assert add(http, f"{gcs.bucket_uri}/teams/vision-2", "beside").status_code == 201
    assert add(http, "gs://no-such-bucket-of-ours", "none").status_code in (422, 503)


def test_a_setting_says_where_roots_may_lie(root, tmp_path, more):
    (tmp_path / "allowed" / "team").mkdir(parents=True)
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(more)
    within = (str(tmp_path / "allowed"), "gs://teams/x")
    with serving(root, tmp_path / "data", roots_within=within) as http:
        for folder in (more, tmp_path / "allowed-not", tmp_path / "allowed" / "link"):
            refused = check_problem(add(http, folder, "new"), 422, "root-refused")
            assert "CAIRN_ROOTS_WITHIN" in refused["detail"]
        assert add(http, tmp_path / "allowed" / "team", "team").status_code == 201
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, roots_within=())
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as http:
        check_problem(add(http, tmp_path / "allowed", "all"), 422, "root-refused")
        assert names(http) == ["default", "team"]


def test_of_many_who_add_the_same_place_one_does(http, more):
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: add(http, more, f"more-{number}"), range(6)))
    assert sorted(one.status_code for one in answers) == [201, *[409] * 5]
    assert len(names(http)) == 2


def test_a_root_of_the_settings_is_not_removed(http, root):
    refused = check_problem(http.delete(f"{ROOTS}/default"), 409, "root-fixed")
    assert "CAIRN_ROOTS" in refused["detail"]
    assert names(http) == ["default"]


def test_settings_that_come_to_name_it_win(settings, more, tmp_path):
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as http:
        add(http, more)
        assert runs(http) == [("more", "run")]
    make_run(tmp_path / "theirs" / "other", [1])
    now = settings.model_copy(update={"roots": {"more": str(tmp_path / "theirs")}})
    with TestClient(create_app(now), BASE_URL, client=PEER) as http:
        found = http.get(f"{ROOTS}/more").json()
        assert (found["uri"], found["source"]) == (f"file://{tmp_path}/theirs", "settings")
        assert runs(http) == [("more", "other")]
        assert http.delete(f"{ROOTS}/more").status_code == 204  # what the catalog says, alone
        assert runs(http) == [("more", "other")]
        check_problem(http.delete(f"{ROOTS}/more"), 409, "root-fixed")


def test_it_is_not_removed_while_operations_on_it_have_not_ended(root, tmp_path, more):
    save_llama(more / "llama")
    with serving(root, tmp_path / "data", worker=False) as http:
        add(http, more)
        path = f"{ROOTS}/more/runs/llama/checkpoints/1:verify"
        operation = http.post(path, json={}).json()["id"]
        refused = check_problem(http.delete(f"{ROOTS}/more"), 409, "root-in-use")
        assert refused["operations"] == [operation]
        http.post(f"/v1/operations/{operation}:cancel")
        assert http.delete(f"{ROOTS}/more").status_code == 204


def test_jobs_of_an_added_root_are_done_here_and_by_workers_apart(root, tmp_path, more):
    save_llama(more / "llama")
    with serving(root, tmp_path / "data") as http:
        add(http, more)
        forked = done(
            http,
            f"{ROOTS}/more/runs/llama/checkpoints/1:restore",
            {"mode": "fork", "run": "child"},
        )
        assert forked["state"] == "succeeded"
        assert ("more", "child") in runs(http)
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, worker=False)
    with (
        TestClient(create_app(settings), BASE_URL, client=PEER) as http,
        working(settings, "apart") as process,
    ):
        started(process)
        save_llama(tmp_path / "late" / "llama")
        add(http, tmp_path / "late", "late")
        operation = done(http, f"{ROOTS}/late/runs/llama:verify", {"steps": "all"})
        assert operation["state"] == "succeeded"


def test_a_job_whose_root_was_removed_meanwhile_says_so(root, tmp_path, more):
    save_llama(more / "llama")
    with serving(root, tmp_path / "data") as http:
        add(http, more)
        operation = done(http, f"{ROOTS}/more/runs/llama:verify", {"steps": "all"})
        assert http.delete(f"{ROOTS}/more").status_code == 204
        jobs = http.app.state.plane.jobs
        request = {**operation["request"], "root": "more"}

        def error():
            late = jobs.start("verify", request)
            until(lambda: jobs.get(late.id).state.final)
            return jobs.get(late.id).error

        until(lambda: error() is not None)  # a worker knows of it a moment later
        assert "the root is gone" in error().detail


def test_the_scanner_looks_at_roots_that_are_added_and_forgets_those_that_go(settings, more, root):
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    roots = Roots(catalog, settings.root_uris, changed=lambda count: scanner.wake())
    scanner = Scanner(Index(catalog), roots, 3600)

    def known():
        with catalog.read() as session:
            names = select(models.RunRow.name).where(models.RunRow.root == "more")
            return session.scalars(names).all()

    try:
        scanner.start()
        with catalog.write() as session:  # by another server
            session.add(added("more", more))
        assert "more" in roots
        until(lambda: known() == ["run"])
        with catalog.write() as session:
            session.delete(session.get(AddedRootRow, "more"))
        until(lambda: "more" not in roots and known() == [])
    finally:
        scanner.close()
        catalog.close()


def added(name, folder):
    return AddedRootRow(name=name, uri=f"file://{folder}", created=utc_now(), created_by="other")


def test_a_rebuild_keeps_what_was_added(settings, more):
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    try:
        with catalog.write() as session:
            session.add(added("more", more))
        roots = Roots(catalog, settings.root_uris)
        assert Index(catalog).rebuild(roots).runs == 1
        assert list(roots) == ["default", "more"]
    finally:
        catalog.close()


def test_the_trail_has_what_was_added_and_removed_by_whom(http, more):
    add(http, more)
    add(http, more)
    http.delete(f"{ROOTS}/more")
    removed, refused, made = http.get("/v1/audit-events").json()["audit_events"]
    body = {"name": "more", "uri": f"file://{more}", "source": "catalog", "adopt_from": []}
    assert (made["action"], made["root"], made["outcome"]) == ("root.add", "more", "done")
    assert made["detail"] == {"uri": f"file://{more}", "before": None, "after": body}
    assert (refused["action"], refused["outcome"]) == ("root.add", "refused")
    assert (removed["action"], removed["detail"]) == (
        "root.remove",
        {"before": body, "after": None},
    )


def test_permissions_count_in_added_roots_as_in_others(root, tmp_path, more):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, auth="keys")
    settings.prepare()
    keys = Keys(settings.database_url)
    admin = keys.make("admin", "admin")
    operator = keys.make("cd", "operate")
    some = keys.make("some", "admin", roots=["default"])
    with TestClient(create_app(settings), ADDRESS, client=ELSEWHERE) as http:

        def ask(key, method, path, **body):
            return http.request(method, path, headers=bearer(key), json=body or None)

        for key in (operator, some):
            refused = ask(key, "POST", ROOTS, name="more", uri=str(more))
            assert refused.status_code == 403
        asked = {"name": "ci", "scope": "operate", "roots": ["more"]}
        assert ask(admin, "POST", "/v1/keys", **asked).status_code == 404
        assert ask(admin, "POST", ROOTS, name="more", uri=str(more)).status_code == 201
        ours = ask(admin, "POST", "/v1/keys", **asked).json()["key"]
        assert ask(ours, "GET", f"{ROOTS}/more/runs/run").status_code == 200
        assert ask(ours, "GET", f"{ROOTS}/default/runs/run").status_code == 403
        assert [one["name"] for one in ask(ours, "GET", ROOTS).json()["roots"]] == ["more"]
        assert ask(some, "GET", f"{ROOTS}/more").status_code == 403
        assert ask(operator, "GET", f"{ROOTS}/more").status_code == 200
        of_it = keys.make("of-it", "admin", roots=["more"])
        for key in (ours, some, operator, of_it):
            assert ask(key, "DELETE", f"{ROOTS}/more").status_code == 403
        assert ask(admin, "DELETE", f"{ROOTS}/more").status_code == 204


def test_gates_and_webhooks_take_added_roots_for_roots(root, tmp_path, more):
    gates = [
        {
            "kind": "gate",
            "name": "checked",
            "alias": "good",
            "root": "mo*",
            "labels": {"eval": "passed"},
        }
    ]
    with serving(root, tmp_path / "data", policies=gates) as http:
        add(http, more)
        path = f"{ROOTS}/more/runs/run/checkpoints/3:promote"
        refused = http.post(path, json={"alias": "good"}, headers={"If-None-Match": "*"})
        check_problem(refused, 409, "gate-refused")
        hook = {"url": "https://example.com/x", "roots": ["more"]}
        assert http.post("/v1/webhooks", json=hook).status_code == 201
        assert http.post("/v1/webhooks", json={**hook, "roots": ["none"]}).status_code == 422


def test_a_catalog_that_is_away_keeps_nobody_from_the_roots_of_the_settings(settings, more):
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    try:
        with catalog.write() as session:
            session.add(added("more", more))
        roots = Roots(catalog, settings.root_uris)
        with catalog.write() as session:
            session.connection().exec_driver_sql("DROP TABLE added_roots")
        assert dict(roots.items()).keys() == {"default"}
        assert roots["default"]
        with pytest.raises(Exception, match="added_roots"):
            roots["none"]
    finally:
        catalog.close()


def test_what_is_read_at_once_by_many_is_read_once(settings, more):
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    try:
        roots, asked, barrier = Roots(catalog, settings.root_uris), [], threading.Barrier(8)
        event.listen(catalog.engine, "before_cursor_execute", lambda *of: asked.append(of[2]))

        def look(number):
            barrier.wait()
            return sorted(roots)

        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(look, range(8))] == [["default"]] * 8
        assert len([text for text in asked if "added_roots" in text]) == 1
    finally:
        catalog.close()


def test_silent_stores_of_added_roots_leave_threads_for_all_else(http, more):
    def threads():
        return http.portal.call(lambda: current_default_thread_limiter().total_tokens)

    before = threads()
    add(http, more)
    assert names(http) == ["default", "more"]
    assert threads() == before + 2 * AT_ONCE + STREAMS_AT_ONCE
    http.delete(f"{ROOTS}/more")
    assert names(http) == ["default"]
    assert threads() == before


def test_a_job_says_which_root_it_saves_to_and_lists_have_its_step(http, more):
    add(http, more)
    make_run(more / "late", [7])
    told = http.post(f"{ROOTS}/more/runs/late/checkpoints", json={"step": 7})
    assert (told.status_code, told.json()["root"]) == (200, "more")
    assert ("more", "late") in runs(http)


def test_what_a_newer_version_has_added_keeps_nobody_from_the_others(catalog, settings, more):
    with catalog.write() as session:
        session.add(added("more", more))
        newer = added("newer", more)
        newer.uri = "az://container/runs"
        session.add(newer)
    roots = Roots(catalog, settings.root_uris)
    assert list(roots) == ["default", "more"]
    assert "newer" not in roots
    place = {"CAIRN_ROOT": settings.root, "CAIRN_DATA_DIR": str(settings.data_dir)}
    told = json.loads(cairn_here("doctor", "--no-probe", "--json", **place).stdout)["findings"]
    (added_roots,) = [one for one in told if one["check"] == "added roots"]
    assert added_roots["outcome"] == "warn"
    assert "foreign URI" in added_roots["found"]


def test_of_servers_that_add_places_in_each_other_at_once_one_does(database_url, tmp_path):
    places = [tmp_path / "/".join("abcdef"[: depth + 1]) for depth in range(6)]
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(Catalog.open(database_url))) for _ in places]
        barrier = threading.Barrier(len(places))

        def ask(number):
            roots = Roots(opened[number], {})
            barrier.wait()
            try:
                roots.add(f"r{number}", parse_uri(places[number]), by="me", now=utc_now())
            except RootTakenError as refused:
                return str(refused)
            return None

        with ThreadPoolExecutor(len(places)) as pool:
            told = [*pool.map(ask, range(len(places)))]
        assert told.count(None) == 1
        (name,) = Roots(opened[0], {})
        assert name == f"r{told.index(None)}"
        assert all(repr(name) in one for one in told if one is not None)
