"""What a control plane costs while nobody asks it anything.

`cairn serve` with its worker, on an empty store: processor time, memory, and how long it takes from
the start to the first answer. Once with its databases in SQLite, once in PostgreSQL.

    python -m benchmarks.idle [--seconds 60] [--databases sqlite postgresql]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from examples.demo.servers import control_plane
from tests.service.databases import running_postgresql

RESULTS: Final = Path(__file__).resolve().parent / "results" / "idle.json"
SETTLE_SECONDS: Final = 70.0
"""DBOS looks for schedules every second for its first minute; what comes after is the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="how long before that")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    rows = [
        measure(database, seconds=arguments.seconds, settle=arguments.settle)
        for database in arguments.databases
    ]
    arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(database: str, *, seconds: float, settle: float) -> dict[str, Any]:
    """One row, printed."""
    with tempfile.TemporaryDirectory() as name, _databases(database) as environment:
        folder = Path(name)
        with control_plane(str(folder / "store"), folder, environment, 0) as (_, answered, process):
            time.sleep(settle)
            before, began = _processor_seconds(process.pid), time.monotonic()
            time.sleep(seconds)
            used, passed = _processor_seconds(process.pid) - before, time.monotonic() - began
            row = {
                "database": database,
                "cpu_percent": round(100 * used / passed, 2),
                "rss_bytes": _resident_bytes(process.pid),
                "first_answer_seconds": round(answered, 2),
                "seconds": round(passed, 1),
            }
    print(json.dumps(row))
    return row


@contextmanager
def _databases(kind: str) -> Iterator[Mapping[str, str]]:
    """The settings of a control plane whose databases are of this kind."""
    if kind == "sqlite":
        yield {}
        return
    with running_postgresql() as server:
        yield {"CAIRN_DATABASE_URL": server.create(), "CAIRN_JOBS_DATABASE_URL": server.create()}


def _processor_seconds(process: int) -> float:
    """Of all its threads, in the kernel too, since it began."""
    # The name, in brackets, may hold blanks; what follows it has none.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
