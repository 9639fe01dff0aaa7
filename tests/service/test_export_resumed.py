"""An export that ran out of room: what is whole of it stays, and the next run goes on with it.

`CAIRN_FAULTS=long` changes what is left in every way.
"""

import hashlib
import json
import os
import shutil
import threading

import numpy as np
import pytest

from cairn import Run, StoreFullError, find_garbage
from tests.faults.report import is_long
from tests.service.jobs import artifact_of, done, save_llama, serving, tries, watch
from tests.service.seams import export_job, exports
from tests.service.test_export_parts import CONVERT, SEVERAL, save_with


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_llama(root / "llama")
    return root


@pytest.fixture(scope="module")
def whole(saved, tmp_path_factory):
    """The digests of the export's files when nothing happens to it."""
    other = tmp_path_factory.mktemp("unhindered")
    shutil.copytree(saved, other / "store")
    with serving(other / "store", other / "data") as http:
        done(http, CONVERT, SEVERAL)
    [folder] = tries(other / "store", "llama")
    return digests(folder)


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "store")


@pytest.fixture(scope="module")
def left(saved, tmp_path_factory):
    """A store with five files of an export that ran out of room, and what the export told."""
    folder = tmp_path_factory.mktemp("left")
    shutil.copytree(saved, folder / "store")
    with (
        pytest.MonkeyPatch.context() as patched,
        serving(folder / "store", folder / "data") as http,
    ):
        Disk(patched).room = 5
        failed = fails(http)
    return folder / "store", failed


class Disk:
    """Stands in for one with room for so many files more; notes which were written."""

    def __init__(self, monkeypatch):
        self.room = 1000
        self.written = []
        real, changed, begun = export_job.write_shard, threading.Condition(), [0]

        def write(files, rel, shard, **options):
            with changed:
                fits, self.room = self.room > 0, self.room - 1
                if not fits:  # those that do are done by then
                    assert changed.wait_for(lambda: not begun[0], 20)
                begun[0] += fits
            if not fits:
                with files.open_write(rel) as sink:
                    sink.write(b"half of it")
                    raise StoreFullError("the store is full", path=files.uri / rel)
            try:
                return real(files, rel, shard, **options)
            finally:
                with changed:
                    begun[0] -= 1
                    self.written.append(int(rel.split("-")[1]))
                    changed.notify_all()

        monkeypatch.setattr(export_job, "write_shard", write)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def records(root, run="llama"):
    return sorted((root / run / "exports").glob("*/*/*.json"))


def kept(root, run="llama"):
    """The files that the one record of what a try has left names, and their paths."""
    [record] = records(root, run)
    names = [file["name"] for file in json.loads(record.read_bytes())["files"]]
    return names, record.with_suffix("")


def fails(http, body=SEVERAL):
    operation = http.post(CONVERT, json=body).json()["id"]
    ended = watch(http, operation)
    assert (ended["state"], ended["error"]["status"]) == ("failed", 507), ended
    return ended


def published(root, run="llama"):
    [folder] = tries(root, run)
    assert records(root, run) == []
    return digests(folder)


def test_the_next_run_goes_on_with_the_files_that_are_whole(root, tmp_path, disk, whole):
    """Which resumes it; one that is asked for anew does in the tests below."""
    disk.room = 3
    with serving(root, tmp_path / "data") as http:
        failed = fails(http)
        names, folder = kept(root)
        assert [int(name.split("-")[1]) for name in names] == sorted(disk.written)
        assert len(names) == 3
        # The half of a file is gone, and so is whatever is not named.
        assert sorted(path.name for path in folder.iterdir()) == names
        assert not [*(root / "llama/exports").glob("*/*.json")]
        size = sum((folder / name).stat().st_size for name in names)
        assert failed["error"]["kept_bytes"] == size
        assert f"{len(names)} files of {size} bytes are whole" in failed["error"]["detail"]
        inodes = {name: (folder / name).stat().st_ino for name in names}
        disk.room, first = 1000, sorted(disk.written)
        disk.written.clear()
        http.post(f"/v1/operations/{failed['id']}:resume")
        ended = watch(http, failed["id"])
    assert ended["state"] == "succeeded", ended
    assert ended["result"]["taken_over"] == size
    [folder] = tries(root, "llama")
    assert not {*first} & {*disk.written}
    assert {name: (folder / name).stat().st_ino for name in names} == inodes
    assert published(root) == whole


def test_what_is_whole_adds_up_over_runs_that_run_out_of_room(root, tmp_path, disk, whole):
    with serving(root, tmp_path / "data") as http:
        for left in (2, 4):
            disk.room = 2
            fails(http)
            folders = [path for path in tries(root, "llama") if path.exists()]
            assert sum(len(os.listdir(folder)) for folder in folders) == left
        disk.room = 1000
        done(http, CONVERT, SEVERAL)
    assert len(disk.written) == len({*disk.written}), "one was written twice"
    assert published(root) == whole


