"""People whom the identity provider signs in, in a browser, and whoever pretends to be one."""

import base64
import threading
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import jwt
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from cairn import Settings, SettingsError, create_app
from cairn.service.access.callers import Caller, Scope
from cairn.service.access.sessions import (
    begin_confirmation,
    begin_session,
    confirm_session,
    find_session,
)
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import SessionRow
from cairn.service.command.doctor.provider import check_provider
from cairn.service.settings import load_settings
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.access.issuer import running_issuer
from tests.service.access.provider import CLIENT, SECRET, query_of, running_provider
from tests.service.access.test_oidc import GRANTS, part
from tests.service.access.test_sign_in import HTML, csrf, promote, sign_in
from tests.service.stores import make_run
from tests.service.trail import audit_trail

pytestmark = pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning")
TTL = "cairn.service.access.ttl_cache.TTL_SECONDS"
SESSION, PENDING = "__Host-cairn_session", "__Host-cairn_sign_in"
NOW = time.time
BASIC = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()


@pytest.fixture(scope="module")
def provider():
    with running_provider() as provider:
        yield provider


@pytest.fixture
def http(settings, provider, monkeypatch):
    monkeypatch.setattr(TTL, 0.0)
    provider.put("ana", "ml", "release")
    with _client(settings, provider.url) as client:
        yield client
    provider.failing, provider.confirms = False, True


def _client(settings, issuer, **changed):
    trusted = {"oidc_issuer": issuer, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET}
    trusted |= {"oidc_grants": GRANTS} | changed
    app = create_app(Settings(**settings.model_dump() | trusted), jobs=False)
    return TestClient(app, base_url=ADDRESS, client=ELSEWHERE, follow_redirects=False)


def begin(http, target="/"):
    answer = http.get("/sign-in/provider", params={"next": target})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def signed_in(http, provider, target="/", person="ana"):
    return http.get(provider.sign_in(begin(http, target), person))


def sign_out(http):
    return http.post("/sign-out", headers={"Origin": ADDRESS, "X-CSRF-Token": csrf(http)})


def rows(keys, **changed):
    """The sessions in the database, changed first."""
    with keys.catalog() as catalog, catalog.write() as session:
        if changed:
            session.execute(update(SessionRow).values(**changed))
        return session.execute(select(SessionRow.__table__)).all()


def confirmed_ago(keys, minutes):
    rows(keys, confirmed=datetime.now(UTC) - timedelta(minutes=minutes), confirming=None)


def trail(http, keys):
    return [
        (entry.action, entry.caller, entry.outcome)
        for entry in audit_trail(http, bearer(keys.make("auditor", "admin")))
    ]


def test_person_signs_in_and_may_what_a_token_with_their_groups_may(http, provider, keys, root):
    make_run(root / "run", [1])
    page = http.get(http.get("/ui/default/run", headers=HTML).headers["location"]).text
    assert 'href="/sign-in/provider?next=/ui/default/run">Sign in with localhost</a>' in page
    url = begin(http, "/ui/default/run")
    asked = query_of(url)
    assert asked.pop("state") != asked.pop("nonce") != asked.pop("code_challenge")
    assert asked == {
        "response_type": "code",
        "client_id": CLIENT,
        "redirect_uri": f"{ADDRESS}/sign-in/callback",
        "scope": "openid profile email",
        "code_challenge_method": "S256",
    }
    answer = http.get(provider.sign_in(url))
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/default/run")
    assert PENDING not in http.cookies
    assert "oidc:ana · operate</span> <button" in http.get("/ui/default/run", headers=HTML).text
    refused = [
        {},
        {"Origin": ADDRESS},
        {"Origin": "https://evil.example", "X-CSRF-Token": csrf(http)},
    ]
    assert [promote(http, **headers).status_code for headers in refused] == [403] * 3
    assert promote(http, **{"Origin": ADDRESS, "X-CSRF-Token": csrf(http)}).status_code == 200
    assert http.get("/v1/roots/other/runs").status_code == 403
    assert trail(http, keys) == [
        ("session.begin", "oidc:ana", "done"),
        ("alias.promote", "oidc:ana", "done"),
    ]


