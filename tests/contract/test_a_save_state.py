"""EasyDeLState.save_state: each argument and the handle; load_or_create."""

import os
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from cairn import (
    Annotation,
    ArgumentError,
    Checkpointer,
    EasyDeLState,
    Run,
    SaveError,
    StepExistsError,
    TreeStructureError,
)
from cairn.storage.runs.writer import sync_folder
from tests.contract.subjects import SGD, SGD_INIT, assert_same_bits, host
from tests.programs.interpreter import FINALIZED
from tests.programs.program import run as run_program
from tests.state.my_model import my_model


@pytest.fixture(scope="module")
def state():
    """A state on one device whose optimizer keeps next to nothing: saves of it are quick."""
    return my_model().to_state(SGD, tx_init=SGD_INIT)


@pytest.fixture
def run(tmp_path):
    yield tmp_path / "run"
    if (tmp_path / "run").exists():
        Checkpointer.for_run(tmp_path / "run").close()


def load(reference, **arguments):
    return EasyDeLState.load_state(reference, verbose=False, **arguments)


@pytest.mark.parametrize("form", ["path", "text", "uri"])
def test_save_directory_is_a_path_a_text_or_a_uri(state, run, form):
    given = {"path": run, "text": str(run), "uri": f"file://{run}"}[form]
    handle = state.save_state(save_directory=given, wait=True, verbose=False)
    assert str(handle.uri).startswith(f"file://{run}/")
    assert_same_bits(load(run).graphstate, state.graphstate)


def test_float_dtype_casts_what_is_stored_and_not_the_state(state, run):
    state.save_state(run, float_dtype=jnp.bfloat16, wait=True, verbose=False)
    loaded = load(run)
    exact = host(state.graphstate)
    for path, leaf in host(loaded.graphstate).items():
        np.testing.assert_array_equal(leaf, exact[path].astype(jnp.bfloat16))
        assert leaf.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in exact.values()} == {np.dtype(np.float32)}
    assert_same_bits(loaded.graphother, state.graphother)
    with pytest.raises(ArgumentError, match="float_dtype: expected a floating dtype; found int32"):
        state.save_state(run, float_dtype=jnp.int32, step=2, verbose=False)


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_tells_what_is_saved(state, run, capsys, verbose):
    state.save_state(run, step=3, wait=True, verbose=verbose)
    said = capsys.readouterr().err
    assert ("saving step 3" in said) == ("step 3 is durable" in said) == verbose


@pytest.mark.parametrize("mismatch_allowed", [True, False])
def test_mismatch_allowed_decides_about_a_model_unlike_its_config(run, mismatch_allowed):
    model = my_model()
    model.config = model.config.replace(num_layers=3)
    other = model.to_state()
    if mismatch_allowed:
        other.save_state(run, mismatch_allowed=True, wait=True, verbose=False)
        assert Run.open(run).latest_step() == 0
        return
    with pytest.raises(TreeStructureError, match="layers/2/kernel: missing"):
        other.save_state(run, mismatch_allowed=False, verbose=False)
    assert not run.exists()


@pytest.mark.parametrize("save_optimizer", [True, False])
def test_save_optimizer_decides_whether_it_is_stored(state, run, save_optimizer):
    handle = state.save_state(run, save_optimizer=save_optimizer, wait=True, verbose=False)
    manifest = Run.open(run).manifest(Run.open(run).step(handle.step))
    assert ("optimizer" in manifest.items) == save_optimizer
    assert (load(run).opt_state is not None) == save_optimizer


@pytest.mark.parametrize("enable", [None, True, False])
def test_enable_decides_whether_anything_is_saved(state, run, enable):
    handle = state.save_state(run, enable=enable, verbose=False)
    handle.wait()
    assert handle.done
    assert run.exists() == (enable is not False)


@pytest.mark.parametrize("step", [None, 12])
def test_step_numbers_the_checkpoint(state, run, step):
    handle = state.replace(step=jnp.int32(4)).save_state(run, step=step, wait=True, verbose=False)
    expected = 4 if step is None else 12
    assert handle.step == expected
    assert Run.open(run).latest_step() == expected
    assert int(load(run).step) == expected


