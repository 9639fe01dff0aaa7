"""A process killed, or failing, in the midst of a save: the others end soon, the run goes on.

`CAIRN_FAULTS=long` kills at every moment, in jobs of two and of four, in both stores.
"""

import json
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from cairn import Checkpointer, CheckpointReader, Run
from cairn.state.checkpointing.restore import restore_item
from tests.faults.report import is_long
from tests.multi_process.deaths import MOMENTS, SHAPE, position, values

JOB_SECONDS = 240
HEARTBEAT_SECONDS = 10
END_SECONDS = HEARTBEAT_SECONDS + 30
"""What the documentation promises: how long the others live on."""

pytestmark = pytest.mark.timeout(2 * JOB_SECONDS)

ONLY_IN_0 = {
    "the folder is made",
    "the parts are merged",
    "Orbax commits",
    "the step is published",
    "the step is listed",
}
NEVER_IN_0 = {"the outcome is awaited"}
STEP_2_IS_LISTED = {"the step is listed", "the outcome is awaited"}
ONLY_ON_A_DISK = {"a data file is written"}

SHORT = [
    ("file", 2, "a data file is written", 1),
    ("gs", 2, "Orbax commits", 0),
]
LONG = [
    (store, count, moment, victim)
    for store in ("file", "gs")
    for count in (2, 4)
    for moment in MOMENTS
    for victim in (0, count - 1)
    if not (moment in ONLY_IN_0 and victim)
    if not (moment in NEVER_IN_0 and not victim)
    if not (moment in ONLY_ON_A_DISK and store == "gs")
]


@pytest.fixture(scope="module")
def dying(launch, bucket, tmp_path_factory):
    """Gives the run of a case, and its job: the short ones wait for the heartbeat together."""

    def start(store, count, moment, victim):
        folder = tmp_path_factory.mktemp("deaths")
        run_uri = str(folder / "run") if store == "file" else f"gs://{bucket}/{folder.name}"
        arguments = {"run": run_uri, "moment": moment, "victim": victim}
        return run_uri, launch(
            "deaths.die_midway", arguments, count=count, heartbeat=HEARTBEAT_SECONDS
        )

    under_way = {} if is_long() else {case: start(*case) for case in SHORT}
    return lambda *case: under_way.get(case) or start(*case)


@pytest.mark.parametrize(("store", "count", "moment", "victim"), LONG if is_long() else SHORT)
def test_death_ends_the_others_soon_and_the_run_goes_on(store, count, moment, victim, dying):
    run_uri, job = dying(store, count, moment, victim)
    job.processes[victim].wait(JOB_SECONDS)
    ended = job.wait(END_SECONDS)
    assert ended[victim].status == -signal.SIGKILL, ended[victim].log
    assert [one.result for one in ended if one.result is None] == []
    assert all(one.status != 0 for one in ended)

    listed = [1, 2] if moment in STEP_2_IS_LISTED else [1]
    assert [info.step for info in Run.open(run_uri).steps()] == listed
    with Checkpointer(run_uri, writer_id="tests") as checkpointer:
        restored(run_uri, listed[-1])
        assert positions(run_uri, listed[-1]) == [
            position(listed[-1], process) for process in range(count)
        ]
        handle = checkpointer.save(3, {"model": jnp_values(3)}, meta={})
        handle.wait(END_SECONDS)
    assert handle.attempt == 2
    restored(run_uri, 3)


def jnp_values(step):
    return {name: jnp.asarray(leaf) for name, leaf in values(step).items()}


def restored(run_uri, step):
    """Reads a step's model, and checks every value of it."""
    run = Run.open(run_uri)
    uri = run.step_uri(run.step(step))
    found = restore_item(uri, "model", jnp_values(0))
    assert found["kernel"].shape == SHAPE
    for name, leaf in values(step).items():
        np.testing.assert_array_equal(found[name], leaf)


def positions(run_uri, step):
    """Where the data of each process was."""
    run = Run.open(run_uri)
    info = run.step(step)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    return [json.loads(state)["at"] for state in reader.iterator_states("train")]


FAILURES = [
    ("the arrays reach the host", 1),
    ("the folder is made", 0),
    ("a data file is written", 1),
    ("the positions are written", 1),
    ("the parts are merged", 0),
    ("Orbax commits", 0),
    ("the step is published", 0),
]


@pytest.fixture(scope="module")
def failed(launch, tmp_path_factory):
    """Two processes; at each moment of a save one of them fails."""
    arguments = {"run": str(tmp_path_factory.mktemp("failed") / "run"), "moments": FAILURES}
    return launch("deaths.fail_midway", arguments, count=2).results(JOB_SECONDS)


@pytest.mark.parametrize(("moment", "victim"), FAILURES)
def test_failure_of_one_is_told_to_both_and_leaves_no_thread_behind(failed, moment, victim):
    for index, told in enumerate(failed):
        kind, text, threads = told[moment]
        assert kind == "SaveError"
        assert "the cable was pulled" in text
        assert (f"process {victim}" in text) == (index != victim)
        assert threads == []


def test_save_after_many_failures_is_durable_on_both(failed):
    step = len(FAILURES) + 1
    assert [told["last"] for told in failed] == [[step, step]] * 2


def test_process_that_does_not_come_is_given_up_and_named(failed):
    assert failed[0]["alone"] == (
        "some processes did not come: cairn/nowhere: expected all 2 at 'the agreed place' within "
        "1 s, found process 1 missing. See their logs."
    )
