"""A bucket that fails in every way it can: saves fail or are durable, and nothing is lost."""

import contextlib
from random import Random

import pytest

from cairn import Checkpointer, Run, StorageError
from tests.faults import report
from tests.faults.gcs_schedules import FAULTS, Trial, make_items
from tests.gcs.impatience import impatient

pytestmark = pytest.mark.timeout(3600 if report.is_long() else 300)


@pytest.fixture
def _impatient():
    """With fewer tries, too: a store that is down for good is asked in vain all the while."""
    with impatient(max_retries=5):
        yield


ALIKE = ("429", "slow")
"""A refusal as 503 is, and answers that come in the end: those of the long run alone."""
CHOSEN = [fault for fault in FAULTS if report.is_long() or fault not in ALIKE]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("fault", CHOSEN)
def test_nothing_is_lost_whatever_the_store_does(double, fault):
    count = report.trials(short=1, long=40)
    lost = refused = fired = behind = 0
    problems = []
    for number in range(count):
        rng = Random(f"{report.seed()} {fault} {number}")
        trial = Trial(f"{double.bucket_uri}/run-{number}", double.faults, FAULTS[fault], rng)
        trial.play()
        refused += trial.refused
        fired += trial.fired
        behind += trial.behind
        lost += bool(trial.problems)
        problems += [f"trial {number}: {text}" for text in trial.problems]
    report.record(
        fault=f"b {fault}",
        store=double.kind,
        trials=count,
        survived=count - lost,
        lost=lost,
        note=f"{fired} faults, {refused} calls failed, as they may"
        + (f", {behind} looks at a latest step that was not yet on the list" if behind else ""),
    )
    assert fired > 0
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("folder", ["manifests/", "attempts/"])
def test_a_restart_that_gets_an_old_list_keeps_what_was_durable(double, folder):
    uri = f"{double.bucket_uri}/run"

    def save(step):
        with Checkpointer(uri, writer_id="job") as checkpointer:
            checkpointer.save(step, make_items(step), meta={"step": step}).wait(60)

    save(1)
    double.faults.add("stale_list", predicate=lambda r: folder in f"{r.query}", count=None)
    durable = {1}
    for step in (2, 3):
        with contextlib.suppress(StorageError):  # to refuse is fine, to lose is not
            save(step)
            durable.add(step)
    double.faults.clear()
    assert durable <= {info.step for info in Run.open(uri).steps()}