def test_cookies_are_kept_from_scripts_forms_of_other_sites_and_the_network(http, provider):
    begun = http.get("/sign-in/provider").headers["set-cookie"]
    (session, _) = signed_in(http, provider).headers.get_list("set-cookie")
    for cookie, name, seconds in ((begun, PENDING, 600), (session, SESSION, 43200)):
        attributes = {one.strip().lower() for one in cookie.split(";")[1:]}
        assert cookie.startswith(f"{name}=")
        assert attributes == {"httponly", "samesite=lax", "secure", "path=/", f"max-age={seconds}"}


def test_key_signs_in_beside_the_provider(http, keys):
    assert sign_in(http, keys.make("ci")).status_code == 303
    assert "ci · read" in http.get("/", headers=HTML).text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example"])
def test_nobody_is_led_elsewhere_by_the_provider(http, provider, target):
    assert signed_in(http, provider, target).headers["location"] == "/"


def test_answer_that_this_browser_did_not_ask_for_is_refused(http, provider, keys):
    """As of login CSRF: another site sends the browser here, with a code of its own account."""
    others = TestClient(http.app, base_url=ADDRESS, client=ELSEWHERE, follow_redirects=False)
    back = provider.sign_in(begin(others))
    path = f"{urlsplit(back).path}?code={query_of(back)['code']}"
    state = query_of(begin(http))["state"]
    for odd in ("", "&state=", "&state=x", f"&state={state[:-1]}", "&state=%C3%A9", f"&{state}"):
        answer = http.get(path + odd)
        assert (answer.status_code, SESSION in http.cookies) == (401, False)
        assert "This browser has not begun the sign-in here" in answer.text
    assert http.get(back).status_code == 401
    assert "session.begin" in str(trail(http, keys))
    http.cookies.clear()
    assert http.get(back).status_code == 401


def test_code_counts_once(http, provider):
    url = begin(http)
    kept = http.cookies[PENDING]
    back = provider.sign_in(url)
    assert http.get(back).status_code == 303
    assert http.get(back).status_code == 401  # the state has counted
    http.cookies.set(PENDING, kept, domain="cairn.example")
    again = http.get(back)
    assert (again.status_code, "does not confirm this sign-in" in again.text) == (401, True)


def test_code_of_another_sign_in_is_refused(http, provider):
    """PKCE: whoever intercepts a code cannot redeem it in a sign-in of their own."""
    stolen = query_of(provider.sign_in(begin(http)))["code"]
    http.cookies.clear()
    state = query_of(begin(http))["state"]
    answer = http.get("/sign-in/callback", params={"code": stolen, "state": state})
    assert (answer.status_code, SESSION in http.cookies) == (401, False)


def test_sign_out_ends_the_session_here_and_at_the_provider(http, provider, keys):
    signed_in(http, provider)
    stolen = http.cookies[SESSION]
    assert http.post("/sign-out", headers={"Origin": ADDRESS}).status_code == 403
    url = sign_out(http).json()["next"]
    assert url.startswith(f"{provider.url}/oauth2/end_session?")
    sent = query_of(url)
    claims = jwt.decode(sent.pop("id_token_hint"), options={"verify_signature": False})
    assert claims["sub"] == "ana"
    assert sent == {"client_id": CLIENT, "post_logout_redirect_uri": f"{ADDRESS}/sign-in"}
    http.cookies.set(SESSION, stolen, domain="cairn.example")
    assert http.get("/v1/runs").status_code == 401
    assert rows(keys) == []
    assert trail(http, keys)[-1] == ("session.end", "oidc:ana", "done")


def test_sign_out_of_a_person_with_many_groups_has_no_endless_url(http, provider):
    provider.put("ana", "ml", "x" * 4000)
    signed_in(http, provider)
    assert "id_token_hint" not in query_of(sign_out(http).json()["next"])


def test_sign_out_does_not_need_the_provider(http, provider, monkeypatch):
    signed_in(http, provider)
    issuer = http.app.state.authenticator.provider._issuer
    monkeypatch.setattr(issuer, "_document", {})
    assert sign_out(http).json() == {"next": "/sign-in"}


