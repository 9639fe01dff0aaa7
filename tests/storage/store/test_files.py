import errno
import os
import resource
import subprocess
import sys
import threading
import time

import google_crc32c
import pytest

from cairn import (
    CorruptionError,
    InvalidURIError,
    NotFoundError,
    StoreFullError,
    StoreUnavailableError,
    open_files,
    parse_uri,
)
from cairn.storage.errors import ConfinementError
from cairn.storage.store.disk.locked_files import locked_file
from cairn.storage.store.files import BLOCK_BYTES
from cairn.storage.store.files_local import TEMPORARY_PREFIX


@pytest.fixture
def files(every_root_uri):
    return open_files(every_root_uri)


def put(files, rel, data):
    with files.open_write(rel) as stream:
        stream.write(data)


def fail_while_writing(files, rel, nbytes):
    def blocks():
        yield b"0" * nbytes
        raise RuntimeError("the caller failed")

    def write():
        with files.open_write(rel) as stream:
            for block in blocks():
                stream.write(block)

    with pytest.raises(RuntimeError, match="the caller failed"):
        write()


def test_what_was_written_is_read(files):
    put(files, "a/b.bin", b"0123456789")
    assert files.stat("a/b.bin").size == 10
    assert files.read_range("a/b.bin", 2, 5) == b"234"
    assert files.read_range("a/b.bin", 8, 50) == b"89"
    assert files.read_range("a/b.bin", 50, 60) == b""
    assert files.read_range("a/b.bin", 5, 5) == b""
    with files.open_read("a/b.bin") as stream:
        assert stream.read(3) == b"012"
        stream.seek(7)
        assert stream.read() == b"789"


def test_bytes_are_read_into_memory_as_far_as_the_file_goes(files):
    put(files, "a/b.bin", b"0123456789")
    memory = bytearray(b"....")
    assert files.read_into("a/b.bin", 2, memoryview(memory)) == 4
    assert memory == b"2345"
    assert files.read_into("a/b.bin", 8, memoryview(memory)) == 2
    assert memory == b"8945"
    assert files.read_into("a/b.bin", 50, memoryview(memory)) == 0
    assert files.read_into("a/b.bin", 3, memoryview(bytearray())) == 0
    assert memory == b"8945"


def test_an_empty_file_is_a_file(files):
    put(files, "empty", b"")
    assert files.stat("empty").size == 0
    assert files.exists("empty")
    assert files.read_range("empty", 0, 10) == b""


def test_a_stream_of_many_blocks_arrives_whole(files):
    block = os.urandom(1 << 20)
    with files.open_write("big") as stream:
        for number in range(19):
            assert stream.write(memoryview(block)[number:]) == len(block) - number
    expected = b"".join(block[number:] for number in range(19))
    assert len(expected) > 2 * BLOCK_BYTES
    with files.open_read("big") as stream:
        assert stream.read() == expected


def test_arrays_are_written_as_their_bytes(files):
    import array

    numbers = array.array("i", [1, 2, 3])
    with files.open_write("numbers") as stream:
        assert stream.write(memoryview(numbers)) == 12
    assert files.read_range("numbers", 0, 12) == numbers.tobytes()


def test_replacing_a_file_changes_its_etag(files):
    put(files, "x", b"one")
    first = files.stat("x")
    put(files, "x", b"two")
    assert files.stat("x").etag != first.etag
    assert files.read_range("x", 0, 3) == b"two"


def test_an_aborted_write_leaves_nothing(files):
    fail_while_writing(files, "a/x", 2 * BLOCK_BYTES)
    assert files.walk() == []
    assert files.list("a") == []
    assert not files.exists("a/x")


def test_an_aborted_write_leaves_the_old_file(files):
    put(files, "x", b"old")
    stream = files.open_write("x")
    stream.write(b"0" * (2 * BLOCK_BYTES))
    stream.abort()
    stream.abort()
    assert files.read_range("x", 0, 10) == b"old"
    assert [entry.name for entry in files.walk()] == ["x"]


def test_nothing_is_visible_before_the_commit(files):
    stream = files.open_write("a/x")
    stream.write(b"0" * (2 * BLOCK_BYTES))
    assert files.walk() == []
    assert not files.exists("a/x")
    stream.commit()
    assert files.stat("a/x").size == 2 * BLOCK_BYTES


