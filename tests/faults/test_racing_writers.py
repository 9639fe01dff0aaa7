"""(d) Two jobs, with clocks that are off and one of them stopped over its expiry: one history.

Every step that a job was told is durable stays listed, holds the bits that this job saved, and is
by the writer that its manifest names; every other save was refused; and a third job goes on. The
short run has them race in a bucket, and promoters on a disk (`test_promoters.py`).
"""

import pytest

from tests.faults import report
from tests.faults.forked import drive

FAULT = "d two writers race, clocks skewed, one stopped over its expiry"


@pytest.mark.parametrize("store", report.stores("gcs"))
def test_writers_that_race_for_a_run_make_one_history(store, tmp_path, request):
    if store == "file":
        root, environment, trials = str(tmp_path), {}, report.trials(short=2, long=60)
    else:
        double = request.getfixturevalue(store)
        root, environment, trials = double.bucket_uri, double.env, report.trials(short=2, long=40)
    found = drive(
        "racing_driver",
        {"root": root, "trials": trials, "seed": report.seed()},
        environment=environment,
        seconds=report.trials(short=240, long=3600),
    )
    broken = len(found["lost"])
    report.record(
        fault=FAULT,
        store=store,
        trials=trials,
        survived=trials - broken,
        lost=broken,
        note=f"{found['steps']} steps in {found['attempts']} attempts, {found['replaced']} jobs "
        f"replaced while stopped; refused {found['refused']}",
    )
    assert found["lost"] == []
    assert sum(found["refused"].values()) > 0, "the jobs never met: nothing was tried"
