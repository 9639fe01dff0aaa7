"""The position in the data is saved with the step, and data goes on there after a restore."""

import itertools
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from pydantic import ValidationError

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    InvalidURIError,
    IteratorMismatchError,
    Manifest,
    NotFoundError,
    Run,
    SaveError,
    StepExistsError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    check_run,
    fork_run,
    load,
    repair_run,
    verify_step,
)
from cairn.storage.runs.records.layout import iterator_file, manifest_file
from tests.state.seams import engine
from tests.state.seams import iterators as positions
from tests.storage.counting import Loader, Numbers
from tests.storage.states import raws

STATE = iterator_file("train", 0, 1)


def tree(step=1):
    return {"model": {"w": jnp.full((4, 4), float(step))}}


@pytest.fixture
def run_uri(some_root_uri):
    return some_root_uri / "run"


@pytest.fixture
def checkpointer(run_uri):
    with Checkpointer(run_uri, writer_id="job") as made:
        yield made


@pytest.fixture
def at_two(tmp_path):
    """A run on a disk whose step 1 was saved when the iterator "train" was at 2."""
    with Checkpointer(tmp_path / "run", writer_id="job") as made:
        made.save(1, tree(), iterators={"train": Numbers(2)})
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize("make", [Numbers, Loader])
def test_data_goes_on_where_the_step_was_saved(checkpointer, make):
    train, test = make(), make(100)
    for step in (1, 2):
        next(train)
        checkpointer.save(step, tree(step), iterators={"train": train, "test": test})
        next(train)  # at once: the state was taken when `save` was called
    for step, at in [(1, 1), (2, 3)]:
        train, test = make(50), make(50)
        found = checkpointer.restore(tree(), step=step, iterators={"train": train, "test": test})
        assert raws(found) == raws(tree(step))
        assert (train.at, test.at) == (at, 100)


def test_a_state_that_the_iterator_goes_on_changing_is_saved_as_it_was(checkpointer):
    class Living(Numbers):
        def __init__(self):
            self.state = {"at": 1, "seen": [1]}

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    train = Living()
    handle = checkpointer.save(1, tree(), iterators={"train": train})
    train.state["at"] = 2
    train.state["seen"].append(2)
    handle.wait()
    checkpointer.restore(tree(), iterators={"train": train})
    assert train.state == {"at": 1, "seen": [1]}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_reads_the_step_as_ever(at_two):
    folder = at_two.step_uri(at_two.step(1)).local_path
    found = ocp.load_checkpointables(folder)
    assert sorted(found) == ["meta", "model"]
    np.testing.assert_array_equal(found["model"]["w"], np.ones((4, 4)))


def test_a_step_tells_of_its_iterators(at_two):
    manifest = at_two.manifest(at_two.step(1))
    assert manifest.iterators == {"train": 1}
    reader = CheckpointReader.open(at_two.step_uri(at_two.step(1)), manifest)
    assert reader.iterators == {"train": 1}
    assert reader.iterator_states("train") == [b'{"at": 2}']
    with pytest.raises(NotFoundError, match="'train' of 1 process, found 'test'"):
        reader.iterator_states("test")
    with pytest.raises(NotFoundError, match=r"found 'train' of processes \[1\]"):
        reader.iterator_states("train", [1])


def test_a_forged_name_leads_nowhere(at_two):
    info = at_two.step(1)
    manifest = at_two.manifest(info).model_copy(update={"iterators": {"../../../run": 1}})
    reader = CheckpointReader.open(at_two.step_uri(info), manifest)
    with pytest.raises(InvalidURIError, match="non-empty segments other than"):
        reader.iterator_states("../../../run")
    with pytest.raises(ValidationError):
        Manifest.model_validate(manifest.model_dump() | {"iterators": {"train": 10**12}})


def test_the_manifest_of_a_step_without_iterators_is_as_it_was(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tree())
    run = Run.open(tmp_path / "run")
    assert b"iterators" not in run.objects.read(manifest_file(1, 1)).value
    with pytest.raises(
        IteratorMismatchError, match=r"as the step has them: none.*Restore without iterators="
    ):
        load(run.uri, tree(), iterators={"train": Numbers()})


# -- what is refused at a save -------------------------------------------------------------------


def counting():
    yield from itertools.count()


@pytest.mark.parametrize(
    ("iterators", "problem"),
    [
        ({"train": counting()}, "train: expected get_state and set_state.*found builtins.gen"),
        ({"train": iter([1])}, "train: .*found builtins.list_iterator without"),
    ],
)
def test_what_has_no_state_is_refused_by_its_name(checkpointer, iterators, problem):
    with pytest.raises(UnsupportedLeafError, match=problem):
        checkpointer.save(1, tree(), iterators=iterators)
    assert checkpointer.steps() == []


