"""Browsers: signed in with a key, kept by a cookie, asking for what a page of ours did only."""

import re
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, text

from cairn import Settings, create_app
from cairn.service.catalog.models import SessionRow
from tests.service.access.conftest import ADDRESS, ELSEWHERE, bearer
from tests.service.jobs import until
from tests.service.stores import make_run

PROMOTE = "/v1/roots/default/runs/run/checkpoints/1:promote"
HTML = {"Accept": "text/html,*/*;q=0.8"}


def sign_in(http, key, wanted="/", origin=ADDRESS):
    headers = {} if origin is None else {"Origin": origin}
    return http.post("/sign-in", data={"key": key, "next": wanted}, headers=headers)


def csrf(http):
    return re.search(r'name="csrf-token" content="([0-9a-f]{64})"', http.get("/").text)[1]


def promote(http, **headers):
    return http.post(
        PROMOTE, json={"alias": "production"}, headers={"If-None-Match": "*", **headers}
    )


def test_page_without_a_session_leads_to_the_sign_in_and_back(http, keys, root):
    make_run(root / "run", [1])
    asked = http.get("/ui/default/run?page_token=x%26y", headers=HTML)
    assert asked.status_code == 303
    form = http.get(asked.headers["location"])
    assert 'name="next" value="/ui/default/run?page_token=x%26y"' in form.text
    answer = sign_in(http, keys.make("ci"), "/ui/default/run")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/default/run")
    page = http.get("/ui/default/run", headers=HTML)
    assert page.status_code == 200
    assert "ci · read</span> <button" in page.text


def test_programs_are_answered_401_and_not_led_to_a_page(http):
    for method, path in (("GET", "/v1/runs"), ("POST", "/"), ("HEAD", "/")):
        headers = HTML if method != "GET" else {}
        assert http.request(method, path, headers=headers).status_code == 401
    wrong = http.get("/", headers=HTML | bearer("x"))
    assert wrong.status_code == 401


def test_cookie_is_kept_from_scripts_other_sites_and_the_network(http, keys):
    (cookie,) = sign_in(http, keys.make("ci")).headers.get_list("set-cookie")
    name, _, rest = cookie.partition("=")
    attributes = {one.strip().lower() for one in rest.split(";")[1:]}
    assert name == "__Host-cairn_session"
    assert {"httponly", "samesite=lax", "secure", "path=/", "max-age=43200"} <= attributes
    assert not any(one.startswith("domain") for one in attributes)


def test_browser_on_this_machine_is_kept_without_https(app, keys):
    with TestClient(
        app, base_url="http://127.0.0.1:8321", client=("127.0.0.1", 1), follow_redirects=False
    ) as http:
        cookie = sign_in(http, keys.make("ci"), origin="http://127.0.0.1:8321").headers[
            "set-cookie"
        ]
        assert cookie.startswith("cairn_session=")
        assert "secure" not in cookie.lower()
        assert http.get("/v1/runs").status_code == 200


def test_sign_in_without_https_says_so(app, keys):
    with TestClient(app, base_url="http://cairn.example", client=ELSEWHERE) as http:
        answer = sign_in(http, keys.make("ci"), origin="http://cairn.example")
    assert answer.status_code == 401
    assert "needs https" in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "key", ["", "ck_", "x" * 10_000, "ck_aaaaaaaaaaaa_" + "a" * 43, "<b>", "\0"]
)
def test_wrong_key_is_refused_on_the_page_and_not_repeated(http, key):
    answer = sign_in(http, key)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "Invalid or expired key." in answer.text
    assert not key or key == "ck_" or key not in answer.text.replace("<body>", "")


def test_forms_that_no_page_has_are_refused(http):
    for body in (b"&".join([b"a=1"] * 50), b"key=%ff%fe", b"\xff\xfe", b"{}", b""):
        answer = http.post("/sign-in", content=body, headers={"Origin": ADDRESS})
        assert answer.status_code == 401
    assert (
        http.post("/sign-in", content=b"x" * 2_000_000, headers={"Origin": ADDRESS}).status_code
        == 413
    )


