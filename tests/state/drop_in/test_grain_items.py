"""A loop that saves Grain's iterator with Orbax's `CheckpointManager` does the same on a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain.checkpoint import CheckpointHandler, CheckpointRestore, CheckpointSave
from grain.sharding import NoSharding

from cairn import (
    CheckpointManager,
    IteratorMismatchError,
    Run,
    UnsupportedFormatError,
    UnsupportedLeafError,
    load,
    verify_step,
)
from tests.storage.states import assert_same

args = ocp.args
TREE = {"w": jnp.arange(8.0)}


class Handler(CheckpointHandler, ocp.CheckpointHandler):
    """As MaxText's: iterators with their places among those of all processes."""

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        ((iterator, index, count),) = args.item
        state = json.dumps(iterator.get_state())
        (directory / f"process_{index}-of-{count}.json").write_text(state)

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        args.item.set_state(json.loads((directory / "process_0-of-1.json").read_text()))
        return args.item


@args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(args.CheckpointArgs):
    item: Any


@args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(args.CheckpointArgs):
    item: Any
    process_index: int | None = None
    process_count: int | None = None


def dataset() -> Any:
    return iter(grain.MapDataset.range(100).seed(3).shuffle().batch(4))


def loader() -> Any:
    sampler = grain.samplers.IndexSampler(
        100, shard_options=NoSharding(), shuffle=True, num_epochs=2, seed=5
    )
    return iter(grain.DataLoader(data_source=range(100), sampler=sampler, worker_count=0))


def drawn(iterator: Any, count: int = 3) -> list[int]:
    return np.concatenate([np.ravel(next(iterator)) for _ in range(count)]).tolist()


def train(manager: Any, folder: Path, make: Any) -> list[Any]:
    """As MaxText does: the iterator is an item, with a handler of Grain's."""
    names = {"item_names": ("items", "iter"), "item_handlers": {"iter": CheckpointHandler()}}
    data = make()
    with manager(folder, **names) as first:
        for step in range(3):
            drawn(data)
            both = args.Composite(items=args.PyTreeSave(TREE), iter=CheckpointSave(item=data))
            first.save(step, args=both)
        after = drawn(data)
    with manager(folder, **names) as second:
        again = make()
        both = args.Composite(items=args.PyTreeRestore(TREE), iter=CheckpointRestore(item=again))
        found = second.restore(2, args=both)
        assert found["iter"] is again
        seen = [after, drawn(again), found["items"]]
        earlier = second.restore(0, args=args.Composite(iter=CheckpointRestore(item=again)))
        return [*seen, sorted(earlier), drawn(again)]


@pytest.mark.parametrize("make", [dataset, loader])
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_loop_goes_on_with_its_data_as_with_orbax(tmp_path: Path, make: Any) -> None:
    theirs = train(ocp.CheckpointManager, tmp_path / "orbax", make)
    ours = train(CheckpointManager, tmp_path / "cairn", make)
    assert ours[0] == ours[1]
    assert_same(ours, theirs)


def test_a_position_saved_so_is_one_like_any_other(tmp_path: Path) -> None:
    data = dataset()
    drawn(data)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            1, args=args.Composite(items=args.StandardSave(TREE), iter=CheckpointSave(item=data))
        )
        manager.wait_until_finished()
        assert sorted(manager.item_metadata(1).keys()) == ["items", "iter"]
    run = Run.open(tmp_path / "run")
    assert run.manifest(run.step(1)).iterators == {"iter": 1}
    assert verify_step(run, 1).ok
    load(run.uri, {"items": TREE}, iterators={"iter": (again := dataset())})
    assert drawn(again) == drawn(data)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_arguments_of_a_handler_made_of_grains_are_followed_as_with_orbax(
    tmp_path: Path, caplog: Any
) -> None:
    seen = []
    for kind in (ocp.CheckpointManager, CheckpointManager):
        data, again = dataset(), dataset()
        drawn(data)
        handlers = {"items": ocp.PyTreeCheckpointHandler(), "iter": Handler()}
        with kind(tmp_path / kind.__module__, item_handlers=handlers) as manager:
            both = {"items": args.PyTreeSave(TREE), "iter": Save([(data, 0, 1)])}
            manager.save(1, args=args.Composite(**both))
            manager.wait_until_finished()
            wanted = {"items": args.PyTreeRestore(TREE), "iter": Restore(again)}
            found = manager.restore(1, args=args.Composite(**wanted))
            seen.append([found["items"], drawn(again), drawn(data)])
    assert seen[1][1] == seen[1][2]
    assert_same(seen[1], seen[0])
    with CheckpointManager(tmp_path / CheckpointManager.__module__, item_handlers=handlers) as ours:
        for asked in (Restore(again, 1, 2), Restore(again, process_count=2)):
            with pytest.raises(UnsupportedFormatError, match="ElasticIterator"):
                ours.restore(1, args=args.Composite(iter=asked))
        for given in ([(data, 0, 2)], [(data, 0, 2), (data, 1, 2)]):
            with pytest.raises(UnsupportedFormatError, match="ElasticIterator"):
                ours.save(2, args=args.Composite(iter=Save(given)))
        assert caplog.text == ""
        ours.restore(1, args=args.Composite(items=args.PyTreeRestore(TREE)))
    assert "step 1 has the position of 'iter'" in caplog.text


def test_an_iterator_alone_is_an_item_too(tmp_path: Path) -> None:
    data, again = dataset(), dataset()
    drawn(data)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=CheckpointSave(item=data))
        assert manager.restore(1, args=CheckpointRestore(item=again)) is again
    assert drawn(again) == drawn(data)


def test_what_is_asked_for_in_another_way_than_it_was_saved_is_named(tmp_path: Path) -> None:
    data = dataset()
    with CheckpointManager(tmp_path / "run") as manager:
        both = args.Composite(items=args.StandardSave(TREE), iter=CheckpointSave(item=data))
        manager.save(1, args=both)
        for asked, named in [
            ({"iter": args.StandardRestore(TREE)}, "iter: StandardRestoreArgs for an iterator"),
            ({"iter": None}, "iter: None for an iterator; give CheckpointRestore"),
            ({"items": CheckpointRestore(item=data)}, "items: CheckpointRestore for a tree"),
            ({"it": CheckpointRestore(item=data)}, "it: no such item"),
        ]:
            with pytest.raises(UnsupportedFormatError, match=named):
                manager.restore(1, args=args.Composite(**asked))
        with pytest.raises(UnsupportedLeafError, match="iter: expected get_state"):
            manager.save(2, args=args.Composite(iter=CheckpointSave(item=iter([1]))))
        with pytest.raises(IteratorMismatchError, match="iter: expected get_state"):
            manager.restore(1, args=args.Composite(iter=CheckpointRestore(item=iter([1]))))


def test_a_restore_of_all_that_leaves_the_iterator_out_says_so(tmp_path: Path, caplog: Any) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        both = args.Composite(items=args.StandardSave(TREE), iter=CheckpointSave(item=dataset()))
        manager.save(1, args=both)
        only = args.Composite(items=args.StandardRestore(TREE))
        assert [*manager.restore(1, args=only)] == ["items"]
        assert caplog.text == ""
        assert [*manager.restore(1)] == ["items"]
    assert "step 1 has the position of 'iter'" in caplog.text
    assert "CheckpointRestore" in caplog.text
