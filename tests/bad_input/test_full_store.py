"""A store that runs full during a save or a job: one clear error, and all that was there stays."""

import errno
import json
import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cairn import Checkpointer, Client, Run, StoreFullError
from cairn.service.errors import ProblemResponseError
from tests.bad_input.conftest import assert_loads_bit_equal, raised
from tests.bad_input.converting_job import RESERVE_BYTES
from tests.bad_input.disks import can_mount
from tests.faults.report import is_long
from tests.programs.program import run
from tests.service.commands import cairn_here
from tests.service.jobs import CONFIG, save_llama
from tests.service.planes import running_plane
from tests.tiny import leaves_of, make_state

ROOT = Path(__file__).parents[2]
NEXT = "Free space or raise the quota, then try again; what was stored before is untouched."
MEANS = {"limit": errno.EFBIG} | ({"disk": errno.ENOSPC} if can_mount() else {})
"""How a disk is full, everywhere; a real one too, where this user may mount it."""

BEST_MEANS = [*MEANS][-1:]
"""The real one, if it can be had."""


def run_on_full_disk(job, folder, size, means):
    """Run a program to its end, with a small disk of its own at the folder if that is the means."""
    mounting = ["tests.bad_input.disks", str(folder), size] if means == "disk" else []
    return run(["-m", *mounting, *job], cwd=ROOT, timeout=240)


@pytest.mark.parametrize("means", MEANS)
def test_a_save_to_a_full_disk_fails_and_the_next_one_works_once_there_is_room(tmp_path, means):
    job = ["tests.bad_input.saving_job", str(tmp_path), means]
    ended = run_on_full_disk(job, tmp_path, "4m", means)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    for text in (report["error"], report["again"]):
        assert text.startswith(f"the store is full: file://{tmp_path}/run/attempts/"), text
        assert "found " in text
        assert text.endswith(NEXT)
    assert report["errno"] == MEANS[means]
    assert report["states"] == [[1, "listed"]]
    assert report["kept"]
    assert [name for name in report["folders"] if name != "attempts/1/1"] == []
    assert report["after"] == [1, 2]


@pytest.fixture(scope="module")
def state():
    return make_state()


def used(gcs) -> int:
    return gcs.server.store.bucket(gcs.bucket).used_bytes


def test_a_save_over_the_quota_fails_and_the_next_one_works_once_it_is_raised(gcs, state):
    uri, leaves = f"{gcs.bucket_uri}/run", leaves_of(state)
    state.save_state(uri, step=1, verbose=False, wait=True)
    before = gcs.names()
    gcs.set_quota(used(gcs) + 100_000)
    handle = state.save_state(uri, step=2, verbose=False)
    error = raised(StoreFullError, handle.wait)
    assert str(error).startswith(f"the store is full: {uri}/attempts/1/2/")  # either item's object
    assert str(error).endswith(NEXT)
    assert [(info.step, info.state.value) for info in Run.open(uri).all_states()] == [(1, "listed")]
    assert [name for name in gcs.names() if name not in before] == []
    assert_loads_bit_equal(uri, leaves)
    gcs.set_quota(None)
    state.save_state(uri, step=2, verbose=False, wait=True)
    assert_loads_bit_equal(f"{uri}/steps/2", leaves)
    assert_loads_bit_equal(f"{uri}/steps/1", leaves)
    Checkpointer.for_run(uri).close()


def test_a_job_that_starts_on_a_full_store_is_told_at_once(gcs, state):
    uri, leaves = f"{gcs.bucket_uri}/run", leaves_of(state)
    state.save_state(uri, step=1, verbose=False, wait=True)
    Checkpointer.for_run(uri).close()
    before = gcs.names()
    gcs.set_quota(used(gcs))
    error = raised(StoreFullError, lambda: state.save_state(uri, step=2, verbose=False))
    assert str(error).startswith(f"the store is full: {uri}/")
    assert str(error).endswith(NEXT)
    assert gcs.names() == before
    assert_loads_bit_equal(uri, leaves)
    Checkpointer.for_run(uri).close()


def test_a_folder_for_transformers_that_does_not_fit_has_no_config(gcs, state):
    gcs.set_quota(20_000)
    target = f"{gcs.bucket_uri}/exported"
    error = raised(StoreFullError, lambda: state.model.save_pretrained(target))
    assert str(error).startswith(f"the store is full: {target}/model.safetensors")
    assert str(error).endswith(NEXT)
    assert gcs.names() == []


JOBS = {
    "convert": lambda client: client.convert("run", 1),
    "gather": lambda client: client.gather("run", 1),
    "restore": lambda client: client.restore("run", 1, target="new"),
}


def refused(client: Client, job: str, where: str) -> None:
    """The job fails with 507 and says where and why."""
    operation = JOBS[job](client)
    with pytest.raises(ProblemResponseError) as caught:
        client.wait(operation.id)
    problem = caught.value.problem
    assert (caught.value.status, problem["type"]) == (507, "urn:cairn:problem:store-full"), problem
    assert problem["detail"].startswith(f"the store is full: {where}"), problem
    assert "found " in problem["detail"]
    assert problem["detail"].endswith("what was stored before is untouched.")
    assert client.operation(operation.id).state == "failed"


