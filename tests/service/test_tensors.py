import io
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import httpx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cairn import Checkpointer, CheckpointReader, CorruptionError, Run, adopt, parse_uri, roll_back
from cairn.service.actions.caches import StepCache
from cairn.service.http.limiters import StoreLimiter
from cairn.storage.arrays.digests import box_digest, digest_text
from cairn.storage.arrays.leaf_paths import keys_of
from cairn.storage.reading.tensor_parts import TensorPart
from cairn.storage.runs.records.layout import INDEX_FILE
from cairn.storage.safetensors.format import DTYPES
from tests.service.planes import running_plane
from tests.service.seams import checked_reads, local_shards
from tests.storage.indexes import publish_index, shards_of
from tests.storage.plain_steps import as_plain_step

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


@pytest.fixture(scope="module")
def every_leaf(tmp_path_factory):
    """A run that nobody changes."""
    folder = tmp_path_factory.mktemp("saved")
    leaves = LEAVES | {"sharded": sharded(LEAVES["matrix"], "fsdp", None)}
    leaves |= {"key": jax.random.key(7), "both": sharded(LEAVES["matrix"], ("dp", "fsdp"))}
    save(folder, leaves, optimizer={"count": jnp.int32(1)})
    return folder / "run"


@pytest.fixture
def saved(every_leaf, root):
    return Run.open(parse_uri(shutil.copytree(every_leaf, root / "run")))


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
    assert found["key"]["bytes"] == jax.random.key_data(jax.random.key(7)).nbytes


def test_tree_of_a_plain_step_is_the_same(http, saved):
    told = listed(http, page_size=1000)
    as_plain_step(saved, saved.step(1))
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
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:corrupt")


def test_few_steps_are_kept_and_each_is_read_once(saved, root, monkeypatch):
    save(root, {"a": np.ones(3, np.float32)}, name="other", steps=(1, 2, 3))
    run = Run.open(parse_uri(root / "other"))
    asked = []
    contents = Run.contents
    monkeypatch.setattr(
        Run, "contents", lambda self, info: asked.append(info.step) or contents(self, info)
    )
    kept = StepCache(leaves=2)
    for number in (1, 2, 1, 3, 1, 2):
        assert kept.open(run, run.step(number)).manifest.step == number
    assert asked == [1, 2, 3, 2]
    kept.open(saved, saved.step(1))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kept.open(run, run.step(3)), range(4)))
    assert asked == [1, 2, 3, 2, 1, 3], "of those that ask at once, one reads"
    kept.open(saved, saved.step(1))  # has more leaves than are kept
    assert len(kept.open(saved, saved.step(1)).leaves) > 2
    assert len(asked) == 7


def read(http, path, text=None, kind="npy", *, url=TENSORS, **parameters):
    asked = {"format": kind} | ({} if text is None else {"slice": text}) | parameters
    return http.get(f"{url}/{quote(path, safe='')}", params=asked)


def values(answer):
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return np.load(io.BytesIO(answer.content), allow_pickle=False)


def same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def of_safetensors(answer):
    """The name and the values of the one tensor of a file; its length is that of its data."""
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    begin = 8 + int.from_bytes(answer.content[:8], "little")
    ((name, entry),) = json.loads(answer.content[8:begin]).items()
    assert entry["data_offsets"] == [0, len(answer.content) - begin]
    found = np.frombuffer(answer.content[begin:], DTYPES[entry["dtype"]])
    return name, found.reshape(entry["shape"])


# The client of these tests decodes a path twice; `test_names_of_every_kind…` asks a server.
PLAIN = [path for path in LEAVES if "%" not in path]


def test_leaves_are_read_as_npy_as_they_were_saved(http, saved):
    for path in PLAIN:
        if LEAVES[path].dtype.name not in EXTENDED:
            same(values(read(http, path)), LEAVES[path])


def test_leaves_are_read_as_safetensors_as_they_were_saved(http, saved):
    for path in PLAIN:
        if path not in ("int4", "uint4", "float4_e2m1fn"):
            name, found = of_safetensors(read(http, path, kind="safetensors"))
            assert name == path
            same(found, LEAVES[path])