def test_all_that_can_not_be_stored_is_told_at_once_and_nothing_is_written(tmp_path):
    class Odd(Numbers):
        def get_state(self):
            return {"key": jnp.arange(2), "seen": [{1}]}

    same = Numbers()
    iterators = {"odd": Odd(), "one": same, "other": same, "gone": counting()}
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(UnsupportedLeafError) as caught:
        checkpointer.save(1, tree(), iterators=iterators)
    assert [problem[:30] for problem in caught.value.problems] == [
        "other: the very iterator that ",
        "odd: state['key']: jaxlib._jax",
        "odd: state['seen'][0]: builtin",
        "gone: expected get_state and s",
    ]
    assert not (tmp_path / "run").exists()


def test_an_iterator_that_fails_is_told_by_its_name(checkpointer):
    class Broken(Numbers):
        def get_state(self):
            raise RuntimeError("the worker died")

    with pytest.raises(UnsupportedLeafError, match=r"iterators: 'train'.*RuntimeError: the worker"):
        checkpointer.save(1, tree(), iterators={"train": Broken()})


@pytest.mark.parametrize(
    ("iterators", "error"),
    [
        (Numbers(), UnsupportedFormatError),
        ([Numbers()], UnsupportedFormatError),
        ({3: Numbers()}, InvalidURIError),
        ({"a/b": Numbers()}, InvalidURIError),
        ({"..": Numbers()}, InvalidURIError),
        ({"": Numbers()}, InvalidURIError),
    ],
)
def test_iterators_without_a_name_that_can_be_used_are_refused(checkpointer, iterators, error):
    with pytest.raises(error, match="iterator"):
        checkpointer.save(1, tree(), iterators=iterators)
    checkpointer.save(1, tree()).wait()
    with pytest.raises(error, match="iterator"):
        checkpointer.restore(tree(), iterators=iterators)


def test_a_state_as_large_as_data_is_refused(checkpointer, monkeypatch):
    class Buffering(Numbers):
        def get_state(self):
            return {"buffer": [bytes(4096)] * 3}

    monkeypatch.setattr(positions, "MAX_STATE_BYTES", 10_000)
    with pytest.raises(UnsupportedLeafError, match=r"at most 10000 bytes.*found 'train': 164"):
        checkpointer.save(1, tree(), iterators={"train": Buffering()})


@pytest.mark.parametrize("name", ["d", "model", "meta", "cairn.index", "process_1", "é", "a b"])
def test_an_iterator_may_have_the_name_of_anything_else(checkpointer, run_uri, name):
    checkpointer.save(1, tree(), iterators={name: Numbers(4)}).wait()
    checkpointer.restore(tree(), iterators={name: (found := Numbers())})
    assert found.at == 4
    assert verify_step(Run.open(run_uri), 1).ok


def test_a_refused_save_leaves_the_iterator_and_the_step_alone(checkpointer):
    train = Numbers(3)
    checkpointer.save(1, tree(), iterators={"train": train}).wait()
    next(train)
    with pytest.raises(StepExistsError):
        checkpointer.save(1, tree(), iterators={"train": train})
    assert train.at == 4
    checkpointer.restore(tree(), iterators={"train": train})
    assert train.at == 3
    next(train)
    checkpointer.save(1, tree(), iterators={"train": train}, overwrite=True).wait()
    checkpointer.restore(tree(), iterators={"train": (found := Numbers())})
    assert found.at == 4


# -- what is refused at a restore ----------------------------------------------------------------


def test_names_that_the_step_does_not_have_are_all_told_and_none_is_set(at_two):
    train = Numbers(7)
    iterators = {"train": train, "tset": Numbers(), "same": train, "gone": counting()}
    with pytest.raises(IteratorMismatchError) as caught:
        load(at_two.uri, tree(), iterators=iterators)
    assert "step 1: expected iterators as the step has them: train of 1 process" in str(
        caught.value
    )
    assert caught.value.problems == (
        "same: the very iterator that is train",
        "tset: the step has no iterator of this name",
        "same: the step has no iterator of this name",
        "gone: the step has no iterator of this name",
    )
    assert train.at == 7


def test_an_iterator_that_can_not_be_set_is_refused_before_anything_is_read(at_two):
    with pytest.raises(IteratorMismatchError, match="train: expected get_state and set_state"):
        load(at_two.uri, tree(), iterators={"train": counting()})


