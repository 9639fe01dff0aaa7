"""What each process of a job reads of somebody's weights: each has a server of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from cairn import DecoderForCausalLM, EasyDeLState
from cairn.state.checkpointing.trees import flatten
from cairn.state.sharding.gather import gather_tree
from tests.gcs.server import GcsServer, client_environment
from tests.multi_process.launcher import Job
from tests.multi_process.scenarios import digest, error_of

BUCKET = "models"
JOB_SECONDS = 240

Launch = Callable[..., Job]


class Imported(NamedTuple):
    """What came of a job of several processes.

    Attributes:
        results: what each of them has returned.
        read: by process and folder the bytes of weights that it was sent.
    """

    results: list[Any]
    read: list[dict[str, int]]


def digest_of(model: Any) -> str:
    """One text for all weights of a model."""
    return digest(flatten(gather_tree(nnx.to_pure_dict(nnx.state(model, nnx.Param)))))


def load(
    urls: list[str], meshes: Mapping[str, list[int]], quantized: str, damaged: Mapping[str, str]
) -> dict[str, Any]:
    """Loads a folder of the name of each mesh onto it; one quantized; and those that are damaged.

    Gives a digest of each model, and what was raised.
    """
    os.environ.update(client_environment(urls[jax.process_index()]))
    found: dict[str, Any] = {}
    for folder, dims in meshes.items():
        uri = f"gs://{BUCKET}/{folder}"
        if folder == quantized:
            model = DecoderForCausalLM.from_pretrained(
                uri,
                sharding_axis_dims=dims,
                quantization_method="8bit",
                quantization_block_size=16,
            ).dequantize()
        else:
            model = EasyDeLState.load_state(
                uri, auto_shard_model=True, sharding_axis_dims=dims, verbose=False
            ).model
        found[folder] = digest_of(model)
    for folder in damaged:
        found[folder] = error_of(
            lambda folder=folder: DecoderForCausalLM.from_pretrained(f"gs://{BUCKET}/{folder}")
        )
    return found


def run(
    launch: Launch,
    root: Path,
    model: Path,
    meshes: Mapping[str, list[int]],
    *,
    quantized: str,
    damaged: Mapping[str, Mapping[str, bytes]],
) -> Imported:
    """Has two processes with two devices each load copies of a folder.

    Args:
        launch: starts jobs.
        root: for the servers' stores.
        model: the folder.
        meshes: by the name of a copy the mesh that it is loaded onto.
        quantized: the copy that is quantized while it is loaded.
        damaged: by the name of a copy the files that the second process finds changed; of one
            without any it can read the headers alone.
    """
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            server = stack.enter_context(GcsServer(root / str(number)))
            server.store.create_bucket(BUCKET)
            for copy in (*meshes, *damaged):
                changes = damaged.get(copy, {}) if number == 1 else {}
                for path in model.iterdir():
                    _put(server, f"{copy}/{path.name}", changes.get(path.name, path.read_bytes()))
            servers.append(server)
        heads = 2 * len(list(model.glob("*.safetensors")))
        for copy in (name for name, changes in damaged.items() if not changes):
            name = rf"{BUCKET}/{copy}/.*\.safetensors$"
            reads = {"operation": r"media\.get", "name": name, "skip": heads}
            servers[1].faults.add("status", status=403, count=None, **reads)
        arguments = {
            "urls": [server.url for server in servers],
            "meshes": dict(meshes),
            "quantized": quantized,
            "damaged": dict.fromkeys(damaged, ""),
        }
        job = launch("importing.load", arguments, count=2, devices=2)
        results = job.results(JOB_SECONDS)
        return Imported(results, [_read(server) for server in servers])


def _put(server: GcsServer, name: str, content: bytes) -> None:
    bucket = server.store.bucket(BUCKET)
    staged = bucket.stage()
    staged.write(content)
    bucket.commit(name, staged, fields={})


def _read(server: GcsServer) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in list(server.requests):
        if one.operation == "media.get" and one.name.endswith(".safetensors"):
            folder = one.name.partition("/")[0]
            found[folder] = found.get(folder, 0) + one.answered
    return found
