"""A store is asked before anybody writes a run there, once for each root."""

import json
import os
import threading

import pytest

from cairn import (
    Checkpointer,
    CheckpointReader,
    LeaseHeldError,
    ObjectStore,
    Run,
    StoreCheckError,
    StoreUnavailableError,
    Writer,
    find_garbage,
    fork_run,
    list_runs,
    open_files,
    parse_uri,
    roll_back,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.store.clock import utc_now
from cairn.storage.store.deadlines import deadline_after
from tests.programs.program import run as run_program
from tests.storage.records import RECORD_FILE, StoreRecord, begin_attempt, list_attempts, probe_name
from tests.storage.seams import deadlines, probe
from tests.storage.states import floats

FORGETS = {"operation": "upload|objects.delete", "count": None}
REQUESTS_OF_A_PROBE = 12

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture
def bucket_root(gcs):
    return parse_uri(gcs.bucket_uri) / "root"


def begin(uri, writer="job"):
    return begin_attempt(Run.create(uri).objects, writer=writer, base_step=-1)


def save(uri, step=1, writer="job"):
    with Checkpointer(uri, writer_id=writer) as checkpointer:
        checkpointer.save(step, {"model": {"w": floats(4) * step}}, meta={}).wait()


def known(root):
    found = ObjectStore.open(root).read(RECORD_FILE)
    return None if found is None else StoreRecord.parse(found.value, root / RECORD_FILE)


def asked(gcs, *, of_probes=True):
    """(operation, name) of every request about this bucket."""
    listed = [one for one in gcs.server.requests if one.bucket == gcs.bucket]
    return [
        (one.operation, one.name)
        for one in listed
        if not of_probes or "/.cairn-" in one.name or one.operation == "objects.list"
    ]


# Of a store that is not sound.


def test_a_save_to_a_store_that_forgets_conditions_is_refused_and_nothing_is_there(
    gcs, bucket_root
):
    gcs.faults.add("unconditional", **FORGETS)
    with pytest.raises(StoreCheckError) as caught:
        save(bucket_root / "run")
    assert caught.value.path == str(bucket_root)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "a write of what must not be there yet, and is",
        "a write over what was replaced since it was read",
    ]
    assert "expected a refusal, found it done" in str(caught.value)
    run = Run.open(bucket_root / "run")
    assert (run.attempts(), run.steps(), run.latest_step()) == ([], [], None)
    assert read_lease(run.objects).released
    assert sorted(gcs.names()) == ["root/run/lease.json", "root/run/run.json"]


def test_of_writers_that_race_on_a_store_that_forgets_conditions_none_is_told_that_it_won(
    gcs, bucket_root
):
    gcs.faults.add("unconditional", **FORGETS)
    told, ready = [], threading.Barrier(8)

    def take(number):
        writer = Writer(Run(bucket_root / "run"), writer=f"job-{number}")
        ready.wait()
        try:
            told.append(writer.claim(1))
        except (StoreCheckError, LeaseHeldError) as error:
            told.append(type(error).__name__)
        writer.close()

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 8
    assert set(told) <= {"StoreCheckError", "LeaseHeldError"}
    assert list_attempts(ObjectStore.open(bucket_root / "run")) == []


def test_what_a_store_forgets_is_told(gcs, bucket_root):
    gcs.faults.add("unconditional", operation="upload", count=None)
    with pytest.raises(StoreCheckError, match="a write over what was replaced"):
        begin(bucket_root / "run")
    assert known(bucket_root) is None


@pytest.mark.parametrize(
    "verb",
    [
        lambda run: fork_run(run, run.step(1), run.uri.parent / "child", by="me"),
        lambda run: roll_back(run, 1, by="me"),
    ],
    ids=["fork", "rollback"],
)
def test_forks_and_rollbacks_are_refused_too(gcs, bucket_root, verb, new_process):
    save(bucket_root / "run")
    ObjectStore.open(bucket_root).delete(RECORD_FILE)
    new_process()
    run = Run.open(bucket_root / "run")
    gcs.faults.add("unconditional", **FORGETS)
    with pytest.raises(StoreCheckError):
        verb(run)
    assert len(run.attempts()) == 1
    assert Run(bucket_root / "child").latest_step() is None


def test_a_store_that_was_mended_is_asked_again_in_the_same_process(gcs, bucket_root):
    gcs.faults.add("unconditional", **FORGETS)
    with pytest.raises(StoreCheckError):
        save(bucket_root / "run")
    gcs.faults.clear()
    save(bucket_root / "run")
    assert Run.open(bucket_root / "run").latest_step() == 1


# Of a sound one.