def test_leaves_are_read_as_json_and_each_value_is_exact(http, saved):
    for path in PLAIN:
        answer, leaf = read(http, path, kind="json"), LEAVES[path]
        assert answer.status_code == 200, answer.text
        body = answer.json()
        described = (body["item"], body["path"], body["dtype"], body["shape"])
        assert described == ("model", path, leaf.dtype.name, [*leaf.shape])
        wide = np.asarray(body["values"], np.float64).reshape(leaf.shape)
        same(wide.astype(leaf.dtype), leaf)


def test_names_of_every_kind_are_read_from_a_server(saved, root, tmp_path):
    (tmp_path / "plane").mkdir()
    with running_plane(root, tmp_path / "plane") as (url, _), httpx.Client(base_url=url) as http:
        for path, leaf in LEAVES.items():
            if leaf.dtype.name not in EXTENDED:
                same(values(read(http, path)), leaf)
        assert http.get(f"{TENSORS}/sl/ash?format=json").json()["path"] == "sl/ash"
        assert http.get(f"{TENSORS}/sl%2Fash?format=json").json()["path"] == "sl/ash"
        assert http.get(f"{TENSORS}/sl%252Fash?format=json").json()["path"] == "sl%2Fash"


def test_what_json_does_not_keep_is_text(http, root):
    numbers = np.asarray([2**53 - 1, 2**53, -(2**63), 5])
    big = np.asarray([2**64 - 1], np.uint64)
    save(root, {"odd": LEAVES["odd"], "i": numbers, "u": big, "c": np.ones(2, np.complex64)})
    told = [read(http, path, kind="json") for path in ("odd", "i", "u", "c")]
    assert told[0].json()["values"] == ["nan", "inf", "-inf", float(np.float32(0.1))]
    assert told[1].json()["values"] == [2**53 - 1, str(2**53), str(-(2**63)), 5]
    assert told[2].json()["values"] == [str(2**64 - 1)]
    assert told[3].status_code == 422
    assert "Ask for format=npy or format=safetensors." in told[3].json()["detail"]
    same(values(read(http, "i")), numbers)


LACKING = [
    ("bfloat16", "npy", "found bfloat16. Ask for format=safetensors or format=json."),
    ("float8_e5m2", "npy", "found float8_e5m2. Ask for format=safetensors or format=json."),
    ("int4", "npy", "found int4. Ask for format=json."),
    ("uint4", "safetensors", "found uint4. Ask for format=json."),
    ("float4_e2m1fn", "safetensors", "found float4_e2m1fn. Ask for format=json."),
]


def test_format_that_lacks_a_dtype_says_which_has_it(http, saved):
    for path, kind, expected in LACKING:
        answer = read(http, path, kind=kind)
        body = answer.json()
        assert (answer.status_code, body["type"]) == (422, "urn:cairn:problem:unsupported-leaf")
        assert expected in body["detail"]


SLICES = ["0:10,:,3", "...", "..., -1", "2", "-1,-2", "::3", "1:-1:2,...,::2", ":", "5:2", "100:"]
SLICES += ["0,0,0", "3:,2:5", " 1 , : ,0:9:4 ", "", "...,0,0", "-7:7"]


@pytest.mark.parametrize("kind", ["plain", "sharded", "packed"])
def test_part_is_what_numpy_says(http, root, kind):
    leaf = np.arange(16 * 8 * 6, dtype=np.float32).reshape(16, 8, 6)
    if kind == "packed":
        leaf = (leaf % 16 - 8).astype(ml_dtypes.int4)
    save(root, {"leaf": sharded(leaf, "fsdp", "dp") if kind == "sharded" else leaf})
    for text in SLICES:
        expected = leaf[eval(f"np.s_[{text or '...'}]")]
        found = read(http, "leaf", text, "json" if kind == "packed" else "npy")
        if kind == "packed":
            assert found.json()["shape"] == list(expected.shape)
            assert found.json()["values"] == expected.astype(int).tolist()
        else:
            same(values(found), np.asarray(expected))


NO_SLICES = [
    ("::-1", "slices with positive steps within (16, 12)"),
    ("::0", "slices with positive steps within (16, 12)"),
    ("16", "within (16, 12)"),
    ("0,-13", "within (16, 12)"),
    ("0,0,0", "up to 2 integers"),
    ("...,...", 'and one "..."'),
    ("a", "0:10 or ::2"),
    ("None", "0:10 or ::2"),
    ("1_0", "0:10 or ::2"),
    ("\u0661", "0:10 or ::2"),
    ("0,,1", "0:10 or ::2"),
    ("[0]", "0:10 or ::2"),
    ("0:1:2:3", "0:10 or ::2"),
    ("1" * 30, "0:10 or ::2"),
]


