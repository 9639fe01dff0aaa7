"""Two exports of one step at once: equal ones are one artifact, others never mix their files."""

import contextlib
import hashlib
import shutil
import threading

import pytest

from cairn import Run, StoreFullError, collect_garbage
from tests.service.jobs import (
    PATIENCE,
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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The store of both servers, in which each test has a run of its own."""
    root = tmp_path_factory.mktemp("shared") / "store"
    root.mkdir()
    return root


@pytest.fixture(scope="module")
def http(root):
    """The server in this process, whose writes can be held."""
    with serving(root, root.parent / "one", scan_seconds=0) as client:
        yield client


@pytest.fixture(scope="module")
def other(root):
    """A server in a process of its own, with databases of its own."""
    with control_plane(root, root.parent / "two") as (client, _):
        yield client


@pytest.fixture
def run(root, saved):
    name = f"run-{len([*root.iterdir()])}"
    shutil.copytree(saved / "llama", root / name)
    return name


@pytest.fixture(scope="module")
def alone(saved, root, http):
    """What exports are one after another."""
    shutil.copytree(saved / "llama", root / "alone")
    of_body = []
    for body in OTHERS:
        before = digests(root, "alone")
        done(http, convert("alone"), body)
        of_body.append((body, dict(digests(root, "alone").items() - before.items())))

    def of(bodies):
        return {
            file: digest
            for body, files in of_body
            if body in bodies
            for file, digest in files.items()
        }

    return of


def convert(run):
    return CONVERT.replace("llama", run)


def digests(root, run):
    """Every file of every try, by the export and its own name."""
    return {
        (folder.parent.name, path.name): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in tries(root, run)
        for path in folder.iterdir()
    }


def start(http, run, body, key=None):
    headers = {"Idempotency-Key": f"{run} {key}"} if key else None
    answer = http.post(convert(run), json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def both_made_one(ended):
    assert [one["state"] for one in ended] == ["succeeded", "succeeded"], ended
    assert len({one["result"]["artifact_id"] for one in ended}) == 1
    assert sorted(one["result"]["existing"] for one in ended) == [False, True]


def test_two_equal_exports_of_one_worker_are_one_artifact(root, http, run, monkeypatch, alone):
    """Of two keys: without, they would be one operation."""
    both = threading.Barrier(2)
    real = export_job.write_shard

    def write(*args, **options):
        if not both.broken:  # the first of each are written at the same time
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(5)
        return real(*args, **options)

    monkeypatch.setattr(export_job, "write_shard", write)
    operations = [start(http, run, SEVERAL, key) for key in ("one", "two")]
    assert len({*operations}) == 2
    both_made_one([watch(http, operation) for operation in operations])
    assert len(tries(root, run)) == 1
    assert digests(root, run) == alone([SEVERAL])


def test_two_equal_exports_of_two_servers_are_one_artifact(
    root, http, other, run, monkeypatch, alone
):
    hold = Hold(monkeypatch)
    mine = start(http, run, SEVERAL)
    assert hold.reached.wait(PATIENCE)
    theirs = start(other, run, SEVERAL)
    ended = watch(other, theirs)
    hold.opened.set()
    both_made_one([ended, watch(http, mine)])
    assert len(tries(root, run)) == 1
    assert digests(root, run) == alone([SEVERAL])


def test_exports_with_other_options_at_once_are_what_they_are_alone(root, http, other, run, alone):
    servers = [http, other, http, other, http, other]
    bodies = [body for body in OTHERS for _ in range(2)]
    started = [start(server, run, body) for server, body in zip(servers, bodies, strict=True)]
    for server, operation in zip(servers, started, strict=True):
        assert watch(server, operation)["state"] == "succeeded"
    assert len(tries(root, run)) == len(OTHERS)
    assert digests(root, run) == alone(OTHERS)


def test_two_servers_that_go_on_with_one_try_share_its_files_and_make_one_artifact(
    root, http, other, run, monkeypatch, alone
):
    real = export_job.write_shard

    def full(files, rel, shard, **options):
        if "-00006-" in rel:
            raise StoreFullError("the store is full", path=files.uri / rel)
        return real(files, rel, shard, **options)

    with monkeypatch.context() as patched:
        patched.setattr(export_job, "write_shard", full)
        failed = watch(http, start(http, run, SEVERAL))
        assert failed["error"]["kept_bytes"]
    http.post(f"/v1/operations/{failed['id']}:resume")
    theirs = start(other, run, SEVERAL)
    ended = [watch(http, failed["id"]), watch(other, theirs)]
    assert [one["state"] for one in ended] == ["succeeded", "succeeded"], ended
    assert len({one["result"]["artifact_id"] for one in ended}) == 1
    assert artifact_of(http, ended[0])["files"]
    assert len(tries(root, run)) == 1
    assert not [*(root / run / "exports").glob("*/*/*.json")]
    assert digests(root, run) == alone([SEVERAL])


def test_an_export_that_was_overtaken_and_collected_ends_with_the_other(
    root, http, other, run, monkeypatch
):
    hold = Hold(monkeypatch)
    mine = start(http, run, SEVERAL)
    assert hold.reached.wait(PATIENCE)
    faster = done(other, convert(run), SEVERAL)
    assert len(tries(root, run)) == 2
    removed = collect_garbage(Run.open(root / run), by="test")
    assert [one.kind.value for one in removed] == ["export"]
    hold.opened.set()
    ended = watch(http, mine)
    assert ended["state"] == "succeeded", ended
    assert ended["result"] == {**faster["result"], "existing": True}
    assert len(tries(root, run)) == 1


def test_an_export_that_is_published_while_its_files_are_removed_does_not_count(
    root, http, run, monkeypatch
):
    """A cancel in one process, while the worker of another is about to publish."""
    done(http, convert(run), {})
    [path] = (root / run / "exports").glob("*/*.json")
    [folder] = tries(root, run)
    kept = path.read_bytes()
    path.unlink()
    stored = Run.open(root / run)
    step, attempt = (int(number) for number in path.parent.name.split("."))
    key = exports.ExportKey(step, attempt, *path.stem.split("-"))
    real = exports.find_export

    def published_since(objects, key):
        found = real(objects, key)
        path.write_bytes(kept)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(exports, "find_export", published_since)
        exports.delete_tries(stored.uri, key, folder.name)
    assert real(stored.objects, key) is None
    assert done(http, convert(run), {})["result"]["existing"] is False
    assert len(tries(root, run)) == 1
