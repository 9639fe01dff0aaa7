"""Trains a small Llama from scratch on this repository's documents, crashes, and goes on.

The job itself is `train`: about thirty lines, and the same lines serve its first start and every
restart. The rest starts it three times: once undisturbed, once with a crash in the middle, and once
more after the crash. The losses of the job that crashed must be those of the undisturbed one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.checks import check, say

DEVICES, STEPS, SAVE_EVERY, CRASH_AFTER = 8, 20, 4, 14
BATCH, LENGTH = 16, 32
CRASHED = 13


def train(run: str, crash_after: int | None) -> None:
    """The job. Prints a JSON line for its start and for every step."""
    import jax
    import numpy as np
    from flax import nnx

    from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, make_optimizer
    from examples.demo.corpus import documents

    text = np.frombuffer(documents().encode(), dtype=np.uint8).astype(np.int32)  # bytes as tokens
    rows = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    mesh = {"sharding_axis_dims": (2, 4, 1, 1)}  # dp=2 x fsdp=4

    def create() -> EasyDeLState:
        config = DecoderConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            scan_layers=True,
            **mesh,
        )
        model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
        tx, tx_init = make_optimizer("adamw", learning_rate=1e-2, max_grad_norm=1.0)
        return EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)

    state = EasyDeLState.load_or_create(run, create, auto_shard_model=True, verbose=False, **mesh)

    def train_step(state: EasyDeLState, batch: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            loss: jax.Array = state.merge(parameters)(input_ids=batch, labels=batch).loss
            return loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    step_fn = jax.jit(train_step, donate_argnums=0)
    position = state.extras.get("position", 0)
    print(json.dumps({"start": int(state.step), "position": position}), flush=True)
    for step in range(int(state.step) + 1, STEPS + 1):
        state, loss = step_fn(state, rows[(position + np.arange(BATCH)) % len(rows)])
        position += BATCH
        value = float(loss)
        blocked = None
        if step % SAVE_EVERY == 0:  # the next step goes on while this one is being written
            save = state.save_state(run, step=step, extras={"position": position}, verbose=False)
            blocked = save.blocked_seconds
        print(
            json.dumps({"step": step, "loss": value, "exact": value.hex(), "blocked": blocked}),
            flush=True,
        )
        if step == crash_after:
            os._exit(CRASHED)  # nothing is cleaned up, nothing is waited for


def start(name: str, run: Path, cache: Path, *arguments: str) -> tuple[int, int, dict[int, Any]]:
    """Starts the job as a process; returns its status, its first step, and its steps' events."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "PJRT_NPROC": str(4 * DEVICES),  # threads: with too few, collectives wait for each other
    }
    command = [sys.executable, "-m", "examples.train_from_scratch", "--job", str(run), *arguments]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    first = next((line["start"] for line in lines if "start" in line), -1)
    events = {line["step"]: line for line in lines if "step" in line}
    for step in (first + 1, *sorted(events)[SAVE_EVERY::SAVE_EVERY], *sorted(events)[-1:]):
        if step in events:
            say(f"     {name}: step {step:>2}  loss {events[step]['loss']:.4f}")
    return result.returncode, first, events


def main() -> None:
    """Runs the job three times and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", metavar="RUN", help="run the job itself, saving to this run")
    parser.add_argument("--crash-after", type=int, metavar="STEP")
    arguments = parser.parse_args()
    if arguments.job:
        return train(arguments.job, arguments.crash_after)
    with tempfile.TemporaryDirectory() as folder:
        cache, calm, crashed = (Path(folder, name) for name in ("cache", "calm", "crashed"))
        say(f"training {STEPS} steps on {DEVICES} virtual devices, saving every {SAVE_EVERY}")
        status, _, expected = start("undisturbed", calm, cache)
        check("the undisturbed job ends well", status == 0, f"status {status}")
        losses = [event["loss"] for event in expected.values()]
        late = sum(losses[-5:]) / 5
        check("its loss falls", late < 0.8 * losses[0], f"{losses[0]:.3f}, at last {late:.3f}")
        blocked = [event["blocked"] for event in expected.values() if event["blocked"] is not None]
        say(f"     saves held training up for {', '.join(f'{one:.3f}' for one in blocked)} s")
        status, _, before = start("to crash", crashed, cache, "--crash-after", str(CRASH_AFTER))
        check(f"the second job crashes after step {CRASH_AFTER}", status == CRASHED, status)
        status, first, after = start("restarted", crashed, cache)
        check("the same command goes on", status == 0, f"status {status}")
        # A save waits for the one before it, so that at most the last one was lost.
        saved = CRASH_AFTER // SAVE_EVERY * SAVE_EVERY
        check("from a step it had saved", first in (saved, saved - SAVE_EVERY), f"step {first}")
        exact = {step: event["exact"] for step, event in expected.items()}
        seen = {step: event["exact"] for step, event in (before | after).items()}
        check("with the undisturbed job's losses, bit for bit", seen == exact, f"{len(seen)} steps")


if __name__ == "__main__":
    main()