def test_jobs_over_the_quota_fail_leave_nothing_and_work_once_it_is_raised(gcs, state, tmp_path):
    root, leaves = f"{gcs.bucket_uri}/runs", leaves_of(state)
    state.save_state(f"{root}/run", step=1, verbose=False, wait=True)
    Checkpointer.for_run(f"{root}/run").close()
    before = gcs.names()
    with (
        running_plane(root, tmp_path, gcs.env) as (url, _),
        Client(url) as client,
    ):
        gcs.set_quota(used(gcs) + 20_000)
        for job in JOBS:
            refused(client, job, f"{root}/{'new' if job == 'restore' else 'run'}/")
            assert gcs.names() == before
        ended = cairn_here("convert", "run", "--watch", url=url)
        assert (ended.returncode, ended.stdout) == (8, "")
        assert "failed: " in ended.stderr
        assert "the store is full: " in ended.stderr
        gcs.set_quota(None)
        for job in JOBS:
            made = client.wait(JOBS[job](client).id)
            if job == "convert":
                artifact = made.result["artifact_id"]
                client.download(artifact, "model.safetensors", tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = leaves["model"]["model/embed_tokens/embedding"]
    assert tensors["model.embed_tokens.weight"].tobytes() == embedding.tobytes()
    assert_loads_bit_equal(f"{root}/run", leaves)
    assert_loads_bit_equal(f"{root}/new", leaves)


def test_a_convert_on_a_full_disk_fails_leaves_nothing_and_works_once_there_is_room(tmp_path):
    """The file size limit of a running server is lowered: its databases still fit below it."""
    root = tmp_path / "store"
    rows = 1 << 17  # an embedding of 16 MiB
    saved = save_llama(root / "run", config=CONFIG.replace(vocab_size=rows))[1]
    with (
        running_plane(root, tmp_path) as (url, process),
        Client(url) as client,
    ):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8 << 20, hard))
        for job in JOBS:
            refused(client, job, f"file://{root}/{'new' if job == 'restore' else 'run'}/")
        left = [path for path in (root / "run").rglob("exports/**/*") if path.is_file()]
        assert left == []
        assert not (root / "new").exists()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        made = client.wait(client.convert("run", 1).id)
        target = tmp_path / "model.safetensors"
        client.download(made.result["artifact_id"], "model.safetensors", target)
        again = client.wait(client.restore("run", 1, target="new").id)
        assert again.result["run"] == "new"
    tensors = load_file(target)
    embedding = saved["model/embed_tokens/embedding"]
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize("means", MEANS if is_long() else BEST_MEANS)
def test_an_export_of_several_files_goes_on_where_the_disk_was_full(tmp_path, means):
    job = ["tests.bad_input.converting_job", str(tmp_path), means]
    ended = run_on_full_disk(job, tmp_path, "160m", means)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    failed, kept = report["failed"], report["kept"]
    assert failed["error"]["type"] == "urn:cairn:problem:store-full", failed
    assert report["published"] == []
    # No half of a file is left, and its room is free again.
    assert kept
    assert all(name.endswith(".safetensors") for name in kept), kept
    assert failed["error"]["kept_bytes"] == sum(size for size, _ in kept.values())
    if means == "disk":
        assert report["free"] > RESERVE_BYTES - (1 << 20)  # what the databases took
        assert failed["error"]["kept_bytes"] > 2 << 20
    # Without more room, what was whole is as it was.
    assert report["again"]["error"]["status"] == 507
    assert {name: report["still"].get(name) for name in kept} == kept
    assert report["ended"]["state"] == "succeeded", report["ended"]
    assert report["ended"]["result"]["taken_over"] >= failed["error"]["kept_bytes"]
    assert {name: report["after"].get(name) for name in kept} == kept
    assert sorted(report["after"]) == sorted(report["files"])
    assert report["same"]


def test_an_export_of_several_files_goes_on_where_the_quota_was_used_up(gcs, tmp_path):
    root = f"{gcs.bucket_uri}/runs"
    leaves = save_llama(f"{root}/llama")[1]
    before = gcs.names()
    with (
        running_plane(root, tmp_path, gcs.env) as (url, _),
        Client(url) as client,
    ):
        start = {"max_shard_size": "20KB"}
        gcs.set_quota(used(gcs) + 70_000)
        operation = client.convert("llama", 1, **start)
        with pytest.raises(ProblemResponseError) as caught:
            client.wait(operation.id)
        kept = caught.value.problem["kept_bytes"]
        held = [name for name in gcs.names() if name not in before]
        large = [name for name in held if name.endswith(".safetensors")]
        assert len(held) == len(large) + 1, held  # and the record of them
        assert kept > 0
        # What the rest takes, and one file more for as long as it is copied.
        gcs.set_quota(used(gcs) + 80_000)
        ended = client.wait(client.convert("llama", 1, **start).id)
        assert ended.result["taken_over"] == kept
        artifact = client.artifact(ended.result["artifact_id"])
        found = {}
        for file in artifact.files:
            if file.name.endswith(".safetensors"):
                client.download(artifact.id, file.name, tmp_path / file.name)
                found |= load_file(tmp_path / file.name)
        held = [name for name in gcs.names() if name not in before]
        assert len(held) == len(artifact.files) + 1, held
    embedding = leaves["model/embed_tokens/embedding"]
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding)
    assert len(found) == 20
