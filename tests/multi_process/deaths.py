"""Processes that die, or fail, at a given moment of a save; every scenario runs in all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, NoReturn
from unittest import mock

import jax
import numpy as np
from orbax.checkpoint._src.path import async_path
from orbax.checkpoint.experimental.v1._src.saving import execution

from cairn import Checkpointer, SaveError, SaveHandle
from tests.multi_process.seams import background, engine, host_arrays, tree_writer
from tests.storage.counting import Numbers
from tests.storage.seams import data_file_writers, writer

SAVE_SECONDS = 60
SHAPE = (64, 96)


class Moment(NamedTuple):
    """A moment of a save: right before or after a call, in whichever process is told to strike."""

    owner: Any
    call: str
    when: Literal["before", "after"] = "before"


MOMENTS: Mapping[str, Moment] = {
    "the arrays reach the host": Moment(host_arrays.Transfers, "wait"),
    "Orbax begins": Moment(engine.ocp, "save_checkpointables_async"),
    "the processes compare the path": Moment(execution, "_check_directory_consistency"),
    "the folder is made": Moment(async_path, "mkdir"),
    "a data file is written": Moment(data_file_writers, "_write_buffers", "after"),
    "the positions are written": Moment(engine.StepWrite, "_write_positions", "after"),
    "the values are written": Moment(tree_writer, "write_files"),
    "the item is written": Moment(engine, "write_tree", "after"),
    "the parts are merged": Moment(engine, "complete_tree"),
    "Orbax commits": Moment(execution.atomicity, "on_commit_callback"),
    "the step is published": Moment(writer, "publish_manifest"),
    "the step is listed": Moment(writer, "publish_manifest", "after"),
    "the outcome is awaited": Moment(background, "share_outcome"),
}


def die() -> NoReturn:
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def fail() -> NoReturn:
    """An error that only this process meets."""
    raise OSError(5, "the cable was pulled")


def striking(moment: str, act: Callable[[], NoReturn]) -> AbstractContextManager[object]:
    """Within it, `act` happens at a moment."""
    owner, call, when = MOMENTS[moment]
    original = getattr(owner, call)

    def struck(*args: Any, **keywords: Any) -> Any:
        if when == "before":
            act()
        original(*args, **keywords)
        return act()

    return mock.patch.object(owner, call, struck)


def values(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """What a step holds."""
    whole = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return {"kernel": whole + step, "scale": whole[0] * step}


def arrays(step: int) -> dict[str, jax.Array]:
    """The same over all devices of the job: the kernel by rows, the scale everywhere."""
    mesh = jax.sharding.Mesh(jax.devices(), ("rows",))
    specs = {"kernel": jax.P("rows"), "scale": jax.P()}
    return {
        name: jax.make_array_from_callback(
            leaf.shape, jax.NamedSharding(mesh, specs[name]), leaf.__getitem__
        )
        for name, leaf in values(step).items()
    }


def save(run: str, step: int) -> SaveHandle:
    """Begins to save a step."""
    items = {"model": arrays(step), "optimizer": {"nu": arrays(step)["kernel"]}}
    data = {"train": Numbers(position(step, int(jax.process_index())))}
    return Checkpointer.for_run(run).save(step, items, meta={"step": step}, iterators=data)


def position(step: int, process: int) -> int:
    """Where the data of a process is at a step."""
    return 100 * step + process


def die_midway(run: str, moment: str, victim: int) -> Iterator[dict[str, Any]]:
    """Saves step 1, then step 2, in the midst of which one process kills itself."""
    save(run, 1).wait(SAVE_SECONDS)
    yield {"saved": 1}
    if jax.process_index() == victim:
        with striking(moment, die):
            save(run, 2).wait(SAVE_SECONDS)
    save(run, 2).wait(SAVE_SECONDS)
    yield {"saved": 2}
    time.sleep(SAVE_SECONDS)  # as training goes on; what ends a process ends it here


def fail_midway(run: str, moments: list[tuple[str, int]]) -> dict[str, Any]:
    """Saves once for each moment, at which one process fails; then once more.

    Before that process 0 waits for a while where nobody comes. Gives for each moment the error that
    this process was told, and the threads it left behind.
    """
    found: dict[str, Any] = {}
    known = set(threading.enumerate())
    if jax.process_index() == 0:
        try:
            background.meet("cairn/nowhere", "the agreed place", seconds=1)
        except SaveError as exc:
            found["alone"] = str(exc)
    for step, (moment, victim) in enumerate(moments, start=1):
        act = striking(moment, fail) if jax.process_index() == victim else mock.MagicMock()
        try:
            with act:
                save(run, step).wait(SAVE_SECONDS)
        except Exception as exc:
            found[moment] = [type(exc).__name__, str(exc), threads_left(known)]
    last = save(run, len(moments) + 1)
    last.wait(SAVE_SECONDS)
    return {**found, "last": [last.step, last.attempt]}


def threads_left(known: set[threading.Thread]) -> list[str]:
    """Names of the threads of a save that are still there after a while."""
    deadline = time.monotonic() + SAVE_SECONDS / 2
    while True:
        left = [
            thread.name
            for thread in set(threading.enumerate()) - known
            if "wait cairn" in thread.name or "cairn-save" in thread.name
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
