"""What the processes of a job do; every function runs in all of them, and returns JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from cairn import (
    Annotation,
    Checkpointer,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    ExpertsConfig,
    Run,
    SaveHandle,
    make_optimizer,
    parse_uri,
)
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.restore import restore_item
from cairn.state.checkpointing.trees import flatten
from cairn.state.sharding.gather import gather_tree
from cairn.state.sharding.mesh import mesh_of
from cairn.storage.runs.records.layout import annotation_file
from tests.tiny import TINY, batch, compile_step

SMALL = dataclasses.replace(
    TINY,
    vocab_size=16_384,
    hidden_size=64,
    num_hidden_layers=1,
    sharding_axis_dims=(1, -1, 1, 1),
)
"""A quarter of the embedding is 1 MiB: TensorStore reads across smaller gaps than that, and how
much each process reads could not be seen."""

SAVE_SECONDS = 60


def make_state(config: DecoderConfig = SMALL) -> EasyDeLState:
    """A fresh state over all devices of the job."""
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    model.shard_model()
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    return EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)


def host_leaves(state: EasyDeLState) -> dict[str, np.ndarray]:
    """Every leaf of a state, whole and in host memory, by item and path."""
    model = {**flatten(nnx.to_pure_dict(state.graphother)), **flatten(state.params)}
    items = {"model": model, "optimizer": flatten(state.opt_state)}
    return {
        f"{item}/{path}": np.asarray(leaf)
        for item, leaves in items.items()
        for path, leaf in gather_tree(leaves).items()
    }


def digest(leaves: dict[str, np.ndarray]) -> str:
    """One text for all values of some leaves: equal only if every bit is."""
    digester = hashlib.sha256()
    for path, leaf in sorted(leaves.items()):
        digester.update(f"{path} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    return digester.hexdigest()


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    """What a call raises."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as exc:
        names = [kind.__name__ for kind in type(exc).__mro__]
        return {"kinds": names, "text": str(exc)}
    raise AssertionError("the call raised nothing")


EVENT_SECONDS = 120
"""A process that has not come so far by then hangs."""


def scenario(name: str) -> Callable[..., Any]:
    """The function of a name, of this module or "module.function"."""
    module, _, function = name.rpartition(".")
    found = getattr(import_module(f"tests.multi_process.{module or 'scenarios'}"), function)
    return cast("Callable[..., Any]", found)


def in_turn(calls: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What several scenarios return, by name: one job is begun for all of them."""
    return {name: scenario(name)(**arguments) for name, arguments in calls.items()}


def tell(folder: str, event: str) -> None:
    """Tell the processes that share a folder that something has happened in this one."""
    Path(folder, f"{event}-{jax.process_index()}").touch()


def wait_for(folder: str, event: str, processes: Iterable[int]) -> None:
    """Wait until it has happened in all of these processes."""
    deadline = time.monotonic() + EVENT_SECONDS
    for index in processes:
        while not Path(folder, f"{event}-{index}").exists():
            assert time.monotonic() < deadline, f"{event} of process {index}"
            time.sleep(0.02)


def train(runs: list[str], folder: str) -> dict[str, Any]:
    """Trains three steps, saves two of them to every run, and brings the second to the host."""
    state = EasyDeLState.load_or_create(runs[0], make_state)
    step_fn = compile_step(state)
    losses, found, handles = [], {}, {}
    for step in (1, 2, 3):
        state, loss = step_fn(state, batch(step - 1))
        losses.append(float(loss))
        if step < 3:
            for run in runs:
                handles[run, step] = state.save_state(
                    run,
                    extras={"position": step},
                    metrics={"loss": losses[-1]},
                    labels={"kind": "small"},
                    verbose=False,
                )
        if step == 2:
            found = {"digest": digest(host_leaves(state)), **to_host(state, folder)}
    for handle in handles.values():
        handle.wait(SAVE_SECONDS)
    return {"losses": losses, "final": digest(host_leaves(state)), **found}


def to_host(state: EasyDeLState, folder: str) -> dict[str, Any]:
    """A state gathered, as PyTorch's tensors, and as a folder that is read again."""
    gathered = state.gather_state()
    on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(gathered.params))
    tensors = {name: tensor.numpy() for name, tensor in state.to_torch().items()}
    names = state.model.save_pretrained(folder, max_shard_size="100KB")
    there = sorted(path.name for path in Path(folder).iterdir())
    again = DecoderForCausalLM.from_pretrained(folder)
    weights = flatten(gather_tree(nnx.to_pure_dict(nnx.state(again, nnx.Param))))
    return {
        "gathered": [on_host, digest(host_leaves(gathered))],
        "torch": digest(tensors),
        "folder": [sorted(names), there],
        "imported": digest(weights) == digest(flatten(gathered.params)),
        "experts_imported": experts_come_back(f"{folder}-experts"),
    }