def flip(path):
    """One bit changes; size and times stay."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(root, run):
    """Two files change places, and their records with them: each is what its record says."""
    [record], (names, folder) = records(root, run), kept(root, run)
    one, two = names[:2]
    (folder / one).rename(folder / "x")
    (folder / two).rename(folder / one)
    (folder / "x").rename(folder / two)
    by_name = {file.name: file for file in exports.LeftTry.parse(record.read_bytes(), record).files}
    files = [
        by_name[{one: two, two: one}.get(name, name)].model_copy(update={"name": name})
        for name in names
    ]
    rewrite(root, run, files=tuple(files))
    return 2


def rewrite(root, run, **changes):
    [record] = records(root, run)
    before = exports.LeftTry.parse(record.read_bytes(), record)
    objects = Run.open(root / run).objects
    exports.put_record(
        objects, str(record.relative_to(root / run)), before.model_copy(update=changes)
    )


def nothing(root, run):
    return 0


def damaged(root, run):
    names, folder = kept(root, run)
    flip(folder / names[0])
    return 1


def shortened(root, run):
    names, folder = kept(root, run)
    os.truncate(folder / names[0], 1000)
    return 1


def missing(root, run):
    names, folder = kept(root, run)
    (folder / names[0]).unlink()
    return 1


def of_another_version(root, run):
    names, _ = kept(root, run)
    rewrite(root, run, by="0.0.1")
    return len(names)


def unreadable_record(root, run):
    names, _ = kept(root, run)
    flip(records(root, run)[0])
    return len(names)


def test_another_server_goes_on_and_writes_anew_what_is_not_what_would_be_written_now(
    left, tmp_path, disk, whole
):
    """Each change is made to a run of its own; how many files it takes to be written anew."""
    root, failed = tmp_path / "store", left[1]
    changes = (nothing, damaged, swap, unreadable_record)
    if is_long():
        changes += (shortened, missing, of_another_version)
    for change in changes:
        shutil.copytree(left[0] / "llama", root / change.__name__)
    with serving(root, tmp_path / "data") as http:
        for change in changes:
            run = change.__name__
            names, folder = kept(root, run)
            inodes = {name: (folder / name).stat().st_ino for name in names}
            anew = change(root, run)
            disk.written.clear()
            ended = done(http, CONVERT.replace("llama", run), SEVERAL)
            total = sum(
                file["name"].endswith(".safetensors") for file in artifact_of(http, ended)["files"]
            )
            assert len(disk.written) == total - len(names) + anew, run
            assert published(root, run) == whole, run
            if change is nothing:
                [folder] = tries(root, run)
                assert ended["result"]["taken_over"] == failed["error"]["kept_bytes"]
                assert {name: (folder / name).stat().st_ino for name in names} == inodes


def test_numbers_that_are_not_finite_are_not_forgotten_with_the_run_that_found_them(tmp_path, disk):
    root = tmp_path / "store"
    save_with(root / "llama", {"model/embed_tokens/embedding": (0, np.nan)})
    with serving(root, tmp_path / "data") as http:
        disk.room = 3
        fails(http)
        disk.room = 1000
        ended = watch(http, http.post(CONVERT, json=SEVERAL).json()["id"])
        assert ended["error"]["status"] == 422
        [problem] = ended["error"]["problems"]
        assert problem.startswith("model.embed_tokens.weight: ")
    assert not [*(root / "llama/exports").glob("*/*.json")]


def test_a_resumed_export_that_is_cancelled_leaves_nothing(root, tmp_path, disk, monkeypatch):
    with serving(root, tmp_path / "data") as http:
        disk.room = 3
        failed = fails(http)
        stopped, go = threading.Event(), threading.Event()
        real = export_job.write_shard

        def held(files, rel, shard, *, on_data, **options):
            stopped.set()
            while not go.wait(0.01):
                on_data(memoryview(b""))
            return real(files, rel, shard, on_data=on_data, **options)

        monkeypatch.setattr(export_job, "write_shard", held)
        http.post(f"/v1/operations/{failed['id']}:resume")
        assert stopped.wait(20)
        cancelled = http.post(f"/v1/operations/{failed['id']}:cancel").json()
        assert cancelled["state"] == "cancelled"
    assert tries(root, "llama") == []
    assert records(root) == []


def test_without_room_even_for_the_record_a_file_goes_and_the_others_stay(
    root, tmp_path, disk, monkeypatch, whole
):
    real, refused = export_job.leave_try, []

    def leave(objects, key, folder, left):
        if not refused:
            refused.append([file.name for file in left.files])
            raise StoreFullError("the store is full", path=objects.uri)
        real(objects, key, folder, left)

    monkeypatch.setattr(export_job, "leave_try", leave)
    with serving(root, tmp_path / "data") as http:
        disk.room = 3
        fails(http)
        names, folder = kept(root)
        assert names == refused[0][:-1]
        assert sorted(path.name for path in folder.iterdir()) == names
        disk.room = 1000
        done(http, CONVERT, SEVERAL)
    assert published(root) == whole


def test_what_nobody_goes_on_with_is_garbage_after_a_day(root, tmp_path, disk, monkeypatch):
    disk.room = 3
    with serving(root, tmp_path / "data") as http:
        fails(http)
        [record], (_, folder) = records(root), kept(root)
        assert find_garbage(Run.open(root / "llama")) == []
        monkeypatch.setattr(exports, "LEFT_SECONDS", 0)
        [garbage] = find_garbage(Run.open(root / "llama"))
        assert root / "llama" / garbage.name == folder
        size = sum(path.stat().st_size for path in (record, *folder.iterdir()))
        assert garbage.nbytes == size
        collected = done(http, "/v1/roots/default/runs/llama:gc", {"dry_run": False})
        assert collected["state"] == "succeeded"
    assert tries(root, "llama") == []
    assert records(root) == []
