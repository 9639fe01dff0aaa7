"""Make a golden store with the code of this commit; README.md says when. No test runs this."""

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from cairn import (
    Checkpointer,
    CheckpointReader,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    Run,
    delete_alias,
    delete_step,
    fork_run,
    list_runs,
    make_optimizer,
    parse_uri,
    promote_step,
    verify_step,
)
from cairn.service.jobs.kinds import convert
from cairn.service.jobs.kinds.export_job import export_request
from cairn.service.schemas import ConvertRequest
from cairn.state.checkpointing.trees import flatten
from cairn.storage.runs.records.exports import ExportKey, find_export
from tests.storage.seams import probe

os.environ["CAIRN_WRITER_ID"] = "golden-job"

ROOT_NAME = "golden"
PLACE = Path("/golden")
"""Orbax and Cairn write into a step where it lies: it is made here, and moved then."""

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=16,
    tie_word_embeddings=True,
    sharding_axis_dims=(2, 4, 1, 1),
    tokenizer_files={"tokenizer_config.json": b'{"model_max_length": 16}\n'},
)
YEARS = 100 * 365 * 24 * 3600.0


def make_state():
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    model.shard_model()
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    return EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)


def train_step(state, ids):
    def loss_of(parameters):
        return state.merge(parameters)(input_ids=ids, labels=ids).loss

    return state.apply_gradients(grads=jax.grad(loss_of)(state.graphstate))


def own_items():
    """Leaves of every kind that a state has none of."""
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(array, *axes):
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

    numbers = np.random.default_rng(7)
    normal = numbers.standard_normal((8, 16), dtype=np.float32)
    whole = numbers.integers(-8, 8, (8, 16))
    mixed = {
        "bfloat16": put(normal.astype(ml_dtypes.bfloat16), "fsdp", "dp"),
        "bool": put(normal > 0),
        "complex64": put(normal[0].astype(np.complex64)),
        "float16": put(normal.astype(np.float16), None, "fsdp"),
        "float8_e4m3fn": put(normal.astype(ml_dtypes.float8_e4m3fn), "fsdp"),
        "int4": put(whole.astype(ml_dtypes.int4), "fsdp", None),
        "int4_odd": put(whole[:3, :5].astype(ml_dtypes.int4)),
        "uint4": put((whole + 8).astype(ml_dtypes.uint4), None, "dp"),
        "nested": {"empty": jnp.zeros((0, 3)), "scalar": jnp.float32(2.5)},
        "pair": (put(whole.astype(np.int8)), np.arange(3.0)),
    }
    keys = {"dropout": jax.random.key(3), "batch": jax.random.split(jax.random.key(4, impl="rbg"))}
    return {"mixed": mixed, "keys": keys}


def frozen_items(step):
    """Leaves that do not change from step to step, beside one that does; keys with "." and "/"."""
    frozen = np.random.default_rng(8).standard_normal((8, 16), dtype=np.float32)
    named = {
        "model.layers.0.weight": jnp.asarray(frozen),
        "linear/~/w": jnp.asarray(-frozen),
        "linear": {"~": {"w": jnp.asarray(2 * frozen)}},
        "100%2F": jnp.asarray(3 * frozen),
        "step": np.int32(step),
    }
    return {"named": named}


def digests(leaves):
    """Dtype, shape and SHA-256 of each leaf: what a reader has to give."""
    found = {}
    for path, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        found[path] = f"{array.dtype.name}{list(array.shape)} sha256:{digest}"
    return dict(sorted(found.items()))


class Job:
    """The job that writes the run, and remembers what it handed to each save."""

    def __init__(self, uri):
        self.uri = uri
        self.saved = {}
        self.ids = jnp.asarray(np.random.default_rng(1).integers(0, 32, (8, 8)).astype(np.int32))
        self.state = make_state()
        self.step_fn = jax.jit(train_step)

    def save_state(self, step, **arguments):
        self.state = self.step_fn(self.state, self.ids)
        model = {**flatten(nnx.to_pure_dict(self.state.graphother)), **flatten(self.state.params)}
        items = {"model": model}
        if arguments.get("save_optimizer", True):
            items["optimizer"] = flatten(self.state.opt_state)
        taken = {item: digests(leaves) for item, leaves in items.items()}
        extras = {"position": int(self.state.step)}
        handle = self.state.save_state(
            self.uri, step=step, extras=extras, verbose=False, wait=True, **arguments
        )
        self.saved[step, handle.attempt] = taken

    def save_items(self, step, items, **arguments):
        taken = {item: digests(flatten(leaves)) for item, leaves in items.items()}
        meta = {"step": step, "nested": {"list": [1, 2.5, "text", None, True]}, "empty": {}}
        handle = Checkpointer.for_run(self.uri).save(step, items, meta=meta, **arguments)
        handle.wait()
        self.saved[step, handle.attempt] = taken

    def save_small(self, step, **arguments):
        items = {"only": {"step": np.int32(step)}}
        self.save_items(step, items, **arguments)

    def restart(self):
        """The next save begins another attempt."""
        Checkpointer.for_run(self.uri).close()


class Progress:
    done_bytes = 0

    def set(self, *, done_bytes=None, **_):
        self.done_bytes = self.done_bytes if done_bytes is None else done_bytes

    def advance(self, count):
        self.done_bytes += count