def test_an_iterator_that_refuses_the_state_is_named(at_two):
    class Other(Numbers):
        def set_state(self, state):
            raise KeyError("next_index")

    with pytest.raises(IteratorMismatchError, match=r"step 1: train: .*set_state\(\) to take what"):
        load(at_two.uri, tree(), iterators={"train": Other()})


def test_what_does_not_load_moves_no_iterator(at_two):
    train = Numbers(7)
    with pytest.raises(TreeMismatchError):
        load(at_two.uri, {"model": {"w": jnp.ones(3)}}, iterators={"train": train})
    (values,) = (Path(at_two.step_uri(at_two.step(1)).local_path) / "model").glob("**/d/*")
    values.write_bytes(bytes(values.stat().st_size))
    with pytest.raises(CorruptionError):
        load(at_two.uri, tree(), iterators={"train": train})
    assert train.at == 7


def test_positions_that_are_left_out_are_warned_of_once(at_two, caplog):
    with caplog.at_level(logging.WARNING, "cairn.restore"):
        load(at_two.uri, tree(), iterators={})
        load(at_two.uri, tree(), only="model")
        assert caplog.text == ""
        for _ in range(2):
            load(at_two.uri, tree())
    (record,) = caplog.records
    assert "step 1 has the position of train, which is not restored" in record.message
    assert "iterators={} to begin anew" in record.message


def test_of_several_positions_those_left_out_are_warned_of(tmp_path, caplog):
    with Checkpointer(tmp_path / "run") as checkpointer:
        items = {**tree(), "optimizer": {"mu": jnp.zeros(2)}}
        checkpointer.save(1, items, iterators={"train": Numbers(1), "test": Numbers(2)})
        checkpointer.restore(tree())  # to evaluate it
        assert caplog.text == ""
        checkpointer.restore(items, iterators={"train": (found := Numbers())})
    assert found.at == 1
    assert "has the position of test, which" in caplog.text


# -- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "swapped"])
def test_damage_to_a_position_is_found_and_never_taken_for_data(tmp_path, damage):
    with Checkpointer(tmp_path / "run", writer_id="job") as checkpointer:
        checkpointer.save(1, tree(), iterators={"train": Numbers(2), "test": Numbers(3)})
    run = Run.open(tmp_path / "run")
    assert verify_step(run, 1).ok
    folder = tmp_path / "run" / "attempts" / "1" / "1"
    path, other = folder / STATE, folder / iterator_file("test", 0, 1)
    if damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    else:
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    report = verify_step(run, 1)
    assert not report.ok
    assert not report.loads
    assert any(problem.startswith(STATE) for problem in report.problems)
    train = Numbers(7)
    with pytest.raises(CorruptionError, match=r"iterators/train/process_0-of-1\.json"):
        load(run.uri, tree(), iterators={"train": train})
    assert train.at == 7
    assert raws(load(run.uri, tree(), iterators={})) == raws(tree())


def test_a_position_that_did_not_arrive_as_it_was_meant_fails_the_save(tmp_path, monkeypatch):
    original = engine.write_files

    def other(folder, files):
        found = original(folder, files)
        if STATE in files:
            (tmp_path / "hit").touch()
            with open(f"{folder.local_path}/{STATE}", "r+b") as file:
                file.write(b"[")
        return found

    monkeypatch.setattr(engine, "write_files", other)
    checkpointer = Checkpointer(tmp_path / "run")
    with pytest.raises(SaveError, match="files of the step are not what was written"):
        checkpointer.save(1, tree(), iterators={"train": Numbers()}).wait()
    assert (tmp_path / "hit").exists()
    assert checkpointer.steps() == []


def test_a_fork_has_the_positions_too(checkpointer, run_uri, some_root_uri):
    checkpointer.save(1, tree(), iterators={"train": Numbers(2)}).wait()
    run = Run.open(run_uri)
    fork_run(run, run.step(1), some_root_uri / "child", by="me")
    load(some_root_uri / "child", tree(), iterators={"train": (found := Numbers())})
    assert found.at == 2
    child = Run.open(some_root_uri / "child")
    assert child.manifest(child.step(1)).iterators == {"train": 1}
    assert verify_step(child, 1).ok


def test_a_manifest_is_rebuilt_with_the_positions(checkpointer, run_uri):
    checkpointer.save(1, tree(), iterators={"train": Numbers(2)})
    checkpointer.close()
    run = Run.open(run_uri)
    before = run.objects.read(manifest_file(1, 1)).value
    run.objects.delete(manifest_file(1, 1))
    repair_run(run, by="me", dry_run=False)
    assert run.objects.read(manifest_file(1, 1)).value == before
    assert check_run(run).ok
    load(run_uri, tree(), iterators={"train": (found := Numbers())})
    assert found.at == 2
