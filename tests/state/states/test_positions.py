"""The position in the data travels with a state: saved, loaded, and right when a job is ended."""

import tempfile
from contextlib import nullcontext, suppress
from typing import NamedTuple

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import (
    ArgumentError,
    EasyDeLState,
    IteratorMismatchError,
    Run,
    RunSaver,
    SavePolicy,
    StepExistsError,
    TrainState,
    UnsupportedLeafError,
)
from cairn.storage.runs.retention import step_facts
from tests.faults.report import trials
from tests.state.my_model import my_model
from tests.storage.counting import Numbers

TX = optax.sgd(1e-1)


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "run")


def at(step=0):
    return TrainState.create(params={"w": jnp.full((4, 4), float(step))}, tx=TX, step=step)


def load(uri, **options):
    return TrainState.load_state(uri, at(), **options)


def position(uri, **options):
    """Where data goes on."""
    load(uri, iterators={"train": (found := Numbers())}, **options)
    return found.at


def test_a_train_state_is_saved_and_loaded_with_the_position(uri):
    train = Numbers(3)
    created = TrainState.load_or_create(uri, at, iterators={"train": train})
    assert (int(created.step), train.at) == (0, 3)  # a first start
    at(1).save_state(uri, iterators={"train": train}, verbose=False, wait=True)
    train.at = 9
    loaded = TrainState.load_or_create(uri, at, iterators={"train": train})
    assert (int(loaded.step), train.at) == (1, 3)
    with pytest.raises(IteratorMismatchError, match="tset: the step has no iterator"):
        load(uri, iterators={"tset": train})


def test_an_easydel_state_is_saved_and_loaded_with_the_position(uri):
    model = my_model()
    options = {"tx": TX, "model_class": type(model), "auto_shard_model": True, "verbose": False}
    model.to_state(TX).save_state(uri, iterators={"train": Numbers(3)}, verbose=False, wait=True)
    train = Numbers()
    EasyDeLState.load_state(uri, iterators={"train": train}, **options)
    assert train.at == 3
    with pytest.raises(ArgumentError, match="expected a load of a whole state; found train"):
        EasyDeLState.from_pretrained(uri, iterators={"train": train}, **options)


def test_a_state_that_does_not_load_moves_no_iterator(uri):
    at(1).save_state(uri, iterators={"train": Numbers(3)}, verbose=False, wait=True)
    other = TrainState.create(params={"w": jnp.zeros(3)}, tx=TX)
    with pytest.raises(ValueError, match="model/w"):
        TrainState.load_state(uri, other, iterators={"train": (train := Numbers(7))})
    assert train.at == 7


def test_who_goes_on_training_is_warned_of_a_position_left_out(uri, caplog):
    at(1).save_state(uri, iterators={"train": Numbers(3)}, verbose=False, wait=True)
    load(uri, optimizer="skip")
    load(uri, iterators={})
    assert caplog.text == ""
    load(uri)
    assert "step 1 has the position of train, which is not restored" in caplog.text


def test_due_steps_are_saved_with_the_position(uri):
    train = Numbers()
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        for step in range(1, 5):
            next(train)
            saver.step(at(step), iterators={"train": train})
        saver.save(at(5), iterators={"train": train})
    assert [position(uri, step=step) for step in (2, 4, 5)] == [2, 4, 4]


@pytest.mark.parametrize("advance", [0, 1])
def test_a_step_that_close_saves_has_the_position_that_it_was_trained_to(uri, advance):
    """The loop may have drawn the next batch before it sees that it is to end."""
    train, state = Numbers(), at(1)
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        next(train)
        assert saver.step(state, iterators={"train": train}) is None
        saver.preempt()
        for _ in range(advance):
            next(train)
    assert Run.open(uri).latest_step() == 1
    assert position(uri) == 1


class Failing(Numbers):
    fails = False

    def get_state(self):
        if self.at == 2 or self.fails:
            raise OSError("the worker died")
        return super().get_state()


def test_a_step_whose_position_was_refused_is_counted(uri):
    train = Failing()
    with RunSaver(uri, SavePolicy(every_steps=4)) as saver:
        for step in range(1, 7):
            next(train)
            with pytest.raises(UnsupportedLeafError) if step == 2 else nullcontext():
                saver.step(at(step), iterators={"train": train})
    assert [info.step for info in Run.open(uri).steps()] == [4]


def test_a_step_whose_position_was_refused_lends_its_state_to_no_other_position(uri):
    train, first, second = Failing(), at(1), at(2)
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        next(train)
        saver.step(first, iterators={"train": train})
        next(train)
        with pytest.raises(UnsupportedLeafError, match="the worker died"):
            saver.step(second, iterators={"train": train})
        next(train)
        saver.preempt()
    assert [info.step for info in Run.open(uri).steps()] == [1]
    assert position(uri) == 1


