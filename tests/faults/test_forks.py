"""(h) Forks that are killed, or whose source is damaged: a fork is the step bit by bit, or no step.

In a bucket a damaged file is another object in its place: of the bytes of one object the store
itself keeps watch, and a copy that it makes is believed to have those that it told the checksum of.
"""

import gc
from random import Random

import pytest

from cairn import ObjectStore, Run, StorageError, fork_run, open_files, parse_uri
from cairn.storage.runs.fork import abandon_fork
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file
from tests.faults import report
from tests.faults.flips import STEP, save_steps
from tests.faults.forked import drive

WRITER = "fork"

pytestmark = pytest.mark.timeout(7200 if report.is_long() else 300)


@pytest.fixture(autouse=True)
def _settled():
    """What the threads of a fork that failed still hold goes here, not inside the next test."""
    yield
    gc.collect()


@pytest.mark.parametrize("store", report.stores("gcs"))
def test_a_fork_killed_at_any_moment_is_repeated_and_is_the_step_bit_by_bit(
    store, tmp_path, request
):
    if store == "file":
        root, environment = str(tmp_path), {}
    else:
        double = request.getfixturevalue(store)
        root, environment = double.bucket_uri, double.env
    found = drive(
        "fork_driver",
        {
            "root": root,
            "trials": report.trials(short=3, long=100),
            "kills_per_fork": 4,
            "seed": report.seed(),
        },
        environment=environment,
        seconds=report.trials(short=200, long=1800),
    )
    broken = len(found["lost"])
    report.record(
        fault="h SIGKILL during a fork",
        store=store,
        trials=found["trials"],
        survived=max(0, found["trials"] - broken),
        lost=broken,
        note=f"{found['forks']} forks done in the end; killed {found['moments']}; "
        f"left {found['left']}",
    )
    assert found["lost"] == []
    assert found["forks"] > 0


@pytest.fixture(params=["file", *report.buckets()])
def saved(request, tmp_path):
    """A run, and every file of its step 8 and its manifest, by name."""
    if request.param == "file":
        uri = parse_uri(tmp_path / "store/run")
    else:
        uri = parse_uri(request.getfixturevalue(request.param).bucket_uri) / "store/run"
    save_steps(uri)
    run = Run.open(uri)
    folder = f"attempts/1/{STEP}"
    names = [f"{folder}/{entry.name}" for entry in run.files.walk(folder) if entry.size]
    found = run.objects.read_many([*names, manifest_file(STEP, 1)])
    return run, {name: value.value for name, value in found.items()}


def put(run, name, data):
    with run.files.open_write(name) as sink:
        sink.write(data)


def flipped(data, place, rng):
    changed = bytearray(data)
    changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def places(stored, count, rng):
    """`count` bytes to change: one in every file, then the first and the last of each, then any."""
    files = rng.sample(sorted(stored), len(stored))
    ends = [(name, place) for name in files for place in (0, len(stored[name]) - 1)]
    rng.shuffle(ends)
    found = [(name, rng.randrange(len(stored[name]))) for name in files] + ends
    while len(found) < count:
        name = rng.choice(files)
        found.append((name, rng.randrange(len(stored[name]))))
    return found[:count]


def missed(run, name, target):
    """What a fork of the damaged step did that it must not; None if it was refused as it must."""
    try:
        fork_run(run, run.step(STEP), target, by=WRITER)
    except StorageError as error:
        own = name.removeprefix(f"attempts/1/{STEP}/")
        if own not in str(error):
            return f"names no file: {error}"
    else:
        return "it was forked"
    forked = Run(target)
    return f"listed: {forked.published()}" if forked.published() else None


def test_a_step_of_which_one_bit_changed_is_not_forked(saved):
    run, stored = saved
    rng = Random(f"{report.seed()} forks {run.uri.scheme}")
    target = run.uri.parent / "fork"
    count = report.trials(short=6, long=200)
    lost = []
    for name, place in places(stored, count, rng):
        changed = flipped(stored[name], place, rng)
        put(run, name, changed)
        wrong = missed(run, name, target)
        if wrong is not None or run.objects.read(name).value != changed:
            lost.append(f"byte {place} of {name}: {wrong}")
        put(run, name, stored[name])
        abandon_fork(target, by=WRITER)
    report.record(
        fault="h one flipped bit in a step that is forked",
        store={"file": "file", "gs": "gcs", "s3": "s3"}[run.uri.scheme],
        trials=count,
        survived=count - len(lost),
        lost=len(lost),
        note=f"in {min(count, len(stored))} of {len(stored)} files that are not empty",
    )
    assert lost == []
    fork_run(run, run.step(STEP), target, by=WRITER)
    forked = open_files(target / f"attempts/1/{STEP}")
    assert {
        f"attempts/1/{STEP}/{entry.name}": ObjectStore.open(forked.uri).read(entry.name).value
        for entry in forked.walk()
        if entry.size and entry.name != INDEX_FILE
    } == {
        name: data
        for name, data in stored.items()
        if name != manifest_file(STEP, 1) and not name.endswith(f"/{INDEX_FILE}")
    }
