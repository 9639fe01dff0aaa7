import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import pytest

from cairn import (
    InvalidURIError,
    ObjectStore,
    PreconditionFailedError,
    StoreFullError,
    StoreUnavailableError,
)
from cairn.storage.store.graves import GRAVE
from tests.storage.seams import deadlines
from tests.storage.seams import objects as objects_module


def test_what_was_written_is_read_with_its_generation(objects):
    assert objects.read("a/b.json") is None
    generation = objects.write("a/b.json", b"one")
    assert objects.read("a/b.json") == (b"one", generation)
    assert objects.write("a/b.json", b"two") != generation


def test_create_if_absent_happens_once(objects):
    objects.write_if("x", b"first", generation=None)
    with pytest.raises(PreconditionFailedError) as caught:
        objects.write_if("x", b"second", generation=None)
    assert caught.value.current.value == b"first"
    assert objects.read("x").value == b"first"


def test_a_stale_generation_loses_and_shows_the_current_value(objects):
    old = objects.write_if("x", b"one", generation=None)
    new = objects.write_if("x", b"two", generation=old)
    with pytest.raises(PreconditionFailedError) as caught:
        objects.write_if("x", b"three", generation=old)
    assert caught.value.current == (b"two", new)


def test_a_generation_of_a_deleted_object_loses(objects):
    generation = objects.write("x", b"one")
    objects.delete("x")
    with pytest.raises(PreconditionFailedError) as caught:
        objects.write_if("x", b"two", generation=generation)
    assert caught.value.current is None
    assert objects.read("x") is None


def test_equal_bytes_count_as_written_only_when_asked(objects):
    objects.write_if("x", b"same", generation=None)
    objects.write_if("x", b"same", generation=None, same_is_success=True)
    with pytest.raises(PreconditionFailedError):
        objects.write_if("x", b"same", generation=None)
    with pytest.raises(PreconditionFailedError):
        objects.write_if("x", b"other", generation=None, same_is_success=True)


def test_delete_if_needs_the_generation_and_accepts_absence(objects):
    old = objects.write("x", b"one")
    new = objects.write("x", b"two")
    with pytest.raises(PreconditionFailedError):
        objects.delete_if("x", generation=old)
    objects.delete_if("x", generation=new)
    assert objects.read("x") is None
    objects.delete_if("x", generation=new)
    objects.delete("x")


def test_listing_names_what_starts_with_the_prefix(objects):
    for key in ("run.json", "m/2.1.json", "m/10.1.json", "mm/x", "m2", "é/ü"):
        objects.write(key, b"1")
    assert objects.list("m/") == ["m/10.1.json", "m/2.1.json"]
    assert objects.list() == sorted(["run.json", "m/2.1.json", "m/10.1.json", "mm/x", "m2", "é/ü"])
    assert objects.list("absent/") == []
    assert objects.list("m/1") == ["m/10.1.json"]


def test_children_are_one_level(objects):
    for key in ("a/1.json", "a/2.json", "a/1/data/x", "ab/3.json"):
        objects.write(key, b"1")
    assert objects.children("a/") == objects.children("a") == ["a/1.json", "a/2.json"]
    assert objects.children("absent") == []
    assert objects.entries("a") == (objects.children("a"), objects.folders("a"))
    assert objects.entries("a/")[1] == ["a/1"]
    assert objects.entries("absent") == ([], [])


def test_what_is_refused_is_told_without_a_look_at_what_is_there(objects):
    old = objects.write_if("x", b"one", generation=None)
    assert objects.refuses_write("x", b"two", generation=None)
    new = objects.write("x", b"two")
    assert objects.refuses_write("x", b"three", generation=old)
    if not objects.is_remote:
        assert objects.refuses_deletion("x", generation=old)
    assert objects.read("x") == (b"two", new)
    assert not objects.refuses_write("x", b"three", generation=new)
    if not objects.is_remote:
        assert not objects.refuses_deletion("x", generation=objects.read("x").generation)
        assert objects.read("x") is None


