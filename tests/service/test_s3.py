"""A run whose root is in a store that speaks S3, from its first save to its export."""

import numpy as np
import pytest
from safetensors.numpy import load

from cairn import EasyDeLState, Run, collect_garbage, delete_step, parse_uri, undelete_step
from tests.service.jobs import artifact_of, done, serving
from tests.tiny import leaves_of, make_run

CHECKPOINTS = "/v1/roots/default/runs/tiny/checkpoints"

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


def test_saved_loaded_promoted_forked_exported_and_deleted(s3, tmp_path):
    root = f"{s3.bucket_uri}/store"
    made = make_run(root)
    requests = [one for one in s3.server.requests if one.bucket == s3.bucket]
    copied = [one.name for one in requests if one.operation.endswith(".copy")]
    assert copied == [], "Orbax commits by a file, not by a rename"

    with serving(root, tmp_path / "data") as http:
        promoted = http.post(
            f"{CHECKPOINTS}/2:promote",
            json={"alias": "production", "reason": "test"},
            headers={"If-None-Match": "*"},
        )
        assert promoted.is_success, promoted.text
        exported = artifact_of(http, done(http, f"{CHECKPOINTS}/2:convert", {}))
        assert exported["uri"].startswith("s3://")
        name = next(f["name"] for f in exported["files"] if f["name"].endswith(".safetensors"))
        address = f"/v1/artifacts/{exported['id']}/files/{name}"
        tensors = load(http.get(address, follow_redirects=True).content)
        np.testing.assert_array_equal(
            tensors["model.norm.weight"], made.leaves["model"]["model/norm/scale"]
        )
        part = http.get(address, headers={"Range": "bytes=10-19"}, follow_redirects=True)
        assert (part.status_code, len(part.content)) == (206, 10)
        forked = done(http, f"{CHECKPOINTS}/2:restore", {"run": "child"})["result"]
        assert forked["step"] == 2
        verified = done(http, f"{CHECKPOINTS}/2:verify", {})
        assert verified["state"] == "succeeded", verified

    loaded = leaves_of(EasyDeLState.load_state(f"{made.uri}@production", verbose=False))
    for item, leaves in made.leaves.items():
        for path, leaf in leaves.items():
            np.testing.assert_array_equal(loaded[item][path], leaf)
    assert [info.step for info in Run.open(f"{root}/child").steps()] == [2]

    run = Run.open(parse_uri(made.uri))
    delete_step(run, run.step(1), by="me")
    undelete_step(run, 1, 1)
    assert [info.step for info in run.steps()] == [1, 2]
    delete_step(run, run.step(1), by="me", grace=0)
    assert [info.step for info in run.steps()] == [2]
    for _ in range(2):  # the second removes what tells of a deletion that was taken back
        collect_garbage(run, by="me")
    assert [name for name in s3.names("store/tiny/") if "/1.1" in name or "/1/1/" in name] == []