def export(root, run, info):
    """What the service's convert job does, with its own code; the export's manifest."""
    context = SimpleNamespace(
        roots={ROOT_NAME: root},
        operation_id="golden-operation",
        progress=Progress(),
        step=lambda _, function: function(),
        check=lambda: None,
    )
    options = convert.requested_options(ConvertRequest(dtype="float32"))
    request = export_request(
        convert.KIND,
        root=ROOT_NAME,
        run=run,
        step=info,
        options=options,
        rule_version=convert.RULE_VERSION,
    )
    convert._run(context, request)
    key = ExportKey.of(
        step=info.step,
        attempt=info.attempt,
        kind=convert.KIND,
        source=info.manifest_digest,
        options=options,
        rule_version=convert.RULE_VERSION,
    )
    return key, find_export(run.objects, key)


def neutral_store(identity, folder, mount):
    """A root remembers which store it is: one that is no real one."""
    return {**identity(folder, mount), "kind": "ext4", "source": "/dev/golden"}


def name_no_machine():
    """Have the store say that it was written on no real machine."""
    socket.gethostname = lambda: "golden"
    platform.platform = lambda *_, **__: "Linux-golden"
    probe.identity = functools.partial(neutral_store, probe.identity)


def read_run(run):
    """All that a reader of this release gives of a run, as JSON."""
    steps = []
    for info in run.all_states():
        reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
        leaves = {
            item: digests({path: reader.read(item, path) for path in reader.leaves(item)})
            for item in reader.items()
        }
        name = f"annotations/{info.step}.{info.attempt}.json"
        found = run.objects.read(name)
        annotation = None if found is None else json.loads(found.value)
        manifest = run.manifest(info)
        steps.append(
            {
                "step": info.step,
                "attempt": info.attempt,
                "state": info.state.value,
                "created": info.created,
                "nbytes": info.nbytes,
                "manifest_digest": info.manifest_digest,
                "assets": {asset.name: asset.sha256 for asset in manifest.assets},
                "labels": annotation and annotation["labels"],
                "metrics": annotation and annotation["metrics"],
                "meta": reader.meta(),
                "leaves": leaves,
            }
        )
    info = run.info()
    return {
        "name": info.name,
        "created": info.created,
        "lineage": info.lineage and info.lineage.model_dump(),
        "attempts": [[one.number, one.base_step, one.writer, one.at] for one in run.attempts()],
        "steps": steps,
        "aliases": [
            {key: value for key, value in one.model_dump().items() if key != "token"}
            for one in run.aliases.list()
        ],
    }


def make(release, commit, out):
    root = parse_uri(str(out.absolute()))
    job = Job(str(root / "my-run"))
    job.save_state(1)
    run = Run.open(root / "my-run")
    metrics = {"loss": float("nan"), "top": float("inf"), "accuracy": 0.25}
    labels = {"stage": "warm-up", "ünïcode": "größe"}
    job.save_state(2, metrics=metrics, labels=labels, save_optimizer=False)
    job.save_small(3)
    job.restart()
    job.save_small(4)
    job.save_small(3, overwrite=True)  # sets aside the 3 and the 4 that there were
    job.save_small(4)  # deleted below
    job.save_items(5, own_items(), assets={"notes.txt": b"golden\n"}, metrics={"loss": 0.5})
    job.save_state(6, compression="zstd", save_optimizer=False)
    job.save_items(7, own_items(), compression="zstd")
    job.save_items(8, frozen_items(8))
    job.save_items(9, frozen_items(9))  # has files of 8
    job.restart()

    listed = {info.step: info for info in run.steps()}

    def move(name, step, expect, reason):
        promote_step(run, step, name, by="golden-person", reason=reason, expect=expect)

    move("production", 1, None, "first")
    move("production", 2, 1, "better")
    move("production", 3, 2, "best")
    move("candidate", 2, None, "to try")
    delete_alias(run, "candidate", expect=1, by="golden-person", reason="tried")
    delete_step(run, listed[4], by="golden-person", reason="space", grace=YEARS)
    key, exported = export(root, run, listed[1])
    fork_run(run, listed[2], root / "forked", by="golden-forker")

    expected = {
        "release": release,
        "commit": commit,
        "runs": {name: read_run(Run.open(root / name)) for name in list_runs(root)},
        "deleted_alias_history": [event.model_dump() for event in run.aliases.history("candidate")],
        "export": {"manifest": key.manifest, **json.loads(exported.to_bytes())},
    }
    for step in expected["runs"]["my-run"]["steps"]:
        assert step["leaves"] == job.saved.pop((step["step"], step["attempt"])), step["step"]
    assert not job.saved
    assert all(verify_step(run, info).ok for info in run.all_states())
    text = json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False)
    (out / "expected.json").write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="name of the store, such as 0.1.0")
    parser.add_argument("commit", help="of the code that runs")
    arguments = parser.parse_args()
    PLACE.mkdir()
    try:
        name_no_machine()
        make(arguments.release, arguments.commit, PLACE)
        shutil.copytree(PLACE, Path(__file__).parent / arguments.release)
    finally:
        shutil.rmtree(PLACE)


if __name__ == "__main__":
    main()