def test_records_deleted_under_a_condition_are_gone_for_every_reader_and_can_be_made_anew(objects):
    names = [f"trash/{number}.json" for number in range(4)]
    other = objects.write("other.json", b"of another")
    objects.delete("other.json")
    for name in names:
        objects.write(name, b'{"one": 1}')
    gone = [*names[:3], "never.json"]
    for name in names[:3]:
        objects.delete_if(name, generation=objects.read(name).generation)
        objects.delete_if(name, generation=other)  # of what is gone, too
    assert [objects.read(name) for name in gone] == [None] * 4
    assert list(objects.read_many(gone).values()) == [None] * 4
    assert objects.parse_many([*gone, names[3]], lambda data, path: len(data)) == {names[3]: 10}
    assert objects.existing([*gone, names[3]]) == {names[3]}
    seen = [objects.list(""), objects.list("trash/"), objects.children("trash")]
    seen += [[*objects.etags("trash")], objects.entries("trash")[0]]
    assert seen == [[names[3]]] * 5
    with pytest.raises(PreconditionFailedError) as caught:
        objects.write_if(names[0], b"late", generation=other)
    assert caught.value.current is None
    objects.write_if(names[0], b'{"two": 22}', generation=None)
    assert objects.read(names[0]).value == b'{"two": 22}'
    with pytest.raises(PreconditionFailedError):
        objects.write_if(names[0], b"late", generation=None)
    objects.delete(names[1])
    objects.delete_prefix("trash/")
    assert objects.list("") == []


def test_an_object_as_short_as_a_grave_is_none(some_objects):
    for name, value in {"a.json": b"{}", "b.json": b"x" * len(GRAVE), "c": GRAVE}.items():
        some_objects.write(name, value)
    assert some_objects.existing(["a.json", "b.json", "c"]) == {"a.json", "b.json", "c"}
    assert some_objects.list("") == ["a.json", "b.json", "c"]
    assert some_objects.read("c").value == GRAVE


def test_of_many_who_write_over_a_grave_one_does(objects):
    name, told = "trash/1.json", []
    objects.delete_if(name, generation=objects.write(name, b"{}"))

    def write(number):
        try:
            objects.write_if(name, b"%d" % number, generation=None)
            told.append(number)
        except PreconditionFailedError:
            return

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert objects.read(name).value == b"%d" % told[0]
    assert len(told) == 1


def test_stamps_tell_what_has_changed_without_reading_it(objects, monkeypatch):
    for key in ("a/one", "a/two", "a/b/deep"):
        objects.write(key, b"1")
    later = time.time_ns() + 60_000_000_000
    assert set(objects.etags("a/")) == {"a/one", "a/two"}
    monkeypatch.setattr("cairn.storage.store.files_local.time.time_ns", lambda: later)
    before = objects.etags("a")
    assert objects.etags("a") == before
    objects.write("a/two", b"2")
    after = objects.etags("a")
    assert after["a/one"] == before["a/one"]
    tells = objects.uri.scheme != "memory"
    assert (after["a/two"] != before["a/two"]) is tells
    assert (None in before.values()) is not tells
    assert objects.etags("none") == {}


def test_a_stamp_taken_just_after_a_change_tells_nothing(tmp_path):
    objects = ObjectStore.open(tmp_path)
    objects.write("a/one", b"1")
    assert objects.etags("a") == {"a/one": None}


def test_deleting_a_prefix_leaves_its_neighbours(objects):
    for key in ("a/1", "a/b/2", "ab/3", "a0"):
        objects.write(key, b"1")
    objects.delete_prefix("a/")
    assert objects.list() == ["a0", "ab/3"]
    objects.delete_prefix("a/")


@pytest.mark.parametrize("prefix", ["", "/", "..", "../x/", "a/../b/"])
def test_deleting_everything_by_mistake_is_refused(objects, prefix):
    objects.write("keep", b"1")
    with pytest.raises(InvalidURIError):
        objects.delete_prefix(prefix)
    assert objects.list() == ["keep"]


@pytest.mark.parametrize(
    "key", ["", "/", "../x", "a/../../x", "/etc/passwd", "a//b", "a\\b", "a%2f"]
)
def test_keys_that_lead_elsewhere_are_refused(objects, key):
    for action in (
        objects.read,
        objects.delete,
        lambda name: objects.write(name, b"1"),
        lambda name: objects.write_if(name, b"1", generation=None),
        lambda name: objects.read_many([name]),
    ):
        with pytest.raises(InvalidURIError):
            action(key)


def test_reading_many_keeps_the_absent_as_none(objects):
    for number in range(150):
        objects.write(f"n/{number}", str(number).encode())
    found = objects.read_many([*(f"n/{number}" for number in range(150)), "n/none"])
    assert found.pop("n/none") is None
    assert {key: int(item.value) for key, item in found.items()} == {
        f"n/{number}": number for number in range(150)
    }