def test_a_save_that_was_refused_lends_its_position_to_no_other(uri):
    train, state = Numbers(), at(1)
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        next(train)
        saver.step(state, iterators={"train": train}, labels={"by": "step"})
        next(train)
        with pytest.raises(ValueError, match="label"):
            saver.save(state, iterators={"train": train}, labels={"by": 3})
        saver.preempt()
    assert position(uri) == 1


def test_what_a_step_was_told_is_saved_as_it_was_then(uri):
    extras, metrics, state = {"seen": [1], "pair": ([1], 2)}, {"loss": 1.0}, at(1)
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(state, extras=extras, metrics=metrics)
        extras["seen"].append(2)  # of the next batch
        extras["pair"][0].append(2)
        metrics["loss"] = 2.0
        saver.preempt()
    loaded = load(uri)
    assert loaded.extras == {"seen": [1], "pair": [[1], 2]}
    assert [facts.metrics for facts in step_facts(Run.open(uri))] == [{"loss": 1.0}]


def test_a_dict_that_changed_since_a_step_was_saved_with_it_is_new(uri):
    extras, state = {"seen": [1]}, at(1)
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        begun = saver.step(state, extras=extras)
        assert saver.save(state, extras=extras) is begun
        extras["seen"].append(2)
        with pytest.raises(StepExistsError, match="extras 'seen'"):
            saver.save(state, extras=extras)


def test_the_last_step_is_not_saved_again_for_an_iterator_that_has_ended(uri):
    train, state = Numbers(), at(1)
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        begun = saver.step(state, iterators={"train": train})
        next(train)
        assert saver.save(state, iterators={"train": train}) is begun
        with pytest.raises(StepExistsError, match="iterators 'test'"):
            saver.save(state, iterators={"test": train})
    assert position(uri) == 0


def test_an_iterator_without_state_is_refused_by_the_first_step_due_or_not(uri):
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        with pytest.raises(UnsupportedLeafError, match="train: expected get_state"):
            saver.step(at(1), iterators={"train": iter([1])})
        with pytest.raises(ArgumentError, match="iterators"):
            RunSaver(uri, SavePolicy(every_steps=1), save_options={"iterators": {}})


def test_a_state_of_ones_own_need_not_know_of_iterators(uri):
    class Plain:
        step = 1

        def save_state(self, run, *, step, metrics, labels, extras, verbose):
            return at(1).save_state(run, verbose=verbose)

    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        assert saver.step(Plain()).step == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_close_saves_no_step_before_one_that_was_saved_by_hand(uri, overwrite):
    first, second = at(1), at(2)
    options = {"overwrite": overwrite}
    with RunSaver(uri, SavePolicy(every_steps=100), save_options=options) as saver:
        saver.step(first)
        saver.save(second)
        saver.preempt()
    assert [info.step for info in Run.open(uri).steps()] == [2]


def test_close_saves_a_step_that_training_went_back_to(uri):
    states = [at(step) for step in (7, 8, 3)]
    options = {"overwrite": True}
    with RunSaver(uri, SavePolicy(every_steps=8), save_options=options) as saver:
        for state in states[:2]:
            saver.step(state)
        saver.step(states[2], step=3)
        saver.preempt()
    assert [info.step for info in Run.open(uri).steps()] == [3]


class Event(NamedTuple):
    """What happens at a step of a loop."""

    drawn: int
    fails: bool
    by_hand: bool


EVENTS = st.lists(st.builds(Event, st.integers(1, 3), st.booleans(), st.booleans()), max_size=6)


@settings(max_examples=trials(short=10, long=200), deadline=None)
@given(EVENTS, st.sampled_from([2, 3, 100]), st.booleans(), st.integers(0, 2))
def test_every_step_has_its_own_position_whatever_else_happens(events, every, preempted, ahead):
    train, extras, expected, states = Failing(), {"at": [0]}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/run"
        with RunSaver(uri, SavePolicy(every_steps=every)) as saver:
            for step, event in enumerate(events, start=1):
                train.at += event.drawn + 2
                extras["at"][0] = train.at
                expected[step] = train.at
                states.append(at(step))
                train.fails = event.fails
                with suppress(UnsupportedLeafError):
                    saver.step(states[-1], iterators={"train": train}, extras=extras)
                train.fails = False
                if event.by_hand:
                    with suppress(StepExistsError):
                        saver.save(states[-1], iterators={"train": train}, extras=extras)
            if preempted:
                saver.preempt()
            train.at += ahead
            extras["at"][0] += ahead
        for info in Run.open(uri).steps():
            loaded = load(f"{uri}/steps/{info.step}", iterators={"train": (found := Numbers())})
            assert float(loaded.params["w"][0, 0]) == info.step
            assert found.at == expected[info.step]
            assert loaded.extras == {"at": [expected[info.step]]}
