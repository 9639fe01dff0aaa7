"""Jobs that go on with their data; every scenario runs in all processes of a job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from grain.checkpoint import CheckpointRestore, CheckpointSave
from grain.experimental import (
    ElasticIterator,
    ThreadPrefetchIterDataset,
    WindowShuffleIterDataset,
)
from grain.sharding import ShardByJaxProcess
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cairn import (
    Checkpointer,
    CheckpointManager,
    ObjectStore,
    RunSaver,
    SavePolicy,
    StoreURI,
    TrainState,
)
from cairn.storage.arrays.data_files import StoredFile
from tests.faults.report import is_long
from tests.multi_process.scenarios import SAVE_SECONDS, error_of
from tests.multi_process.seams import engine

EXAMPLES = 100_000 if is_long() else 56_000
BATCH = 800
"""Of all processes together."""

EVERY_STEPS = 5


class Numbers:
    """Counts up; the processes of a job count each for itself."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "process": int(jax.process_index())}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["process"] == jax.process_index()
        self.at = state["at"]


class Strided:
    """Every n-th example in an order that a seed gives; n processes take turns.

    Attributes:
        base: examples that all processes of earlier jobs had taken.
        taken: batches that this process has taken since.
        count: processes.
    """

    def __init__(self, size: int = EXAMPLES) -> None:
        self.order = np.random.default_rng(5).permutation(size)
        self.base, self.taken, self.count = 0, 0, jax.process_count()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> np.ndarray[Any, Any]:
        start = self.base + self.taken * BATCH + jax.process_index()
        if start >= len(self.order):
            raise StopIteration
        self.taken += 1
        return self.order[start : self.base + self.taken * BATCH : self.count]

    def state_dict(self) -> dict[str, int]:
        return {"base": self.base, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.base, self.taken = state["base"], state["taken"]

    def load_state_dicts(self, states: list[dict[str, int]]) -> None:
        (place,) = {state["base"] + BATCH * state["taken"] for state in states}
        self.base, self.taken = place, 0


def elastic() -> Any:
    data = grain.MapDataset.range(EXAMPLES).seed(7).shuffle()
    return iter(ElasticIterator(data, BATCH, ShardByJaxProcess()))


def mapped() -> Any:
    """The same data, made into something else, and drawn by a thread ahead of its use."""
    data = grain.MapDataset.range(EXAMPLES).seed(7).shuffle()
    made = ElasticIterator(data, BATCH, ShardByJaxProcess()).map(lambda batch: -batch)
    return iter(ThreadPrefetchIterDataset(made, prefetch_buffer_size=2))


def shuffled_after() -> Any:
    """Shuffled by each process in itself, after the data was cut: nobody can cut it anew."""
    data = ElasticIterator(grain.MapDataset.range(EXAMPLES), BATCH, ShardByJaxProcess())
    return iter(WindowShuffleIterDataset(data, window_size=4, seed=1))


def train(run: str, kind: str, pause: float) -> Iterator[dict[str, Any]]:
    """Trains until the data ends; the state counts how often it has seen each example."""
    data = {"grain": elastic, "own": Strided}[kind]()
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in [["data"], []])
    seen = jax.make_array_from_callback(
        (EXAMPLES,), whole, lambda index: np.zeros(EXAMPLES, np.int32)[index]
    )
    train_step = jax.jit(
        lambda seen, batch: seen.at[batch].add(jnp.int32(1)), donate_argnums=0, out_shardings=whole
    )
    with Checkpointer(run) as checkpointer:
        begun = checkpointer.latest_step() or 0
        if begun:
            found = checkpointer.restore({"state": {"seen": seen}}, iterators={"train": data})
            seen = found["state"]["seen"]
        yield {"begun": begun}
        step = begun
        for batch in data:
            rows = np.asarray(batch, np.int32)
            seen = train_step(seen, jax.make_array_from_process_local_data(split, rows, (BATCH,)))
            step += 1
            if step % EVERY_STEPS == 0:
                checkpointer.save(step, {"state": {"seen": seen}}, iterators={"train": data})
            time.sleep(pause)
    counts = np.asarray(seen)
    yield {
        "begun": begun,
        "steps": step,
        "lost": int((counts == 0).sum()),
        "twice": int((counts > 1).sum()),
    }


def save_positions(run: str) -> dict[str, Any]:
    """Saves a step with iterators of three kinds; then differs in what is saved."""
    process = int(jax.process_index())
    own, made = (
        Numbers(10 + process),
        {
            "strided": Strided(),
            "grain": elastic(),
            "mapped": mapped(),
            "plain": _plain(),
            "shuffled": shuffled_after(),
        },
    )
    for data in made.values():
        for _ in range(3):
            next(data)
    with Checkpointer(run) as checkpointer:
        iterators = {"own": own, **made}
        checkpointer.save(1, _tree(), iterators=iterators).wait(SAVE_SECONDS)
        again = Numbers()
        checkpointer.restore(_tree(), iterators={"own": again})
        odd = {"own": Odd(fails=process == 1)}
        some = {"own": own} if process else {}
        errors = [
            error_of(lambda: checkpointer.save(2, _tree(), iterators=some)),
            error_of(lambda: checkpointer.save(2, _tree(), iterators=odd)),
            error_of(lambda: checkpointer.restore(_tree(), iterators=some)),
            error_of(lambda: checkpointer.restore(_tree(), iterators=odd)),
        ]
        with damaging_positions() if process == 1 else nullcontext():
            handle = checkpointer.save(2, _tree(), iterators={"own": own})
            errors.append(error_of(lambda: handle.wait(SAVE_SECONDS)))
    return {"at": again.at, "errors": [[one["kinds"][0], one["text"]] for one in errors]}


