"""The measurements of the storage benchmark. Each is made in a process of its own.

Files are in the page cache when they are read, unless a row says otherwise. Before every save
`os.sync()` has returned, so that nobody pays for what was written earlier.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import storage_limits as limits
from benchmarks import storage_places as places
from benchmarks import storage_states as states
from benchmarks import storage_workload as workload
from benchmarks.storage_contenders import CONTENDERS, OURS, RUN, Contender
from benchmarks.storage_memory import PeakMemory

IDLE_STEPS = 5

Measured = dict[str, Any]


def save(name: str, place: str, megabytes: float, layers: int, saves: int) -> Measured:
    """Saves of one process with an idle caller; each begins once the one before is durable.

    Between them all leaves on devices change, as they do in training. The last step is what
    `restore` reads.
    """
    contender = _contender(name, place)
    shapes = workload.state_shapes(megabytes, layers)
    state, step = _state_and_step(contender, shapes, saves)
    made = []
    for number in range(1, saves + 1):
        if step is not None and number > 1:
            state = workload.train(step, state)
        given = contender.prepared(state)
        os.sync()
        memory = PeakMemory()
        worked, began = time.process_time(), time.perf_counter()
        wait = contender.save(number, given)
        blocked = time.perf_counter() - began
        wait()
        durable = time.perf_counter() - began
        worked = time.process_time() - worked
        made.append(
            {"blocked": blocked, "durable": durable, "extra": memory.extra, "worked": worked}
        )
    contender.close()
    later = [one["blocked"] for one in made[1:]]
    return {
        "durable": made[0]["durable"],
        "blocked_first": made[0]["blocked"],
        "blocked_later": statistics.median(later) if later else None,
        "extra": max(one["extra"] for one in made),
        "worked": made[0]["worked"],
        "bytes": workload.nbytes(shapes),
        "fingerprint": workload.fingerprint(state),
        "step": saves,
    }


def save_while_training(name: str, place: str, megabytes: float, layers: int) -> Measured:
    """Two saves while a jitted step that donates the state runs on, until each is durable.

    Blocked is the call and by how much the next step is longer than the median of idle steps. The
    cost is by how much the whole loop is longer than as many idle steps. Idle steps are those just
    before and just after. Extra memory is above their peak.
    """
    contender = _contender(name, place)
    shapes = workload.state_shapes(megabytes, layers)
    state, step = workload.device_state(shapes), workload.compiled_step()
    state = workload.train(step, workload.train(step, state))
    made = []

    def idle(state: Any) -> tuple[Any, list[float]]:
        durations = []
        for _ in range(IDLE_STEPS):
            began = time.perf_counter()
            state = workload.train(step, state)
            durations.append(time.perf_counter() - began)
        return state, durations

    memory = PeakMemory()
    state, durations = idle(state)
    median, idle_peak = statistics.median(durations), memory.peak
    for number in (1, 2):
        os.sync()
        memory = PeakMemory()
        began = time.perf_counter()
        wait = contender.save(number, state)
        called = time.perf_counter() - began
        waiting = _InBackground(wait)
        first, steps = None, 0
        while first is None or waiting.is_alive():
            step_began = time.perf_counter()
            state = workload.train(step, state)
            steps += 1
            if first is None:
                first = time.perf_counter() - step_began
        whole = time.perf_counter() - began
        waiting.result()
        durable = time.perf_counter() - began
        before, (state, durations) = durations, idle(state)
        median = statistics.median(before + durations)
        made.append(
            {
                "blocked": called + max(0.0, first - median),
                "durable": durable,
                "cost": whole - steps * median,
                "extra": max(0, memory.peak - idle_peak),
            }
        )
    contender.close()
    return {
        "blocked_first": made[0]["blocked"],
        "blocked_later": made[1]["blocked"],
        "cost_first": made[0]["cost"],
        "cost_later": made[1]["cost"],
        "durable": made[0]["durable"],
        "extra": max(one["extra"] for one in made),
        "bytes": workload.nbytes(shapes),
        "step_seconds": median,
    }


def restore(
    name: str, place: str, megabytes: float, layers: int, step: int, devices: int
) -> Measured:
    """The first restore of a process, onto the first `devices` devices."""
    import jax

    contender = _contender(name, place)
    shapes = workload.state_shapes(megabytes, layers)
    target = workload.abstract_state(shapes, devices)
    jax.block_until_ready(jax.device_put(0))
    worked, began = time.process_time(), time.perf_counter()
    state = jax.block_until_ready(contender.restore(step, target))
    seconds = time.perf_counter() - began
    worked = time.process_time() - worked
    held = {device for leaf in jax.tree.leaves(state) for device in leaf.devices()}
    if len(held) != devices:
        raise RuntimeError(f"{name}: expected leaves on {devices} devices, found {len(held)}")
    return {
        "seconds": seconds,
        "worked": worked,
        "bytes": workload.nbytes(shapes),
        "fingerprint": workload.fingerprint(state),
    }


def cold(name: str, place: str, step: int) -> Measured:
    """Takes every file of a step out of the page cache."""
    return {"bytes": places.evict(_contender(name, place).step_place(step))}


def warm(name: str, place: str, step: int) -> Measured:
    """Reads every file of a step once, so that they are in the page cache."""
    return {"bytes": places.read(_contender(name, place).step_place(step))}


def read(place: str, step: int) -> Measured:
    """One read of every file of a step that Cairn wrote."""
    folder = _contender(OURS, place).step_place(step)
    began = time.perf_counter()
    count = places.read(folder)
    return {"seconds": time.perf_counter() - began, "bytes": count}


def read_direct(place: str, step: int) -> Measured:
    """One read of every file of a step that Cairn wrote, past the page cache, by eight threads."""
    folder = _contender(OURS, place).step_place(step)
    began = time.perf_counter()
    count = limits.read(folder)
    return {"seconds": time.perf_counter() - began, "bytes": count}


def verify(place: str, step: int) -> Measured:
    """`cairn verify` of a step, as a call."""
    from cairn.storage.reading.verify import verify_step
    from cairn.storage.runs.run import Run

    places.connect(place)
    run_uri = f"{place}/{RUN}"
    began = time.perf_counter()
    report = verify_step(Run.open(run_uri), step)
    seconds = time.perf_counter() - began
    if report.problems:
        raise RuntimeError(f"{run_uri}: expected a sound step, found {report.problems}")
    return {"seconds": seconds, "bytes": report.nbytes}


def save_adapters(place: str, megabytes: float, layers: int) -> Measured:
    """What the second save of a state with a frozen base writes, or sends to a store."""
    contender = _contender(OURS, place)
    shapes = workload.lora_shapes(megabytes, layers)
    state, step = workload.device_state(shapes), workload.compiled_step()
    contender.save(1, state)()
    before = places.sent(place)
    state = workload.train(step, state, "lora")
    os.sync()
    began = time.perf_counter()
    contender.save(2, state)()
    seconds = time.perf_counter() - began
    contender.close()
    trained = {"lora": shapes["model"]["lora"], "optimizer": shapes["optimizer"]}
    return {
        "seconds": seconds,
        "added": places.sent(place) - before,
        "trained": workload.nbytes(trained),
        "base": workload.nbytes(shapes["model"]["base"]),
    }


def many_leaves(place: str, megabytes: float, layers: int) -> Measured:
    """A later save of many small leaves, and a restore of them.

    What each is compared with is measured just before and just after, on leaves that nobody has
    looked at yet, for a view of one is kept.
    """
    import jax
    import numpy as np

    contender = _contender(OURS, place)
    leaves = workload.small_leaves(megabytes, layers)
    half = jax.jit(lambda leaf: leaf * 0.5)  # of all leaves at once it would take long to compile
    contender.save(1, {"model": leaves})()
    state, *others = (jax.block_until_ready(jax.tree.map(half, leaves)) for _ in range(3))
    on_host = [np.array(leaf) for leaf in jax.tree.leaves(leaves)]
    (device,) = jax.tree.leaves(leaves)[0].devices()

    def hold(tree: Any) -> float:
        parts = jax.tree.leaves(tree)
        gc.collect()
        gc.disable()  # what a save has left to the collector is none of this
        began = time.perf_counter()
        views = [np.asarray(leaf) for leaf in parts]
        seconds = time.perf_counter() - began
        gc.enable()
        del views
        return seconds

    def put() -> float:
        began = time.perf_counter()
        jax.block_until_ready([jax.device_put(leaf, device) for leaf in on_host])
        return time.perf_counter() - began

    before = hold(others[0])
    began = time.perf_counter()
    wait = contender.save(2, {"model": state})
    blocked = time.perf_counter() - began
    wait()
    held = statistics.mean((before, hold(others[1])))
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    before = put()
    began = time.perf_counter()
    found = jax.block_until_ready(contender.restore(2, {"model": target}))["model"]
    restored = time.perf_counter() - began
    placed = statistics.mean((before, put()))
    contender.close()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        if not np.array_equal(one, other):
            raise RuntimeError("expected the values that were saved, found others")
    return {
        "blocked": blocked,
        "held": held,
        "restored": restored,
        "placed": placed,
        "bytes": sum(leaf.nbytes for leaf in on_host),
    }


def delete(place: str) -> Measured:
    """Removes a place."""
    places.delete(place)
    return {}


MEASURES: dict[str, Callable[..., Measured]] = {
    measure.__name__: measure
    for measure in (
        save,
        save_while_training,
        cold,
        warm,
        restore,
        read,
        read_direct,
        verify,
        save_adapters,
        many_leaves,
        states.save_state,
        states.save_train_state,
        states.save_items,
        states.save_state_of_many_layers,
        states.save_items_of_many_layers,
        delete,
    )
}


class _InBackground(threading.Thread):
    """A call in a thread, whose error `result` raises."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Makes the call."""
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Raises what the call raised; once it is over."""
        self.join()
        if self._error is not None:
            raise self._error


def _contender(name: str, place: str) -> Contender:
    places.connect(place)
    return CONTENDERS[name](place)


def _state_and_step(contender: Contender, shapes: Any, saves: int) -> tuple[Any, Any]:
    """The state as the contender takes it, and the step between saves, already compiled."""
    if contender.takes_host_arrays:
        return workload.host_state(shapes), None
    state = workload.device_state(shapes)
    if saves == 1:
        return state, None
    step = workload.compiled_step()
    return workload.train(step, state), step
