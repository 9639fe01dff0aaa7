"""Tokens of an issuer, real ones and forged ones, at a server that trusts it."""

import base64
import hmac
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from fastapi.testclient import TestClient

from cairn import Settings, SettingsError, create_app
from cairn.service.access.oidc import Issuer as Verifier
from cairn.service.errors import NotReadyError, UnauthenticatedError
from cairn.service.settings import load_settings
from tests.service.access.conftest import ADDRESS, ELSEWHERE, bearer
from tests.service.access.issuer import AUDIENCE, PRIVATE, public, running_issuer
from tests.service.seams import oidc
from tests.service.stores import make_run
from tests.service.trail import audit_trail

GRANTS = {
    "ml": {"scope": "read"},
    "release": {"scope": "operate", "roots": ["default"]},
    "archive": {"scope": "operate", "roots": ["other"]},
    "platform": {"scope": "admin"},
}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def issuer():
    with running_issuer() as issuer:
        yield issuer


@pytest.fixture
def trusting(settings, issuer):
    return Settings(
        **settings.model_dump()
        | {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE, "oidc_grants": GRANTS}
    )


@pytest.fixture
def http(trusting):
    app = create_app(trusting, jobs=False)
    with TestClient(app, base_url=ADDRESS, client=ELSEWHERE) as client:
        yield client


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def verifier(trusting, clock):
    return Verifier(trusting, clock=clock)


def refused(verifier, token):
    with pytest.raises(UnauthenticatedError) as raised:
        verifier.caller(token)
    assert not token or len(token) < 20 or token not in str(raised.value)
    return str(raised.value)


def part(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


@pytest.mark.parametrize(
    ("kid", "algorithm"),
    [("rsa", "RS256"), ("rsa", "PS512"), ("ec", "ES256"), ("ec-384", "ES384"), ("ed", "EdDSA")],
)
def test_token_of_the_issuer_is_its_bearers(http, app, issuer, kid, algorithm):
    assert http.get("/v1/runs", headers=bearer(issuer.token(kid, algorithm))).status_code == 200


def test_bearer_is_named_in_the_trail_and_may_what_their_groups_may(http, issuer, root):
    make_run(root / "run", [1])
    path = "/v1/roots/default/runs/run/checkpoints/1:promote"

    def promote(groups):
        headers = {"If-None-Match": "*", **bearer(issuer.token(groups=groups))}
        return http.post(path, json={"alias": "production"}, headers=headers).status_code

    assert promote(["ml"]) == 403
    assert promote(["archive"]) == 403
    assert promote(["unknown"]) == 403
    assert promote(["ml", "release"]) == 200
    administrator = bearer(issuer.token(groups=["platform"]))
    assert [entry.caller for entry in audit_trail(http, administrator)] == ["oidc:ana"]


@pytest.mark.parametrize(
    ("groups", "scope", "roots"),
    [
        ("ml", "read", None),
        (["ml", "release"], "operate", {"default"}),
        (["release", "archive", "x"], "operate", {"default", "other"}),
        (["release", "platform"], "admin", None),
    ],
)
def test_highest_scope_counts_in_the_roots_where_it_is_granted(
    verifier, issuer, groups, scope, roots
):
    caller = verifier.caller(issuer.token(groups=groups))
    assert (caller.scope.value, caller.roots) == (scope, roots)


@pytest.mark.parametrize("groups", [None, [], {}, 1, [1, None, ["platform"]], "PLATFORM", [{}]])
def test_bearer_of_nothing_that_is_granted_may_nothing(http, issuer, groups):
    answer = http.get("/v1/runs", headers=bearer(issuer.token(groups=groups)))
    assert (answer.status_code, "CAIRN_OIDC_GRANTS" in answer.json()["detail"]) == (403, True)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"exp": int(time.time()) - 61}, "expired"),
        ({"exp": None}, "exp"),
        ({"nbf": int(time.time()) + 3600}, "not yet valid"),
        ({"iat": int(time.time()) + 3600}, "not yet valid"),
        ({"iat": None}, "iat"),
        ({"aud": "another"}, "udience"),
        ({"aud": None}, "aud"),
        ({"aud": []}, "aud"),
        ({"iss": "https://evil.example"}, "ssuer"),
        ({"iss": None}, "iss"),
        ({"sub": None}, "'sub'"),
        ({"sub": "x" * 201}, "'sub'"),
        ({"sub": "a\nb"}, "'sub'"),
        ({"exp": "soon"}, "exp"),
        ({"headers": {"crit": ["x"], "x": 1}}, ""),
        ({"headers": {"kid": "elsewhere"}}, "found 0 that fit"),
        ({"headers": {"kid": "ec"}}, "found 0 that fit"),
        ({"kid": "rsa-2", "headers": {"kid": "rsa"}}, "Signature"),
    ],
)
def test_token_that_is_not_ours_or_not_of_now_is_refused(verifier, issuer, changed, part):
    assert part in refused(verifier, issuer.token(**changed))