def save_and_load_a_state(run: str) -> dict[str, Any]:
    """The same by a state and a saver, which is told to end after the loop drew one batch more."""
    process = int(jax.process_index())
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    weights = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, PartitionSpec()))
    state = TrainState.create(params={"w": weights}, tx=optax.sgd(1.0), step=7)
    data = Numbers(20 + process)
    with RunSaver(run, SavePolicy(every_steps=100), agree_every=1) as saver:
        saver.step(state, iterators={"own": data})
        data.at += 1
        if process:
            saver.preempt()
    loaded = TrainState.load_state(run, state, iterators={"own": data})
    some = {"own": Numbers()} if process else {}
    refused = error_of(lambda: TrainState.load_state(run, state, iterators=some))
    odd = {"own": Odd(fails=process == 1)}
    failed = error_of(lambda: TrainState.load_state(run, state, iterators=odd))
    later = state.replace(step=state.step + 1)
    with RunSaver(run, SavePolicy(every_steps=1), agree_every=1) as saver:
        unsaved = error_of(lambda: saver.step(later, iterators=odd))
        saver.step(later.replace(step=later.step + 1), iterators={"own": data})
    errors = [[one["kinds"][0], one["text"]] for one in (refused, failed, unsaved)]
    return {"step": int(loaded.step), "at": data.at, "errors": errors}


def save_with_grains_arguments(run: str) -> dict[str, Any]:
    """What a loop over Orbax's `CheckpointManager` does; then each process asks for its own."""
    process = int(jax.process_index())
    data, again = _plain(), _plain()
    for _ in range(2 + process):
        next(data)
    args = ocp.args
    with CheckpointManager(run) as manager:
        items = args.Composite(
            items=args.StandardSave(_tree()),
            note=args.JsonSave({"at": 1}),
            train=CheckpointSave(item=data),
        )
        manager.save(1, args=items)
        manager.wait_until_finished()
        manager.restore(1, args=args.Composite(train=CheckpointRestore(item=again)))
        note = {"note": args.JsonRestore()}
        train = {"train": CheckpointRestore(item=again)}
        mine = train if process else note
        more = {**note, **train} if process else note
        errors = [
            error_of(lambda: manager.restore(1, args=args.Composite(**mine))),
            error_of(lambda: manager.restore(1, args=args.Composite(**more))),
            error_of(lambda: manager.restore(1 + process, args=args.Composite(**note))),
        ]
        whole = manager.restore(1, args=args.Composite(**note, **train))
    return {
        "same": np.asarray(next(again)).tolist() == np.asarray(next(data)).tolist(),
        "note": whole["note"],
        "errors": [[one["kinds"][0], one["text"]] for one in errors],
    }


def damaging_positions() -> AbstractContextManager[object]:
    """Within it, what this process writes of positions arrives as something else."""
    write = engine.write_files

    def damaged(folder: StoreURI, files: Mapping[str, bytes]) -> list[StoredFile]:
        told = write(folder, files)
        for name in files:
            if "iterators/" in name:
                ObjectStore.open(folder).write(name, b'{"at": 0}')
        return told

    return mock.patch.object(engine, "write_files", damaged)


class Odd(Numbers):
    """Fails, if it is to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def get_state(self) -> dict[str, Any]:
        if self.fails:
            raise OSError("the cable was pulled")
        return super().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("the cable was pulled")
        super().set_state(state)


def restore_positions(run: str) -> dict[str, Any]:
    """Restores what another number of processes has saved."""
    able = {"strided": Strided(), "grain": elastic(), "mapped": mapped()}
    before = {name: str(_state(data)) for name, data in able.items()}
    unable = {"own": Numbers(), "plain": _plain(), "shuffled": shuffled_after()}
    exchanged = {"grain": _plain(), "plain": elastic()}
    with Checkpointer(run) as checkpointer:
        refused = [
            error_of(lambda given=given: checkpointer.restore(_tree(), iterators=given))
            for given in ({**able, **unable}, exchanged)
        ]
        untouched = before == {name: str(_state(data)) for name, data in able.items()}
        checkpointer.restore(_tree(), iterators=able)
    return {
        "refused": [[one["kinds"][0], one["text"]] for one in refused],
        "untouched": untouched,
        "next": {name: np.asarray(next(data)).tolist() for name, data in able.items()},
    }


def _state(iterator: Any) -> Any:
    return iterator.state_dict() if isinstance(iterator, Strided) else iterator.get_state()


def _plain() -> Any:
    """Of Grain, sharded by process: its index is the process's own."""
    data = grain.MapDataset.range(EXAMPLES)
    return iter(data[jax.process_index() :: jax.process_count()].batch(8))


def _tree() -> dict[str, Any]:
    return {"model": {"w": np.ones(3, np.float32)}}
