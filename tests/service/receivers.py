"""A receiver of events on loopback: it checks signatures by itself, and answers as it is told."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 30.0


@dataclass(frozen=True)
class Message:
    """What was received, and what was answered."""

    uid: str
    timestamp: int
    signature: str
    body: bytes
    status: int

    @property
    def event(self) -> dict[str, Any]:
        return json.loads(self.body)["data"]

    def is_signed(self, secret: str) -> bool:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        signed = f"{self.uid}.{self.timestamp}.".encode() + self.body
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return f"v1,{expected}" in self.signature.split(" ")


Decide = Callable[[dict[str, Any]], int]
"""From an event to the status that it is answered with; 0: nothing is answered."""


class Receiver:
    """What has come, oldest first."""

    def __init__(self, decide: Decide) -> None:
        self.decide = decide
        self.messages: list[Message] = []
        self.url = ""
        self.closing = threading.Event()

    def taken(self) -> list[dict[str, Any]]:
        """Events whose message was answered 200, in the order in which they came."""
        return [one.event for one in [*self.messages] if one.status == 200]

    def wait(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < until, [one.event["kind"] for one in self.messages]
            time.sleep(0.02)


@contextmanager
def receiving(decide: Decide = lambda event: 200) -> Iterator[Receiver]:
    """A receiver; its URL is that of HTTP on 127.0.0.1."""
    receiver = Receiver(decide)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = receiver.decide(json.loads(body)["data"])
            message = Message(
                self.headers["webhook-id"],
                int(self.headers["webhook-timestamp"]),
                self.headers["webhook-signature"],
                body,
                status,
            )
            receiver.messages.append(message)
            if status == 0:
                receiver.closing.wait(PATIENCE)
                return
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{receiver.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