def experts_come_back(folder: str) -> bool:
    """Write a model with a file for each tensor, of which a leaf of experts becomes several."""
    experts = ExpertsConfig(count=2, per_token=1, intermediate_size=64)
    config = dataclasses.replace(SMALL, model_type="mixtral", vocab_size=128, experts=experts)
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    model.shard_model()
    model.save_pretrained(folder, max_shard_size=1)
    again = DecoderForCausalLM.from_pretrained(folder)
    first, second = (
        digest(flatten(gather_tree(nnx.to_pure_dict(nnx.state(each, nnx.Param)))))
        for each in (model, again)
    )
    return first == second


def resume(
    run: str, dims: Sequence[int], aligned: str | None = None, save: bool = False
) -> dict[str, Any]:
    """Goes on with a run on another mesh: restores, trains one step, and may save it.

    Before that it may load `aligned`, whose parts are just those that the processes will hold.
    """

    def no_create() -> EasyDeLState:
        raise AssertionError("the run has a checkpoint")

    if aligned is not None:
        EasyDeLState.load_state(aligned, auto_shard_model=True, verbose=False)
    state = EasyDeLState.load_or_create(
        run,
        no_create,
        auto_shard_model=True,
        sharding_axis_dims=dims,
        verbose=False,
    )
    found = {"extras": state.extras, "digest": digest(host_leaves(state))}
    state, loss = compile_step(state)(state, batch(state.extras["position"]))
    if save:
        handle = state.save_state(run, extras={"position": int(state.step)}, verbose=False)
        handle.wait(SAVE_SECONDS)
        found["attempt"] = handle.attempt
    return {"loss": float(loss), "final": digest(host_leaves(state)), **found}


def hybrid(run: str, dims: Sequence[int], across: str) -> dict[str, Any]:
    """Loads a run onto hybrid meshes, then goes on with it on an ordinary one; loads `across` too.

    Gives for each mesh the processes of its devices, along the axes `dp` and `fsdp`.
    """
    owners: dict[str, Any] = {}
    other = EasyDeLState.load_state(across, auto_shard_model=True, verbose=False)
    for name, dcn_dims in (("dp", (2, 1, 1, 1)), ("fsdp", (1, 2, 1, 1))):
        state = EasyDeLState.load_state(
            run,
            auto_shard_model=True,
            sharding_axis_dims=(1, 2, 1, 1),
            sharding_dcn_axis_dims=dcn_dims,
            verbose=False,
        )
        mesh = mesh_of(state.graphstate)
        assert mesh is not None
        owners[name] = [
            [device.process_index for device in row] for row in mesh.devices[:, :, 0, 0]
        ]
        owners[f"{name} digest"] = digest(host_leaves(state))
    return {"owners": owners, "across": digest(host_leaves(other)), **resume(run, dims)}


def merge(run: str) -> dict[str, Any]:
    """Saves adapters and the merged weights, and loads both again."""
    state = make_state(dataclasses.replace(SMALL, vocab_size=TINY.vocab_size))
    model = state.model.apply_lora_to_layers(4, 8.0, "q_proj|down_proj")
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    step_fn = compile_step(state)
    for position in range(2):
        state, _ = step_fn(state, batch(position))
    merged = state.merge(state.graphstate).unwrap_lora_to_layers()
    expected = digest(host_leaves(merged.to_state()))
    kept = digest(host_leaves(state))
    refused = error_of(
        lambda: state.save_state(run, merge_lora=jax.process_index() == 0, verbose=False)
    )
    state.save_state(run, merge_lora=True, verbose=False).wait(SAVE_SECONDS)
    again = EasyDeLState.load_state(run, auto_shard_model=True, verbose=False)
    served = DecoderForCausalLM.from_pretrained(run)
    return {
        "resumed": digest(host_leaves(again)) == kept,
        "served": digest(host_leaves(served.to_state())) == expected,
        "adapters": [again.model.lora_is_enabled, served.lora_is_enabled],
        "refused": refused["text"],
    }


