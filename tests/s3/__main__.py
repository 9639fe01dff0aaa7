"""`python -m tests.s3 --root DIR --port N [--bucket NAME ...]`: the double as a process.

Prints one line of JSON once it serves: its port, its URL and the variables that send clients to
it. SIGTERM and SIGINT end it with status 0.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path

from tests.gcs.errors import ConflictError
from tests.gcs.server import bind
from tests.s3.server import S3Server, client_environment


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(prog="python -m tests.s3", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder that keeps the objects")
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument(
        "--bucket", action="append", default=[], help="a bucket to make unless it is there"
    )
    options = parser.parse_args(arguments)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    with S3Server(options.root, bind(options.host, options.port)) as server:
        for name in options.bucket:
            try:
                server.store.create_bucket(name)
            except ConflictError:
                continue
        ready = {"event": "ready", "port": server.port, "url": server.url}
        print(json.dumps({**ready, "env": client_environment(server.url)}), flush=True)
        end.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
