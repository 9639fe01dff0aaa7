import json
from pathlib import Path

import jax
import numpy as np
import pytest

from cairn import Run, open_files, parse_uri
from cairn.service.jobs.kinds import convert
from cairn.storage.runs.annotate import note_verified
from cairn.storage.runs.records.annotations import Damage
from cairn.storage.safetensors.reader import read_header, read_tensor
from tests.service.jobs import (
    ASSETS,
    artifact_of,
    done,
    save_llama,
    serving,
    tries,
    watch,
)
from tests.service.stores import begin_saving
from tests.state.states.test_adapted_checkpoints import state_of, tiny

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
CONVERT = "/v1/roots/default/runs/llama/checkpoints/1:convert"
KEEP = {"lora": "keep"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    return root, save_llama(root / "llama", steps=(1, 2))


@pytest.fixture(scope="module")
def tuned(store):
    """A state with adapters, saved merged and resumable as step 1 of the run "tuned"."""
    state = state_of(tiny("lora"))
    state = state.replace(graphstate=jax.tree.map(lambda leaf: leaf + 0.1, state.graphstate))
    state.save_state(store[0] / "tuned", step=1, merge_lora=True, wait=True, verbose=False)
    return state


@pytest.fixture(scope="module")
def http(store, tuned, tmp_path_factory):
    with serving(store[0], tmp_path_factory.mktemp("data")) as client:
        yield client


def test_export_holds_the_weights_under_hugging_face_names(http, store):
    operation = done(http, CONVERT, {"max_shard_size": "20KB"})
    artifact = artifact_of(http, operation)
    names = [file["name"] for file in artifact["files"]]
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= {*names}
    files = open_files(parse_uri(artifact["uri"]))
    index = json.loads(files.read_range("model.safetensors.index.json", 0, 1 << 20))
    leaves = store[1][1]
    assert len(index["weight_map"]) == len(leaves)
    name = "model.layers.1.mlp.down_proj.weight"
    shard = index["weight_map"][name]
    header = read_header(files, shard)
    np.testing.assert_array_equal(
        read_tensor(files, shard, name, header=header),
        leaves["model/layers/1/mlp/down_proj/kernel"].T,
    )


def test_a_step_that_is_merged_and_resumable_is_exported_merged(http, tuned):
    artifact = artifact_of(http, done(http, CONVERT.replace("llama", "tuned"), {}))
    files = open_files(parse_uri(artifact["uri"]))
    header = read_header(files, "model.safetensors")
    assert not any("lora" in name for name in header.tensors)
    merged = tuned.merge(tuned.graphstate).unwrap_lora_to_layers()
    np.testing.assert_array_equal(
        read_tensor(files, "model.safetensors", Q_PROJ, header=header),
        np.asarray(merged.model.layers[0].self_attn.q_proj.kernel[...]).T,
    )


def test_config_is_ours_and_assets_come_along(http):
    artifact = artifact_of(http, done(http, CONVERT, {}))
    base = f"/v1/artifacts/{artifact['id']}/files"
    config = http.get(f"{base}/config.json").json()
    assert (config["model_type"], config["hidden_size"]) == ("llama", 32)
    assert http.get(f"{base}/tokenizer.json").content == ASSETS["tokenizer.json"]
    assert http.get(f"{base}/generation_config.json").content == ASSETS["generation_config.json"]


def test_dtype_is_honoured(http):
    artifact = artifact_of(http, done(http, CONVERT, {"dtype": "bfloat16"}))
    header = read_header(open_files(parse_uri(artifact["uri"])), "model.safetensors")
    assert {entry.dtype.name for entry in header.tensors.values()} == {"bfloat16"}
    config = http.get(f"/v1/artifacts/{artifact['id']}/files/config.json").json()
    assert config["dtype"] == "bfloat16"


def test_pytorch_is_another_name_for_the_same_artifact(http):
    one = done(http, CONVERT, {"format": "huggingface", "dtype": "float16"})
    two = done(http, CONVERT, {"format": "pytorch", "dtype": "float16"})
    assert one == two


def test_equal_sizes_written_differently_are_one_artifact(http, store):
    one = done(http, CONVERT, {"max_shard_size": "30KB"})
    before = tries(store[0], "llama")
    two = done(http, CONVERT, {"max_shard_size": "30000"})
    assert one["result"]["artifact_id"] == two["result"]["artifact_id"]
    assert tries(store[0], "llama") == before


def test_two_requests_at_once_are_one_operation(http, store):
    before = len(tries(store[0], "llama"))
    path = CONVERT.replace("/1:", "/2:")
    answers = [http.post(path, json={"max_shard_size": "15KB"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert answers[0].headers["Location"] == f"/v1/operations/{answers[0].json()['id']}"
    assert watch(http, answers[0].json()["id"])["state"] == "succeeded"
    assert len(tries(store[0], "llama")) == before + 1


@pytest.mark.parametrize("verb", ["convert", "gather"])
def test_what_has_been_made_is_answered_at_once_and_starts_nothing(http, store, verb):
    path = CONVERT.replace(":convert", f":{verb}")
    made = done(http, path, {"dtype": "float64"})
    before = http.get("/v1/operations").json()["operations"]
    again = http.post(path, json={"dtype": "float64"})
    assert (again.status_code, again.json()) == (202, made)
    assert again.headers["Location"] == f"/v1/operations/{made['id']}"
    assert http.get("/v1/operations").json()["operations"] == before


@pytest.mark.parametrize("lost", ["a file", "the manifest"])
def test_what_is_not_whole_any_more_is_made_again(http, lost):
    body = {"max_shard_size": "12KB"}
    made = done(http, CONVERT, body)
    folder = Path(artifact_of(http, made)["uri"].removeprefix("file://"))
    (folder / "tokenizer.json" if lost == "a file" else folder.parent.with_suffix(".json")).unlink()
    again = done(http, CONVERT, body)
    assert again["id"] != made["id"]
    assert again["result"] == {**made["result"], "existing": False}
    assert http.get(
        f"/v1/artifacts/{made['result']['artifact_id']}/files/tokenizer.json"
    ).is_success


def test_a_key_names_an_operation_of_its_own_also_where_the_artifact_exists(http):
    made = done(http, CONVERT, {"max_shard_size": "13KB"})
    key = {"Idempotency-Key": "export-2"}
    ids = {
        http.post(CONVERT, json={"max_shard_size": "13KB"}, headers=key).json()["id"]
        for _ in range(2)
    }
    (own,) = ids
    assert own != made["id"]
    ended = watch(http, own)
    assert ended["result"] == {**made["result"], "existing": True}
    other = http.post(CONVERT.replace(":convert", ":gather"), json={}, headers=key)
    assert (other.status_code, other.json()["type"]) == (
        422,
        "urn:cairn:problem:idempotency-key-reused",
    )


def test_idempotency_key_names_the_operation_for_good(http):
    key = {"Idempotency-Key": "export-1"}
    first = http.post(CONVERT, json={"dtype": "float64"}, headers=key)
    watch(http, first.json()["id"])
    again = http.post(CONVERT, json={"dtype": "float64"}, headers=key)
    assert again.status_code == 202
    assert again.json()["id"] == first.json()["id"]
    other = http.post(CONVERT, json={}, headers=key)
    assert other.status_code == 422
    assert other.json()["type"] == "urn:cairn:problem:idempotency-key-reused"
    assert other.json()["detail"] == (
        f"Idempotency-Key 'export-1' belongs to the request of operation {first.json()['id']}, "
        "and this is another one than its convert of default/llama/steps/1: options.dtype None "
        "where it was 'float64'. Use a new key for a new request."
    )


def test_a_key_that_was_used_for_another_path_or_kind_is_told_for_which(http):
    key = {"Idempotency-Key": "export-3"}
    assert http.post(CONVERT, json={"dtype": "float16"}, headers=key).status_code == 202
    verify = http.post(CONVERT.replace(":convert", ":verify"), headers=key)
    assert verify.status_code == 422
    assert "kind 'verify' where it was 'convert'" in verify.json()["detail"]
    run = CONVERT.partition("/checkpoints")[0]
    collect = http.post(f"{run}:gc", json={}, headers=key)
    assert collect.status_code == 422
    assert "its convert of default/llama/steps/1: kind 'gc'" in collect.json()["detail"]
    assert "dry_run True where it was not given" in collect.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (CONVERT.replace("/1:", "/7:"), {}, 404, "step-not-found"),
        (CONVERT.replace("llama", "nobody"), {}, 404, "run-not-found"),
        (CONVERT.replace("default", "other"), {}, 404, "root-not-found"),
        (CONVERT, {"dtype": "int3"}, 422, "invalid-request"),
        (CONVERT, {"max_shard_size": "much"}, 422, "unsupported-format"),
        (CONVERT, {"max_shard_size": "9" * 400 + "GB"}, 422, "invalid-request"),
        (CONVERT, {"format": "onnx"}, 422, "invalid-request"),
        (CONVERT, {"surprise": 1}, 422, "invalid-request"),
        (CONVERT.replace("/1:", "/x:"), {}, 422, "invalid-request"),
    ],
)
def test_impossible_requests_are_refused_at_once(http, path, body, status, kind):
    answer = http.post(path, json=body)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:cairn:problem:{kind}")


def test_step_in_flight_is_a_conflict(http, store):
    save_llama(store[0] / "busy", steps=(1,))
    begin_saving(Run.open(parse_uri(store[0] / "busy")), 2)
    answer = http.post(CONVERT.replace("llama", "busy").replace("/1:", "/2:"), json={})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:step-in-flight")


def test_unknown_model_type_is_refused_by_name(http, store):
    save_llama(store[0] / "strange", steps=(1,), model_type="perceptron")
    answer = http.post(CONVERT.replace("llama", "strange"), json={})
    assert answer.status_code == 422
    assert "perceptron" in answer.json()["detail"]


def test_damaged_checkpoint_fails_the_operation_with_a_problem_and_leaves_nothing(http, store):
    root = store[0]
    save_llama(root / "damaged", steps=(1,))
    for path in (root / "damaged/attempts/1/1/model").rglob("*"):
        if path.is_file() and path.stat().st_size > 10_000:
            data = bytearray(path.read_bytes())
            for position in range(200, len(data), 97):
                data[position] ^= 1
            path.write_bytes(data)
    answer = http.post(CONVERT.replace("llama", "damaged"), json={})
    assert answer.status_code == 202, answer.text
    ended = watch(http, answer.json()["id"])
    assert ended["state"] == "failed"
    assert ended["error"]["type"] == "urn:cairn:problem:corrupt"
    assert ended["error"]["instance"] == f"/v1/operations/{ended['id']}"
    assert ended["result"] is None
    assert tries(root, "damaged") == []


def test_adapters_of_a_model_without_are_not_kept(http):
    ended = watch(http, http.post(CONVERT, json=KEEP).json()["id"])
    assert ended["error"]["status"] == 422
    assert "expected a model with adapters" in ended["error"]["detail"]


def test_export_has_an_address_by_run_checkpoint_and_options(http, store):
    run = "/v1/roots/default/runs/llama"
    asked = {"dtype": "float16", "max_shard_size": "40KB"}
    query = "?dtype=float16&max_shard_size=40KB"
    save_as = "files/model.safetensors.index.json"
    missing = http.get(f"{run}/exports/1/{save_as}{query}")
    assert (missing.status_code, missing.json()["type"][-18:]) == (404, "artifact-not-found")
    command = "cairn convert default/llama/steps/1 --dtype float16 --max-shard-size 40KB --watch"
    assert command in missing.json()["detail"]
    made = {step: done(http, f"{run}/checkpoints/{step}:convert", asked) for step in (1, 2)}
    ids = {step: operation["result"]["artifact_id"] for step, operation in made.items()}

    promoted = {"alias": "serving", "reason": ""}
    answer = http.post(
        f"{run}/checkpoints/1:promote", json=promoted, headers={"If-None-Match": "*"}
    )
    assert answer.status_code == 200, answer.text
    listed = http.get(f"{run}/exports/serving{query}").json()
    assert listed == http.get(f"/v1/artifacts/{ids[1]}").json()
    assert http.get(f"{run}/exports/latest{query}").json()["id"] == ids[2]

    weights = next(file["name"] for file in listed["files"] if file["name"].endswith("tensors"))
    address = f"{run}/exports/serving/files/{weights}{query}"
    first = http.get(address)
    etag = first.headers["ETag"]
    assert first.headers["Content-Location"] == f"/v1/artifacts/{ids[1]}/files/{weights}"
    assert first.content == http.get(first.headers["Content-Location"]).content
    part = http.get(address, headers={"Range": "bytes=4-7", "If-Range": etag})
    assert (part.status_code, part.content) == (206, first.content[4:8])
    assert http.get(address, headers={"If-None-Match": etag}).status_code == 304
    assert http.head(address).headers["Content-Length"] == str(len(first.content))

    moved = {"If-Match": answer.headers["ETag"]}
    assert (
        http.post(f"{run}/checkpoints/2:promote", json=promoted, headers=moved).status_code == 200
    )
    second = http.get(address, headers={"Range": "bytes=4-7", "If-Range": etag})
    assert (second.status_code, second.headers["ETag"] == etag) == (200, False)
    assert second.headers["Content-Location"] == f"/v1/artifacts/{ids[2]}/files/{weights}"

    other = http.get(f"{run}/exports/serving", params={"dtype": "float32", "lora": "keep"})
    assert (other.status_code, other.json()["expected"]) == (404, "dtype=float32 lora=keep")
    assert "dtype=float16 max_shard_size=40kB" in other.json()["found"]
    folder = Path(artifact_of(http, made[2])["uri"].removeprefix("file://"))
    (folder / "config.json").unlink()
    lost = http.get(f"{run}/exports/serving{query}")
    assert (lost.status_code, lost.json()["found"]) == (404, "one that has lost config.json")

    odd = f"{run}/exports/{{}}/files/config.json"
    assert http.get(odd.format("nobody")).json()["type"].endswith("alias-not-found")
    assert http.get(odd.format("7")).json()["type"].endswith("step-not-found")
    assert http.get(odd.format("1") + "?dtype=int3").status_code == 422


def test_export_by_earlier_rules_is_not_at_its_address(http, monkeypatch):
    address = "/v1/roots/default/runs/llama/exports/2"
    done(http, "/v1/roots/default/runs/llama/checkpoints/2:convert", {})
    assert http.get(address).status_code == 200
    monkeypatch.setattr(convert, "RULE_VERSION", convert.RULE_VERSION + 1)
    answer = http.get(address)
    assert answer.status_code == 404
    assert "exports by the rules of an earlier version" in answer.json()["found"]


def test_export_of_a_damaged_step_is_not_at_its_address(http, store):
    save_llama(store[0] / "broken")
    run = Run.open(store[0] / "broken")
    path = "/v1/roots/default/runs/broken"
    assert done(http, f"{path}/checkpoints/1:convert", {})["state"] == "succeeded"
    assert http.get(f"{path}/exports/1/files/config.json").status_code == 200
    damage = Damage(at="2026-01-02T03:04:05Z", problem_count=1, problems=["a leaf"])
    note_verified(run, run.step(1), damage=damage)
    answer = http.get(f"{path}/exports/1/files/config.json")
    assert (answer.status_code, answer.json()["type"][-12:]) == (409, "step-damaged")
