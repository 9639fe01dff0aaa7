"""Files of a step over HTTP: which there are, and their bytes, whoever owns them."""

import base64
import shutil
from urllib.parse import quote

import google_crc32c
import httpx
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from cairn import Checkpointer, adopt
from cairn.storage.runs.records.layout import INDEX_FILE
from tests.plain_orbax import manager
from tests.service.jobs import leaves_of, save_llama, serving
from tests.service.planes import running_plane

STEPS = "/v1/roots/default/runs/{run}/checkpoints/{step}/files"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    save_llama(root / "llama")
    manager(root.parent / "plain")
    adopt(str(root.parent / "plain"), str(root / "adopted"))
    return root


@pytest.fixture(scope="module")
def http(store, tmp_path_factory):
    allowed = {"default": [str(store.parent / name) for name in ("plain", "fickle")]}
    with serving(store, tmp_path_factory.mktemp("data"), adopt_from=allowed) as client:
        yield client


def files_of(http, run, step=1):
    answer = http.get(STEPS.format(run=run, step=step), params={"page_size": 1000})
    assert answer.status_code == 200, answer.text
    return answer.json()["files"]


def address(run, name, step=1):
    return f"{STEPS.format(run=run, step=step)}/{quote(name)}"


@pytest.fixture(scope="module")
def largest(http):
    return max(files_of(http, "llama"), key=lambda one: one["bytes"])


@pytest.fixture(scope="module")
def content(store, largest):
    return (store / "llama/attempts/1/1" / largest["name"]).read_bytes()


def test_every_file_of_a_step_is_listed_and_downloaded_as_it_lies_in_the_store(http, store):
    folder = store / "llama/attempts/1/1"
    lying = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = files_of(http, "llama")
    assert {one["name"] for one in found} == lying - {INDEX_FILE}
    assert any("/" in one["name"] for one in found)
    for one in found:
        answer = http.get(address("llama", one["name"]))
        assert answer.status_code == 200, answer.text
        assert answer.content == (folder / one["name"]).read_bytes()
        assert len(answer.content) == one["bytes"]
        assert f"{google_crc32c.value(answer.content):08x}" == one["crc32c"]


def test_copy_of_all_files_is_a_checkpoint_of_plain_orbax(http, tmp_path):
    for one in files_of(http, "llama"):
        target = tmp_path / one["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(http.get(address("llama", one["name"])).content)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "model")
    flat = {"/".join(path): leaf for path, leaf in flatten_dict(found).items()}
    assert flat.keys() == leaves_of().keys()
    for path, leaf in leaves_of(seed=1).items():
        np.testing.assert_array_equal(flat[path], leaf)


def test_files_are_listed_by_pages(http):
    names, token = [], None
    for _ in range(100):
        query = {"page_size": 3} | ({} if token is None else {"page_token": token})
        page = http.get(STEPS.format(run="llama", step=1), params=query).json()
        assert len(page["files"]) <= 3
        names += [one["name"] for one in page["files"]]
        token = page["next_page_token"]
        if token is None:
            break
    assert names == [one["name"] for one in files_of(http, "llama")]


def test_download_says_what_it_is_and_a_look_at_it_says_the_same(http, largest, content):
    answer = http.get(address("llama", largest["name"]))
    digest = base64.b64encode(bytes.fromhex(largest["crc32c"])).decode()
    assert answer.headers["repr-digest"] == f"crc32c=:{digest}:"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(content))
    name = quote(largest["name"].rpartition("/")[2])
    assert answer.headers["content-disposition"] == f"attachment; filename*=UTF-8''{name}"
    head = http.head(address("llama", largest["name"]))
    assert head.content == b""
    own = {"x-request-id": answer.headers["x-request-id"]}
    assert {**head.headers, **own} == {**answer.headers}


