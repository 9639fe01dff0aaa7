"""Exports of several files: parts that workers share, checked as they are written."""

import hashlib
import os
import threading
import time

import numpy as np
import pytest

from cairn import Checkpointer, ModelInfo, StorageError
from cairn.state.checkpointing.trees import nest
from tests.service.jobs import (
    ASSETS,
    CONFIG,
    Hold,
    artifact_of,
    done,
    leaves_of,
    save_llama,
    serving,
    tries,
    watch,
)
from tests.service.seams import database, direct_writes, export_job

CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"
SEVERAL = {"max_shard_size": "20KB"}


@pytest.fixture
def root(tmp_path):
    save_llama(tmp_path / "store/llama")
    return tmp_path / "store"


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_files_are_written_two_at_a_time_and_as_many_as_the_memory_allows(
    root, tmp_path, monkeypatch
):
    """Though the queue gives out more: what it has given out counts there once it has begun."""
    real, lock, now, most = export_job.write_shard, threading.Lock(), [0], [0]
    both = threading.Barrier(2)

    def counted(*args, **options):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if met:
            both.wait(20)
        try:
            return real(*args, **options)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(export_job, "write_shard", counted)
    with serving(root, tmp_path / "data") as http:
        queue = http.app.state.plane.jobs._client.retrieve_queue(database.queue_of("part"))
        queue.set_worker_concurrency(8)
        met = False
        made = done(http, CONVERT, {**SEVERAL, "memory": "400MiB"})
        files = artifact_of(http, made)["files"]
        assert most == [1]
        met = sum(file["name"].endswith(".safetensors") for file in files) % 2 == 0
        assert met, "an even number, or the last would wait for another"
        done(http, CONVERT, {**SEVERAL, "dtype": "bfloat16", "max_shard_size": "10KB"})
        assert most == [2]


class Counted:
    """How many files are written at the same time, at most."""

    def __init__(self, monkeypatch):
        self.most = self.now = 0
        self.began = threading.Semaphore(0)
        self.held = threading.Event()
        self.held.set()
        self._lock = threading.Lock()
        self._real = export_job.write_shard
        monkeypatch.setattr(export_job, "write_shard", self._write)

    def _write(self, *args, **options):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.began.release()
        try:
            assert self.held.wait(60)
            time.sleep(0.02)  # in which another begins, if it may
            return self._real(*args, **options)
        finally:
            with self._lock:
                self.now -= 1


@pytest.mark.parametrize("body", [{}, {**SEVERAL, "memory": "400MiB"}], ids=["one file", "several"])
def test_an_export_that_goes_on_does_not_write_beside_what_is_left_of_it_here(
    root, tmp_path, monkeypatch, body
):
    """Cancelled by a server that can't stop it, and resumed before its worker has noticed."""
    monkeypatch.setattr("cairn.service.jobs.dbos_engine.worker.STOP_TIMEOUT_SECONDS", 0.1)
    counted = Counted(monkeypatch)
    counted.held.clear()
    with (
        serving(root, tmp_path / "data") as http,
        serving(root, tmp_path / "data", worker=False) as other,
    ):
        operation = http.post(CONVERT, json=body).json()["id"]
        assert counted.began.acquire(timeout=60)
        other.post(f"/v1/operations/{operation}:cancel")
        assert other.post(f"/v1/operations/{operation}:resume").status_code == 200
        counted.began.acquire(timeout=0.5)
        counted.held.set()
        assert watch(http, operation)["state"] == "succeeded"
    assert counted.most == 1


def test_an_export_that_does_not_fit_is_refused_before_anything_is_written(root, tmp_path):
    with serving(root, tmp_path / "data") as http:
        for body in ({"memory": "1MB"}, {**SEVERAL, "memory": "1MB"}):
            operation = http.post(CONVERT, json=body).json()
            error = watch(http, operation["id"])["error"]
            assert error["status"] == 422
            assert "memory: expected at least" in error["detail"]
        assert tries(root, "llama") == []
        assert http.post(CONVERT, json={"memory": "much"}).status_code == 422


def test_the_same_export_is_the_same_bytes_in_one_worker_or_another(root, tmp_path):
    made = []
    for name in ("one", "two"):
        with serving(root, tmp_path / name) as http:
            done(http, CONVERT, SEVERAL)
        [folder] = tries(root, "llama")
        made.append(digests(folder))
        for manifest in (root / "llama/exports").rglob("convert-*.json"):
            manifest.unlink()
        folder.rename(tmp_path / f"{name}-made")
    assert made[0] == made[1]
    assert len(made[0]) > 4