def test_parsing_many_parses_again_only_what_changed(objects):
    parsed = []

    def parse(data, path):
        parsed.append(str(path))
        return int(data)

    objects.write("n/1", b"1")
    objects.write("n/2", b"2")
    keys = ["n/1", "n/2", "n/3"]
    assert objects.parse_many(keys, parse) == {"n/1": 1, "n/2": 2}
    objects.write("n/2", b"22")
    objects.write("n/3", b"3")
    assert objects.parse_many(keys, parse) == {"n/1": 1, "n/2": 22, "n/3": 3}
    objects.delete("n/1")
    assert objects.parse_many(keys, parse) == {"n/2": 22, "n/3": 3}
    assert [path.rpartition("/")[2] for path in parsed] == ["1", "2", "2", "3"]


def test_the_cache_of_parsed_objects_is_bounded(objects, monkeypatch):
    monkeypatch.setattr(objects_module, "_MAX_PARSED", 10)
    for number in range(30):
        objects.write(f"n/{number}", str(number).encode())
    parse = lambda data, path: int(data)  # noqa: E731
    found = objects.parse_many([f"n/{number}" for number in range(30)], parse)
    assert sorted(found.values()) == list(range(30))
    assert len(objects._parsed) == 10


def test_parsed_objects_that_are_removed_do_not_pile_up(objects, monkeypatch):
    """A job saves for as long as it runs, and retention deletes."""
    monkeypatch.setattr(objects_module, "_MIN_PARSED", 20)
    store = ObjectStore(objects.uri)
    parsed = []

    def parse(data, path):
        parsed.append(path)
        return int(data)

    for number in range(100):
        store.write(f"n/{number}", b"1")
        store.delete(f"n/{number - 3}")
        store.parse_many([f"n/{one}" for one in range(max(0, number - 2), number + 1)], parse)
    assert len(store._parsed) <= 24
    assert len(parsed) == 100  # those that are there are kept
    store.parse_many([f"n/{one}" for one in range(97, 100)] * 10, parse)
    assert store._parsed_limit == 240  # as many as one asks for


def test_stores_that_nobody_holds_are_kept_in_a_bounded_number(tmp_path, monkeypatch):
    monkeypatch.setattr(objects_module, "_MAX_STORES", 5)
    monkeypatch.setattr(objects_module, "_last_opened", {})
    monkeypatch.setattr(objects_module, "_open_stores", WeakValueDictionary())
    held = ObjectStore.open(tmp_path / "held")
    for number in range(20):
        ObjectStore.open(tmp_path / str(number))
    gc.collect()
    assert len(objects_module._open_stores) == 6
    assert ObjectStore.open(tmp_path / "held") is held
    last = objects_module._last_opened
    assert [key[0].rpartition("/")[2] for key in last] == ["16", "17", "18", "19", "held"]


def test_racing_increments_lose_nothing(objects):
    writers, rounds = 4, 20
    start = threading.Barrier(writers)

    def count_up(_):
        start.wait()
        for _ in range(rounds):
            while True:
                found = objects.read("counter")
                value = str(int(found.value) + 1 if found else 1).encode()
                try:
                    objects.write_if(
                        "counter", value, generation=found.generation if found else None
                    )
                    break
                except PreconditionFailedError:
                    continue

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(count_up, range(writers)))
    assert int(objects.read("counter").value) == writers * rounds


def test_one_store_per_folder(tmp_path):
    assert ObjectStore.open(tmp_path / "a") is ObjectStore.open(f"file://{tmp_path}/a")
    assert ObjectStore.open(tmp_path / "a") is not ObjectStore.open(tmp_path / "b")


def test_listings_of_a_run_do_not_walk_checkpoint_data(tmp_path):
    store = ObjectStore.open(tmp_path)
    store.write("manifests/1.1.json", b"1")
    data = tmp_path / "attempts" / "1"
    data.mkdir(parents=True)
    data.chmod(0)
    try:
        assert store.list("manifests/") == ["manifests/1.1.json"]
    finally:
        data.chmod(0o700)


def test_lock_files_of_the_driver_are_not_listed(tmp_path):
    store = ObjectStore.open(tmp_path)
    store.write("m/1", b"1")
    (tmp_path / "m" / "2.__lock").write_text("")
    assert store.list("m/") == ["m/1"]