def test_a_sound_root_remembers_it_and_no_process_asks_again(gcs, bucket_root, new_process):
    begin(bucket_root / "run")
    assert len(asked(gcs)) - lists_of_a_claim(gcs) == REQUESTS_OF_A_PROBE
    record = known(bucket_root)
    assert record.store["bucket"] == gcs.bucket
    assert record.checked == ("create if absent", "replace if unchanged")
    gcs.server.requests.clear()
    begin(bucket_root / "other")
    assert [name for _, name in asked(gcs) if name] == []
    new_process()
    begin(bucket_root / "third")
    assert [one for one in asked(gcs) if one[1]] == [("media.get", f"root/{RECORD_FILE}")]
    assert [name for name in gcs.names() if "probe" in name] == []


def lists_of_a_claim(gcs):
    """Listings that are not the probe's."""
    return sum(operation == "objects.list" for operation, _ in asked(gcs)) - 1


def test_many_first_writers_of_a_process_ask_once(gcs, bucket_root):
    threads = [
        threading.Thread(target=begin, args=(bucket_root / f"run{number}",)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    uploads = [name for kind, name in asked(gcs) if kind == "upload" and "probe" in name]
    assert len(uploads) == 5
    assert len(set(uploads)) == 2


def test_it_is_asked_beside_the_claim_which_is_promised_only_after_the_answer(gcs, bucket_root):
    gcs.server.requests.clear()
    held = gcs.faults.add("hold", operation="upload", name=r"\.cairn-probe")
    told = []
    claim = threading.Thread(target=lambda: told.append(begin(bucket_root / "run").number))
    claim.start()
    held.wait()
    objects = ObjectStore.open(bucket_root / "run")
    while read_lease(objects) is None:
        pass
    claim.join(0.2)
    assert (told, list_attempts(objects)) == ([], [])
    held.release()
    claim.join()
    assert told == [1]


def test_a_root_that_was_moved_is_asked_anew(gcs, bucket_root, new_process):
    begin(bucket_root / "run")
    record = ObjectStore.open(bucket_root).read(RECORD_FILE).value
    elsewhere = bucket_root / "copy"
    moved = StoreRecord.parse(record, "").model_copy(
        update={"store": {"scheme": "gs", "bucket": "another", "endpoint": ""}}
    )
    ObjectStore.open(elsewhere).write(RECORD_FILE, moved.to_bytes())
    begin(elsewhere / "run")
    assert known(elsewhere).store == known(bucket_root).store


LATER = b'{"at":"2030-01-01T00:00:00Z","format":"cairn.store","version":99}'


@pytest.mark.parametrize("left", [b"", b"{}", b"\xff", LATER, None])
def test_a_record_that_can_not_be_read_is_asked_for_anew(root_uri, left):
    older = StoreRecord(at="2026-01-01T00:00:00Z", cairn="0", checked=(), store={}).to_bytes()
    ObjectStore.open(root_uri).write(RECORD_FILE, older if left is None else left)
    begin(root_uri / "run")
    assert len(known(root_uri).checked) >= 2


def test_what_a_killed_probe_left_is_harmless_and_removed_later(root_uri):
    now = int(utc_now().timestamp())
    killed, young = (probe_name(now - age, "0" * 16) for age in (7200, 60))
    inside = "/object" if root_uri.scheme == "file" else ""  # a disk is probed in a folder
    for name in (killed, young):
        ObjectStore.open(root_uri).write(f"{name}{inside}", b"left")
    Run.create(root_uri / "run")
    begin(root_uri / "run")
    left = [entry.name for entry in open_files(root_uri).list() if "probe" in entry.name]
    assert left == [young]
    assert list_runs(root_uri) == ["run"]


def test_a_root_that_can_not_be_written_has_the_run_remember(gcs, bucket_root, new_process):
    run = bucket_root / "run"
    refused = gcs.faults.add(
        "status", status=403, operation="upload", name=r"/root/\.cairn-", count=None
    )
    save(run)
    assert (known(bucket_root), known(run).store["bucket"]) == (None, gcs.bucket)
    new_process()
    gcs.server.requests.clear()
    begin(run)
    probes = [name for kind, name in asked(gcs) if kind == "upload" and "run/.cairn-" in name]
    assert probes == []
    assert find_garbage(Run.open(run)) == []
    assert refused.fired >= 2


def test_a_fork_into_a_run_that_remembers_goes_on(gcs, bucket_root):
    gcs.faults.add("status", status=403, operation="upload", name=r"/root/\.cairn-", count=None)
    save(bucket_root / "run")
    run = Run.open(bucket_root / "run")
    stop = gcs.faults.add("status", status=403, operation="upload", name="child/manifests/")
    with pytest.raises(StoreUnavailableError):
        fork_run(run, run.step(1), bucket_root / "child", by="me")
    assert stop.fired == 1
    begin_by_hand = ObjectStore.open(bucket_root / "child")
    begin_by_hand.write(RECORD_FILE, ObjectStore.open(run.uri).read(RECORD_FILE).value)
    begin_by_hand.write(probe_name(0, "0" * 16), b"left")
    assert fork_run(run, run.step(1), bucket_root / "child", by="me").step == 1


def test_a_store_without_an_answer_is_not_called_unsound_and_asked_again(gcs, bucket_root):
    gcs.faults.add("status", status=403, operation="upload", name=r"\.cairn-", count=4)
    with pytest.raises(StoreUnavailableError, match="refused access"):
        begin(bucket_root / "run")
    assert begin(bucket_root / "run").number == 1


def test_who_is_refused_the_lease_need_not_wait_for_the_answer(gcs, bucket_root, new_process):
    begin(bucket_root / "run", writer="other")
    ObjectStore.open(bucket_root).delete(RECORD_FILE)
    new_process()
    held = gcs.faults.add("hold", operation="upload", name=r"\.cairn-probe")
    with pytest.raises(LeaseHeldError):
        begin(bucket_root / "run")
    held.wait()
    held.release()


def test_a_caller_with_less_time_does_not_wait_longer_for_the_answer(gcs, bucket_root, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 3600.0)
    silent = gcs.faults.add("hang", operation="media.get", name=r"root/\.cairn-store")
    with (
        deadline_after(0.5),
        pytest.raises(StoreUnavailableError, match="does not answer") as caught,
    ):
        begin(bucket_root / "run")
    assert caught.value.path == str(bucket_root)
    assert silent.fired == 1
    assert list_attempts(ObjectStore.open(bucket_root / "run")) == []
    gcs.faults.clear()
    assert begin(bucket_root / "run").number == 1


def test_a_forked_process_asks_for_itself(gcs, bucket_root):
    held = gcs.faults.add("hold", operation="upload", name=r"\.cairn-probe")
    asking = threading.Thread(target=begin, args=(bucket_root / "run",))
    asking.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(len(probe._answers) + probe._lock.locked())
    held.release()
    asking.join()
    assert os.waitpid(child, 0)[1] == 0


AT_EXIT = """
import sys
from cairn.storage.errors import LeaseHeldError
from cairn.storage.runs.lease import begin_attempt
from cairn import ObjectStore
try:
    begin_attempt(ObjectStore.open(sys.argv[1]), writer="job", base_step=-1)
except LeaseHeldError:
    print("held")
"""


def test_a_process_that_ends_lets_its_probe_end(gcs, bucket_root, new_process):
    begin(bucket_root / "run", writer="other")
    ObjectStore.open(bucket_root).delete(RECORD_FILE)
    slow = gcs.faults.add("slow", seconds=0.5, operation="upload", name=r"\.cairn-probe")
    ended = run_program(["-c", AT_EXIT, str(bucket_root / "run")])
    assert (ended.stdout, ended.returncode) == ("held\n", 0), ended.stderr
    assert slow.fired == 1
    assert known(bucket_root) is not None
    assert [name for name in gcs.names() if "probe" in name] == []


# Readers, and other stores.


def test_readers_never_ask(gcs, bucket_root, new_process):
    save(bucket_root / "run")
    ObjectStore.open(bucket_root).delete(RECORD_FILE)
    new_process()
    gcs.server.requests.clear()
    before = gcs.names()
    assert list_runs(bucket_root) == ["run"]
    run = Run.open(bucket_root / "run")
    (info,) = run.steps()
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    assert reader.read("model", "w").shape == (4,)
    assert run.all_states()[0].step == 1
    assert {one.method for one in gcs.server.requests if one.bucket == gcs.bucket} == {"GET"}
    assert gcs.names() == before
    assert not any(".cairn-" in name for _, name in asked(gcs))


def test_stores_of_every_kind_are_asked(objects):
    begin(objects.uri)
    root = objects.uri.parent
    assert known(root).store["scheme"] == root.scheme


def test_a_run_at_the_top_of_a_bucket_is_asked(gcs):
    begin(parse_uri(gcs.bucket_uri))
    assert known(parse_uri(gcs.bucket_uri)).store["bucket"] == gcs.bucket


def test_a_record_says_when_by_what_and_of_which_store(tmp_path):
    begin(parse_uri(tmp_path / "run"))
    body = json.loads((tmp_path / RECORD_FILE).read_text())
    assert body["format"] == "cairn.store"
    assert body["store"].keys() == {"scheme", "kind", "source"}
    assert {"rename", "hard link", "lock", "create if absent"} <= set(body["checked"])
    assert body["at"].endswith("Z")
    assert body["cairn"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD_FILE, "run"]
