import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cairn.service.actions.open_steps import OpenStep, OpenSteps
from cairn.service.actions.tensors import list_tensors
from cairn.storage.arrays.digests import box_digest, digest_text
from cairn.storage.arrays.leaf_paths import keys_of
from cairn.storage.runs.records.layout import INDEX_FILE
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.runs.rollback import roll_back
from cairn.storage.runs.run import Run
from cairn.storage.store.uri import parse_uri
from cairn.storage.training.checkpointer import Checkpointer
from tests.storage.older_steps import as_version_3

TENSORS = "/v1/roots/default/runs/run/checkpoints/1/tensors"


def mesh():
    return jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(array, *axes):
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(array, jax.sharding.NamedSharding(mesh(), spec))


def small(dtype, shape=(4, 6)):
    values = np.random.default_rng(1).integers(0, 4, shape)
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


NATIVE = ("bool", "int8", "uint16", "int32", "float16", "float32")
EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn")
LEAVES = {
    "matrix": np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32),
    "scalar": np.float32(2.5),
    "nothing": np.zeros((0, 3), np.float32),
    "layers/0/kernel": np.arange(24, dtype=np.int32).reshape(4, 6),
    "odd:promote": np.arange(3, dtype=np.int32),
    "dots.in.it": np.arange(4, dtype=np.int32),
    "per%cent": np.arange(5, dtype=np.int32),
    "sl%2Fash": np.arange(6, dtype=np.int32),
    "mis%252Fleading": np.arange(9, dtype=np.int32),
    "sl/ash": -np.arange(7, dtype=np.int32),
    "ünï code": np.arange(8, dtype=np.int32),
    "odd": np.asarray([np.nan, np.inf, -np.inf, 0.1], np.float32),
    **{name: small(name) for name in (*NATIVE, *EXTENDED)},
}


def nested(leaves):
    tree: dict = {}
    for path, leaf in leaves.items():
        *folders, name = keys_of(path)
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def save(root, leaves, name="run", steps=(1,), **items):
    with Checkpointer(str(root / name)) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": nested(leaves), **items}, meta={}).wait()
    return Run.open(parse_uri(root / name))


@pytest.fixture
def saved(root):
    leaves = LEAVES | {"sharded": sharded(LEAVES["matrix"], "fsdp", None)}
    leaves |= {"key": jax.random.key(7), "both": sharded(LEAVES["matrix"], ("dp", "fsdp"))}
    return save(root, leaves, optimizer={"count": jnp.int32(1)})