def test_database_has_no_token_that_counts(http, provider, keys):
    signed_in(http, provider)
    (row,) = rows(keys)
    assert http.cookies[SESSION] not in str(row)
    assert "eyJ" not in str(row)  # as tokens begin
    signed_in(http, provider)
    rows(keys, tokens=row.tokens)  # whoever writes there gives one session those of another
    confirmed_ago(keys, 6)
    assert http.get("/v1/runs").status_code == 401


def test_group_that_is_lost_counts_for_minutes(http, provider, keys):
    signed_in(http, provider)
    provider.put("ana", "ml")
    confirmed_ago(keys, 4)
    assert "operate" in http.get("/", headers=HTML).text
    confirmed_ago(keys, 6)
    assert "read" in http.get("/", headers=HTML).text
    assert rows(keys)[0].scope == "read"
    provider.put("ana", "choir")
    confirmed_ago(keys, 6)
    refused = http.get("/", headers=HTML)
    assert (refused.status_code, "CAIRN_OIDC_GRANTS" in refused.text) == (403, True)
    assert http.get("/v1/runs").status_code == 401
    assert trail(http, keys)[-1] == ("session.end", "oidc:ana", "done")


def test_session_ends_with_the_provider_in_the_settings(http, provider, monkeypatch):
    signed_in(http, provider)
    monkeypatch.setattr(http.app.state.authenticator, "provider", None)
    assert http.get("/v1/runs").status_code == 401


