"""Connections that ask for nothing, ask slowly, or ask for too much; and readers that take time."""

import inspect
import json
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.service.http.connections import MAX_HEAD_BYTES, BoundedConnection
from tests.service.planes import running_plane

GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n"


class Impatient(BoundedConnection):
    head_seconds = 0.4
    body_seconds = 0.8
    most = 20


class Patient(BoundedConnection):
    head_seconds = body_seconds = 120.0
    most = 20


async def echo(scope, receive, send):
    """Answers with the length of the body; `/large` with 32 MB, `/early` without reading."""
    if scope["type"] == "lifespan":
        return
    size = 0
    while scope["path"] != "/early":
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": str(size).encode()})


@contextmanager
def running(protocol):
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            started.set()

    options = {"h11_max_incomplete_event_size": MAX_HEAD_BYTES, "lifespan": "off", "ws": "none"}
    config = uvicorn.Config(echo, port=0, http=protocol, log_level="critical", **options)
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def address():
    with running(Impatient) as address:
        yield address


def ends_within(connection, seconds):
    """Whether the server ends it, and after how many seconds."""
    began = time.monotonic()
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return None
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"G", GET, GET + b"X: "])
def test_connection_without_a_whole_head_ends(address, sent):
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert ends_within(connection, 60) > 0.3


def drip(connection, data, pause):
    """Send a byte at a time until the server ends the connection; the seconds that took."""
    began = time.monotonic()
    try:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(pause)
    except (BrokenPipeError, ConnectionResetError):
        return time.monotonic() - began
    return None


def test_head_that_comes_a_byte_at_a_time_ends_too(address):
    with socket.create_connection(address) as connection:
        assert drip(connection, GET * 4, 0.05) > 0.3


@pytest.mark.parametrize("path", [b"/v1/x", b"/early"])
def test_body_that_comes_a_byte_at_a_time_ends_the_connection(address, path):
    """Also where the answer was sent long ago."""
    with socket.create_connection(address) as connection:
        connection.sendall(POST.replace(b"/v1/x", path).replace(b": 10", b": 1000"))
        assert drip(connection, b"x" * 50, 0.1) > 0.6


def test_half_of_a_second_request_ends_as_the_first_would(address):
    with socket.create_connection(address) as connection:
        connection.sendall(GET + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /")
        assert ends_within(connection, 60) > 0.2


def test_requests_one_after_another_are_answered_for_longer_than_any_deadline(address):
    host, port = address[:2]
    with httpx.Client(base_url=f"http://{host}:{port}") as client:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert client.post("/x", content=b"12345").text == "5"
            time.sleep(0.1)


def test_requests_sent_together_are_answered_in_order(address):
    with socket.create_connection(address) as connection:
        connection.sendall(POST + b"1234567890" + POST + b"1234567890" + GET + b"\r\n" + b"GET /")
        assert ends_within(connection, 60) > 0.2


def test_reader_of_a_large_answer_takes_what_time_it_needs(address):
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        time.sleep(2)  # longer than every deadline
        size = 0
        while chunk := connection.recv(1 << 20):
            size += len(chunk)
        assert size > 512 * 65536


def test_one_connection_too_many_takes_the_place_of_the_one_that_waited_longest():
    with ExitStack() as stack:
        address = stack.enter_context(running(Patient))  # none ends for its own delay
        host, port = address[:2]
        halves = []
        for _ in range(Patient.most):
            halves.append(stack.enter_context(socket.create_connection(address)))
            halves[-1].sendall(b"GET /")
        time.sleep(0.1)
        assert httpx.get(f"http://{host}:{port}/x").status_code == 200
        assert ends_within(halves[0], 20) is not None
        assert ends_within(halves[-1], 0.02) is None


def test_connections_that_are_all_at_work_are_not_ended_for_another():
    with ExitStack() as stack:
        address = stack.enter_context(running(Patient))  # none ends for its own delay
        readers = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for one in readers:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            one.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.3)
        late = stack.enter_context(socket.create_connection(address))
        assert ends_within(late, 30) is not None
        assert all(one.recv(100) for one in readers)


def test_reader_who_takes_nothing_for_long_makes_room_for_another(address):
    """It takes no key to ask for a page often, and to read none of the answers."""
    host, port = address[:2]
    with ExitStack() as stack:
        for _ in range(Impatient.most):
            one = stack.enter_context(socket.create_connection(address))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            one.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(2 * Impatient.head_seconds)
        assert httpx.get(f"http://{host}:{port}/x").status_code == 200


def test_body_that_is_kept_back_makes_room_for_another_connection(address):
    host, port = address[:2]
    with ExitStack() as stack:
        for _ in range(Impatient.most):
            one = stack.enter_context(socket.create_connection(address))
            one.sendall(POST)
        time.sleep(0.1)
        assert httpx.get(f"http://{host}:{port}/x").status_code == 200


def answer_of(address, sent):
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, json.loads(body)


def test_head_that_is_too_large_is_refused_with_a_problem(address):
    for sent in (GET + b"X: " + b"x" * 2 * MAX_HEAD_BYTES, b"GET /" + b"x" * 2 * MAX_HEAD_BYTES):
        status, head, problem = answer_of(address, sent)
        assert (status, problem["status"]) == (431, 431)
        assert b"application/problem+json" in head
        assert "16384 bytes" in problem["detail"]


@pytest.mark.parametrize(
    "sent",
    [b"\r\n\r\n\r\nGET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
     GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", GET + b" folded\r\nX : y\r\n\r\n",
     GET + b"Transfer-Encoding: chunked, x\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_is_refused_with_a_problem(address, sent):
    status, _, problem = answer_of(address, sent)
    assert (status // 100, problem["type"][:19]) in ((4, "urn:cairn:problem:b"), (5, ""))


def test_uvicorn_is_as_the_deadlines_need_it():
    """What the protocol stands on: if this changes, look at `service/http/connections.py` again."""
    named = inspect.getsource(H11Protocol)
    for method in ("data_received", "on_response_complete", "connection_made", "connection_lost"):
        assert list(inspect.signature(getattr(H11Protocol, method)).parameters) == list(
            inspect.signature(getattr(BoundedConnection, method)).parameters
        )
    assert "self.send_400_response(msg)" in named
    assert "on_response=self.on_response_complete" in named
    assert "self.connections.add(self)" in named
    assert "self.timeout_keep_alive_task = None" in named


def test_eight_hundred_half_requests_keep_nobody_waiting_and_end(tmp_path):
    """Of `cairn serve`, with its own deadlines."""
    (tmp_path / "store").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with running_plane(tmp_path / "store", tmp_path) as (url, _), ExitStack() as stack:
        port = httpx.URL(url).port
        halves = []
        for number in range(800):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            one.sendall((GET if number % 2 else POST)[: -1 if number % 2 else None])
            halves.append(one)
        for _ in range(5):  # they are answered while the halves are open: those end after 10 s
            assert httpx.get(f"{url}/v1/runs", timeout=9).status_code == 200
        heads = [one for number, one in enumerate(halves) if number % 2]
        assert all(ends_within(one, 15) is not None for one in heads)