def test_clocks_may_be_a_minute_apart(verifier, issuer):
    now = int(time.time())
    assert verifier.caller(issuer.token(exp=now - 50)).name == "oidc:ana"
    assert verifier.caller(issuer.token(iat=now + 50, nbf=now + 50)).name == "oidc:ana"


def test_token_for_several_audiences_is_taken_if_ours_is_among_them(verifier, issuer):
    assert verifier.caller(issuer.token(aud=["x", AUDIENCE])).name == "oidc:ana"


def test_token_without_signature_is_refused(verifier, issuer):
    claims = part(jwt.decode(issuer.token(), options={"verify_signature": False}))
    for algorithm in ("none", "None", "NONE", "", None, 1, ["RS256"]):
        for header in ({"alg": algorithm}, {"alg": algorithm, "kid": "rsa"}):
            refused(verifier, f"{part(header)}.{claims}.")
    head, body, _ = issuer.token().split(".")
    refused(verifier, f"{head}.{body}.")


def test_token_signed_with_the_public_key_as_a_secret_is_refused(verifier, issuer):
    """A server that trusts the header's algorithm takes what all the world knows for a secret."""
    known = PRIVATE["rsa"].public_key()
    pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    secrets = [known.public_bytes(*pem), json.dumps(public("rsa")).encode()]
    head, claims = part({"alg": "HS256", "kid": "rsa"}), issuer.token().split(".")[1]
    for secret in secrets:
        for algorithm in ("sha256", "sha512"):
            signature = part(hmac.digest(secret, f"{head}.{claims}".encode(), algorithm))
            assert "key pair" in refused(verifier, f"{head}.{claims}.{signature}")
    assert len(issuer.asked) == 0


def test_token_that_brings_its_own_key_is_refused(verifier, issuer):
    for headers in ({"jwk": public("rsa-2")}, {"jku": f"{issuer.url}/keys"}, {"x5u": issuer.url}):
        refused(verifier, issuer.token("rsa-2", headers={"kid": "rsa", **headers}))
        refused(verifier, issuer.token("rsa-2", headers={"kid": "own", **headers}))


@pytest.mark.parametrize(
    "published",
    [public("rsa", use="enc"), public("rsa", alg="RS512"), public("rsa", d="AQAB"),
     {"kty": "oct", "k": "c2VjcmV0", "kid": "rsa"}, public("ec") | {"kid": "rsa"},
     {"kid": "rsa"}, 1],
)  # fmt: skip
def test_published_key_that_is_not_for_this_signature_verifies_none(verifier, issuer, published):
    issuer.keys = [published]
    assert "found 0 that fit" in refused(verifier, issuer.token())


def test_key_that_is_too_short_verifies_nothing(verifier, issuer):
    issuer.keys = [public("short")]
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        token = issuer.token("short")
    refused(verifier, token)


def test_secret_that_the_issuer_publishes_verifies_nothing(verifier, issuer):
    issuer.keys = [{"kty": "oct", "k": part(b"x" * 32), "kid": "s", "alg": "HS256"}]
    assert "key pair" in refused(verifier, issuer.token("s", "HS256", key=b"x" * 32))


def test_token_without_kid_is_taken_if_one_key_fits(verifier, issuer, clock):
    token = issuer.token(headers={"kid": None})
    issuer.keys = [public("rsa"), public("ec")]
    assert verifier.caller(token).name == "oidc:ana"
    issuer.keys = [public("rsa"), public("rsa-2")]
    clock.now += oidc.FRESH_SECONDS
    assert "found 2 that fit" in refused(verifier, token)


def test_new_key_of_the_issuers_is_asked_for_and_not_by_every_token(verifier, issuer, clock):
    assert verifier.caller(issuer.token()).name == "oidc:ana"
    issuer.keys = [public("rsa-2")]
    before = len(issuer.asked)
    refused(verifier, issuer.token("rsa-2"))  # the issuer was asked just now
    assert len(issuer.asked) == before
    clock.now += oidc.RETRY_SECONDS
    assert verifier.caller(issuer.token("rsa-2")).name == "oidc:ana"
    asked = len(issuer.asked)
    for number in range(20):
        refused(verifier, issuer.token("rsa-2", headers={"kid": f"flood-{number}"}))
    assert len(issuer.asked) == asked
    refused(verifier, issuer.token("rsa"))  # withdrawn


