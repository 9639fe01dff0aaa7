"""Bytes of optimizer state that each device holds, against the least that it could hold.

A small Llama is sharded over 8 virtual CPU devices (fsdp=4 x tp=2), and each optimizer's state is
made by `EasyDeLState.init_tx`. Held are the bytes of the shards that are really on a device, on
the fullest one. Ideal is, for each leaf, its bytes divided by the number of different parts into
which its parameter is cut along the dimensions that the leaf has: all of them for a moment, one
less for Adafactor's rows and columns; counters are whole.

    python benchmarks/optimizer_sharding.py [--json results.json]

Fails (exit 1) if a device holds more than 1.05 times the ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "optimizer_sharding.json"
MESH = (1, 4, 2, 1)
LIMIT = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(REPOSITORY))
    state = sharded_state()
    results = [measure(name, state) for name in optimizers()]
    print_table(results)
    report = {
        "device": f"8 virtual CPU devices, {platform.platform()}",
        "mesh": dict(zip(("dp", "fsdp", "tp", "sp"), MESH, strict=True)),
        "reference": "each leaf cut like its parameter, along the dimensions that both have",
        "parameter_bytes": state.size,
        "results": results,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result["ratio"] <= LIMIT for result in results) else 1


def optimizers() -> dict[str, Any]:
    """The optimizers by name."""
    import jax
    import optax

    def matrices(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: "adam" if leaf.ndim > 1 else "sgd", tree)

    clip = optax.clip_by_global_norm(1.0)
    momentum = optax.sgd(1e-3, momentum=0.9)
    steps = optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation()
    injected = optax.inject_hyperparams(optax.adamw)
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    return {
        "adam": optax.adam(1e-3),
        "adamw": optax.adamw(1e-3),
        "lion": optax.lion(1e-3),
        "sgd + momentum": momentum,
        "adafactor": optax.adafactor(1e-3),
        "adafactor + momentum": optax.adafactor(1e-3, momentum=0.9),
        "chain": optax.chain(clip, optax.adamw(schedule)),
        "masked": optax.masked(optax.adam(1e-3), matrices),
        "multi_transform": optax.multi_transform(
            {"adam": optax.adam(1e-3), "sgd": momentum}, labels
        ),
        "MultiSteps": steps,
        "inject_hyperparams": injected(learning_rate=schedule),
        "ema": optax.chain(optax.ema(0.9), optax.sgd(1e-3)),
        "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
        "adadelta": optax.adadelta(1e-3),
    }


def sharded_state() -> Any:
    """A state without an optimizer: two layers, width 256, 2,048 words."""
    from flax import nnx

    from cairn.interop.config.decoder import DecoderConfig
    from cairn.state.models.decoder.decoder import DecoderForCausalLM

    config = DecoderConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        sharding_axis_dims=MESH,
    )
    return DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model().to_state()


def measure(name: str, state: Any) -> dict[str, Any]:
    """Makes one optimizer's state and counts its bytes."""
    from cairn.state.paths import named_leaves

    parameters = {named.path: named.leaf for named in named_leaves(state.graphstate)}
    held: dict[Any, int] = {}
    ideal = 0.0
    replicated = []
    for named in named_leaves(state.init_tx(optimizers()[name]).opt_state):
        for shard in named.leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        parameter = _parameter_of(named.path, parameters)
        parts = 1 if parameter is None else _parts(named, parameter)
        ideal += named.leaf.nbytes / parts
        if named.leaf.size >= 16_384 and named.leaf.is_fully_replicated:
            replicated.append(named.path)
    most = max(held.values())
    return {
        "optimizer": name,
        "held_bytes_per_device": most,
        "ideal_bytes_per_device": round(ideal),
        "ratio": most / ideal,
        "large_replicated_leaves": replicated,
    }


def _parameter_of(path: str, parameters: dict[str, Any]) -> Any:
    found = [name for name in parameters if path == name or path.endswith(f"/{name}")]
    return parameters[max(found, key=len)] if found else None


def _parts(named: Any, parameter: Any) -> int:
    """Into how many different parts the parameter is cut along the dimensions of a leaf."""
    keys = named.path.split("/")
    by_length = sorted(range(parameter.ndim), key=lambda index: parameter.shape[index])
    if named.leaf.shape == parameter.shape:
        dimensions: Sequence[int] = range(parameter.ndim)
    elif "v_row" in keys and named.leaf.size > 1:
        dimensions = [index for index in range(parameter.ndim) if index != by_length[-1]]
    elif "v_col" in keys and named.leaf.size > 1:
        dimensions = [index for index in range(parameter.ndim) if index != by_length[-2]]
    else:
        dimensions = []
    indices = parameter.sharding.devices_indices_map(parameter.shape).values()
    return len({tuple(str(index[dimension]) for dimension in dimensions) for index in indices})


def print_table(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="optimizer state, bytes per device (fsdp=4 x tp=2)")
    table.add_column("optimizer")
    for column in ("held", "ideal", "held / ideal"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result["optimizer"],
            f"{result['held_bytes_per_device']:,}",
            f"{result['ideal_bytes_per_device']:,}",
            f"{result['ratio']:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
