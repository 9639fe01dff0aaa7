"""A store that takes a request of one process and never answers: the save fails on all of them.

One deadline is over every phase of it, whichever process waits, and for whatever: for the store, or
for the process that waits for the store.
"""

import pytest

from cairn import Run

JOB_SECONDS = 240
DEADLINE_SECONDS = 2.0
"""Instead of 90, of which a few are longer than the job may take."""

PHASES = {
    2: ("the part of process 1", {"name": r"/attempts/\d+/2/.*ocdbt\.process_1/"}),
    3: ("the part of process 0", {"name": r"/attempts/\d+/3/.*ocdbt\.process_0/"}),
    4: ("all of the step", {"name": r"/attempts/\d+/4/"}),
    5: ("Orbax's commit", {"name": r"/attempts/\d+/5/commit_success"}),
    6: ("the manifest", {"name": r"/manifests/6\.", "operation": "upload"}),
    7: ("the claim", {"name": r"/attempts/6\.json", "operation": "upload", "count": 1}),
}
"""By step: what is not answered. Every save that fails has the next begin another attempt."""

pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)


@pytest.fixture(scope="module")
def silent(launch, bucket, gcs_server):
    """What each of two processes was told, and the run."""
    run = f"gs://{bucket}/run"
    faults = {
        step: gcs_server.faults.add("hang", **{"count": None, **options})
        for step, (_, options) in PHASES.items()
    }
    arguments = {"run": run, "steps": max(PHASES) + 1, "deadline": DEADLINE_SECONDS}
    ended = launch("silences.fall_silent", arguments, count=2).wait(JOB_SECONDS)
    met = {step for step, fault in faults.items() if fault.fired}
    gcs_server.faults.clear()
    # As the documentation says of a process that ends while a request of Orbax's hangs.
    assert [one.status for one in ended] == [1, 1], "\n".join(one.log for one in ended)
    return run, [one.result for one in ended], met


@pytest.mark.parametrize("step", PHASES, ids=[name for name, _ in PHASES.values()])
def test_a_store_silent_for_one_process_fails_the_save_on_all_soon(silent, step):
    run, told, met = silent
    assert step in met
    for one in told:
        kinds, text, threads = one[str(step)]
        assert "StorageError" in kinds
        assert run in text
        assert "answer" in text
        assert threads == []


def test_the_save_after_them_is_durable_on_all_and_nothing_else_is_listed(silent):
    run, told, _ = silent
    last = max(PHASES) + 1
    assert [one["last"][0] for one in told] == [last, last]
    assert [info.step for info in Run.open(run).steps()] == [1, last]