@pytest.mark.parametrize("origin", [None, "null", "https://evil.example", "https://["])
def test_no_other_page_signs_a_browser_in(http, keys, origin):
    answer = sign_in(http, keys.make("ci"), origin=origin)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def test_changes_by_cookie_take_the_token_and_the_origin_of_our_page(http, keys, root):
    make_run(root / "run", [1])
    sign_in(http, keys.make("ci", "operate"))
    token = csrf(http)
    refused = [
        {},
        {"Origin": ADDRESS},
        {"X-CSRF-Token": token},
        {"Origin": ADDRESS, "X-CSRF-Token": token[:-1]},
        {"Origin": ADDRESS, "X-CSRF-Token": ""},
        {"Origin": ADDRESS, "X-CSRF-Token": "é"},
        {"Origin": "https://evil.example", "X-CSRF-Token": token},
        {"Origin": "null", "X-CSRF-Token": token},
    ]
    for headers in refused:
        answer = promote(http, **{name: one.encode() for name, one in headers.items()})
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:cairn:problem:forbidden")
        assert token not in answer.text
    assert not (root / "run" / "aliases").exists()
    assert promote(http, **{"Origin": ADDRESS, "X-CSRF-Token": token}).status_code == 200


def test_token_of_another_session_is_refused(http, app, keys, root):
    make_run(root / "run", [1])
    key = keys.make("ci", "operate")
    sign_in(http, key)
    other = csrf(http)
    http.cookies.clear()
    sign_in(http, key)
    assert csrf(http) != other
    assert promote(http, **{"Origin": ADDRESS, "X-CSRF-Token": other}).status_code == 403


def test_cookie_does_not_lend_itself_to_a_wrong_key(http, keys, root):
    make_run(root / "run", [1])
    sign_in(http, keys.make("boss", "admin"))
    reads = keys.make("reads")
    assert http.get("/v1/runs", headers=bearer(reads[:-1])).status_code == 401
    assert http.get("/v1/keys", headers=bearer(reads)).status_code == 403
    assert promote(http, **bearer(keys.make("ci", "operate"))).status_code == 200  # no page asked


def test_sign_out_ends_the_session_for_whoever_has_its_cookie(http, keys):
    sign_in(http, keys.make("ci"))
    held = dict(http.cookies)
    token = csrf(http)
    assert http.post("/sign-out", headers={"Origin": ADDRESS}).status_code == 403
    done = http.post("/sign-out", headers={"Origin": ADDRESS, "X-CSRF-Token": token})
    assert done.json() == {"next": "/sign-in"}
    assert 'cairn_session=""' in done.headers["set-cookie"]
    http.cookies.update(held)
    assert http.get("/v1/runs").status_code == 401


def test_session_ends_with_its_key(http, keys, monkeypatch):
    monkeypatch.setattr("cairn.service.access.ttl_cache.TTL_SECONDS", 0.2)
    sign_in(http, keys.make("ci"))
    assert http.get("/v1/runs").status_code == 200
    with keys.catalog() as catalog, catalog.write() as session:
        session.execute(text("UPDATE keys SET revoked = '2026-01-01 00:00:00'"))
    until(lambda: http.get("/v1/runs").status_code == 401)


def test_session_ends_in_time(http, keys, monkeypatch):
    monkeypatch.setattr(http.app.state.authenticator, "lifetime", timedelta(seconds=2))
    sign_in(http, keys.make("ci"))
    assert http.get("/v1/runs").status_code == 200
    until(lambda: http.get("/v1/runs").status_code == 401)


