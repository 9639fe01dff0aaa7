"""A run neither begins nor goes on in a folder where plain Orbax has saved."""

import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cairn import (
    Checkpointer,
    EasyDeLState,
    InvalidURIError,
    NotFoundError,
    Run,
    RunSaver,
    SavePolicy,
    TrainState,
    adopt,
)
from tests.plain_orbax import LAYOUTS, manager


@pytest.fixture(params=LAYOUTS)
def plain(request, tmp_path):
    folder = tmp_path / "old_run"
    LAYOUTS[request.param](folder)
    logging.getLogger("absl").setLevel(logging.ERROR)
    return folder


def names(folder):
    return sorted(folder.rglob("*"))


def never():
    raise AssertionError("a first state was made")


def state():
    return TrainState.create(params={"w": jnp.ones((4, 4))}, tx=optax.sgd(0.1))


def test_no_run_begins_where_plain_orbax_has_saved(plain):
    before = names(plain)
    for begin in (
        lambda: EasyDeLState.load_or_create(str(plain), never),
        lambda: state().save_state(str(plain), step=1, verbose=False),
        lambda: Checkpointer(plain).save(1, {"model": {"w": np.ones(3)}}, meta={"step": 1}),
        lambda: RunSaver(plain, SavePolicy(every_steps=1)),
        lambda: Run.create(plain),
    ):
        with pytest.raises(InvalidURIError) as caught:
            begin()
        assert str(plain) in str(caught.value)
        assert "checkpoint" in caught.value.found
        assert caught.value.next_step
    assert names(plain) == before


def test_folders_of_other_things_do_not_keep_a_run_from_beginning(tmp_path):
    for name in ("logs/1", "5", "tokens_10/shards"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "events").write_text("other")
    state().save_state(str(tmp_path / "run"), step=1, verbose=False).wait()
    assert Run.open(tmp_path / "run").latest_step() == 1


def test_an_adopted_step_that_save_state_did_not_write_says_how_it_is_loaded(tmp_path):
    manager(tmp_path / "old")
    run = str(adopt(tmp_path / "old").run)
    for load_it in (
        lambda: EasyDeLState.load_state(run),
        lambda: EasyDeLState.load_or_create(run, never),
        lambda: TrainState.load_state(run, state()),
    ):
        with pytest.raises(NotFoundError, match=r"cairn\.load"):
            load_it()
