"""A run neither begins nor goes on in a folder where plain Orbax has saved."""

import logging

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints
from orbax.checkpoint import v1

from cairn.state.easydel_state import EasyDeLState
from cairn.state.saving.run_saver import RunSaver
from cairn.state.train_state import TrainState
from cairn.storage.errors import InvalidURIError
from cairn.storage.runs.run import Run
from cairn.storage.training.checkpointer import Checkpointer
from cairn.storage.training.save_policy import SavePolicy

TREE = {"w": np.ones((4, 4), np.float32)}


def manager(folder, **options):
    """Its steps' folders are named by `options`."""
    options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(folder, options=options) as made:
        for step in (5, 10):
            made.save(step, args=ocp.args.StandardSave(TREE))


def manager_of_items(folder):
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(TREE), data=ocp.args.JsonSave({"position": 1})
    )
    with ocp.CheckpointManager(folder) as made:
        made.save(5, args=items)


def training_checkpointer(folder):
    with v1.training.Checkpointer(folder) as made:
        made.save(5, TREE)


def training_checkpointables(folder):
    with v1.training.Checkpointer(folder) as made:
        made.save_checkpointables(5, {"state": TREE, "extra": {"a": 1}})


def tree_folders(folder):
    ocp.PyTreeCheckpointer().save(folder / "best", TREE)


def tree_folders_of_small_files(folder):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(folder / "best", TREE)


def flax_checkpoints(folder):
    checkpoints.save_checkpoint(
        str(folder), TREE, step=5, orbax_checkpointer=ocp.PyTreeCheckpointer()
    )


def older_items(folder):
    """Before Orbax described a whole step: only each item says what it is."""
    for step in ("5", "10"):
        item = folder / step / "params"
        item.mkdir(parents=True)
        (item / "_METADATA").write_text("{}")


def oldest_items(folder):
    """All leaves of an item in one file."""
    item = folder / "checkpoint_5" / "state"
    item.mkdir(parents=True)
    (item / "checkpoint").write_bytes(b"leaves")


def one_tree(folder):
    ocp.PyTreeCheckpointer().save(folder, TREE)


def one_step(folder):
    v1.save(folder, TREE)


LAYOUTS = {
    "steps": manager,
    "steps with a prefix": lambda folder: manager(folder, step_prefix="ckpt"),
    "steps of eight digits": lambda folder: manager(folder, step_format_fixed_length=8),
    "steps of several items": manager_of_items,
    "steps of the v1 checkpointer": training_checkpointer,
    "checkpointables of the v1 checkpointer": training_checkpointables,
    "folders of trees": tree_folders,
    "folders of trees in small files": tree_folders_of_small_files,
    "steps of flax.training": flax_checkpoints,
    "steps of an older release": older_items,
    "steps of the oldest releases": oldest_items,
    "one tree": one_tree,
    "one step": one_step,
}


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
