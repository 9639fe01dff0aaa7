"""Two exports of one step at once: equal ones are one artifact, others never mix their files."""

import contextlib
import hashlib
import shutil
import threading

import pytest

from cairn import Run, StoreFullError, collect_garbage
from tests.service.jobs import (
    Hold,
    artifact_of,
    control_plane,
    done,
    save_llama,
    serving,
    tries,
    watch,
)
from tests.service.seams import export_job, exports
from tests.service.test_export_parts import CONVERT, SEVERAL

OTHERS = [SEVERAL, {"max_shard_size": "20KB", "dtype": "bfloat16"}, {"format": "gguf"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_llama(root / "llama")
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "store")


@pytest.fixture(scope="module")
def alone(saved, tmp_path_factory):
    """What exports are one after another."""
    other = tmp_path_factory.mktemp("alone")
    shutil.copytree(saved, other / "store")
    of_body = []
    with serving(other / "store", other / "data") as http:
        for body in ({}, *OTHERS):
            before = digests(other / "store")
            done(http, CONVERT, body)
            of_body.append((body, dict(digests(other / "store").items() - before.items())))

    def of(bodies):
        return {
            file: digest
            for body, files in of_body
            if body in bodies
            for file, digest in files.items()
        }

    return of


def digests(root, run="llama"):
    """Every file of every try, by the export and its own name."""
    return {
        (folder.parent.name, path.name): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in tries(root, run)
        for path in folder.iterdir()
    }


def start(http, body, key=None):
    headers = {"Idempotency-Key": key} if key else None
    answer = http.post(CONVERT, json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def both_made_one(ended):
    assert [one["state"] for one in ended] == ["succeeded", "succeeded"], ended
    assert len({one["result"]["artifact_id"] for one in ended}) == 1
    assert sorted(one["result"]["existing"] for one in ended) == [False, True]


@pytest.mark.parametrize("body", [{}, SEVERAL], ids=["one file", "several"])
def test_two_equal_exports_of_one_worker_are_one_artifact(root, tmp_path, body, monkeypatch, alone):
    """Of two keys: without, they would be one operation."""
    both = threading.Barrier(2)
    real = export_job.write_shard

    def write(*args, **options):
        if not both.broken:  # the first of each are written at the same time
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(5)
        return real(*args, **options)

    monkeypatch.setattr(export_job, "write_shard", write)
    with serving(root, tmp_path / "data") as http:
        operations = [start(http, body, key) for key in ("one", "two")]
        assert len({*operations}) == 2
        both_made_one([watch(http, operation) for operation in operations])
    assert len(tries(root, "llama")) == 1
    assert digests(root) == alone([body])


def test_two_equal_exports_of_two_servers_are_one_artifact(root, tmp_path, monkeypatch, alone):
    hold = Hold(monkeypatch)
    with (
        control_plane(root, tmp_path / "two") as (other, _),
        serving(root, tmp_path / "one") as http,
    ):
        mine = start(http, SEVERAL)
        assert hold.reached.wait(20)
        theirs = start(other, SEVERAL)
        ended = watch(other, theirs)
        hold.opened.set()
        both_made_one([ended, watch(http, mine)])
    assert len(tries(root, "llama")) == 1
    assert digests(root) == alone([SEVERAL])


def test_exports_with_other_options_at_once_are_what_they_are_alone(root, tmp_path, alone):
    with (
        control_plane(root, tmp_path / "two") as (other, _),
        serving(root, tmp_path / "one") as http,
    ):
        servers = [http, other, http, other, http, other]
        bodies = [body for body in OTHERS for _ in range(2)]
        started = [start(*each) for each in zip(servers, bodies, strict=True)]
        for server, operation in zip(servers, started, strict=True):
            assert watch(server, operation)["state"] == "succeeded"
    assert len(tries(root, "llama")) == len(OTHERS)
    assert digests(root) == alone(OTHERS)


def test_two_servers_that_go_on_with_one_try_share_its_files_and_make_one_artifact(
    root, tmp_path, monkeypatch, alone
):
    real = export_job.write_shard

    def full(files, rel, shard, **options):
        if "-00006-" in rel:
            raise StoreFullError("the store is full", path=files.uri / rel)
        return real(files, rel, shard, **options)

    with (
        control_plane(root, tmp_path / "two") as (other, _),
        serving(root, tmp_path / "one") as http,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(export_job, "write_shard", full)
            failed = watch(http, start(http, SEVERAL))
            assert failed["error"]["kept_bytes"]
        http.post(f"/v1/operations/{failed['id']}:resume")
        theirs = start(other, SEVERAL)
        ended = [watch(http, failed["id"]), watch(other, theirs)]
        assert [one["state"] for one in ended] == ["succeeded", "succeeded"], ended
        assert len({one["result"]["artifact_id"] for one in ended}) == 1
        assert artifact_of(http, ended[0])["files"]
    assert len(tries(root, "llama")) == 1
    assert not [*(root / "llama/exports").glob("*/*/*.json")]
    assert digests(root) == alone([SEVERAL])


def test_an_export_that_was_overtaken_and_collected_ends_with_the_other(
    root, tmp_path, monkeypatch
):
    hold = Hold(monkeypatch)
    with (
        control_plane(root, tmp_path / "two") as (other, _),
        serving(root, tmp_path / "one") as http,
    ):
        mine = start(http, SEVERAL)
        assert hold.reached.wait(20)
        faster = done(other, CONVERT, SEVERAL)
        assert len(tries(root, "llama")) == 2
        removed = collect_garbage(Run.open(root / "llama"), by="test")
        assert [one.kind.value for one in removed] == ["export"]
        hold.opened.set()
        ended = watch(http, mine)
    assert ended["state"] == "succeeded", ended
    assert ended["result"] == {**faster["result"], "existing": True}
    assert len(tries(root, "llama")) == 1


def test_an_export_that_is_published_while_its_files_are_removed_does_not_count(
    root, tmp_path, monkeypatch
):
    """A cancel in one process, while the worker of another is about to publish."""
    with serving(root, tmp_path / "data") as http:
        done(http, CONVERT, {})
        [path] = (root / "llama/exports").glob("*/*.json")
        [folder] = tries(root, "llama")
        kept = path.read_bytes()
        path.unlink()
        run = Run.open(root / "llama")
        step, attempt = (int(number) for number in path.parent.name.split("."))
        key = exports.ExportKey(step, attempt, *path.stem.split("-"))
        real = exports.find_export

        def published_since(objects, key):
            found = real(objects, key)
            path.write_bytes(kept)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(exports, "find_export", published_since)
            exports.delete_tries(run.uri, key, folder.name)
        assert real(run.objects, key) is None
        assert done(http, CONVERT, {})["result"]["existing"] is False
    assert len(tries(root, "llama")) == 1
