"""(a) SIGKILL at random moments of a save loop: nothing listed is lost, and a restart just goes on.

What the kill struck is drawn from the time that a save takes here: from the first request of a
start to the third save of it. The short run kills saves on a disk, and forks in a bucket.
"""

import pytest

from tests.faults import report
from tests.faults.forked import drive

FAULT = "a SIGKILL during a save loop"


@pytest.mark.parametrize("store", report.stores("file"))
def test_a_job_killed_at_any_moment_loses_nothing_and_its_restart_goes_on(store, tmp_path, request):
    if store == "file":
        root, environment, trials = str(tmp_path), {}, report.trials(short=2, long=300)
    else:
        double = request.getfixturevalue(store)
        root, environment, trials = double.bucket_uri, double.env, report.trials(short=2, long=200)
    found = drive(
        "kill_driver",
        {
            "root": root,
            "trials": trials,
            "trials_per_run": report.trials(short=4, long=20),
            "seed": report.seed(),
        },
        environment=environment,
        seconds=report.trials(short=240, long=3600),
    )
    broken = len(found["lost"])
    report.record(
        fault=FAULT,
        store=store,
        trials=trials,
        survived=max(0, trials - broken),
        lost=broken,
        note=f"{found['steps']} steps listed; killed {found['moments']}",
    )
    assert found["lost"] == []
    assert found["steps"] > 0
