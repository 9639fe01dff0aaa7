"""The `cairn` command as a shell runs it."""

import os
import pty
import subprocess
import sys
from pathlib import Path

CAIRN = (sys.executable, "-m", "cairn")


def environment(url: str | None = None, **variables: str) -> dict[str, str]:
    """Ours without any setting of Cairn's, then these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
    address = {} if url is None else {"CAIRN_URL": url}
    return {**kept, "COLUMNS": "80", **address, **variables}


def cairn(
    *arguments: str, url: str | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it, with standard output and error piped."""
    return subprocess.run(
        [*CAIRN, *arguments],
        env=environment(url, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def cairn_on_a_terminal(*arguments: str, url: str) -> tuple[int, str]:
    """Run it on an 80-column terminal; its exit status and everything it showed."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*CAIRN, *arguments],
        env=environment(url, TERM="xterm"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown = bytearray()
    while chunk := _read(master):
        shown += chunk
    os.close(master)
    return process.wait(120), shown.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's end of file of a terminal
        return b""
