"""Who writes one root has a server open nothing else: what a record names, and where links lead."""

import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import google_crc32c
import pytest

from cairn import Manifest, adopt
from cairn.storage.runs.records.manifest import ObjectRecord
from tests.plain_orbax import manager
from tests.service.access.conftest import Keys, bearer
from tests.service.jobs import done, save_llama, serving, watch

SECRET = b"a secret of another team's"
STEP = "/v1/roots/default/runs/{run}/checkpoints/{step}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A root with an adopted run and one of our own, and beside it what is no business of it."""
    folder = tmp_path_factory.mktemp("confined")
    for name in ("mine/plain", "allowed/plain"):
        manager(folder / name)
    adopt(str(folder / "mine/plain"), str(folder / "mine/adopted"))
    save_llama(folder / "mine/llama")
    save_llama(folder / "theirs/llama")
    for name in ("theirs/llama/attempts/1/1/file", "outside/file", "allowed/plain/10/file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SECRET)
    os.symlink(folder / "outside", folder / "mine/link")
    return folder


@pytest.fixture(scope="module")
def http(folder, tmp_path_factory):
    """Asked with a key of a reader of the first root."""
    with serving(
        folder / "mine",
        tmp_path_factory.mktemp("data"),
        roots={"theirs": str(folder / "theirs")},
        adopt_from={"default": [str(folder / "allowed")]},
        auth="keys",
    ) as client:
        keys = Keys(client.app.state.plane.settings.database_url)
        client.headers = bearer(keys.make("mine", "operate", roots=["default"]))
        yield client


@pytest.fixture
def forge(folder):
    """A run whose step 10 says that it lies elsewhere; made anew for each test."""
    made: list[Path] = []

    def forged(source: str, content: bytes = SECRET, crc32c: str = "00000000") -> str:
        run = folder / f"mine/forged-{len(made)}"
        shutil.copytree(folder / "mine/adopted", run)
        made.append(run)
        path = run / "manifests/10.1.json"
        manifest = Manifest.parse(path.read_bytes(), path)
        assert manifest.plain is not None
        record = ObjectRecord(name="file", size=len(content), crc32c=crc32c)
        other = manifest.model_copy(
            update={
                "plain": manifest.plain.model_copy(update={"source": source}),
                "inline_objects": (record,),
            }
        )
        assert manifest.location is not None
        path.write_bytes(other.with_location(manifest.location).to_bytes())
        return run.name

    yield forged
    for run in made:
        shutil.rmtree(run)


def problem(answer, status, slug):
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:cairn:problem:{slug}")
    assert SECRET not in answer.content
    return answer.json()["detail"]


@pytest.mark.parametrize(
    "source",
    [
        "{folder}/theirs/llama/attempts/1/1",
        "file://{folder}/outside",
        "{folder}/mine/link",
        "/etc",
        "gs://bucket/old",
        "memory://old",
    ],
)
def test_step_that_says_it_lies_elsewhere_is_listed_and_never_opened(http, folder, forge, source):
    crc32c = f"{google_crc32c.value(SECRET):08x}"
    run = forge(source.format(folder=folder), SECRET, crc32c)
    step = STEP.format(run=run, step=10)
    assert http.get(f"{step}?refresh=true").status_code == 200
    page = http.get(f"/ui/default/{run}/steps/10")
    assert (page.status_code, "--adopt-from" in page.text) == (200, True)
    for path in ("/files/file", "/tensors/state%2Fw?stats=1"):
        for headers in ({}, {"Range": "bytes=0-"}):
            told = problem(http.get(f"{step}{path}", headers=headers), 409, "source-refused")
            assert "--adopt-from" in told
    create = {"If-None-Match": "*"}
    promoted = http.post(f"{step}:promote", json={"alias": "x"}, headers=create)
    problem(promoted, 409, "source-refused")
    for verb, body in (
        ("verify", {}),
        ("gather", {"items": ["state"]}),
        ("restore", {"run": "f"}),
    ):
        answer = http.post(f"{step}:{verb}", json=body)
        if answer.status_code == 409:
            problem(answer, 409, "source-refused")
        else:
            ended = watch(http, answer.json()["id"])
            assert (ended["state"], SECRET.decode() in json.dumps(ended)) == ("failed", False)
            assert ended["error"]["type"] == "urn:cairn:problem:source-refused"
    assert not (folder / "mine/f").exists()


@pytest.mark.parametrize("asked", ["range", "whole", "headers"])
def test_file_that_is_not_the_runs_own_is_sent_once_its_checksum_was_seen(
    http, folder, forge, asked
):
    source = str(folder / "allowed/plain/10")

    def ask(run):
        path = f"{STEP.format(run=run, step=10)}/files/file"
        headers = {"Range": "bytes=2-"} if asked == "range" else {}
        return http.request("HEAD" if asked == "headers" else "GET", path, headers=headers)

    crc32c = f"{google_crc32c.value(SECRET):08x}"
    for refused in (ask(forge(source)), ask(forge(source, SECRET[1:], crc32c))):
        assert refused.status_code == 409
        assert SECRET not in refused.content
        assert crc32c not in f"{refused.headers} {refused.text}".partition("expected")[0]
        assert f"found {len(SECRET)}" not in refused.text
        assert crc32c not in refused.text.partition("found")[2]
    right = ask(forge(source, SECRET, crc32c))
    assert (right.status_code, right.content) == {
        "range": (206, SECRET[2:]),
        "whole": (200, SECRET),
        "headers": (200, b""),
    }[asked]


def test_changed_file_that_is_not_the_runs_own_is_compared_anew(http, folder, forge):
    path = folder / "mine/other/file"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    run = forge(str(path.parent), SECRET, f"{google_crc32c.value(SECRET):08x}")
    address = f"{STEP.format(run=run, step=10)}/files/file"
    assert http.get(address, headers={"Range": "bytes=0-3"}).content == SECRET[:4]
    path.write_bytes(bytes(reversed(SECRET)))
    changed = http.get(address, headers={"Range": "bytes=0-3"})
    assert (changed.status_code, bytes(reversed(SECRET))[:4] in changed.content) == (409, False)


LINKED = {
    "the folder of a step": "attempts/1/1",
    "the folder of an attempt": "attempts/1",
    "the folder of all attempts": "attempts",
    "the folder of an item": "attempts/1/1/model",
    "the folder of manifests": "manifests",
    "a manifest": "manifests/1.1.json",
    "the index of a step": "attempts/1/1/cairn.index",
    "the record of the run": "run.json",
    "the folder of exports": "exports",
    "the run": ".",
}


@pytest.fixture
def linked(http, folder, request):
    """A run of which a part lies outside of it, by a link; what lies there."""
    run, elsewhere = folder / "mine/linked", folder / "outside/linked"
    shutil.copytree(folder / "mine/llama", run)
    if request.param == "the folder of exports":
        done(http, f"{STEP.format(run='linked', step=1)}:gather", {"items": ["model"]})
    shutil.move(run / LINKED[request.param], elsewhere)
    os.symlink(elsewhere, run if LINKED[request.param] == "." else run / LINKED[request.param])
    yield elsewhere
    (shutil.rmtree if elsewhere.is_dir() else os.unlink)(elsewhere)
    os.unlink(run) if run.is_symlink() else shutil.rmtree(run)


@pytest.mark.parametrize("linked", LINKED, indirect=True)
def test_no_link_leads_out_of_a_run(http, folder, linked):
    def lying():
        paths = [linked, *linked.rglob("*")]
        return {path: path.read_bytes() for path in paths if path.is_file()}

    before, step = lying(), STEP.format(run="linked", step=1)
    names = [str(path.relative_to(linked)) for path in before if path != linked] or ["cairn.index"]
    names = sorted(names, key=len)[:6]
    for name in [*names, *(name.partition("attempts/1/1/")[2] or name for name in names)]:
        for headers in ({}, {"Range": "bytes=0-"}):
            answer = http.get(f"{step}/files/{quote(name)}", headers=headers)
            assert answer.status_code in (200, 206, 404, 409, 416), answer.text
            if answer.is_success and answer.content:  # of what is not linked
                own = [path.read_bytes() for path in files_below(folder / "mine/linked")]
                assert answer.content in own
    for verb in ("verify", "convert"):
        answer = http.post(f"{step}:{verb}", json={})
        if answer.is_success:
            watch(http, answer.json()["id"])
    http.delete(step, params={"grace_seconds": 0})
    collecting = http.post("/v1/roots/default/runs/linked:gc", json={"dry_run": False})
    if collecting.is_success:
        watch(http, collecting.json()["id"])
    assert lying() == before


def files_below(folder):
    """Those that lie there, and not behind a link."""
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names if not Path(place, name).is_symlink())