def test_range_and_conditions_are_those_of_any_download(http, largest, content):
    here = address("llama", largest["name"])
    etag = http.get(here).headers["etag"]
    part = http.get(here, headers={"Range": "bytes=5-9", "If-Range": etag})
    assert (part.status_code, part.content) == (206, content[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(content)}"
    stale = http.get(here, headers={"Range": "bytes=5-9", "If-Range": '"other"'})
    assert (stale.status_code, stale.content) == (200, content)
    same = http.get(here, headers={"If-None-Match": etag})
    assert (same.status_code, same.content) == (304, b"")
    assert http.head(here, headers={"If-None-Match": etag}).status_code == 304
    behind = http.get(here, headers={"Range": f"bytes={len(content)}-"})
    assert behind.status_code == 416
    assert behind.headers["content-range"] == f"bytes */{len(content)}"


def test_two_files_have_two_etags(http):
    tags = {
        http.head(address("llama", one["name"])).headers["etag"] for one in files_of(http, "llama")
    }
    assert len(tags) == len(files_of(http, "llama"))


@pytest.mark.parametrize(
    "name",
    [
        "..%2F..%2F..%2Frun.json",
        "%2e%2e/%2e%2e/%2e%2e/run.json",
        "model/..%2f..%2f..%2f..%2frun.json",
        "%2Fetc%2Fpasswd",
        "run.json",
        "model",
        "missing",
    ],
)
def test_only_files_that_the_manifest_names_are_served(http, name):
    answer = http.get(f"{STEPS.format(run='llama', step=1)}/{name}")
    assert answer.status_code == 404, answer.text
    assert answer.json()["type"] == "urn:cairn:problem:not-found"
    assert b"cairn.run" not in answer.content


def test_files_of_an_adopted_step_are_its_owners(http, store):
    found = files_of(http, "adopted", 10)
    owners = store.parent / "plain/10"
    own = [one["name"] for one in found if (owners / one["name"]).is_file()]
    kept = [one["name"] for one in found if one["name"] not in own]
    assert own
    assert kept  # digests of chunks, which lie in the run
    for name in own:
        assert http.get(address("adopted", name, 10)).content == (owners / name).read_bytes()
    for name in kept:
        (here,) = (store / "adopted/attempts").glob(f"*/10/{name}")
        assert http.get(address("adopted", name, 10)).content == here.read_bytes()


def test_file_that_its_owner_changed_or_removed_is_said_to_be_so(http, store):
    manager(store.parent / "fickle")
    adopt(str(store.parent / "fickle"), str(store / "fickle"))
    marker = "_CHECKPOINT_METADATA"
    file = store.parent / "fickle/5" / marker
    file.write_bytes(bytes(reversed(file.read_bytes())))
    changed = http.get(address("fickle", marker, 5))
    assert (changed.status_code, changed.json()["type"]) == (409, "urn:cairn:problem:corrupt")
    assert "Its owner has changed it" in changed.json()["detail"]
    file.unlink()
    missing = http.get(address("fickle", marker, 5))
    assert (missing.status_code, missing.json()["type"]) == (409, "urn:cairn:problem:corrupt")
    assert "found nothing" in missing.json()["detail"]
    shutil.rmtree(store.parent / "fickle/5")
    gone = http.get(address("fickle", marker, 5))
    assert (gone.status_code, gone.json()["type"]) == (404, "urn:cairn:problem:step-not-found")


def test_large_file_that_was_damaged_ends_short_and_is_never_whole(tmp_path):
    noise = np.random.default_rng(0).standard_normal((1500, 1000), np.float32)  # two blocks
    with Checkpointer(str(tmp_path / "store/noise")) as checkpointer:
        checkpointer.save(1, {"model": {"noise": noise}}, meta={}).wait()
    (tmp_path / "data").mkdir()
    with (
        running_plane(tmp_path / "store", tmp_path / "data") as (url, _),
        httpx.Client(base_url=url) as http,
    ):
        largest = max(files_of(http, "noise"), key=lambda one: one["bytes"])
        here = address("noise", largest["name"])
        assert len(http.get(here).content) == largest["bytes"] > 4 << 20
        with open(tmp_path / "store/noise/attempts/1/1" / largest["name"], "r+b") as stream:
            stream.seek(100)
            stream.write(b"damaged!")
        with pytest.raises(httpx.RemoteProtocolError):
            http.get(here)
