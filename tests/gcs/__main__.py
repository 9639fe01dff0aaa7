"""`python -m tests.gcs --root DIR --port N [--bucket NAME ...]`: the double as a process.

Prints one line of JSON once it serves: its port, its URL and the variables that send clients to
it. SIGTERM and SIGINT end it with status 0; started again on the same folder, it goes on with
the same objects and generations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
from pathlib import Path

from tests.gcs import nginx
from tests.gcs.errors import ConflictError
from tests.gcs.nginx_check import ensure_same
from tests.gcs.server import GcsServer, bind, client_environment


def main(arguments: list[str] | None = None) -> int:
    """Serves until told to end."""
    parser = argparse.ArgumentParser(prog="python -m tests.gcs", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder that keeps the objects")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument(
        "--bucket", action="append", default=[], help="a bucket to make unless it is there"
    )
    parser.add_argument(
        "--nginx", action="store_true", help="nginx in front, which sends what is downloaded"
    )
    options = parser.parse_args(arguments)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    with contextlib.ExitStack() as stack:
        listener = bind(options.host, options.port)
        server = stack.enter_context(GcsServer(options.root, listener))
        for name in options.bucket:
            try:
                server.store.create_bucket(name)
            except ConflictError:
                continue
        port = server.port
        if options.nginx:
            folder = options.root / "nginx"
            port = stack.enter_context(nginx.in_front_of(server.port, options.root, folder))
        url = f"http://{server.host}:{port}"
        if options.nginx:
            ensure_same(url, server.url, server.store)
        ready = {"event": "ready", "port": port, "url": url, "env": client_environment(url)}
        print(json.dumps(ready), flush=True)
        end.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
