"""Requests as no client makes them, byte for byte, to `cairn serve` with keys."""

import re
import socket
from contextlib import suppress

import httpx
import pytest

from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.stores import make_run


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plane")
    (folder / "store").mkdir()
    make_run(folder / "store" / "run", [1])
    made = cairn_here(
        *("keys", "create", "--name", "ana", "--data-dir", str(folder / "control-plane")),
        CAIRN_ROOT=str(folder / "store"),
    )
    with running_plane(folder / "store", folder, {"CAIRN_AUTH": "keys"}) as (url, _):
        yield httpx.URL(url).port, made.stdout.strip(), folder


def ask(port, *lines, body=b"", patience=20.0):
    """Status of the first answer, everything that was answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        answer = b""
        with suppress(TimeoutError, ConnectionResetError):
            while chunk := connection.recv(65536):
                answer += chunk
    return int(answer.split()[1]), answer


CLOSE = "Connection: close"
HOST = "Host: cairn.example"
RUNS = "GET /v1/runs HTTP/1.1"


def test_key_is_answered(plane):
    port, key, _ = plane
    for header in (f"Authorization: Bearer {key}", f"authorization:bearer   {key}  "):
        status, answer = ask(port, RUNS, HOST, header, CLOSE)
        assert (status, b'"name":"run"' in answer) == (200, True)


@pytest.mark.parametrize(
    "target",
    ["//v1/runs", "/V1/runs", "/v1//runs", "/v1/./runs", "/v1/runs/", "/%76%31/runs", "/v1%2fruns",
     "/healthz/../v1/runs", "/healthz%2f..%2fv1%2fruns", "/healthz;/v1/runs", "/healthz%00/v1/runs",
     "/static/../v1/runs", "/static/%2e%2e/v1/runs", "/static/..%2f..%2fpages.py",
     "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/....//pages.py",
     "/sign-in/../v1/runs", "/sign-in%3f/v1/runs", "http://127.0.0.1/v1/runs", "http://127.0.0.1/healthz/../v1/runs",
     "*", "/v1/runs#/healthz", "/v1/runs?/healthz", "/openapi.json", "/docs", "/redoc", "/metrics"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "CONNECT"])
def test_no_spelling_of_a_path_goes_around_the_keys(plane, method, target):
    port, _, folder = plane
    status, answer = ask(port, f"{method} {target} HTTP/1.1", HOST, CLOSE)
    assert status in (400, 401, 404, 405), answer
    if status != 401:
        assert target.startswith("/static/") or status == 400
    for secret in (b'"runs"', b'"paths"', b"root:", b"APIRouter", str(folder).encode()):
        assert secret not in answer


@pytest.mark.parametrize(
    "headers",
    [("Authorization: Bearer {key}", "Authorization: Bearer x"),
     ("Authorization: Bearer x", "Authorization: Bearer {key}"),
     ("Authorization: Bearer x, Bearer {key}",), ("Authorization : Bearer {key}",),
     ("Authorization: Bearer\r\n {key}",), ("Authorization: Basic {key}",),
     ("X-Authorization: Bearer {key}",), ("Proxy-Authorization: Bearer {key}",),
     ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1"),
     ("X-Original-URL: /healthz",), ("X-Rewrite-URL: /healthz",), ("X-HTTP-Method-Override: GET",),
     ("Host: localhost",), ("Cookie: cairn_session={key}",),
     ("Cookie: __Host-cairn_session={key}",), ("Upgrade: websocket", "Connection: Upgrade"),
     ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", "Connection: Upgrade, HTTP2-Settings"),
     ("Authorization: Bearer \x00{key}",), ("Authorization: Bearer {key}\xe9",)],
)  # fmt: skip
def test_no_header_but_the_one_lets_anybody_in(plane, headers):
    port, key, _ = plane
    status, answer = ask(port, RUNS, HOST, *(one.format(key=key) for one in headers), CLOSE)
    folded = headers == ("Authorization: Bearer\r\n {key}",)  # HTTP/1.0's way; h11 unfolds it
    assert status in (400, 401) or (folded and status == 200), answer
    assert key.encode() not in answer


def test_request_hidden_in_the_body_of_another_is_no_request_of_its_callers(plane):
    port, key, _ = plane
    hidden = f"{RUNS}\r\n{HOST}\r\n\r\n".encode()
    for lengths in (
        (f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked"),
        ("Content-Length: 0", f"Content-Length: {len(hidden)}"),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        ("Transfer-Encoding : chunked",),
        ("Content-Length: +0",),
    ):
        _, answer = ask(
            port, "POST /v1/runs HTTP/1.1", HOST, f"Authorization: Bearer {key}", *lengths,
            body=b"0\r\n\r\n" + hidden, patience=0.5,
        )  # fmt: skip
        assert b'"runs"' not in answer


def test_second_request_on_a_connection_needs_a_key_of_its_own(plane):
    port, key, _ = plane
    first = f"{RUNS}\r\n{HOST}\r\nAuthorization: Bearer {key}\r\n\r\n"
    _, answer = ask(port, first + RUNS, HOST, CLOSE)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"401"]


def test_body_of_who_is_not_known_is_not_waited_for(plane):
    port, _, _ = plane
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/keys HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_log_of_the_server_has_no_key(plane):
    port, key, folder = plane
    ask(port, RUNS, HOST, f"Authorization: Bearer {key}x", CLOSE)
    ask(port, f"GET /v1/runs?key={key} HTTP/1.1", HOST, CLOSE)
    log = (folder / "control-plane.log").read_text()
    assert key not in log
    assert key.split("_", 2)[2] not in log