@pytest.fixture
def gate(monkeypatch):
    """Holds saves back in the background until it is set."""
    opened = threading.Event()

    def hold(*args, **kwargs):
        assert opened.wait(60)
        return sync_folder(*args, **kwargs)

    monkeypatch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", hold)
    yield opened
    opened.set()


def test_wait_returns_once_the_step_is_durable(state, run):
    handle = state.save_state(run, wait=True, verbose=False)
    assert handle.done
    assert Run.open(run).latest_step() == handle.step


def test_without_wait_the_handle_says_when_it_is_done(state, run, gate):
    handle = state.save_state(run, wait=False, verbose=False)
    assert not handle.done
    with pytest.raises(TimeoutError, match="still being saved"):
        handle.wait(timeout=0.01)
    assert Run.open(run).latest_step() is None
    gate.set()
    handle.wait()
    assert handle.done
    assert Run.open(run).latest_step() == 0


def test_the_handle_names_step_and_uri(state, run):
    handle = state.save_state(run, step=5, wait=True, verbose=False)
    assert handle.step == 5
    info = Run.open(run).latest()
    assert handle.uri == Run.open(run).step_uri(info)
    assert (run / "attempts/1/5/_CHECKPOINT_METADATA").exists()


def test_a_failure_in_the_background_surfaces_on_wait_and_as_error(state, run, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr("cairn.state.checkpointing.saves.save_job.sync_folder", fail)
        handle = state.save_state(run, verbose=False)
        with pytest.raises(SaveError, match="the disk went away"):
            handle.wait()
    assert handle.error is not None
    state.save_state(run, step=1, wait=True, verbose=False)
    assert Run.open(run).latest_step() == 1


def test_overwrite_replaces_the_step_and_sets_later_ones_aside(state, run):
    for step in (1, 2):
        state.save_state(run, step=step, extras={"n": step}, verbose=False)
    with pytest.raises(StepExistsError):
        state.save_state(run, step=1, verbose=False)
    state.save_state(run, step=1, overwrite=True, extras={"n": 10}, wait=True, verbose=False)
    assert [info.step for info in Run.open(run).steps()] == [1]
    assert load(run).extras == {"n": 10}


def test_metrics_and_labels_are_kept_with_the_checkpoint(state, run):
    state.save_state(run, metrics={"loss": 1.25}, labels={"note": "good"}, wait=True, verbose=False)
    found = Run.open(run).objects.read("annotations/0.1.json")
    annotation = Annotation.parse(found.value, "annotation")
    assert annotation.metrics == {"loss": 1.25}
    assert annotation.labels == {"note": "good"}


def test_extras_come_back_from_load_state(state, run):
    extras = {"position": 17, "rng": [1, 2], "files": {"a": True}}
    state.save_state(run, extras=extras, wait=True, verbose=False)
    assert load(run).extras == extras
    assert state.extras == {}


SCRIPT = """
import sys
from tests.contract.subjects import SGD
from tests.state.my_model import my_model
if sys.argv[2] == "broken":
    import cairn.state.checkpointing.saves.save_job
    def fail(*args):
        raise OSError("the disk went away")
    cairn.state.checkpointing.saves.save_job.sync_folder = fail
state = my_model((1, 1, 1, 1)).to_state(SGD)
state.save_state(sys.argv[1])
"""


@pytest.mark.parametrize("disk", ["sound", "broken"])
def test_a_script_whose_last_line_is_save_state_exits_once_durable_or_fails(run, disk):
    """The process waits for save_state: exit code 0 means durable, another one that it failed."""
    arguments, folder = ["-c", SCRIPT, str(run), disk], Path(__file__).parents[2]
    done = run_program(arguments, cwd=folder, env={**os.environ, FINALIZED: "1"}, timeout=240)
    assert (done.returncode == 0) == (disk == "sound"), done.stderr
    assert Run.open(run).latest_step() == (0 if disk == "sound" else None)
    assert ("the disk went away" in done.stderr) == (disk == "broken")


def test_load_or_create_creates_once_and_loads_from_the_uri_after(state, run):
    made = []

    def create():
        made.append(state)
        return state

    first = EasyDeLState.load_or_create(uri=run, create=create, verbose=False)
    assert first is state
    first.save_state(run, step=5, wait=True, verbose=False)
    second = EasyDeLState.load_or_create(f"{run}", create, verbose=False)
    assert int(second.step) == 5
    assert made == [state]