def test_of_requests_at_once_one_has_a_session_confirmed(database_url):
    """In all servers that share a database, of either kind."""
    catalog, now, begun = Catalog.open(database_url), datetime.now(UTC), []
    row = SessionRow(digest="a" * 64, expires=now + timedelta(hours=1), confirmed=now)
    begin_session(catalog, row, now=now)
    threads = [
        threading.Thread(
            target=lambda: begun.append(begin_confirmation(catalog, "a" * 64, now=now))
        )
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(begun) == [False] * 4 + [True]
    confirm_session(catalog, "a" * 64, Caller("oidc:ana", Scope.READ), "sealed", now=now)
    session = find_session(catalog, "a" * 64)
    assert (session.name, session.row.roots, session.row.tokens) == ("oidc:ana", None, "sealed")
    catalog.close()


@pytest.mark.parametrize("ending", ["forget", "confirms"])
def test_session_ends_that_the_provider_does_not_confirm(http, provider, keys, ending):
    signed_in(http, provider)
    provider.forget("ana") if ending == "forget" else setattr(provider, "confirms", False)
    confirmed_ago(keys, 6)
    assert http.get("/v1/runs").status_code == 401
    assert rows(keys) == []


def test_provider_is_asked_once_for_many_requests(http, provider, keys):
    """A refresh token that two requests use ends the session at providers that rotate them."""
    signed_in(http, provider)
    confirmed_ago(keys, 30)
    before, statuses = provider.refreshes, []
    threads = [
        threading.Thread(target=lambda: statuses.append(http.get("/v1/runs").status_code))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 5
    assert provider.refreshes == before + 1


def test_session_outlives_a_short_absence_of_the_provider_and_no_long_one(http, provider, keys):
    signed_in(http, provider)
    provider.failing = True
    confirmed_ago(keys, 8)
    assert http.get("/v1/runs").status_code == 200
    confirmed_ago(keys, 11)
    refused = http.get("/", headers=HTML)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
    assert "Try again, or sign in with a key." in refused.text
    provider.failing = False
    confirmed_ago(keys, 11)
    assert http.get("/v1/runs").status_code == 200


def test_provider_that_is_away_is_told_on_the_sign_in_page(http, provider, keys):
    back = provider.sign_in(begin(http, "/health"))
    provider.failing = True
    late = http.get(back)
    assert (late.status_code, "or sign in with a key" in late.text) == (503, True)
    assert 'name="next" value="/health"' in late.text
    issuer = http.app.state.authenticator.provider._issuer
    issuer._fetched = issuer._asked = float("-inf")
    away = http.get("/sign-in/provider?next=/health")
    assert (away.status_code, away.headers["retry-after"]) == (503, "10")
    assert "The identity provider is unavailable." in away.text
    assert sign_in(http, keys.make("ci"), "/health").headers["location"] == "/health"


def test_who_is_granted_nothing_is_told_so_and_noted(http, provider, keys):
    provider.put("eve", "choir")
    answer = signed_in(http, provider, person="eve")
    assert (answer.status_code, SESSION in http.cookies) == (403, False)
    assert "CAIRN_OIDC_GRANTS" in answer.text
    assert trail(http, keys) == [("session.begin", "oidc:eve", "refused")]


def test_refusal_of_the_provider_is_shown_as_text(http):
    for error, shown in (
        ("access_denied", "answered: access_denied"),
        ("<script>", "answered: &lt;script&gt;"),
        ("\u202e", "answered: no code"),
    ):
        state = query_of(begin(http))["state"]
        answer = http.get("/sign-in/callback", params={"state": state, "error": error})
        assert (answer.status_code, shown in answer.text) == (401, True)


def test_settings_bound_a_session(settings, provider, keys):
    provider.put("ana", "ml")
    with _client(settings, provider.url, session_hours=0.5) as http:
        answer = signed_in(http, provider)
        assert "Max-Age=1800" in answer.headers["set-cookie"]
        (row,) = rows(keys)
        assert row.expires - row.confirmed == timedelta(minutes=30)
        rows(keys, expires=datetime.now(UTC))
        assert http.get("/v1/runs").status_code == 401


def test_refusals_of_strangers_do_not_fill_the_trail(http, keys, monkeypatch):
    monkeypatch.setattr(http.app.state.authenticator._refusals, "_at_once", 2.0)
    statuses = [http.get("/sign-in/callback").status_code for _ in range(25)]
    assert set(statuses) == {401, 429}
    assert len(trail(http, keys)) in (2, 3)


class Forger:
    """A browser that signs in with whatever tokens an issuer answers."""

    def __init__(self, issuer, settings, http):
        self.issuer, self.http, self.keys = issuer, http, Keys(settings.database_url)

    def sign_in(self, answer=None, **changed):
        """Sign in by a token of these claims, or by a whole answer of the token endpoint."""
        asked = query_of(begin(self.http))
        claims = {"aud": CLIENT, "nonce": asked["nonce"]} | changed
        token = self.issuer.token(**claims)
        sent = {"access_token": "x", "token_type": "Bearer", "id_token": token}
        self.issuer.answer = sent | (answer or {})
        return self.http.get("/sign-in/callback", params={"state": asked["state"], "code": "x"})


@pytest.fixture(scope="module")
def shared_forger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged")
    (folder / "store").mkdir()
    settings = Settings(
        root=str(folder / "store"), data_dir=folder / "data", scan_seconds=0, auth="keys"
    )
    grants = {"ml": {"scope": "read"}}
    with (
        running_issuer() as issuer,
        _client(settings, issuer.url, oidc_grants=grants) as http,
    ):
        yield Forger(issuer, settings, http)


@pytest.fixture
def forger(shared_forger):
    shared_forger.http.cookies.clear()
    shared_forger.http.app.state.authenticator._failures._used.clear()
    return shared_forger


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"aud": "another"}, "udience"),
        ({"aud": None}, "aud"),
        ({"aud": [CLIENT, "another"], "azp": "another"}, "azp"),
        ({"iss": "https://evil.example"}, "ssuer"),
        ({"nonce": None}, "nonce"),
        ({"nonce": "of another sign-in"}, "nonce"),
        ({"nonce": ["x"]}, "nonce"),
        ({"exp": NOW() - 61}, "expired"),
        ({"iat": NOW() + 3600}, "not yet valid"),
        ({"nbf": NOW() + 3600}, "not yet valid"),
        ({"sub": None}, "sub"),
        ({"kid": "rsa-2", "headers": {"kid": "rsa"}}, "Signature"),
        ({"algorithm": "HS256", "key": SECRET.ljust(32, "x")}, "key pair"),
    ],
)  # fmt: skip
def test_forged_id_token_signs_nobody_in(forger, changed, told):
    answer = forger.sign_in(**changed)
    assert (answer.status_code, told in answer.text) == (401, True), answer.text
    assert SESSION not in answer.headers.get("set-cookie", "")