def test_slice_that_does_not_fit_is_refused(http, root):
    save(root, {"matrix": LEAVES["matrix"]})
    for text, expected in NO_SLICES:
        for kind in ("npy", "json"):
            body = read(http, "matrix", text, kind).json()
            assert body["type"] == "urn:cairn:problem:invalid-slice"
            assert expected in body["detail"]
            assert "model: matrix" in body["detail"]


def test_keys_are_their_words(http, saved):
    same(values(read(http, "key")), np.asarray(jax.random.key_data(jax.random.key(7))))
    assert values(read(http, "key", "0")).shape == ()


def test_leaf_of_another_item_and_leaf_that_is_not_there(http, saved):
    assert values(read(http, "count", item="optimizer")) == 1
    for path, item, expected in (
        ("count", "model", "no such leaf"),
        ("matrix", "nothing", "one of ['model', 'optimizer']"),
        ("matrx", "model", "Did you mean matrix"),
        ("", "model", "no such leaf"),
        ("layers/0/kernel/", "model", "no such leaf"),
        ("/matrix", "model", "no such leaf"),
    ):
        answer = read(http, path, item=item)
        assert (answer.status_code, expected in answer.json()["detail"]) == (404, True)


def test_head_tells_what_get_would_and_reads_no_value(http, saved, monkeypatch):
    for path, text, kind in (("matrix", "3:5", "npy"), ("bfloat16", "", "safetensors")):
        got = read(http, path, text, kind)
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointReader, "iter_blocks", None)
            told = http.head(got.request.url)
        assert (told.status_code, told.content) == (200, b"")
        assert told.headers["content-length"] == str(len(got.content))
        assert told.headers["etag"] == got.headers["etag"]
    told = http.head(read(http, "scalar", kind="json").request.url)
    assert (told.status_code, told.headers["content-type"]) == (200, "application/json")
    assert http.head(f"{TENSORS}/matrix?slcie=0").status_code == 422


def test_client_that_has_it_gets_it_again_only_if_it_is_another(http, root, saved):
    asked = [("matrix", "", "npy"), ("matrix", "0", "npy"), ("matrix", "", "json")]
    asked += [("scalar", "", "npy"), ("odd", "", "json")]
    tags = [read(http, *one).headers["etag"] for one in asked]
    assert len(set(tags)) == len(tags)
    for one, tag in zip(asked, tags, strict=True):
        url = read(http, *one).request.url
        assert http.get(url, headers={"If-None-Match": tag}).status_code == 304
        other = http.get(url, headers={"If-None-Match": tags[tags.index(tag) - 1]})
        assert other.status_code == 200
    other = save(root, {"a": np.ones(2)}, name="other", steps=(0, 1))
    url = TENSORS.replace("/run/", "/other/")
    before = read(http, "a", url=url).headers["etag"]
    roll_back(other, 0, by="me")
    save(root, {"a": np.zeros(2)}, name="other")
    assert read(http, "a", url=url).headers["etag"] != before


def test_json_has_a_limit_that_it_names(http, root):
    save(root, {"large": np.zeros((257, 256), np.float32)})
    answer = read(http, "large", kind="json")
    assert (answer.status_code, "at most 65536" in answer.json()["detail"]) == (422, True)
    assert read(http, "large", ":256", "json").status_code == 200


def chunked(root, rows=64):
    """A leaf of a chunk for each device's rows."""
    leaf = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024)
    return leaf, save(root, {"leaf": sharded(leaf, ("dp", "fsdp"))})


ROWS_READ = {"3": 8, "9:15": 8, "7:9": 16, "::40": 16, "5:5": 0, "...": 64}


def test_only_chunks_that_a_part_needs_are_read(http, root, monkeypatch):
    leaf, _ = chunked(root)
    checked = []
    check, digest = checked_reads.CheckedReads.check, local_shards.box_digest
    monkeypatch.setattr(
        checked_reads.CheckedReads,
        "check",
        lambda self, found, box: checked.append(found.shape[0]) or check(self, found, box),
    )
    monkeypatch.setattr(
        local_shards,
        "box_digest",
        lambda found, origin: checked.append(found.shape[0]) or digest(found, origin),
    )
    monkeypatch.setattr(checked_reads, "READ_BYTES", 8 * 4096)
    for text, rows in ROWS_READ.items():
        checked.clear()
        part = eval(f"np.s_[{text}]")
        same(values(read(http, "leaf", text)), np.asarray(leaf[part]))
        assert sum(checked) == rows


