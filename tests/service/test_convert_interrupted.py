"""A convert that is cancelled, overtaken or killed half-way."""

import json
import shutil

import numpy as np

from cairn import open_files, parse_uri
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.service.jobs import (
    Hold,
    artifact_of,
    control_plane,
    done,
    save_llama,
    serving,
    tries,
    until,
    watch,
)

CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"


def progress(http, operation):
    return http.get(f"/v1/operations/{operation}").json()["progress"]


def test_cancel_takes_effect_within_a_shard_and_leaves_nothing(tmp_path, monkeypatch):
    root = tmp_path / "store"
    save_llama(root / "llama")
    hold = Hold(monkeypatch)
    with serving(root, tmp_path / "data") as http:
        operation = http.post(CONVERT, json={"max_shard_size": "20KB"}).json()
        assert hold.reached.wait(20)
        assert len(tries(root, "llama")) == 1
        cancelled = http.post(f"/v1/operations/{operation['id']}:cancel")
        assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
        assert tries(root, "llama") == []
        assert [path for path in (root / "llama/exports").rglob("*") if path.is_file()] == []
        hold.opened.set()
        resumed = http.post(f"/v1/operations/{operation['id']}:resume")
        assert resumed.status_code == 200
        ended = watch(http, operation["id"])
        assert ended["state"] == "succeeded"
        assert artifact_of(http, ended)["files"]


def test_two_control_planes_publish_one_artifact(tmp_path, monkeypatch):
    """With databases of their own, only the store can settle it."""
    root = tmp_path / "store"
    save_llama(root / "llama")
    with serving(root, tmp_path / "one") as http:
        first = done(http, CONVERT, {})
    manifest = next((root / "llama/exports").rglob("convert-*.json"))
    kept = manifest.read_bytes()
    manifest.unlink()
    hold = Hold(monkeypatch)
    with serving(root, tmp_path / "two") as http:
        operation = http.post(CONVERT, json={}).json()
        assert hold.reached.wait(20)
        manifest.write_bytes(kept)  # the other one was faster
        hold.opened.set()
        second = watch(http, operation["id"])
    assert second["result"]["artifact_id"] == first["result"]["artifact_id"]
    assert (first["result"]["existing"], second["result"]["existing"]) == (False, True)
    assert len(tries(root, "llama")) == 1


def test_what_another_control_plane_has_made_is_found_by_the_job(tmp_path):
    """Its operations are in a database of its own: nobody can be sent there."""
    root = tmp_path / "store"
    save_llama(root / "llama")
    with serving(root, tmp_path / "one") as http:
        made = done(http, CONVERT, {})
    with serving(root, tmp_path / "two") as http:
        found = done(http, CONVERT, {})
        assert found["id"] != made["id"]
        assert found["result"] == {**made["result"], "existing": True}
    assert len(tries(root, "llama")) == 1


def test_killed_control_plane_goes_on_where_it_was(tmp_path):
    root, data, reached = tmp_path / "store", tmp_path / "data", tmp_path / "reached"
    leaves = save_llama(root / "llama")[1]
    with control_plane(root, data, stall_at="model-00003", reached=reached) as (http, process):
        operation = http.post(CONVERT, json={"max_shard_size": "25KB"}).json()
        until(reached.exists)
        until(lambda: progress(http, operation["id"])["done_bytes"])
        before = http.get(f"/v1/operations/{operation['id']}").json()
        process.kill()
        process.wait()
    assert before["state"] == "running"
    assert 0 < before["progress"]["done_bytes"] < before["progress"]["total_bytes"]
    [folder] = tries(root, "llama")
    finished = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    names = [name[:11] for name in sorted(finished)]
    assert names[:2] == ["model-00001", "model-00002"]
    assert "model-00003" not in names
    with control_plane(root, data) as (http, _):
        ended = watch(http, operation["id"])
        assert ended["state"] == "succeeded", ended
        artifact = artifact_of(http, ended)
    assert tries(root, "llama") == [folder]
    # Two are written at a time: the kill may fall between the end of one and its record.
    again = {name: (folder / name).stat() for name in finished}
    kept = [
        name
        for name, stat in finished.items()
        if (again[name].st_ino, again[name].st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    ]
    assert kept, "every file was written again"
    assert {path.name for path in folder.iterdir()} == {f["name"] for f in artifact["files"]}
    files = open_files(parse_uri(artifact["uri"]))
    index = json.loads(files.read_range("model.safetensors.index.json", 0, 1 << 20))
    for path in ("model/embed_tokens/embedding", "model/norm/scale"):
        name = path.replace("/", ".").replace("embedding", "weight").replace("scale", "weight")
        shard = index["weight_map"][name]
        read = read_tensor(files, shard, name, header=read_header(files, shard))
        np.testing.assert_array_equal(read, leaves[path])


def test_export_whose_files_were_deleted_is_made_again(tmp_path):
    root = tmp_path / "store"
    save_llama(root / "llama")
    with serving(root, tmp_path / "data") as http:
        first = done(http, CONVERT, {})
        [folder] = tries(root, "llama")
        shutil.rmtree(folder)
        address = f"/v1/artifacts/{first['result']['artifact_id']}/files/model.safetensors"
        assert http.get(address).status_code == 404
        second = done(http, CONVERT, {})
        assert second["result"]["existing"] is False
        assert http.get(address).status_code == 200
        assert done(http, CONVERT, {}) == second
    assert len(tries(root, "llama")) == 1


def test_tries_that_nobody_removed_go_when_the_resumed_operation_publishes(tmp_path, monkeypatch):
    """A server that died between a cancel and its cleaning up, say."""
    root = tmp_path / "store"
    save_llama(root / "llama")
    hold = Hold(monkeypatch)
    with serving(root, tmp_path / "data") as http:
        operation = http.post(CONVERT, json={}).json()["id"]
        assert hold.reached.wait(20)
        [folder] = tries(root, "llama")
        http.post(f"/v1/operations/{operation}:cancel")
        left = folder.with_name(f"{operation}-00000000")
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
        hold.opened.set()
        http.post(f"/v1/operations/{operation}:resume")
        assert watch(http, operation)["state"] == "succeeded"
    assert len(tries(root, "llama")) == 1
    assert not left.exists()