def listed(http, url=TENSORS, **parameters):
    answer = http.get(url, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tree_tells_each_leaf_as_it_was_saved(http, saved):
    found = {one["path"]: one for one in listed(http, page_size=1000)["tensors"]}
    assert set(found) == {*LEAVES, "sharded", "key", "both", "count"}
    for path, values in LEAVES.items():
        assert found[path]["shape"] == list(values.shape)
        assert found[path]["dtype"] == values.dtype.name
    digest = digest_text(box_digest(LEAVES["matrix"], (0, 0)))
    matrix = {"item": "model", "path": "matrix", "shape": [16, 12], "dtype": "float32"}
    assert found["matrix"] == matrix | {"bytes": 768, "spec": None, "digest": digest}
    assert found["sharded"] == found["matrix"] | {"path": "sharded", "spec": ["fsdp", None]}
    assert found["both"]["spec"] in ([["dp", "fsdp"]], [["dp", "fsdp"], None])
    assert found["int4"]["bytes"] == 12
    assert found["count"]["item"] == "optimizer"
    assert (found["key"]["shape"], found["key"]["dtype"]) == ([], "key<fry>")


def test_tree_of_an_older_step_is_the_same(http, saved):
    told = listed(http, page_size=1000)
    as_version_3(saved, saved.step(1))
    assert listed(http, page_size=1000) == told


def test_tree_is_cut_by_item_and_prefix(http, saved):
    def paths(**parameters):
        return [one["path"] for one in listed(http, **parameters)["tensors"]]

    assert paths(item="optimizer") == ["count"]
    assert paths(prefix="layers/") == ["layers/0/kernel"]
    assert paths(prefix="sl%2F") == ["sl%2Fash"]
    assert paths(item="optimizer", prefix="layers/") == []
    assert paths(item="meta") == []
    answer = http.get(TENSORS, params={"item": "modle"})
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:cairn:problem:leaf-not-found")
    assert "one of ['meta', 'model', 'optimizer']" in answer.json()["detail"]


@pytest.mark.parametrize("page_size", [1, 3, 1000])
def test_pages_have_every_leaf_once_in_order(http, saved, page_size):
    found, token = [], {}
    while token is not None:
        page = listed(http, page_size=page_size, **token)
        assert len(page["tensors"]) <= page_size
        found += [(one["item"], one["path"]) for one in page["tensors"]]
        token = page["next_page_token"] and {"page_token": page["next_page_token"]}
    model = sorted((*LEAVES, "sharded", "key", "both"))
    assert found == [*(("model", path) for path in model), ("optimizer", "count")]


def test_token_of_a_step_that_was_saved_anew_is_refused(http, root):
    save(root, LEAVES, steps=(0, 1))
    token = listed(http, page_size=2)["next_page_token"]
    roll_back(Run.open(parse_uri(root / "run")), 0, by="me")
    save(root, LEAVES)
    for parameters in ({}, {"prefix": "m"}):
        answer = http.get(TENSORS, params={"page_token": token, "page_size": 2} | parameters)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "query.page_token"


def test_step_that_is_not_listed_has_no_tree(http, saved):
    assert http.get(TENSORS.replace("/1/", "/2/")).json()["type"].endswith("step-not-found")
    listed(http)
    http.delete("/v1/roots/default/runs/run/checkpoints/1")
    assert http.get(TENSORS).status_code == 404, "what is kept of a step does not outlive it"


def test_damaged_index_is_no_tree(http, saved):
    index = Path(saved.step_uri(saved.step(1)).local_path) / INDEX_FILE
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)
    answer = http.get(TENSORS)
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:cairn:problem:corrupt")


def many(count):
    return tuple(
        LeafRecord(item="model", path=f"layers/{one:06}/kernel", shape=(8, 8), dtype="float32")
        for one in range(count)
    )


def test_pages_of_a_hundred_thousand_leaves_come_quickly():
    step = OpenStep(
        parse_uri("file:///run/1"),
        SimpleNamespace(items=("model",)),
        "digest",
        SimpleNamespace(leaves=many(100_000)),
    )
    list_tensors(step, item=None, prefix="", after=0, limit=1)
    begun = time.process_time()
    for after in range(0, 100_000, 10_000):
        page, more = list_tensors(step, item="model", prefix="layers/", after=after, limit=1000)
        assert (page[0].path, len(page), more) == (f"layers/{after:06}/kernel", 1000, True)
    assert (time.process_time() - begun) / 10 < 0.5


def test_few_steps_are_kept_and_each_is_read_once(saved, root, monkeypatch):
    save(root, {"a": np.ones(3, np.float32)}, name="other", steps=(1, 2, 3))
    run = Run.open(parse_uri(root / "other"))
    asked = []
    contents = Run.contents
    monkeypatch.setattr(
        Run, "contents", lambda self, info: asked.append(info.step) or contents(self, info)
    )
    kept = OpenSteps(leaves=2)
    for number in (1, 2, 1, 3, 1, 2):
        assert kept.open(run, run.step(number)).manifest.step == number
    assert asked == [1, 2, 3, 2]
    kept.open(saved, saved.step(1))  # has more leaves than are kept
    assert len(kept.open(saved, saved.step(1)).leaves) > 2
    assert len(asked) == 5
