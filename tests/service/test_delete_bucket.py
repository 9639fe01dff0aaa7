"""Deletion, retention and garbage in a store that is no disk."""

from cairn.storage.runs.records.layout import manifest_file, step_dir, trash_file
from tests.service.jobs import serving, watch
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/run"
STEPS = f"{RUN}/checkpoints"


def test_steps_in_a_bucket_are_deleted_had_back_and_collected(some_bucket_uri, tmp_path):
    root = f"{some_bucket_uri}/store"
    run = make_run(f"{root}/run", range(1, 13))
    with serving(root, tmp_path / "data") as http:
        body = http.delete(f"{STEPS}/6", params={"reason": "bad data"}).json()
        assert (body["state"], body["deletion"]["reason"]) == ("trashed", "bad data")
        assert http.post(f"{STEPS}/6:undelete", json={}).json()["state"] == "listed"

        policy = {"policy": {"keep_last": 2}, "dry_run": False, "grace_seconds": 0}
        started = http.post(f"{RUN}:applyRetention", json=policy).json()
        deleted = watch(http, started["id"])["result"]["deleted"]
        assert [one["step"] for one in deleted] == list(range(1, 11))
        listed = http.get(STEPS).json()["checkpoints"]
        assert [one["step"] for one in listed] == [12, 11]

        started = http.post(f"{RUN}:gc", json={"dry_run": False}).json()
        assert watch(http, started["id"])["result"]["count"] == 10
    for name in (manifest_file(6, 1), trash_file(6, 1), f"{step_dir(1, 6)}/commit_success.txt"):
        assert run.objects.read(name) is None
    assert [info.step for info in run.all_states()] == [11, 12]
