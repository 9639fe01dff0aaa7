from datetime import UTC, datetime, timedelta, timezone
from io import StringIO

import pytest
from rich.console import Console

from cairn.service.schemas import CheckpointState
from cairn.service.sizes import Size
from tests.service.seams import tables

MOMENT = datetime(2026, 3, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
TITLES = ("run", "step", "size", "created", "state", "alias")
ROWS = [
    ("a-run", 7, Size(1500), MOMENT, CheckpointState.LISTED, None),
    ("[bold]\tx", 10, Size(0), MOMENT, CheckpointState.IN_FLIGHT, ""),
]


def printed(*, terminal: bool, width: int = 20) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=width, no_color=True)
    tables.print_table(console, TITLES, ROWS)
    return console.file.getvalue()


def test_pipe_gets_whole_values_between_tabs():
    assert printed(terminal=False).splitlines() == [
        "run\tstep\tsize\tcreated\tstate\talias",
        "a-run\t7\t1500\t2026-02-28T23:30:00Z\tlisted\t",
        "[bold] x\t10\t0\t2026-02-28T23:30:00Z\tin_flight\t",
    ]


def test_terminal_gets_readable_values_that_a_narrow_one_does_not_cut():
    lines = printed(terminal=True).splitlines()
    assert len(lines) == 3
    readable = ["a-run", "7", "1.5", "kB", "2026-02-28", "23:30", "available", "-"]
    assert lines[1].split() == readable
    assert lines[2].startswith("[bold]")


def test_pipe_gets_nothing_if_the_first_row_cannot_be_had():
    def rows():
        raise LookupError
        yield ()

    console = Console(file=StringIO(), force_terminal=False)
    with pytest.raises(LookupError):
        tables.print_table(console, TITLES, rows())
    assert console.file.getvalue() == ""


def test_no_rows_leave_the_titles():
    console = Console(file=StringIO(), force_terminal=False)
    tables.print_table(console, TITLES, [])
    assert console.file.getvalue() == "\t".join(TITLES) + "\n"


def test_moment_of_whole_seconds_is_rfc3339():
    console = Console(file=StringIO(), force_terminal=False)
    tables.print_table(console, ("at",), [(datetime(2026, 1, 1, tzinfo=UTC),)])
    assert console.file.getvalue() == "at\n2026-01-01T00:00:00Z\n"
