"""A training job: fine-tunes SmolLM2-135M and saves to a run while it goes on.

Run by the demo as its own process; prints one JSON object a line: what a log collector would get.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="URI of the run to save to")
    parser.add_argument("--restore", help="start from this checkpoint: RUN, RUN@alias, RUN/steps/N")
    parser.add_argument("--steps", type=int, required=True, help="stop after this step")
    parser.add_argument("--save-every", type=int, default=0, help="save every so many steps")
    parser.add_argument("--mesh", default="1,4", help="dp,fsdp")
    parser.add_argument(
        "--show-refusal",
        action="store_true",
        help="first ask for a mesh that the heads don't divide",
    )
    parser.add_argument("--digests", type=Path, help="write the digests of the last saved state")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens a row")
    parser.add_argument("--batches", type=int, default=3, help="then the first one comes again")
    return parser.parse_args()


def say(event: str, **fields: Any) -> None:
    """Prints one event as a JSON line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def leaf_digests(state: Any) -> dict[str, str]:
    """Returns a BLAKE2 digest per leaf of the state's parameters and optimizer, from host bytes."""
    import numpy as np

    from cairn.state.checkpointing.trees import flatten

    leaves: Mapping[str, Any] = flatten({"model": state.graphstate, "optimizer": state.opt_state})
    return {
        path: hashlib.blake2b(np.ascontiguousarray(leaf).tobytes(), digest_size=16).hexdigest()
        for path, leaf in leaves.items()
    }


def main() -> None:
    """Trains; every number the demo shows comes from these events."""
    arguments = parse_arguments()
    dp, fsdp = (int(part) for part in arguments.mesh.split(","))
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={dp * fsdp}"
    # Threads of XLA's pool: with one a device, collectives that run side by side can deadlock.
    os.environ.setdefault("PJRT_NPROC", str(4 * dp * fsdp))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax

    from cairn import DecoderForCausalLM, EasyDeLState
    from cairn.state.errors import ShardingError
    from cairn.state.states.optimizers import make_optimizer
    from examples.demo.corpus import Batches
    from examples.demo.weights import load_tokenizer, smollm2_gguf

    started = time.perf_counter()
    mesh_arguments = {"sharding_axis_dims": (dp, fsdp, 1, 1), "auto_shard_model": True}
    position = 0
    if arguments.restore:
        state = EasyDeLState.load_state(arguments.restore, verbose=False, **mesh_arguments)
        position = state.extras["position"]
        say("restored", source=arguments.restore, step=int(state.step), position=position)
    else:
        if arguments.show_refusal:
            try:
                DecoderForCausalLM.from_pretrained(
                    smollm2_gguf(),
                    sharding_axis_dims=(1, dp * fsdp // 2, 2, 1),
                    auto_shard_model=True,
                )
            except ShardingError as error:
                say("refused", mesh="tp=2", message=str(error))
        model = DecoderForCausalLM.from_pretrained(
            smollm2_gguf(), config_kwargs={"scan_layers": True, "remat": True}, **mesh_arguments
        )
        # One moment, not AdamW's two: 8 bytes a parameter in each save, where AdamW has 12.
        tx, tx_init = make_optimizer("lion", learning_rate=3e-5, weight_decay=0.01)
        state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
        say("loaded", source=smollm2_gguf().name, parameters=model.num_parameters)
    say(
        "ready",
        seconds=time.perf_counter() - started,
        bytes=state.size,
        devices=jax.device_count(),
        mesh=dict(zip(("dp", "fsdp"), (dp, fsdp), strict=True)),
    )
    if arguments.digests and arguments.restore:
        arguments.digests.write_text(json.dumps(leaf_digests(state)))

    def train_step(state: EasyDeLState, batch: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            loss: jax.Array = state.merge(parameters)(input_ids=batch, labels=batch).loss
            return loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(state.shardings, None))
    batches = Batches(load_tokenizer(), batch=arguments.batch, length=arguments.length)
    for step in range(int(state.step) + 1, arguments.steps + 1):
        began = time.perf_counter()
        state, loss = step_fn(state, batches[position % arguments.batches])
        value = float(loss)
        position += 1
        say("step", step=step, loss=value, exact=value.hex(), seconds=time.perf_counter() - began)
        if arguments.save_every and step % arguments.save_every == 0:
            say("saving", step=step)
            began = time.perf_counter()
            save = state.save_state(
                arguments.run,
                step=step,
                metrics={"loss": value},
                labels={"mesh": f"dp={dp} fsdp={fsdp}"},
                extras={"position": position},
                verbose=False,
            )
            blocked = time.perf_counter() - began
            say("saved", step=step, blocked=blocked, in_flight=not save.done)
            last = step + arguments.save_every > arguments.steps
            if arguments.digests and not arguments.restore and last:
                arguments.digests.write_text(json.dumps(leaf_digests(state)))
    say("done", step=int(state.step))


if __name__ == "__main__":
    main()
