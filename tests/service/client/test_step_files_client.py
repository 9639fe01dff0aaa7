"""A copy of a step's files by the client, from a real server, and what may go wrong."""

import asyncio
import fcntl
import json
from contextlib import contextmanager

import google_crc32c
import httpx
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from cairn import AsyncClient, Checkpointer, Client
from cairn.service.errors import DownloadError, ProblemResponseError, ServerUnreachableError
from cairn.storage.runs.records.layout import INDEX_FILE
from tests.service.jobs import leaves_of, save_llama
from tests.service.planes import running_plane
from tests.service.servers import reply, scripted


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of a store, and the URL of a server of it."""
    folder = tmp_path_factory.mktemp("served")
    save_llama(folder / "store/llama")
    noise = np.random.default_rng(0).standard_normal((1500, 1000), np.float32)
    with Checkpointer(str(folder / "store/noise")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": {"noise": noise + step}}, meta={}).wait()
    (folder / "data").mkdir()
    with running_plane(folder / "store", folder / "data") as (url, _):
        yield folder / "store", url


@contextmanager
def counted(url):
    """A client, and the path and `Range` of each request for bytes that it has sent."""
    asked = []

    class Counting(httpx.HTTPTransport):
        def handle_request(self, request):
            name = request.url.path.partition("/files/")[2]
            if name:
                asked.append((name, request.headers.get("Range")))
            return super().handle_request(request)

    with Client(url, transport=Counting()) as client:
        yield client, asked


def lying(folder):
    """The bytes of every file below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_copy_of_a_step_is_what_lies_in_the_store_and_plain_orbax_reads_it(served, tmp_path):
    store, url = served
    stored = lying(store / "llama/attempts/1/1")
    del stored[INDEX_FILE]
    with Client(url) as client:
        listed = list(client.step_files("llama", 1, page_size=3))
        assert client.download_step("llama", 1, tmp_path / "new" / "copy") == listed
    assert {one.name for one in listed} == stored.keys()
    assert lying(tmp_path / "new" / "copy") == stored
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "new" / "copy" / "model")
    flat = {"/".join(path): leaf for path, leaf in flatten_dict(found).items()}
    assert flat.keys() == leaves_of().keys()
    for path, leaf in leaves_of(seed=1).items():
        np.testing.assert_array_equal(flat[path], leaf)


def test_the_client_that_is_awaited_copies_the_same(served, tmp_path):
    store, url = served

    async def copy():
        async with AsyncClient(url) as client:
            files = await client.download_step("llama", 1, tmp_path, prefix="model/")
            assert [one async for one in client.step_files("llama", 1, prefix="model/")] == files

    asyncio.run(copy())
    stored = lying(store / "llama/attempts/1/1")
    assert lying(tmp_path) == {
        name: data for name, data in stored.items() if name.startswith("model/")
    }


def test_the_same_again_fetches_only_what_is_missing_or_wrong(served, tmp_path):
    _, url = served
    with counted(url) as (client, asked):
        files = client.download_step("noise", 1, tmp_path)
        assert {name for name, _ in asked} == {one.name for one in files}
        asked.clear()
        client.download_step("noise", 1, tmp_path)
        assert asked == []
        largest = max(files, key=lambda one: one.bytes)
        target = tmp_path / largest.name
        whole = target.read_bytes()
        part = target.with_name(f".{target.name}.part")
        target.unlink()
        part.write_bytes(whole[:5_000_000])
        client.download_step("noise", 1, tmp_path)
        assert asked == [(largest.name, "bytes=5000000-")]
        assert target.read_bytes() == whole
        asked.clear()
        target.write_bytes(bytes(reversed(whole)))  # of the same size
        client.download_step("noise", 1, tmp_path)
        assert asked == [(largest.name, None)]
        assert target.read_bytes() == whole
    assert not list(tmp_path.rglob("*.part"))