CORRUPT = (409, "urn:cairn:problem:corrupt")


def problem_of(answer):
    return answer.status_code, answer.json()["type"]


def data_files(run):
    folder = Path(run.step_uri(run.step(1)).local_path) / "model"
    return sorted(path for path in folder.rglob("*") if path.is_file() and "d/" in str(path))


def damage(run, every=512):
    for file in data_files(run):
        content = bytearray(file.read_bytes())
        for at in range(64, len(content), every):
            content[at] ^= 1
        file.write_bytes(content)


def test_damaged_chunk_is_corrupt_and_never_values(http, root):
    leaf = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    run = save(root, {"leaf": leaf})
    asked = list(itertools.product(["", "63", "::9", "8:9,:5"], ["npy", "safetensors", "json"]))
    assert all(read(http, "leaf", *one).status_code == 200 for one in asked)
    damage(run)
    assert {problem_of(read(http, "leaf", *one)) for one in asked} == {CORRUPT}


def test_swapped_chunks_are_corrupt(http, root):
    _, run = chunked(root)
    info = run.step(1)
    contents = run.contents(info)
    (leaf,) = contents.leaves
    shards = shards_of(contents, leaf)
    first, last = shards[0], shards[-1]
    shards[0], shards[-1] = first._replace(ref=last.ref), last._replace(ref=first.ref)
    publish_index(run, info, shards={("model", "leaf"): shards})
    asked = ["", "0", "63", "::9"]
    assert {problem_of(read(http, "leaf", text)) for text in asked} == {CORRUPT}
    assert read(http, "leaf", "9:12").status_code == 200


@pytest.fixture
def long_answers(monkeypatch):
    """Answers of a few kilobytes are long ones, and blocks are short."""
    monkeypatch.setattr("cairn.service.routes.tensors.WHOLE_BYTES", 1000)
    monkeypatch.setattr("cairn.storage.reading.tensor_parts.BLOCK_BYTES", 8 * 4096)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_long_answer_is_sent_as_it_is_read(http, root, long_answers, kind):
    leaf, _ = chunked(root)
    answer = read(http, "leaf", kind=kind)
    found = values(answer) if kind == "npy" else of_safetensors(answer)[1]
    same(found, leaf)
    same(values(read(http, "leaf", "3:60,5")), np.ascontiguousarray(leaf[3:60, 5]))


def test_long_answer_whose_first_values_are_damaged_is_a_problem(http, root, long_answers):
    _, run = chunked(root)
    for file in data_files(run):
        file.write_bytes(bytes(file.stat().st_size))
    assert problem_of(read(http, "leaf")) == CORRUPT


def test_long_answer_that_meets_damage_ends_short(root, tmp_path, monkeypatch):
    leaf = np.zeros((24 << 20, 1), np.float32)
    run = save(root, {"leaf": leaf})
    contents = run.contents(run.step(1))
    last = shards_of(contents, contents.leaves[0])[-1].ref
    with (Path(run.step_uri(run.step(1)).local_path) / last.file).open("r+b") as stream:
        stream.seek(last.offset + last.length // 2)
        stream.write(b"damaged!" * 64)
    (tmp_path / "plane").mkdir()
    with running_plane(root, tmp_path / "plane") as (url, process):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}{TENSORS}/leaf", timeout=60)
        assert process.poll() is None
        assert httpx.get(f"{url}{TENSORS}/leaf?slice=5").status_code == 200


def test_answer_about_a_step_that_is_removed_meanwhile_ends_short(root, long_answers):
    _, run = chunked(root)
    reader = CheckpointReader.open(run.step_uri(run.step(1)), run.manifest(run.step(1)))
    file = TensorPart.of(reader, "model", "leaf").file("npy")
    blocks = file.blocks()
    sent = len(next(blocks)) + len(next(blocks))
    shutil.rmtree(run.step_uri(run.step(1)).local_path)
    assert sent < file.nbytes
    with pytest.raises(CorruptionError, match="stored data of a leaf is missing"):
        list(blocks)


