"""Files are what was written, whatever a writer that was killed had left beside them."""

import fcntl
import os
import struct
import subprocess
import threading

import pytest

from cairn import ObjectStore
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX, remove_stale_lock
from tests.programs.program import Program
from tests.storage.seams import objects

LEFT = b"x" * 300
UNTIL_KILLED = """
import sys
from cairn.storage.store.objects import ObjectStore
store = ObjectStore.open(sys.argv[1])
for number in range(1_000_000):
    store.write("name", b"x" * 300)
    if number == 3:
        print(flush=True)
"""


@pytest.fixture
def store(tmp_path):
    return ObjectStore.open(tmp_path)


@pytest.fixture
def lock_file(tmp_path):
    """As a writer leaves it that is killed before it renames it."""
    path = tmp_path / f"name{LOCK_SUFFIX}"
    path.write_bytes(LEFT)
    return path


def written(store, value):
    generation = store.write("name", value)
    assert store.read("name") == (value, generation)
    return generation


def test_a_shorter_value_does_not_end_in_what_a_killed_writer_left(store, lock_file):
    written(store, b"short")
    assert not lock_file.exists()


def test_nor_does_one_that_is_written_if_absent(store, lock_file):
    store.write_if("name", b"short", generation=None)
    assert store.read("name").value == b"short"


def test_nor_does_one_that_is_written_if_unchanged(store, lock_file):
    generation = written(store, b"first")
    lock_file.write_bytes(LEFT)
    store.write_if("name", b"second", generation=generation)
    assert store.read("name").value == b"second"


def test_what_is_left_after_the_look_is_noticed_and_written_over(store, lock_file, monkeypatch):
    looks = []

    def looked(path):
        if path == f"{lock_file}".removesuffix(LOCK_SUFFIX):
            looks.append(path)
        if len(looks) > 1:
            remove_stale_lock(path)

    monkeypatch.setattr(objects, "remove_stale_lock", looked)
    written(store, b"short")
    assert len(looks) == 2


def test_a_lock_file_that_a_writer_holds_is_left_alone(tmp_path, lock_file):
    with lock_file.open("r+b") as held:
        whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, whole_file)
        remove_stale_lock(str(tmp_path / "name"))
        assert lock_file.read_bytes() == LEFT
    remove_stale_lock(str(tmp_path / "name"))
    assert not lock_file.exists()


def test_nothing_happens_where_nobody_left_anything(tmp_path):
    remove_stale_lock(str(tmp_path / "name"))
    (tmp_path / "file").write_bytes(b"")
    remove_stale_lock(str(tmp_path / "file" / "name"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_writers_that_race_while_lock_files_are_looked_for_lose_no_move(store):
    store.write("count", b"0")

    def move(times):
        while times:
            found = store.read("count")
            try:
                value = str(int(found.value) + 1).encode()
                store.write_if("count", value, generation=found.generation)
                times -= 1
            except objects.PreconditionFailedError:
                continue

    movers = [threading.Thread(target=move, args=(25,)) for _ in range(8)]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join()
    assert store.read("count").value == b"200"


def test_a_value_is_whole_after_kills_of_the_writers_before_it(tmp_path, store):
    for trial in range(6):
        with Program(["-c", UNTIL_KILLED, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            writer.kill()
        written(store, b"%d" % trial)
