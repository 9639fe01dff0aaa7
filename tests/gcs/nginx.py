"""nginx in front of the double: the bytes of large downloads are sent by a native server.

The double answers a download with its headers and the name of the file (`X-Accel-Redirect`), of
which nginx sends the range that was asked for. All else goes through nginx to the double and back.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.gcs.server import bind

PROGRAM = "nginx"
PACKAGE = "nginx-light"
STARTS_WITHIN_SECONDS = 20.0
KEPT = (
    "ETag",
    "Last-Modified",
    "x-goog-generation",
    "x-goog-metageneration",
    "x-goog-hash",
    "x-goog-storage-class",
    "x-goog-stored-content-encoding",
    "x-goog-stored-content-length",
    "Content-Encoding",
)
"""Headers of a download that nginx would lose, or put its own in place of."""

CONFIGURATION = """\
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
worker_processes auto;
{user}
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  keepalive_timeout 600s;
  keepalive_requests 1000000;
  client_max_body_size 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  scgi_temp_path {folder}/scgi;
  uwsgi_temp_path {folder}/uwsgi;
  upstream double {{ server 127.0.0.1:{double}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://double;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_set_header X-Accel yes;
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 600s;
    }}
    location /_stored/ {{
      internal;
      alias {root}/;
      max_ranges 1;
      etag off;
      if_modified_since off;
      {kept}
    }}
  }}
}}
"""


def program() -> str:
    """The path of nginx; installed with apt-get, if that can be done.

    Raises:
        RuntimeError: it is not there.
    """
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    found = shutil.which(PROGRAM, path=places)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for order in (["update", "-qq"], ["install", "-y", "-qq", PACKAGE]):
            subprocess.run(["apt-get", *order], env=quietly, stdout=subprocess.DEVNULL, check=False)
        found = shutil.which(PROGRAM, path=places)
    if found is None:
        raise RuntimeError(
            f"expected the program '{PROGRAM}' on PATH or in /usr/sbin, found none: install it "
            f"(Debian: sudo apt-get install {PACKAGE}) and run this again"
        )
    return found


@contextmanager
def in_front_of(double: int, root: Path, folder: Path) -> Iterator[int]:
    """nginx while this is entered; its port.

    Args:
        double: port of the double.
        root: the double's folder.
        folder: for nginx's own files; made.

    Raises:
        RuntimeError: it is not installed, or does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with bind() as free:
        port = free.getsockname()[1]
    text = CONFIGURATION.format(
        folder=folder.resolve(),
        user=f"user {getpass.getuser()};" if os.geteuid() == 0 else "",
        double=double,
        port=port,
        root=root.resolve(),
        kept="\n      ".join(
            f"add_header {name} $upstream_http_{name.lower().replace('-', '_')};" for name in KEPT
        ),
    )
    written = folder / "nginx.conf"
    written.write_text(text)
    log = folder / "nginx.log"
    process = subprocess.Popen([program(), "-c", str(written), "-e", str(log)])
    try:
        _wait_until_it_answers(process, port, log)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    told = log.read_text() if log.exists() else ""
    raise RuntimeError(f"nginx did not start:\n{told[-2000:]}")