def test_listing_is_one_level_and_walking_is_all(files):
    for rel in ("a/1", "a/b/2", "a/b/c/3", "ab", "z/4"):
        put(files, rel, rel.encode())
    assert [(e.name, e.size, e.is_dir) for e in files.list()] == [
        ("a", 0, True),
        ("ab", 2, False),
        ("z", 0, True),
    ]
    assert [(e.name, e.size, e.is_dir) for e in files.list("a")] == [
        ("1", 3, False),
        ("b", 0, True),
    ]
    assert files.list("a/") == files.list("a")
    assert [(e.name, e.size) for e in files.walk("a")] == [("1", 3), ("b/2", 5), ("b/c/3", 7)]
    assert [e.name for e in files.walk()] == ["a/1", "a/b/2", "a/b/c/3", "ab", "z/4"]


def test_an_absent_folder_lists_nothing(files):
    assert files.list() == files.list("none") == files.walk() == files.walk("none") == []
    assert not files.exists("none")


def test_a_listing_is_never_stale(files):
    put(files, "a/1", b"1")
    assert len(files.list("a")) == 1
    put(open_files(files.uri), "a/2", b"2")
    assert len(files.list("a")) == 2
    open_files(files.uri).delete_tree("a/1")
    assert [entry.name for entry in files.list("a")] == ["2"]


def test_a_file_that_goes_while_a_folder_is_listed_hides_no_other(tmp_path, monkeypatch):
    """Locks come and go beside the objects of a run: a fence must still see the other attempts."""
    files = open_files(tmp_path)
    for name in ("a", "b", "c"):
        put(files, f"folder/{name}", b"1")
    local_files = type(files)
    is_shown = local_files._is_shown

    def gone_once_seen(self, item):
        if item.name == "b":
            os.unlink(item.path)
        return is_shown(self, item)

    monkeypatch.setattr(local_files, "_is_shown", gone_once_seen)
    assert [entry.name for entry in files.list("folder")] == ["a", "c"]


def test_absent_files_and_folders_are_not_found(files):
    put(files, "a/b", b"1")
    for rel in ("none", "a", "a/none", "a/b/c"):
        with pytest.raises(NotFoundError, match="root"):
            files.stat(rel)
    with pytest.raises(NotFoundError):
        files.read_range("none", 0, 1)
    with pytest.raises(NotFoundError):
        files.read_into("none", 0, memoryview(bytearray(1)))
    with pytest.raises(NotFoundError), files.open_read("none") as stream:
        stream.read()
    with pytest.raises(NotFoundError):
        files.copy("none", files, "x")
    assert not files.exists("x")


def test_deleting_a_tree_leaves_its_neighbours(files):
    for rel in ("a/1", "a/b/2", "ab", "a.c/3"):
        put(files, rel, b"1")
    files.delete_tree("a")
    assert [entry.name for entry in files.walk()] == ["a.c/3", "ab"]
    files.delete_tree("a")
    files.delete_tree("ab")
    assert [entry.name for entry in files.walk()] == ["a.c/3"]


def test_copying_inside_a_store_keeps_the_bytes(files):
    data = os.urandom(3 << 20)
    put(files, "a/x", data)
    other = open_files(files.uri.parent / "other")
    files.copy("a/x", other, "b/y")
    assert other.read_range("b/y", 0, len(data) + 1) == data


def test_copying_between_kinds_of_store_keeps_the_bytes(tmp_path, gcs):
    data = os.urandom(BLOCK_BYTES + 123)
    here, there = open_files(tmp_path), open_files(f"{gcs.bucket_uri}/run")
    put(here, "x", data)
    here.copy("x", there, "a/x")
    there.copy("a/x", here, "back")
    assert here.read_range("back", 0, len(data) + 1) == data


def test_a_moved_file_has_its_new_name_alone_and_takes_the_place_of_another(files):
    data = os.urandom(1 << 20)
    put(files, "a/x", data)
    other = open_files(files.uri.parent / "other")
    put(other, "b/y", b"before")
    files.move("a/x", other, "b/y")
    assert other.read_range("b/y", 0, len(data) + 1) == data
    assert not files.exists("a/x")
    with pytest.raises(NotFoundError):
        files.move("a/x", other, "b/y")
    assert other.stat("b/y").size == len(data)


