"""The main job on a tiny model: train and save, read with plain Orbax, promote, export, restore."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn import Client, EasyDeLState
from cairn.service.errors import ProblemResponseError
from tests.programs.program import run
from tests.service.planes import running_plane
from tests.state.forward import logits_of
from tests.tiny import TinyRun, batch, compile_step, leaves_of, make_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyRun:
    return make_run(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    with running_plane(tiny.root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


PLAIN_ORBAX = """
import sys
import numpy as np
from orbax.checkpoint import v1 as ocp

folder, target, *items = sys.argv[1:]
def walk(flat, prefix, node):
    for key, value in node.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, dict):
            walk(flat, path, value)
        else:
            flat[path] = np.asarray(value)
for item in items:
    flat = {}
    walk(flat, "", ocp.load_pytree(folder, checkpointable_name=item))
    np.savez(f"{target}/{item}.npz", **flat)
assert not {"cairn"} & set(sys.modules), "Cairn was imported"
"""


def test_plain_orbax_reads_a_run_bit_equal_without_cairn(tiny, tmp_path):
    folder, items = f"{tiny.uri}/attempts/1/2", ("model", "optimizer")
    command = [sys.executable, "-c", PLAIN_ORBAX, folder, str(tmp_path), *items]
    subprocess.run(command, check=True, cwd=tmp_path)
    for item in items:
        with np.load(tmp_path / f"{item}.npz") as found:
            assert sorted(found) == sorted(tiny.leaves[item])
            for path, expected in tiny.leaves[item].items():
                assert found[path].dtype == expected.dtype, path
                np.testing.assert_array_equal(found[path], expected, err_msg=path)


def test_promoted_step_exports_to_files_that_transformers_loads_with_equal_logits(
    tiny, server, tmp_path
):
    with Client(server) as client:
        alias = client.promote("tiny", 2, "export-me", expect=None)
        with pytest.raises(ProblemResponseError) as stale:
            client.promote("tiny", 1, "export-me", expect=alias.sequence + 1)
        assert stale.value.status == 412
        operation = client.wait(client.convert("tiny", 2, max_shard_size="20KB").id)
        artifact = client.artifact(operation.result["artifact_id"])
        for file in artifact.files:
            client.download(artifact.id, file.name, tmp_path / file.name)
    assert sum(file.name.endswith(".safetensors") for file in artifact.files) > 1

    ids = batch(7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    state = EasyDeLState.load_state(f"{tiny.uri}@export-me", optimizer="skip", verbose=False)
    ours = logits_of(state.model, ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_restored_state_continues_bit_equal_on_the_same_mesh(tiny):
    state = EasyDeLState.load_state(
        tiny.uri, sharding_axis_dims=(2, 4, 1, 1), auto_shard_model=True, verbose=False
    )
    assert state.extras == {"position": 2}
    restored = leaves_of(state)
    for item, leaves in tiny.leaves.items():
        for path, expected in leaves.items():
            np.testing.assert_array_equal(restored[item][path], expected, err_msg=path)
    _, loss = compile_step(state)(state, batch(state.extras["position"]))
    assert float(loss) == tiny.losses[2]


def test_catalog_deleted_and_rebuilt_lists_the_same(tiny, tmp_path):
    def listing() -> dict:
        with (
            running_plane(tiny.root, tmp_path) as (url, _),
            Client(url) as client,
        ):
            runs = list(client.runs())
            return {
                "runs": [one.model_dump(mode="json") for one in runs],
                "steps": [
                    checkpoint.model_dump(mode="json")
                    for one in runs
                    for checkpoint in client.checkpoints(one.name, state="all")
                ],
                # `audited` is the trail's, which is not in the store.
                "aliases": [
                    alias.model_dump(mode="json", exclude={"audited"})
                    for one in runs
                    for alias in client.aliases(one.name)
                ],
            }

    with running_plane(tiny.root, tmp_path) as (url, _), Client(url) as client:
        client.promote("tiny", 1, "before-rebuild", expect=None, reason="kept in the store")
    before = listing()
    assert before["aliases"]
    databases = list((tmp_path / "control-plane").glob("catalog.sqlite*"))
    assert databases
    for database in databases:
        database.unlink()
    command = ["-m", "cairn", "index", "rebuild", "--root", tiny.root]
    rebuilt = run([*command, "--data-dir", tmp_path / "control-plane"])
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert "1 run, 2 checkpoints" in rebuilt.stdout
    assert json.dumps(listing()) == json.dumps(before)
