"""A file that is damaged in the store is not put together of halves that nobody compared."""

import asyncio
import base64

import google_crc32c
import httpx
import numpy as np
import pytest

from cairn import AsyncClient, Client
from cairn.service.errors import DownloadError, ProblemResponseError
from cairn.service.jobs.artifacts import ArtifactRef
from cairn.storage.runs.records.exports import ExportFile, ExportKey, ExportManifest, publish_export
from cairn.storage.store.clock import rfc3339, utc_now
from tests.service.planes import running_plane
from tests.service.servers import reply, scripted
from tests.service.stores import make_run

NAME = "model.safetensors"
BLOCK_BYTES = 4 << 20
"""Of a download; the rest of a file begins after two."""
SUM = f"{google_crc32c.value(b'abcdef'):08x}"
TOLD = {
    "ETag": '"v1"',
    "Repr-Digest": f"crc32c=:{base64.b64encode(bytes.fromhex(SUM)).decode()}:",
}


@pytest.fixture
def artifact(tmp_path):
    """The URL of a server, the id of an artifact, and where its one file lies."""
    run = make_run(tmp_path / "store" / "run", [1])
    info = run.step(1)
    data = np.random.default_rng(0).bytes(2 * BLOCK_BYTES + 1000)
    identity = {
        "step": 1,
        "attempt": info.attempt,
        "kind": "gather",
        "source": info.manifest_digest,
        "options": {},
        "rule_version": 1,
    }
    file = ExportFile(name=NAME, size=len(data), crc32c=f"{google_crc32c.value(data):08x}")
    made = ExportManifest(**identity, folder="op-1", created=rfc3339(utc_now()), files=(file,))
    key = ExportKey.of(**identity)
    path = tmp_path / "store" / "run" / key.try_folder("op-1") / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    publish_export(run.objects, key, made)
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        yield url, ArtifactRef("default", "run", key).id, path


def flip(path):
    """Change the last byte of a file."""
    with path.open("r+b") as stored:
        stored.seek(-1, 2)
        last = stored.read(1)[0]
        stored.seek(-1, 2)
        stored.write(bytes([last ^ 1]))


@pytest.mark.parametrize("awaited", [False, True])
def test_damaged_file_is_not_downloaded(artifact, tmp_path, awaited):
    url, made, path = artifact
    target = tmp_path / "got" / NAME
    target.parent.mkdir()

    async def await_it():
        async with AsyncClient(url) as client:
            return await client.download(made, NAME, target)

    def download():
        if awaited:
            return asyncio.run(await_it())
        with Client(url) as client:
            return client.download(made, NAME, target)

    assert download() == path.stat().st_size
    assert target.read_bytes() == path.read_bytes()
    target.unlink()
    flip(path)
    with pytest.raises((DownloadError, ProblemResponseError), match="crc32c"):
        download()
    assert list(target.parent.iterdir()) == []


def test_rest_of_a_file_that_was_found_damaged_is_not_sent(artifact):
    url, made, path = artifact
    flip(path)
    address = f"{url}/v1/artifacts/{made}/files/{NAME}"
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(address)
    rest = {"Range": f"bytes={2 * BLOCK_BYTES}-"}
    refused = httpx.get(address, headers=rest)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:cairn:problem:corrupt")
    flip(path)
    answer = httpx.get(address, headers=rest)
    assert (answer.status_code, answer.content) == (206, path.read_bytes()[2 * BLOCK_BYTES :])


def test_halves_that_do_not_fit_are_no_file(tmp_path):
    with (
        scripted(reply(200, b"abc", length=6, **TOLD), reply(206, b"xyz", **TOLD)) as (url, _),
        Client(url) as client,
        pytest.raises(DownloadError, match=f"{SUM}, found"),
    ):
        client.download("a", "f", tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
