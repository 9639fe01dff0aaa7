"""What each file of tests costs in seconds of CPU, those of the processes that it starts included.

    python -m pytest -p tests.costs -n 2 -q tests/service

Seconds of CPU say what a test takes on any machine, however busy; its duration does not.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.programs.program import SHARED

os.environ[SHARED] = ""  # programs are children of the worker whose tests start them

SHOWN = 40
TICKS = os.sysconf("SC_CLK_TCK")
KEY = "cpu_seconds"
_begun: dict[str, float] = {}
_of_files: Counter[str] = Counter()


def spent() -> float:
    """Seconds of CPU of this process and its descendants, those that have ended included."""
    children, seconds = defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children[int(fields[1])].append(int(folder.name))
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS
    total, found = 0.0, [os.getpid()]
    while found:
        pid = found.pop()
        total += seconds.get(pid, 0.0)
        found += children[pid]
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    _begun[item.nodeid] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        item.user_properties.append((KEY, spent() - _begun.pop(item.nodeid)))


def pytest_runtest_logreport(report):
    """Where pytest-xdist is used: in the process that hears of all tests."""
    if report.when == "teardown":
        _of_files[report.nodeid.partition("::")[0]] += dict(report.user_properties).get(KEY, 0.0)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section(f"seconds of CPU: {_of_files.total():.0f}")
    for name, seconds in _of_files.most_common(SHOWN):
        terminalreporter.line(f"{seconds:8.1f}  {name}")