def test_moving_between_kinds_of_store_keeps_the_bytes(tmp_path, gcs):
    here, there = open_files(tmp_path), open_files(f"{gcs.bucket_uri}/run")
    put(here, "x", b"some")
    here.move("x", there, "a/x")
    assert there.read_range("a/x", 0, 9) == b"some"
    assert not here.exists("x")


def test_a_folder_is_written_by_one_at_a_time_and_also_if_it_is_removed_meanwhile(tmp_path):
    files = open_files(tmp_path / "folder")
    order = []

    def second():
        with open_files(tmp_path / "folder").exclusive():
            order.append("second")

    with files.exclusive():
        other = threading.Thread(target=second)
        other.start()
        time.sleep(0.1)
        order.append("first")
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").mkdir()
    other.join(20)
    assert order == ["first", "second"]


def test_copying_an_empty_file(files):
    put(files, "x", b"")
    files.copy("x", files, "y")
    assert files.stat("y").size == 0


@pytest.mark.parametrize("rel", ["", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a\\b", "."])
def test_names_that_lead_elsewhere_are_refused(files, rel):
    actions = [
        files.stat,
        files.open_read,
        files.open_write,
        files.delete_tree,
        files.exists,
        lambda name: files.read_range(name, 0, 1),
        lambda name: files.read_into(name, 0, memoryview(bytearray(1))),
        lambda name: files.copy(name, files, "x"),
        lambda name: files.move(name, files, "x"),
    ]
    if rel:
        actions += [files.list, files.walk]
    for action in actions:
        with pytest.raises(InvalidURIError):
            action(rel)


def test_symlinks_out_of_the_folder_are_refused_and_not_listed(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "broken").symlink_to(tmp_path / "none")
    (root / "real").write_text("fine")
    (root / "in").symlink_to(root / "real")
    files = open_files(root)
    for rel in ("file", "folder/secret", "folder"):
        for action in (files.stat, files.open_read, files.open_write, files.list, files.walk):
            with pytest.raises(ConfinementError, match="leads out of its root"):
                action(rel)
        with pytest.raises(ConfinementError, match="leads out of its root"):
            files.delete_tree(rel)
    assert [entry.name for entry in files.list()] == ["in", "real"]
    assert [entry.name for entry in files.walk()] == ["in", "real"]
    assert (outside / "secret").read_text() == "secret"


def test_unfinished_files_are_not_listed(tmp_path):
    files = open_files(tmp_path)
    stream = files.open_write("x")
    stream.write(b"1")
    assert [name for name in os.listdir(tmp_path) if name.startswith(TEMPORARY_PREFIX)]
    assert files.list() == files.walk() == []
    stream.abort()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    script = f"""
import os, resource
from cairn.storage.errors import StoreFullError
from cairn.storage.store.open_files import open_files
files = open_files({str(tmp_path)!r})
with files.open_write("x") as stream:
    stream.write(b"before")
with files.open_write("big") as stream:
    stream.write(b"a" * 50_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for rel in ("x", "new"):
    try:
        with files.open_write(rel) as stream:
            stream.write(b"a" * 50_000)
    except StoreFullError as error:
        print("write", error.errno)
try:
    files.copy("big", files, "copy")
except StoreFullError as error:
    print("copy", error.errno)
assert files.read_range("x", 0, 10) == b"before"
assert sorted(os.listdir({str(tmp_path)!r})) == ["big", "x"]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["write", "27", "write", "27", "copy", "27"]
    assert errno.EFBIG == 27
    assert resource.RLIMIT_FSIZE is not None


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "blocked").write_text("")
    with pytest.raises(InvalidURIError, match=r"a file is in the way.*blocked"):
        open_files(tmp_path / "blocked").open_write("x")


def test_a_bucket_over_its_quota_is_told_and_leaves_nothing(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    put(files, "x", b"before")
    gcs.set_quota(1 << 20)
    with pytest.raises(StoreFullError, match="run/big"), files.open_write("big") as stream:
        stream.write(b"a" * (3 * BLOCK_BYTES))
    assert gcs.names() == ["run/x"]
    assert files.read_range("x", 0, 10) == b"before"


def test_the_store_tells_the_checksum(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    put(files, "a/x", b"hello")
    ours = f"{google_crc32c.value(b'hello'):08x}"
    assert files.stat("a/x").crc32c == ours
    assert [entry.crc32c for entry in files.walk()] == [ours]


def test_an_upload_that_arrives_damaged_is_told(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    stream = files.open_write("x")
    stream.write(b"hello")
    stream._checksum.update(b"!")
    with pytest.raises(CorruptionError, match="arrived damaged"):
        stream.commit()


def test_passing_failures_of_the_store_are_ridden_out(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    gcs.faults.add("status", status=503, count=1)
    put(files, "x", b"1")
    gcs.faults.add("status", status=429, count=1)
    assert [entry.name for entry in files.list()] == ["x"]


def test_refused_credentials_are_told_as_such(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    put(files, "x", b"1")
    gcs.faults.add("status", status=403, count=None)
    with pytest.raises(StoreUnavailableError, match="refused access"):
        files.stat("x")
    with pytest.raises(StoreUnavailableError, match="refused access"):
        files.list()


def test_a_listing_asks_once_and_does_not_walk(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    for number in range(5):
        put(files, f"attempts/1/{number}/data", b"1")
    put(files, "attempts/1.json", b"1")
    asked = gcs.faults.add("slow", operation=r".*list.*", count=None)
    assert [entry.name for entry in files.list("attempts")] == ["1", "1.json"]
    assert asked.fired == 1


def test_long_listings_come_in_pages(gcs):
    files = open_files(f"{gcs.bucket_uri}/run")
    from cairn.storage.store.objects import ObjectStore

    objects = ObjectStore.open(f"{gcs.bucket_uri}/run")
    names = [f"{number:04}" for number in range(1030)]
    for name in names:
        objects.write(f"a/{name}", b"1")
    assert [entry.name for entry in files.list("a")] == names
    assert [entry.name for entry in files.walk("a")] == names


def test_memory_has_files_too():
    files = open_files("memory://test-files/run")
    put(files, "a/x", b"hello")
    assert files.read_range("a/x", 1, 3) == b"el"
    assert [(e.name, e.is_dir) for e in files.list()] == [("a", True)]
    assert [e.name for e in files.walk()] == ["a/x"]
    fail_while_writing(files, "a/y", 1)
    files.copy("a/x", files, "b/z")
    assert [e.name for e in files.walk()] == ["a/x", "b/z"]
    files.delete_tree("a")
    assert [e.name for e in files.walk()] == ["b/z"]


def test_open_picks_the_store():
    assert type(open_files("/x")).__name__ == "LocalFiles"
    assert type(open_files(parse_uri("gs://my-bucket/x"))).__name__ == "GcsFiles"
    assert type(open_files(parse_uri("s3://my-bucket/x"))).__name__ == "S3Files"


HALF = """
import os, sys
from cairn.storage.store.open_files import open_files

writer = open_files(sys.argv[1]).open_write("kept/half")
writer.write(b"half")
os.kill(os.getpid(), 9)
"""


def test_sweep_removes_what_killed_writers_left_and_nothing_else(tmp_path):
    files = open_files(tmp_path)
    with files.open_write("kept/whole") as sink:
        sink.write(b"whole")
    assert subprocess.run([sys.executable, "-c", HALF, str(tmp_path)]).returncode == -9
    alive = files.open_write("kept/alive")
    alive.write(b"alive")
    below = tmp_path / "kept/below"
    below.mkdir()
    for name in ("gone.__lock", "used.__lock"):
        (below / name).touch()
    assert len(list((tmp_path / "kept").iterdir())) == 4
    with locked_file(str(below / "used")):
        files.sweep("kept")
        assert [path.name for path in below.iterdir()] == ["used.__lock"]
    alive.commit()
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"whole", "alive", "below"}
    files.sweep("never/made")


def test_writers_and_sweepers_of_one_folder_do_not_disturb_each_other(tmp_path):
    files, done = open_files(tmp_path), threading.Event()

    def sweep():
        while not done.is_set():
            files.sweep("")

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for one in sweepers:
        one.start()
    try:
        for number in range(200):
            with files.open_write(f"{number}") as sink:
                sink.write(b"whole")
    finally:
        done.set()
        for one in sweepers:
            one.join()
    assert len(files.walk()) == len(list(tmp_path.iterdir())) == 200
