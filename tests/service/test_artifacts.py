import pytest

from tests.service.jobs import done, save_llama, serving

GATHER = "/v1/roots/default/runs/llama/checkpoints/1:gather"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    save_llama(root / "llama")
    return root


@pytest.fixture(scope="module")
def http(store, tmp_path_factory):
    with serving(store, tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(scope="module")
def artifact(http):
    operation = done(http, GATHER, {})
    return http.get(f"/v1/artifacts/{operation['result']['artifact_id']}").json()


@pytest.fixture(scope="module")
def address(artifact):
    return f"/v1/artifacts/{artifact['id']}/files/gathered.safetensors"


@pytest.fixture(scope="module")
def content(http, address):
    return http.get(address).content


def test_artifact_tells_what_it_is(artifact, store, content):
    assert (artifact["kind"], artifact["root"], artifact["run"]) == ("gather", "default", "llama")
    assert (artifact["step"], artifact["attempt"]) == (1, 1)
    assert artifact["manifest_digest"].startswith("sha256:")
    assert artifact["options"] == {"items": ["model"], "dtype": None}
    assert artifact["uri"].startswith(f"file://{store}/llama/exports/1.1/gather-")
    assert artifact["bytes"] == len(content) == artifact["files"][0]["bytes"]


def test_checksum_is_that_of_the_bytes(artifact, content):
    import google_crc32c

    assert artifact["files"][0]["crc32c"] == f"{google_crc32c.value(content):08x}"


def test_download_has_what_a_client_needs_to_go_on(http, address, content):
    answer = http.get(address)
    assert answer.status_code == 200
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(content))
    assert answer.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''gathered.safetensors"
    )
    assert answer.headers["etag"].startswith('"')
    head = http.head(address)
    assert head.content == b""
    own = {"x-request-id": answer.headers["x-request-id"]}
    assert {**head.headers, **own} == {**answer.headers}


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("bytes=0-9", 0, 10), ("bytes=100-", 100, None), ("bytes=-7", -7, None), ("bytes=5-5", 5, 6)],
)
def test_range_is_answered_with_that_part(http, address, content, asked, start, stop):
    answer = http.get(address, headers={"Range": asked})
    part = content[start:stop]
    first = len(content) + start if start < 0 else start
    assert answer.status_code == 206
    assert answer.content == part
    assert answer.headers["content-range"] == (
        f"bytes {first}-{first + len(part) - 1}/{len(content)}"
    )


def test_range_past_the_end_is_cut(http, address, content):
    answer = http.get(address, headers={"Range": f"bytes=10-{10 * len(content)}"})
    assert (answer.status_code, answer.content) == (206, content[10:])


@pytest.mark.parametrize("asked", ["bytes={size}-", "bytes={size}-{size}", "bytes=-0"])
def test_range_behind_the_end_is_a_problem(http, address, content, asked):
    answer = http.get(address, headers={"Range": asked.format(size=len(content))})
    assert answer.status_code == 416
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["content-range"] == f"bytes */{len(content)}"


@pytest.mark.parametrize("asked", ["bytes=1-2,5-6", "lines=1-2", "bytes=9-3", "bytes=a-b"])
def test_range_of_another_kind_is_ignored(http, address, content, asked):
    answer = http.get(address, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, content)


def test_conditions_follow_the_etag(http, address, content):
    etag = http.get(address).headers["etag"]
    same = http.get(address, headers={"If-None-Match": f'"other", {etag}'})
    assert (same.status_code, same.content) == (304, b"")
    part = http.get(address, headers={"Range": "bytes=0-3", "If-Range": etag})
    assert (part.status_code, part.content) == (206, content[:4])
    stale = http.get(address, headers={"Range": "bytes=0-3", "If-Range": '"other"'})
    assert (stale.status_code, stale.content) == (200, content)


@pytest.mark.parametrize(
    "name",
    ["..%2F..%2F..%2Frun.json", "%2e%2e%2frun.json", "run.json", "%2Fetc%2Fpasswd", "missing"],
)
def test_only_the_files_of_the_artifact_are_served(http, artifact, name):
    answer = http.get(f"/v1/artifacts/{artifact['id']}/files/{name}")
    assert answer.status_code == 404, answer.text
    assert b"cairn.run" not in answer.content


@pytest.mark.parametrize(
    "damage",
    [
        lambda parts: ["other", *parts[1:]],
        lambda parts: [parts[0], "nobody", *parts[2:]],
        lambda parts: [*parts[:2], "2", *parts[3:]],
        lambda parts: [*parts[:4], "gather-00000000000000000000000000000000"],
        lambda parts: [*parts[:4], "x"],
        lambda parts: [parts[0], "..", *parts[2:]],
    ],
)
def test_unknown_artifact_is_not_found(http, artifact, damage):
    changed = "~".join(damage(artifact["id"].split("~")))
    answer = http.get(f"/v1/artifacts/{changed}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:cairn:problem:artifact-not-found"


def test_truncated_file_is_corrupt_not_short(http, store, tmp_path):
    save_llama(store / "cut")
    operation = done(http, GATHER.replace("llama", "cut"), {})
    address = f"/v1/artifacts/{operation['result']['artifact_id']}"
    body = http.get(address).json()
    path = body["uri"].removeprefix("file://") + "/gathered.safetensors"
    with open(path, "r+b") as stream:
        stream.truncate(100)
    answer = http.get(f"{address}/files/gathered.safetensors")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:cairn:problem:corrupt")
