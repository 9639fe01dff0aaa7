"""A training job for tests to end: `python -m tests.state.preempted_job RUN HOW [INDEX PORT]`.

HOW is "saves" or "hangs" (its store never finishes a save after the first). With an index it is one
of two processes. It prints the number of each of its first steps, and at the end what it saved.
"""

import atexit
import json
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn import RunSaver, SavePolicy, TrainState
from tests.state.seams import save_job

FIRST_STEPS = 10


def make_state() -> TrainState:
    """A state over all devices of the job."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), PartitionSpec("devices"))
    weight = jax.jit(lambda: jnp.ones((8, 8)), out_shardings=rows)()
    return TrainState.create(params={"w": weight}, tx=optax.sgd(1e-2))


def main(run: str, how: str, index: str = "", port: str = "") -> None:
    """Trains until it is told to end."""
    if port:
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    atexit.register(print, "exit handlers run", flush=True)
    state = make_state()
    train_step = jax.jit(lambda state: state.apply_gradients(grads=state.params), donate_argnums=0)
    policy = SavePolicy(at_steps=[1], deadline_seconds=60.0 if how == "saves" else 0.5)
    taken, handle = 0, None
    with RunSaver(run, policy, agree_every=4) as saver:
        while not saver.should_stop:
            state = train_step(state)
            taken += 1
            handle = saver.step(state)
            if handle is not None and handle.reason == "at_step":
                handle.wait()
                if how == "hangs":
                    save_job.sync_folder = lambda folder: threading.Event().wait()
            if taken <= FIRST_STEPS:
                print(taken, flush=True)
        if handle is None or handle.reason != "preemption":  # told after the last step
            handle = saver.step(state, step=taken)
        assert handle is not None
        said = {"step": handle.step, "state": handle.state, "taken": int(state.step)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