def disagree(run: str, other: str) -> dict[str, Any]:
    """Calls that differ between the processes; none of them may leave a process waiting."""
    first = jax.process_index() == 0
    state = make_state()

    def save(**arguments: Any) -> Callable[[], object]:
        uri = arguments.pop("uri", run)
        return lambda: state.save_state(uri, verbose=False, **{"step": 1, **arguments})

    def load(**arguments: Any) -> Callable[[], object]:
        uri = arguments.pop("uri", run)
        arguments = {"auto_shard_model": True, "verbose": False, **arguments}
        return lambda: EasyDeLState.load_state(uri, **arguments)

    found: dict[str, Any] = {
        "enable": error_of(save(enable=first)),
        "step": error_of(save(step=1 if first else 2)),
        "labels": error_of(save(labels={"who": str(first)})),
        "extras": error_of(save(extras={"position": int(first)})),
        "overwrite": error_of(save(overwrite=first)),
        "save_optimizer": error_of(save(save_optimizer=first)),
        "float_dtype": error_of(save(float_dtype=None if first else "float16")),
        "save_directory": error_of(save(uri=run if first else other)),
        "only one fails": error_of(save(extras={"position": 1 if first else {1, 2}})),
        "no such run": error_of(load()),
    }
    skipped = state.save_state(run, enable=False, verbose=False)
    found["skipped"] = [type(skipped).__name__, skipped.done, skipped.error is None]
    found["runs made"] = sum(
        uri.exists() for uri in (Path(parse_uri(run).local_path), Path(parse_uri(other).local_path))
    )
    # After all that, the processes are still in step with each other.
    state.save_state(run, step=1, metrics={"seconds": float(not first)}, verbose=False).wait(60)
    found["metrics"] = metrics_of(run, 1)
    found["one device"] = error_of(load(auto_shard_model=False))
    found["load_directory"] = error_of(load(uri=run if first else other))
    found["load_state"] = error_of(load(param_dtype=None if first else "bfloat16"))
    found["same step again"] = error_of(save(step=1))

    def check() -> None:
        if not first:
            time.sleep(1)  # the others are done with everything else
            raise ValueError("refused by process 1")

    refused = Checkpointer.for_run(other).save(1, {"model": state.params}, check=check)
    found["check"] = error_of(lambda: refused.wait(SAVE_SECONDS))
    found["listed"] = Checkpointer.for_run(other).steps()
    return found


def metrics_of(run: str, step: int) -> dict[str, float]:
    """The metrics kept with a step."""
    there = Run.open(run)
    info = there.step(step)
    stored = there.objects.read(annotation_file(info.step, info.attempt))
    assert stored is not None
    return dict(Annotation.parse(stored.value, run).metrics)


def fail_midway(run: str, folder: str) -> Iterator[dict[str, Any]]:
    """Failures that only process 1 meets: refused uploads, a flipped bit, and in the end its death.

    The store refuses what it writes of step 2, and holds back what it writes of step 4.
    """
    leaves = make_state().params

    def save(step: int, uri: str = run) -> SaveHandle:
        return Checkpointer.for_run(uri).save(step, {"model": leaves}, meta={})

    save(1).wait(SAVE_SECONDS)
    found: dict[str, Any] = {"refused": error_of(lambda: save(2).wait(SAVE_SECONDS))}
    after = save(3)
    after.wait(SAVE_SECONDS)
    found["after"] = [after.step, after.attempt]
    stored = save(1, folder)
    stored.wait(SAVE_SECONDS)
    agreement.agree(lambda: flip_bit(Path(stored.uri.local_path)))
    found["flipped"] = error_of(lambda: restore_item(stored.uri, "model", leaves))
    yield found
    save(4).wait(SAVE_SECONDS)
    yield {"survived": True}


def flip_bit(step: Path) -> None:
    """Damages what process 1 wrote of a step, and nothing else."""
    largest = max(step.glob("model/ocdbt.process_1/d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 1
    largest.write_bytes(content)