def test_too_many_long_answers_at_a_time_are_refused(http, app, root, long_answers, monkeypatch):
    monkeypatch.setattr("cairn.service.http.limiters.WAIT_SECONDS", 0.05)
    chunked(root)
    app.state.stream_limiter = StoreLimiter(at_once=0, share=4)
    answer = read(http, "leaf")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cairn:problem:not-ready")
    assert read(http, "leaf", "0,:9").status_code == 200


def test_short_answer_of_many_chunks_is_no_request_with_a_deadline(http, app, root, monkeypatch):
    leaf, _ = chunked(root)
    app.state.stream_limiter = StoreLimiter(at_once=0, share=4)
    monkeypatch.setattr("cairn.service.http.limiters.WAIT_SECONDS", 0.05)
    for module in ("cairn.service.routes.tensors", "cairn.storage.reading.tensor_parts"):
        monkeypatch.setattr(f"{module}.MOST_READ_BYTES", 16 * 4096)
    same(values(read(http, "leaf", "7:9,0")), leaf[7:9, 0])
    same(values(read(http, "leaf", "::40,0")), leaf[::40, 0])
    assert read(http, "leaf", "7:17,0").status_code == 503, "waits for a turn of the long ones"
    assert read(http, "leaf", "::20,0").status_code == 503
    refused = read(http, "leaf", ":,0", "json")
    assert problem_of(refused) == (422, "urn:cairn:problem:invalid-slice")
    assert (
        "found 262144 bytes. Ask for less of it; a chunk is [8, 1024]" in refused.json()["detail"]
    )
    app.state.stream_limiter = StoreLimiter()
    same(values(read(http, "leaf", ":,0")), np.ascontiguousarray(leaf[:, 0]))
    same(values(read(http, "leaf", "::20,0")), np.ascontiguousarray(leaf[::20, 0]))


def test_large_part_with_steps_is_refused_by_its_size(http, root, monkeypatch):
    leaf, _ = chunked(root)
    monkeypatch.setattr("cairn.storage.reading.tensor_parts.MOST_STEPPED_BYTES", 64 << 10)
    same(values(read(http, "leaf", "::4")), leaf[::4])
    answer = read(http, "leaf", "::2")
    assert (answer.status_code, "at most 65536 bytes" in answer.json()["detail"]) == (422, True)
    same(values(read(http, "leaf", "::1")), leaf)


def test_adopted_and_plain_steps_are_read_too(http, root, saved):
    before = values(read(http, "matrix", "2:9,3"))
    as_plain_step(saved, saved.step(1))
    same(values(read(http, "matrix", "2:9,3")), before)
    plain = root / "plain"
    with ocp.CheckpointManager(plain) as made:
        tree = {"matrix": LEAVES["matrix"], "half": LEAVES["bfloat16"]}
        made.save(1, args=ocp.args.StandardSave(tree))
    adopt(plain, root / "adopted")
    url = TENSORS.replace("/run/", "/adopted/")
    found = {one["path"]: one for one in listed(http, url)["tensors"]}
    assert found["matrix"]["digest"] == digest_text(box_digest(LEAVES["matrix"], (0, 0)))
    item = found["matrix"]["item"]
    same(values(read(http, "matrix", "3:,::2", url=url, item=item)), LEAVES["matrix"][3:, ::2])
    half = read(http, "half", "1", "json", url=url, item=item).json()["values"]
    assert half == LEAVES["bfloat16"][1].astype(float).tolist()


def test_step_that_shares_files_of_another_is_read(http, root):
    save(root, {"same": np.arange(4096, dtype=np.float32)}, steps=(1, 2))
    url = TENSORS.replace("/1/", "/2/")
    same(values(read(http, "same", "4000:", url=url)), np.arange(4000, 4096, dtype=np.float32))


def test_transposed_and_foreign_arrays_are_read_as_they_were_saved(http, root):
    turned = np.arange(60, dtype=np.float32).reshape(6, 10).T
    foreign = np.arange(60, dtype=">f4").reshape(10, 6)
    save(root, {"turned": turned, "foreign": foreign})
    same(values(read(http, "turned", "2:7,::3")), np.ascontiguousarray(turned[2:7, ::3]))
    assert (values(read(http, "foreign", "1:3")) == foreign[1:3]).all()


