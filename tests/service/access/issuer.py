"""A little OpenID Connect issuer on loopback, with real keys."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

PRIVATE = {
    "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "rsa-2": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ec": ec.generate_private_key(ec.SECP256R1()),
    "ec-384": ec.generate_private_key(ec.SECP384R1()),
    "ed": ed25519.Ed25519PrivateKey.generate(),
    "short": rsa.generate_private_key(public_exponent=65537, key_size=1024),
}
KINDS = {"rsa": RSAAlgorithm, "short": RSAAlgorithm, "ec": ECAlgorithm, "ed": OKPAlgorithm}
AUDIENCE = "cairn"
ENDPOINTS = ("authorization", "token")
METHODS = {"code_challenge_methods_supported": ["plain"]}


def public(kid: str, **more: Any) -> dict[str, Any]:
    """The published half of a key."""
    kind = KINDS[kid.partition("-")[0]]
    return {**kind.to_jwk(PRIVATE[kid].public_key(), as_dict=True), "kid": kid, **more}


class Issuer:
    """What it publishes can be changed while it runs.

    Attributes:
        keys: Published ones.
        asked: Paths of the requests so far.
        failing: Answers 500 then.
        answer: What its token endpoint answers, whatever it is asked.
        credentials: What it was asked with last: by which client, with which secret, and where.
        silent: Seconds before each answer.
    """

    def __init__(self) -> None:
        self.keys = [public(kid) for kid in ("rsa", "ec", "ec-384", "ed")]
        self.asked: list[str] = []
        self.failing = False
        self.silent = 0.0
        self.answer: dict[str, Any] = {}
        self.credentials = ("", "", "")
        self.changed: dict[str, Any] = {}
        self.url = ""

    def token(self, kid: str = "rsa", algorithm: str = "RS256", **changed: Any) -> str:
        """A token of Ana's; `None` leaves a claim out; `headers` are added."""
        now = int(time.time())
        headers = changed.pop("headers", {})
        key = changed.pop("key", PRIVATE.get(kid))
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ana",
            "iat": now,
            "exp": now + 300,
            "groups": ["ml"],
        } | changed
        claims = {name: value for name, value in claims.items() if value is not None}
        sent = {
            name: value for name, value in ({"kid": kid} | headers).items() if value is not None
        }
        return jwt.encode(claims, key, algorithm=algorithm, headers=sent)


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked.append(self.path)
            time.sleep(issuer.silent)
            if self.path.endswith("/openid-configuration"):
                body = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"} | issuer.changed
                body |= {f"{name}_endpoint": f"{issuer.url}/{name}" for name in ENDPOINTS} | METHODS
            else:
                body = {"keys": issuer.keys}
            self._send(body)

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            sent = {name: form.get(name, [""])[0] for name in ("client_id", "client_secret")}
            issuer.credentials = (self.headers.get("Authorization", ""), *sent.values())
            self._send(issuer.answer)

        def _send(self, body: dict[str, Any]) -> None:
            self.send_response(500 if issuer.failing else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()
