"""`oidc-provider-mock` on loopback, stricter and more talkative than it is.

It checks no PKCE and sends no ID token with a refresh: both are added here, from outside.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import flask
import httpx
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from werkzeug.serving import make_server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of parts of Authlib that are old to Authlib
    import oidc_provider_mock

CLIENT, SECRET = "cairn", "client-secret"
VERIFIER = "v" * 43
AUTHORIZE, TOKEN = "/oauth2/authorize", "/oauth2/token"


def query_of(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query))


class Provider:
    """An identity provider whose people and state can be changed while it runs.

    Attributes:
        url: Of the issuer.
        failing: Answers 503 then.
        refreshes: How often it was asked to confirm somebody.
        confirms: Whether it sends an ID token then.
    """

    def __init__(self) -> None:
        self.url = ""
        self.failing = False
        self.confirms = True
        self.refreshes = 0
        self._challenges: dict[str, str] = {}
        self._nonces: dict[str, str] = {}
        self._people: dict[str, str] = {}
        self.app = oidc_provider_mock.app(require_nonce=True)
        self.app.before_request(self._before)
        self.app.after_request(self._after)

    def put(self, person: str, *groups: str, **claims: Any) -> None:
        """Have a person in these groups, from now on."""
        body = {"groups": groups, **claims}
        httpx.put(f"{self.url}/users/{person}", json=body).raise_for_status()

    def forget(self, person: str) -> None:
        """Confirm nobody any more."""
        httpx.post(f"{self.url}/users/{person}/revoke-tokens").raise_for_status()

    def sign_in(self, url: str, person: str = "ana") -> str:
        """What a browser does that is sent there: the URL that it is sent back to."""
        assert url.startswith(f"{self.url}{AUTHORIZE}?")
        answer = httpx.post(url, data={"sub": person})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def _before(self) -> tuple[dict[str, str], int] | None:
        request = flask.request
        if self.failing:
            return {"problem": "away"}, 503
        if request.path == AUTHORIZE and request.args.get("code_challenge_method") != "S256":
            return {"error": "invalid_request"}, 400
        if request.path == TOKEN:
            self.refreshes += request.form["grant_type"] == "refresh_token"
            sent = request.authorization
            if sent is None or (sent.username, sent.password) != (CLIENT, SECRET):
                return {"error": "invalid_client"}, 401
            challenge = self._challenges.get(request.form.get("code", ""))
            verifier = request.form.get("code_verifier", "")
            if challenge not in (None, create_s256_code_challenge(verifier)):
                return {"error": "invalid_grant"}, 400
        return None

    def _after(self, answer: flask.Response) -> flask.Response:
        request = flask.request
        if request.path == AUTHORIZE and answer.status_code == 302:
            code = query_of(answer.headers["location"]).get("code", "")
            self._challenges[code] = request.args["code_challenge"]
            self._people[code] = request.form.get("sub", "")
            self._nonces[code] = request.args["nonce"]
        if request.path == TOKEN and answer.status_code == 200:
            body = answer.get_json()
            is_refresh = request.form["grant_type"] == "refresh_token"
            shown = request.form["refresh_token" if is_refresh else "code"]
            if is_refresh and self.confirms:
                body["id_token"] = self._id_token(self._people[shown], self._nonces[shown])
                answer.set_data(flask.json.dumps(body))
            if "refresh_token" in body:
                self._people[body["refresh_token"]] = self._people[shown]
                self._nonces[body["refresh_token"]] = self._nonces[shown]
        return answer

    def _id_token(self, person: str, nonce: str) -> str:
        """One as it issues them: by another sign-in."""
        browser = self.app.test_client()
        asked = {
            "client_id": CLIENT,
            "response_type": "code",
            "redirect_uri": "https://cairn.example/",
            "scope": "openid",
            "nonce": nonce,
            "code_challenge": create_s256_code_challenge(VERIFIER),
            "code_challenge_method": "S256",
        }
        sent = {"query_string": asked, "data": {"sub": person}, "base_url": self.url}
        code = query_of(browser.post(AUTHORIZE, **sent).headers["location"])["code"]
        form = {"grant_type": "authorization_code", "code": code, "code_verifier": VERIFIER}
        form |= {"redirect_uri": asked["redirect_uri"]}
        answer = browser.post(TOKEN, data=form, auth=(CLIENT, SECRET), base_url=self.url)
        return answer.get_json()["id_token"]


@contextmanager
def running_provider() -> Iterator[Provider]:
    provider = Provider()
    server = make_server("localhost", 0, provider.app, threaded=True)
    provider.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()
