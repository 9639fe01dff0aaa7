"""What a run takes, beside what `du` says of its folder."""

import subprocess

import jax.numpy as jnp
import pytest

from cairn import Checkpointer, Run, StepState, collect_garbage, delete_step, parse_uri
from cairn.storage.runs.usage import run_usage

FROZEN = jnp.arange(300_000, dtype=jnp.float32)


def save(uri, steps):
    """Steps whose larger leaf stays as it is, so that later ones link it."""
    with Checkpointer(str(uri)) as checkpointer:
        for step in steps:
            tree = {"frozen": FROZEN, "trained": jnp.full(1000 * step, step, jnp.float32)}
            checkpointer.save(step, {"model": tree}, meta={}).wait()
    return Run.open(uri)


def du(folder):
    """Bytes of the files below a folder, names of the same file once, as `du` counts them."""
    files = subprocess.run(["find", folder, "-type", "f", "-print0"], stdout=-1, check=True).stdout
    counted = ["du", "--bytes", "--total", "--files0-from=-"]
    told = subprocess.run(counted, input=files, stdout=-1, check=True).stdout
    return int(told.split()[-2])


@pytest.fixture
def run(tmp_path):
    return save(tmp_path / "run", [1, 2, 3])


def test_a_run_takes_what_du_says_to_the_byte(run, tmp_path):
    found = run_usage(run)
    assert found.nbytes == sum(found.uses.values()) == du(tmp_path / "run")
    assert found.uses["records"] > 0
    (tmp_path / "run" / "attempts" / "1" / ".cairn-tmp-half").write_bytes(b"half" * 1000)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    after = run_usage(run)
    assert after.nbytes == found.nbytes + 4004 == du(tmp_path / "run")
    assert after.uses["other"] == found.uses["other"] + 4000


def test_what_steps_have_in_common_counts_for_the_first(run):
    first, second, third = run_usage(run).steps
    assert [one.step for one in (first, second, third)] == [1, 2, 3]
    assert (first.added, first.state) == (first.nbytes, StepState.LISTED)
    assert first.nbytes > FROZEN.nbytes
    assert second.nbytes > FROZEN.nbytes > second.added == second.own
    assert third.added == third.own
    assert sum(one.added for one in run_usage(run).steps) == run_usage(run).uses["steps"]


def test_what_goes_with_a_step_is_its_own(run, tmp_path):
    before, own = du(tmp_path / "run"), run_usage(run).steps[1].own
    delete_step(run, run.step(2), by="me", grace=0)
    found = run_usage(run)
    assert [one.state for one in found.steps].count(StepState.TRASHED) == 1
    assert found.garbage >= own
    collect_garbage(run, by="me")
    after = run_usage(run)
    assert after.nbytes == du(tmp_path / "run")
    assert before - after.nbytes >= own
    assert (len(after.steps), after.garbage) == (2, 0)


def test_a_run_in_a_bucket_takes_all_its_objects(gcs):
    run = save(parse_uri(gcs.bucket_uri) / "run", [1, 2])
    found = run_usage(run)
    objects = run.files.walk()
    assert (found.nbytes, found.files) == (sum(one.size for one in objects), len(objects))
    assert [one.own for one in found.steps] == [one.nbytes for one in found.steps]


def test_an_empty_run_takes_its_records(tmp_path):
    run = Run.create(tmp_path / "empty")
    found = run_usage(run)
    assert found.nbytes == found.uses["records"] == du(tmp_path / "empty")
    assert (found.steps, found.garbage) == ((), 0)


def test_what_a_save_under_way_has_written_is_its_steps(run, tmp_path):
    before = run_usage(run)
    half = tmp_path / "run" / "attempts" / "1" / "4.orbax-checkpoint-tmp-7" / "model"
    half.mkdir(parents=True)
    (half / "values").write_bytes(b"half" * 1000)
    after = run_usage(run)
    assert (after.steps[-1].step, after.steps[-1].nbytes) == (4, 4000)
    assert after.uses["records"] == before.uses["records"]
    assert after.nbytes == before.nbytes + 4000 == du(tmp_path / "run")
