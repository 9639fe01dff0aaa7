"""Servers on loopback for tests of the client: the real application, and a scripted one."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvicorn
from fastapi import FastAPI


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Run an application on a free port of this machine; gives its URL."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list | None = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(30)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


Reply = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def scripted(*replies: Reply) -> Iterator[tuple[str, list[BaseHTTPRequestHandler]]]:
    """A server that answers each request with the next reply; gives its URL and the requests."""
    requests: list[BaseHTTPRequestHandler] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append(self)
            replies[min(len(requests), len(replies)) - 1](self)
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def reply(status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> Reply:
    """An answer; a `length` beyond the body's is a connection that breaks off."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if length is not None:
            handler.send_header("Content-Length", str(length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def silent_server() -> Iterator[tuple[str, Callable[[], bool]]]:
    """A server that answers nobody; its URL, and whether its first client went away in time.

    That is, long before a client goes away that was not told how long to wait.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:

        def first_goes() -> bool:
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(30)
                try:
                    while connection.recv(4096):
                        pass
                except TimeoutError:
                    return False
            return True

        gone = pool.submit(first_goes)
        yield f"http://127.0.0.1:{silent.getsockname()[1]}", gone.result