def test_a_file_size_limit_is_a_full_store_and_keeps_what_was_there(tmp_path):
    script = f"""
import resource
from cairn.storage.errors import StoreFullError
from cairn.storage.store.objects import ObjectStore
store = ObjectStore.open({str(tmp_path)!r})
store.write("x", b"before")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.write("x", b"a" * 5000)
except StoreFullError as error:
    print(error.errno, error)
assert store.read("x").value == b"before"
assert store.list() == ["x"], store.list()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the store is full" in done.stdout
    assert str(tmp_path) in done.stdout


def test_a_folder_that_is_a_file_is_an_error_not_a_hang(tmp_path):
    (tmp_path / "blocked").write_text("")
    with pytest.raises(OSError, match="blocked"):
        ObjectStore.open(tmp_path / "blocked").write("x", b"1")


@pytest.mark.parametrize("status", [403, 507])
def test_a_bucket_over_its_quota_is_a_full_store(gcs, status):
    store = ObjectStore.open(f"{gcs.bucket_uri}/run")
    store.write("x", b"before")
    gcs.set_quota(10, status=status)
    with pytest.raises(StoreFullError, match="run/x"):
        store.write("x", b"a" * 100)
    assert store.read("x").value == b"before"


def test_passing_failures_of_the_store_are_ridden_out(gcs):
    store = ObjectStore.open(f"{gcs.bucket_uri}/run")
    for status in (429, 503):
        gcs.faults.add("status", status=status, count=2)
        store.write("x", str(status).encode())
        assert store.read("x").value == str(status).encode()


def test_a_store_that_keeps_failing_is_unavailable_soon(gcs, monkeypatch):
    store = ObjectStore.open(f"{gcs.bucket_uri}/run")
    gcs.faults.add("hold", count=None)
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.5)
    with pytest.raises(StoreUnavailableError, match=r"run/x.*within 0\.5\d* s"):
        store.read("x")


def test_refused_credentials_are_told_as_such(gcs):
    store = ObjectStore.open(f"{gcs.bucket_uri}/run")
    gcs.faults.add("status", status=403, count=None)
    with pytest.raises(StoreUnavailableError, match="refused access"):
        store.read("x")


def test_a_create_whose_answer_was_lost_does_not_lose_against_itself(gcs):
    store = ObjectStore.open(f"{gcs.bucket_uri}/run")
    gcs.faults.add("lost_response", operation=r".*(insert|upload).*")
    store.write_if("x", b"mine", generation=None, same_is_success=True)
    assert store.read("x").value == b"mine"


def test_a_missing_bucket_is_told(gcs):
    store = ObjectStore.open("gs://no-such-bucket-here/run")
    with pytest.raises(OSError, match="no-such-bucket-here"):
        store.write("x", b"1")


def test_importing_storage_loads_no_array_framework():
    modules = (
        "cairn",
        "cairn.storage",
        "cairn.storage.errors",
        "cairn.storage.store.uri",
        "cairn.storage.store.objects",
        "cairn.storage.store.files",
        "cairn.storage.store.files_gcs",
        "cairn.storage.store.files_s3",
        "cairn.storage.runs.records.layout",
        "cairn.storage.runs.records.manifest",
        "cairn.storage.runs.records.attempts",
        "cairn.storage.runs.records.aliases",
        "cairn.storage.runs.run",
    )
    script = "import importlib, sys\n" + "".join(
        f"importlib.import_module({module!r})\n"
        f"found = {{'jax', 'flax', 'orbax', 'torch'}} & set(sys.modules)\n"
        f"assert not found, ({module!r}, found)\n"
        for module in modules
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)


def test_what_is_asked_at_once_waits_for_nothing_else_and_has_its_callers_deadline(gcs):
    objects = ObjectStore.open(f"{gcs.bucket_uri}/run")
    everybody = threading.Barrier(3, timeout=30)

    def seconds():
        everybody.wait()  # none would pass it if they were made in turn
        return deadlines.deadline_seconds_left()

    with deadlines.deadline_after(50):
        left = objects.gather(seconds, seconds, seconds)
    assert all(0 < one <= 50 for one in left)


def test_calls_that_are_made_at_once_have_ended_when_one_of_them_raises(gcs):
    objects = ObjectStore.open(f"{gcs.bucket_uri}/run")
    failed = threading.Event()

    def fails():
        failed.set()
        raise StoreUnavailableError("no answer", path=objects.uri)

    def writes():
        assert failed.wait(30)
        return objects.write("b", b"two")

    with pytest.raises(StoreUnavailableError, match="no answer"):
        objects.gather(fails, writes)
    assert objects.read("b").value == b"two"


def test_many_objects_are_removed_at_once_and_others_stay(objects):
    names = [f"folder/{number}" for number in range(150)]
    for name in (*names, "other"):
        objects.write(name, b"value")
    objects.delete_many([*names, "was never there"])
    assert objects.list() == ["other"]
