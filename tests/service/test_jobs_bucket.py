"""Jobs over a store that is no disk."""

import numpy as np
from safetensors.numpy import load

from cairn import Run, parse_uri
from tests.service.jobs import artifact_of, done, save_llama, serving

CHECKPOINT = "/v1/roots/default/runs/llama/checkpoints/1"


def test_convert_gather_and_fork_in_a_bucket(some_bucket_uri, tmp_path):
    root = f"{some_bucket_uri}/store"
    leaves = save_llama(f"{root}/llama")[1]
    with serving(root, tmp_path / "data") as http:
        exported = artifact_of(
            http, done(http, f"{CHECKPOINT}:convert", {"max_shard_size": "40KB"})
        )
        assert len([f for f in exported["files"] if f["name"].endswith(".safetensors")]) > 1
        assert exported["uri"].startswith(root)

        gathered = artifact_of(http, done(http, f"{CHECKPOINT}:gather", {}))
        address = f"/v1/artifacts/{gathered['id']}/files/gathered.safetensors"
        whole = http.get(address).content
        np.testing.assert_array_equal(
            load(whole)["model/model/norm/scale"], leaves["model/norm/scale"]
        )
        part = http.get(address, headers={"Range": "bytes=1000-1999"})
        assert (part.status_code, part.content) == (206, whole[1000:2000])

        forked = done(http, f"{CHECKPOINT}:restore", {"run": "child"})["result"]
        assert "crc32c" in forked["checked"]
        child = Run.open(parse_uri(f"{root}/child"))
        assert [info.step for info in child.steps()] == [1]