def test_of_a_session_the_database_has_no_more_than_a_digest_and_forgets_old_ones(
    http, keys, monkeypatch
):
    key = keys.make("ci")
    with monkeypatch.context() as patched:
        patched.setattr(http.app.state.authenticator, "lifetime", timedelta(0))
        sign_in(http, key)
    sign_in(http, key)
    with keys.catalog() as catalog, catalog.read() as session:
        (row,) = session.execute(select(SessionRow.__table__))
    assert http.cookies["__Host-cairn_session"] not in str(tuple(row))


@pytest.mark.parametrize(
    "cookie",
    ["__Host-cairn_session=", "__Host-cairn_session=x", "cairn_session={0}", "=; ;;", "x" * 5000,
     "__Host-cairn_session={0}; __Host-cairn_session=x", "__HOST-CAIRN_SESSION={0}"],
)  # fmt: skip
def test_other_cookies_are_no_session(http, keys, cookie):
    sign_in(http, keys.make("ci"))
    value = http.cookies["__Host-cairn_session"]
    http.cookies.clear()
    assert http.get("/v1/runs", headers={"Cookie": cookie.format(value)}).status_code == 401


@pytest.mark.parametrize(
    "wanted",
    ["https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "evil",
     "javascript:alert(1)", "/\t/evil.example", "/ /evil", "///evil.example", "", "http:evil",
     "/\r\nSet-Cookie: a=b", "/é", "//[", "\0//evil"],
)  # fmt: skip
def test_nobody_is_led_elsewhere_after_signing_in(http, keys, wanted):
    answer = sign_in(http, keys.make("ci"), wanted)
    assert answer.headers["location"] == "/"
    assert "evil" not in http.get("/sign-in", params={"next": wanted}).text


def test_path_that_was_asked_for_is_kept(http, keys):
    key = keys.make("ci")
    for path in ("/", "/ui/default/run?page_token=a%2F%2Fb", "/ui/a/b//c"):
        assert sign_in(http, key, path).headers["location"] == path


def test_path_of_another_server_in_the_address_is_not_led_to(http):
    answer = http.get(f"{ADDRESS}//evil.example/x", headers=HTML)
    assert answer.headers["location"] == "/sign-in?next=%2F%2Fevil.example%2Fx"
    assert 'value="/"' in http.get(answer.headers["location"]).text


def test_sign_in_page_leads_on_where_no_keys_are_needed(settings):
    plain = Settings(**settings.model_dump() | {"auth": "loopback"})
    with TestClient(
        create_app(plain, jobs=False),
        base_url="http://127.0.0.1",
        client=("127.0.0.1", 1),
        follow_redirects=False,
    ) as http:
        assert http.get("/sign-in?next=/ui/a/b").headers["location"] == "/ui/a/b"
        assert http.post("/sign-in", data={"key": "x"}).headers["location"] == "/"
        assert "Sign out" not in http.get("/").text


def test_key_that_signs_in_again_and_again_is_slowed_down(http, keys):
    """The page needs no key that counts, but each session is a row that is written."""
    key = keys.make("ci")
    statuses = [sign_in(http, key).status_code for _ in range(30)]
    assert statuses[:20] == [303] * 20
    assert 429 in statuses
    refused = sign_in(http, key)
    assert refused.headers["retry-after"] == "1"
    assert "with the key of &#39;ci&#39;" in refused.text
    assert "does not count" not in refused.text
    assert sign_in(http, keys.make("other")).status_code == 303


def test_key_has_so_many_sessions_and_the_oldest_ends_for_a_new_one(http, keys, monkeypatch):
    monkeypatch.setattr("cairn.service.access.sessions.MAX_SESSIONS", 3)
    key = keys.make("ci")
    for _ in range(5):
        assert sign_in(http, key).status_code == 303
        http.cookies.clear()
    assert sign_in(http, keys.make("other")).status_code == 303
    with keys.catalog() as catalog, catalog.read() as session:
        found = [row.key_id for row in session.scalars(select(SessionRow))]
    assert sorted(found.count(one) for one in set(found)) == [1, 3]