def test_part_of_another_step_is_not_gone_on_with(served, tmp_path):
    _, url = served
    with counted(url) as (client, asked):
        files = client.download_step("noise", 1, tmp_path)
        largest = max(files, key=lambda one: one.bytes)
        target = tmp_path / largest.name
        whole = target.read_bytes()
        target.rename(target.with_name(f".{target.name}.part"))
        with target.with_name(f".{target.name}.part").open("r+b") as part:
            part.write(b"of another step")
            part.truncate(1_000_000)
        asked.clear()
        client.download_step("noise", 1, tmp_path)
        assert asked == [(largest.name, "bytes=1000000-"), (largest.name, None)]
        assert target.read_bytes() == whole


def test_part_of_one_step_does_not_come_beside_parts_of_another(served, tmp_path):
    _, url = served
    with counted(url) as (client, asked):
        client.download_step("noise", 1, tmp_path)
        before = lying(tmp_path)
        asked.clear()
        for prefix in ("model/", "meta/"):
            with pytest.raises(DownloadError, match=r"nothing of another step, found \d+ files"):
                client.download_step("noise", 2, tmp_path, prefix=prefix)
        assert (asked, lying(tmp_path)) == ([], before)
        client.download_step("noise", 1, tmp_path, prefix="model/")
        assert (asked, lying(tmp_path)) == ([], before)


def test_damaged_file_is_never_there(served, tmp_path):
    store, url = served
    with Client(url) as client:
        largest = max(client.step_files("noise", 2), key=lambda one: one.bytes)
        assert largest.bytes > 4 << 20  # of several blocks
        with open(store / "noise/attempts/1/2" / largest.name, "r+b") as stream:
            stream.seek(100)
            stream.write(b"damaged!")
        with pytest.raises(ProblemResponseError, match=rf"{largest.name}: .*{largest.crc32c}"):
            client.download_step("noise", 2, tmp_path)
    assert largest.name not in lying(tmp_path)


def test_two_that_write_one_file_do_not(served, tmp_path):
    _, url = served
    with Client(url) as client:
        first = next(client.step_files("llama", 1))
        part = tmp_path / f".{first.name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(DownloadError, match="no other process that writes it"):
                client.download_step("llama", 1, tmp_path)


def test_what_is_not_there_is_said(served, tmp_path):
    _, url = served
    with Client(url) as client:
        with pytest.raises(DownloadError, match="begin with 'nothing/', found none"):
            client.download_step("llama", 1, tmp_path / "new", prefix="nothing/")
        with pytest.raises(ProblemResponseError) as raised:
            client.download_step("llama", 7, tmp_path / "new")
    assert raised.value.status == 404
    assert not (tmp_path / "new").exists()


def listed(*files):
    body = {"files": list(files), "next_page_token": None}
    return reply(200, json.dumps(body).encode(), Content_Type="application/json")


def described(name, data):
    return {"name": name, "bytes": len(data), "crc32c": f"{google_crc32c.value(data):08x}"}


def test_download_that_breaks_off_goes_on_in_the_next_call(tmp_path):
    data = bytes(range(256)) * 1000
    half = len(data) // 2
    broken = reply(200, data[:half], length=len(data))
    gone = reply(206, b"", length=1)
    rest = reply(206, data[half:])
    page = listed(described("model/data", data))
    with (
        scripted(page, broken, gone, gone, gone, gone, gone, page, rest) as (url, asked),
        Client(url) as client,
    ):
        with pytest.raises(ServerUnreachableError):
            client.download_step("run", 1, tmp_path)
        assert lying(tmp_path) == {"model/.data.part": data[:half]}
        client.download_step("run", 1, tmp_path)
    assert asked[-1].headers["Range"] == f"bytes={half}-"
    assert asked[-1].path == "/v1/roots/default/runs/run/checkpoints/1/files/model/data"
    assert lying(tmp_path) == {"model/data": data}


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "a//x", "./x", "", "a\\x", "a\0x", ".."]
)
def test_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    with (
        scripted(listed(described(name, b"x")), reply(200, b"x")) as (url, asked),
        Client(url) as client,
        pytest.raises(DownloadError, match="expected the name of a file in a folder"),
    ):
        client.download_step("run", 1, tmp_path / "copy")
    assert len(asked) == 1
    assert lying(tmp_path) == {}
