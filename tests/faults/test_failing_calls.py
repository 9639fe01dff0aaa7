"""(l) Each call of each verb fails once, in each way, and is once the last before a kill.

What fails are calls of the C library, of native threads too: see `below/failing_calls.c`. The long
run is complete: every call of every verb, as many as there are without a fault and then as long as
there is one more. `make test` walks a few calls of one verb.
"""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.faults import report
from tests.faults.below.failing_calls import CHANGE, KILL, READ, Control
from tests.faults.below.verbs import VERBS
from tests.faults.below.walk import BAD
from tests.faults.forked import ROOT, variables

RESULTS = report.RESULTS.with_name("failing_calls.json")
LONG = {"names": [[name] for name in VERBS], "kinds": None, "every": 1}
SHORT = {
    "names": [["delete step"]],
    "kinds": {CHANGE: [errno.EIO, KILL], READ: [errno.EIO]},
    "every": 43,
}
PLAN = LONG if report.is_long() else SHORT


def walked(names, folder):
    """A row for each of the verbs, from a driver that begins with the library preloaded."""
    control = Control(folder / "control")
    arguments = {
        "names": names,
        "folder": str(folder / "cases"),
        "control": str(control.path),
        "kinds": PLAN["kinds"],
        "every": PLAN["every"],
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.below.walk", json.dumps(arguments)],
        env={**os.environ, **variables(control.environment)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=report.trials(short=240, long=3600),
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout)


@pytest.mark.timeout(3600 if report.is_long() else 300)
@pytest.mark.parametrize("names", PLAN["names"], ids=", ".join)
def test_a_call_that_fails_is_told_and_leaves_a_run_that_somebody_wrote(names, tmp_path):
    rows = walked(names, tmp_path)
    for row in rows:
        lost = sum(count for outcome, count in row["outcomes"].items() if outcome in BAD)
        report.record(
            fault=f"l each call: {row['verb']}",
            store="file",
            trials=row["cases"],
            survived=row["cases"] - lost,
            lost=lost,
            note=f"{row['calls']}; {row['outcomes']}; {row['seconds']} s",
        )
        if report.is_long():
            kept = {"fault": row["verb"], "store": "file", "calls": row["calls"]}
            report.keep(RESULTS, kept | {"cases": row["cases"], "outcomes": row["outcomes"]})
    assert [line for row in rows for line in row["wrong"]] == []
    assert all(row["cases"] > 0 for row in rows)