def test_id_token_without_signature_signs_nobody_in(forger):
    for algorithm in ("none", "None", ""):
        head = part({"alg": algorithm, "kid": "rsa"})
        body = forger.issuer.token(aud=CLIENT).split(".")[1]
        answer = forger.sign_in({"id_token": f"{head}.{body}."})
        assert (answer.status_code, "key pair" in answer.text) == (401, True)


@pytest.mark.parametrize("token", [None, 1, "", "a.b.c"])
def test_answer_without_an_id_token_signs_nobody_in(forger, token):
    assert forger.sign_in({"id_token": token}).status_code == 401


def test_clocks_may_be_a_minute_apart(forger):
    assert forger.sign_in(exp=NOW() - 50).status_code == 303
    assert forger.sign_in(iat=NOW() + 50, nbf=NOW() + 50).status_code == 303


def test_session_without_a_refresh_token_is_short(forger):
    rows(forger.keys, expires=datetime.now(UTC))
    assert forger.sign_in().status_code == 303
    (row,) = rows(forger.keys)
    assert row.expires - row.confirmed == timedelta(minutes=10)


@pytest.mark.parametrize("odd", [{"sub": "eve"}, {"nonce": "another"}, {"aud": "another"}])
def test_provider_can_not_turn_a_session_into_another_persons(forger, odd):
    assert forger.sign_in({"refresh_token": "x"}).status_code == 303
    forger.issuer.answer["id_token"] = forger.issuer.token(**{"aud": CLIENT} | odd)
    confirmed_ago(forger.keys, 6)
    assert forger.http.get("/v1/runs").status_code == 401


def test_client_that_the_provider_does_not_know_is_the_servers_fault(forger):
    answer = forger.sign_in({"error": "invalid_client"})
    assert (answer.status_code, "CAIRN_OIDC_CLIENT_ID" in answer.text) == (503, True)


@pytest.mark.parametrize(
    ("secret", "methods", "credentials"),
    [
        (SECRET, None, (BASIC, "", "")),
        (SECRET, ["client_secret_basic"], (BASIC, "", "")),
        (SECRET, ["client_secret_basic", "client_secret_post"], ("", CLIENT, SECRET)),
        ("", ["client_secret_post", "none"], ("", CLIENT, "")),
    ],
)
def test_client_proves_itself_as_the_provider_takes_it(
    settings, forger, monkeypatch, secret, methods, credentials
):
    methods = {} if methods is None else {"token_endpoint_auth_methods_supported": methods}
    monkeypatch.setattr(forger.issuer, "changed", methods)
    with _client(settings, forger.issuer.url, oidc_client_secret=secret) as http:
        assert Forger(forger.issuer, settings, http).sign_in().status_code == 303
    assert forger.issuer.credentials == credentials


def test_id_token_is_no_bearer_token(forger):
    """Of whoever gets hold of one: the settings name no audience of bearer tokens here."""
    answer = forger.http.get("/v1/runs", headers=bearer(forger.issuer.token(aud=CLIENT)))
    assert answer.status_code == 401


def test_client_without_an_issuer_is_refused(settings):
    with pytest.raises(SettingsError, match="CAIRN_OIDC_ISSUER"):
        load_settings(**settings.model_dump() | {"oidc_client_id": CLIENT})


def test_doctor_says_what_the_provider_lacks(settings, provider, forger):
    def looked_at(url, **changed):
        changed = {"oidc_client_id": CLIENT, "oidc_grants": GRANTS} | changed | {"oidc_issuer": url}
        findings = check_provider(Settings(**settings.model_dump() | changed))
        return [(finding.outcome.value, finding.found) for finding in findings]

    assert looked_at("", oidc_client_id="") == []
    ((outcome, found),) = looked_at(provider.url)
    assert (outcome, "register https://HOST/sign-in/callback" in found) == ("ok", True)
    ((outcome, found),) = looked_at(f"{provider.url}/other")
    assert (outcome, "expected the keys of" in found) == ("fail", True)
    ((_, methods), (_, found)) = looked_at(forger.issuer.url)
    assert "found plain" in methods
    assert "no sign-out" in found