def test_a_part_that_fails_fails_the_export_and_leaves_nothing(root, tmp_path, monkeypatch):
    real = export_job.write_shard

    def broken(files, rel, shard, **options):
        if "00003" in rel:
            raise StorageError("a tensor's blocks don't add up", path=files.uri)
        return real(files, rel, shard, **options)

    with serving(root, tmp_path / "data") as http:
        monkeypatch.setattr(export_job, "write_shard", broken)
        operation = http.post(CONVERT, json=SEVERAL).json()["id"]
        ended = watch(http, operation)
        assert ended["state"] == "failed"
        assert "a tensor's blocks don't add up" in ended["error"]["detail"]
        assert tries(root, "llama") == []
        monkeypatch.setattr(export_job, "write_shard", real)
        http.post(f"/v1/operations/{operation}:resume")
        assert watch(http, operation)["state"] == "succeeded"
        listed = http.get("/v1/operations").json()["operations"]
        assert [one["id"] for one in listed] == [operation]


def test_a_cancel_stops_every_part_and_leaves_nothing(root, tmp_path, monkeypatch):
    hold = Hold(monkeypatch)
    with serving(root, tmp_path / "data") as http:
        operation = http.post(CONVERT, json=SEVERAL).json()["id"]
        assert hold.reached.wait(20)
        [worker] = http.get("/v1/workers").json()["workers"]
        assert worker["running"] == [operation]
        assert http.post(f"/v1/operations/{operation}:cancel").json()["state"] == "cancelled"
        assert tries(root, "llama") == []
        hold.opened.set()
        http.post(f"/v1/operations/{operation}:resume")
        assert watch(http, operation)["state"] == "succeeded"
    assert len(tries(root, "llama")) == 1


@pytest.mark.parametrize("body", [{}, SEVERAL], ids=["one file", "several"])
def test_a_file_that_is_not_what_was_written_is_never_published(root, tmp_path, monkeypatch, body):
    real = direct_writes.DirectWrites._read

    def other(writes, start, end):
        with open(writes._path, "r+b") as stream:
            byte = os.pread(stream.fileno(), 1, end - 3)
            os.pwrite(stream.fileno(), bytes([byte[0] ^ 1]), end - 3)
        return real(writes, start, end)

    monkeypatch.setattr(direct_writes.DirectWrites, "_read", other)
    with serving(root, tmp_path / "data") as http:
        operation = http.post(CONVERT, json=body).json()["id"]
        ended = watch(http, operation)
        assert ended["state"] == "failed"
        assert "a file is not what was written" in ended["error"]["detail"]
        assert tries(root, "llama") == []
        assert not [*(root / "llama/exports").rglob("*.json")]


def save_with(run, changes):
    leaves = leaves_of()
    for path, (index, value) in changes.items():
        leaves[path][index] = value
    info = ModelInfo(model_type="llama", model_class="DecoderForCausalLM", config=CONFIG.to_dict())
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"model": nest(leaves)}, model=info, assets=ASSETS).wait()


@pytest.mark.parametrize("body", [{}, SEVERAL], ids=["one file", "several"])
def test_weights_that_are_not_finite_are_refused_all_at_once_unless_allowed(tmp_path, body):
    changes = {
        "model/layers/0/mlp/up_proj/kernel": ((3, 4), np.nan),
        "model/layers/1/mlp/down_proj/kernel": ((slice(2), 0), np.inf),
    }
    save_with(tmp_path / "store/llama", changes)
    with serving(tmp_path / "store", tmp_path / "data") as http:
        ended = watch(http, http.post(CONVERT, json=body).json()["id"])
        assert ended["error"]["status"] == 422
        assert ended["error"]["problems"] == [
            "model.layers.0.mlp.up_proj.weight: 1 number that is NaN or infinite",
            "model.layers.1.mlp.down_proj.weight: 2 numbers that are NaN or infinite",
        ]
        assert tries(tmp_path / "store", "llama") == []
        made = done(http, CONVERT, {**body, "allow_nonfinite": True})
        assert made["result"]["nonfinite"] == {
            "model.layers.0.mlp.up_proj.weight": 1,
            "model.layers.1.mlp.down_proj.weight": 2,
        }


def test_numbers_that_overflow_in_the_dtype_of_the_export_are_refused(tmp_path):
    save_with(tmp_path / "store/llama", {"model/norm/scale": (0, 1e6)})
    with serving(tmp_path / "store", tmp_path / "data") as http:
        ended = watch(http, http.post(CONVERT, json={"dtype": "float16"}).json()["id"])
        assert ended["error"]["problems"] == ["model.norm.weight: 1 number that is NaN or infinite"]
        done(http, CONVERT, {"dtype": "bfloat16"})