def test_issuer_that_is_away_keeps_no_known_key_from_counting_for_a_while(verifier, issuer, clock):
    token = issuer.token()
    verifier.caller(token)
    issuer.failing = True
    clock.now += oidc.FRESH_SECONDS
    assert verifier.caller(token).name == "oidc:ana"
    clock.now += oidc.KEPT_SECONDS
    with pytest.raises(NotReadyError, match="CAIRN_OIDC_ISSUER: expected the keys of"):
        verifier.caller(token)
    issuer.failing = False
    clock.now += oidc.RETRY_SECONDS
    assert verifier.caller(token).name == "oidc:ana"


@pytest.mark.parametrize(
    "changed",
    [{"issuer": "https://evil.example"}, {"jwks_uri": "http://203.0.113.7/keys"},
     {"jwks_uri": "file:///etc/passwd"}, {"jwks_uri": None}, {"x": "y" * 2_000_000}],
)  # fmt: skip
def test_issuer_that_describes_another_is_not_trusted(verifier, issuer, changed):
    issuer.changed = changed
    with pytest.raises(NotReadyError):
        verifier.caller(issuer.token())


def test_silent_issuer_is_503_for_its_tokens_and_keeps_keys_from_nothing(http, issuer, keys):
    issuer.failing = True
    answer = http.get("/v1/runs", headers=bearer(issuer.token()))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert http.get("/v1/runs", headers=bearer(keys.make("ci"))).status_code == 200


@pytest.mark.parametrize(
    "token",
    ["a.b.c", "..", "a" * 8000, "é.é.é", part({"alg": "RS256", "kid": "rsa"}) + ".e30.",
     part(b"[" * 5000) + ".e30.AA", part(b"\xff") + ".e30.AA", part([]) + ".e30.AA",
     part({"alg": "RS256", "kid": {"a": 1}}) + ".e30.AA",
     part(b'{"alg":"RS256","alg":"none"}') + ".e30.AA"],
)  # fmt: skip
def test_text_that_is_no_token_is_refused(http, token):
    answer = http.get("/v1/runs", headers={"Authorization": f"Bearer {token}".encode()})
    assert (answer.status_code, answer.json()["type"]) == (401, "urn:cairn:problem:unauthenticated")


def test_claims_that_no_clock_has_are_refused(verifier, issuer):
    head = part({"alg": "RS256", "kid": "rsa"})
    for odd in ("1e400", "-1e400", "NaN", "[" * 2000):
        body = issuer.token().split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=="))
        text = json.dumps(claims).replace(str(claims["exp"]), odd)
        signed = f"{head}.{part(text.encode())}"
        signature = PRIVATE["rsa"].sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        refused(verifier, f"{signed}.{part(signature)}")


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"oidc_issuer": "http://issuer.example"}, "expected https://"),
        ({"oidc_issuer": "https://user:pw@issuer.example"}, "expected https://"),
        ({"oidc_issuer": "issuer.example"}, "expected https://"),
        ({"oidc_audience": ""}, "CAIRN_OIDC_AUDIENCE"),
        ({"oidc_grants": {}}, "CAIRN_OIDC_GRANTS"),
        ({"auth": "loopback"}, "CAIRN_AUTH=keys"),
        ({"oidc_grants": {"a": {"scope": "read", "roots": ["gone"]}}}, "root 'gone'"),
        ({"oidc_grants": {"a": {"scope": "all"}}}, "OIDC_GRANTS"),
        ({"oidc_grants": {"a": {"scope": "read", "root": "x"}}}, "OIDC_GRANTS"),
        ({"oidc_grants": {"a": {"scope": "read", "roots": []}}}, "OIDC_GRANTS"),
    ],
)
def test_issuer_that_could_not_be_trusted_is_named(trusting, changed, part):
    with pytest.raises(SettingsError, match=part):
        load_settings(**trusting.model_dump() | changed)


def test_grants_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("CAIRN_OIDC_GRANTS", '{"ml": {"scope": "read", "roots": ["default"]}}')
    assert load_settings().oidc_grants["ml"].roots == ("default",)
    monkeypatch.setenv("CAIRN_OIDC_GRANTS", "{")
    with pytest.raises(SettingsError, match="CAIRN_OIDC_GRANTS: expected a JSON object"):
        load_settings()


def test_server_that_trusts_an_issuer_needs_no_key_to_be_reached_by_others(trusting):
    reachable = Settings(**trusting.model_dump() | {"host": "0.0.0.0"})
    with TestClient(create_app(reachable, jobs=False)) as http:
        assert http.get("/healthz").status_code == 200