def statistics(http, leaf, **parameters):
    answer = http.get(f"{TENSORS}/{quote(leaf)}", params={"stats": "1"} | parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("leaf", ["matrix", "sharded", "bfloat16", "float8_e5m2", "int4", "bool"])
def test_statistics_tell_what_the_elements_are_like(http, saved, leaf):
    values = LEAVES.get(leaf, LEAVES["matrix"])
    wide = values.astype(np.float64)
    found = statistics(http, leaf)
    assert (found["path"], found["dtype"]) == (leaf, values.dtype.name)
    assert (found["shape"], found["count"]) == (list(values.shape), values.size)
    assert (found["min"], found["max"]) == (wide.min(), wide.max())
    assert found["mean"] == pytest.approx(wide.mean())
    assert found["std"] == pytest.approx(wide.std())
    assert found["norm"] == pytest.approx(np.linalg.norm(wide))
    assert found["zeros"] == np.count_nonzero(wide == 0)
    assert sum(found["histogram"]["counts"]) == values.size


def test_statistics_of_a_slice_are_those_of_its_elements_alone(http, saved):
    part = LEAVES["matrix"][2:9:3, -1]
    found = statistics(http, "matrix", slice="2:9:3,-1")
    assert (found["shape"], found["max"]) == ([3], part.max())
    assert found["mean"] == pytest.approx(part.mean(dtype=np.float64))


def test_statistics_count_what_is_not_finite(http, saved):
    found = statistics(http, "odd")
    counted = {name: found[name] for name in ("nan", "positive_infinity", "negative_infinity")}
    assert counted == dict.fromkeys(counted, 1)
    assert found["min"] == found["max"] == found["mean"] == float(np.float32(0.1))
    nothing = statistics(http, "nothing")
    assert (nothing["count"], nothing["min"], nothing["histogram"]) == (0, None, None)
    assert statistics(http, "odd", slice=":3")["norm"] is None


def test_statistics_of_large_integers_stay_exact(http, root):
    save(root, {"ids": np.asarray([2**63 - 1, -(2**63)], np.int64)})
    found = statistics(http, "ids")
    assert (found["min"], found["max"]) == (str(-(2**63)), str(2**63 - 1))
    assert found["mean"] == -0.5


def test_statistics_are_json_alone(http, saved):
    assert statistics(http, "matrix", format="json") == statistics(http, "matrix")
    answer = http.get(f"{TENSORS}/matrix", params={"stats": True, "format": "npy"})
    assert answer.status_code == 422
    assert "statistics are JSON" in answer.json()["detail"]


def test_complex_elements_have_no_statistics(http, root):
    save(root, {"wave": np.ones(3, np.complex64)})
    answer = http.get(f"{TENSORS}/wave", params={"stats": 1})
    assert problem_of(answer) == (422, "urn:cairn:problem:unsupported-leaf")


def test_statistics_are_never_of_damaged_values(http, root):
    values = np.arange(4096, dtype=np.float32)
    run = save(root, {"values": values})
    damage(run)
    assert problem_of(http.get(f"{TENSORS}/values", params={"stats": 1})) == CORRUPT


def test_what_two_steps_share_is_read_once(http, root, monkeypatch):
    save(root, {"frozen": np.ones(8, np.float32)}, steps=(1, 2))
    read = []
    real = TensorPart.statistics
    monkeypatch.setattr(TensorPart, "statistics", lambda part: read.append(part) or real(part))
    found = [statistics(http, "frozen") for _ in range(2)]
    url = TENSORS.replace("/1/", "/2/")
    other = http.get(f"{url}/frozen", params={"stats": 1}).json()
    assert [*found, other] == [other] * 3
    assert len(read) == 1
    assert statistics(http, "frozen", slice=":4")["count"] == 4
    assert len(read) == 2


def test_statistics_of_too_much_are_refused(http, saved, monkeypatch):
    monkeypatch.setattr("cairn.service.actions.tensors.MOST_STATISTICS_BYTES", 100)
    answer = http.get(f"{TENSORS}/matrix", params={"stats": 1})
    assert answer.status_code == 422
    assert "Ask for a slice" in answer.json()["detail"]


def test_statistics_seen_before_are_not_read_again(http, saved):
    first = http.get(f"{TENSORS}/matrix", params={"stats": 1})
    tag = {"If-None-Match": first.headers["ETag"]}
    assert http.get(f"{TENSORS}/matrix", params={"stats": 1}, headers=tag).status_code == 304
    assert http.get(f"{TENSORS}/matrix", headers=tag).status_code == 200
