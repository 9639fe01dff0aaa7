"""`cairn` and `python` for shell scripts, forked as `Program` forks what tests start.

A folder for PATH: each command asks for its program through a socket beside it, hands over its
streams, passes signals on, and ends as the program ends. What can't be forked (an interpreter that
reads its program, `JAX_` variables of its own) is started as ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.programs.interpreter import MESSAGE_BYTES
from tests.programs.program import hand_on

COMMANDS = {"cairn": ["-m", "cairn.service.command.cli"], "python": []}

_SCRIPT = """#!{interpreter} -IS
import array, json, os, signal, socket, sys

FIRST = {first}
arguments = FIRST + sys.argv[1:]


def start_afresh():
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])


if not arguments or not (arguments[0] in ("-m", "-c") or arguments[0].endswith(".py")):
    start_afresh()
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect({address!r})
asked = {{"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(line, [json.dumps(asked).encode()], [0, 1, 2])
pid = json.loads(line.recv(64))
if not pid:
    start_afresh()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = json.loads(line.recv(64) or b"-9")
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """The folder, with the commands in it; they work inside.

    Args:
        folder: an empty one; its path is short enough for a socket's.
    """
    address = folder / "socket"
    for name, first in COMMANDS.items():
        path = folder / name
        text = _SCRIPT.format(
            interpreter=sys.executable,
            first=first,
            real=str(Path(sys.executable).parent / name),
            address=str(address),
        )
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen()
        answers = threading.Thread(target=_answer, args=(listening,), daemon=True)
        answers.start()
        try:
            yield folder
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            answers.join()


def _answer(listening: socket.socket) -> None:
    while True:
        try:
            line, _ = listening.accept()
        except OSError:  # nobody asks any more
            return
        with line:
            message, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
            try:
                hand_on(json.loads(message), [line.fileno(), *files])
            except ValueError:
                with contextlib.suppress(OSError):
                    line.send(b"0")
            finally:
                for file in files:
                    os.close(file)
