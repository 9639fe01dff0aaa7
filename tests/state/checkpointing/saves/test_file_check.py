"""What arrived is what was meant, or the save fails.

`CAIRN_FAULTS=long` has whole saves meet every kind of damage.
"""

import itertools

import pytest

from cairn import (
    Checkpointer,
    CorruptionError,
    ObjectStore,
    Run,
    SaveError,
    open_files,
    verify_step,
)
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.arrays.data_files import stored_file
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.runs.records.layout import COMMIT_FILE, INDEX_FILE
from tests.faults.report import is_long
from tests.state.seams import check_files, save_job
from tests.storage.plain_steps import record_of
from tests.storage.states import abstract, assert_same, floats, put
from tests.stores import STORES

MARKER = b"Checkpoint commit was successful to somewhere"
CONTENTS = {
    "model/d/" + "1" * 32: b"the values of many leaves",
    "model/ocdbt.process_1/d/" + "2" * 32: b"",
    "model/_METADATA": b"{}",
    "meta/data.json": b'{"step": 1}',
}


def flipped(data):
    return bytes([data[0] ^ 16, *data[1:]]) if data else b"x"


DAMAGES = {
    "flipped": flipped,
    "cut short": lambda data: data[:-1] if data else b"x",
    "grown": lambda data: data + b"\0",
    "gone": None,
    "of another": lambda data: data[::-1] if data != data[::-1] else data + b"{}",
}


OF_ONE_SIZE = ("flipped", "of another")
"""Unless the file is empty."""


def harm(objects, name, damage):
    """Do something to a file of a folder."""
    change = DAMAGES[damage]
    if change is None:
        objects.delete(name)
    else:
        objects.write(name, change(objects.read(name).value))


@pytest.fixture
def folder(some_root_uri):
    """A step's folder."""
    objects = ObjectStore(some_root_uri)
    for name, data in {**CONTENTS, COMMIT_FILE: MARKER}.items():
        objects.write(name, data)
    return some_root_uri


MEANT = {name: stored_file(name, data) for name, data in CONTENTS.items()}


def test_files_that_arrived_are_recorded_as_they_were_meant(folder):
    records = check_files(folder, MEANT, marker=MARKER)
    everything = {**CONTENTS, COMMIT_FILE: MARKER}
    assert list(records) == [record_of(name, everything[name]) for name in sorted(everything)]


@pytest.mark.parametrize("some_root_uri", STORES, indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_not_what_was_meant_is_named(folder, name, damage):
    harm(ObjectStore(folder), name, damage)
    if not is_looked_at(folder, name, damage) and CONTENTS[name]:
        check_files(folder, MEANT, marker=MARKER)
        return
    with pytest.raises(SaveError, match="files of the step are not what was written") as caught:
        check_files(folder, MEANT, marker=MARKER)
    (problem,) = caught.value.problems
    file = MEANT[name]
    assert problem.startswith(f"{name}: expected {file.size} bytes, crc32c {file.crc32c}, ")
    assert ("found none" in problem) == (damage == "gone")
    assert str(folder) in str(caught.value)
    assert "the step is not listed" in str(caught.value)


def test_all_files_that_are_not_what_was_meant_are_named_at_once(folder):
    objects = ObjectStore(folder)
    for name in CONTENTS:
        harm(objects, name, "grown")
    objects.delete(COMMIT_FILE)
    with pytest.raises(SaveError) as caught:
        check_files(folder, MEANT, marker=MARKER)
    names = [problem.partition(": ")[0] for problem in caught.value.problems]
    assert names == [*sorted(CONTENTS), COMMIT_FILE]


@pytest.mark.parametrize("found", [b"", MARKER[:-1], MARKER + b"/else"])
def test_the_commit_of_another_folder_is_none(folder, found):
    ObjectStore(folder).write(COMMIT_FILE, found)
    with pytest.raises(SaveError) as caught:
        check_files(folder, MEANT, marker=MARKER)
    (problem,) = caught.value.problems
    assert problem == f"{COMMIT_FILE}: expected {MARKER!r}, found {found!r}"


def test_what_somebody_else_has_written_is_recorded_as_it_was_read(folder):
    others = {"notes.txt": b"theirs", "model/d/" + "3" * 32: b"values of theirs"}
    for name, data in others.items():
        ObjectStore(folder).write(name, data)
    records = {record.name: record for record in check_files(folder, MEANT, marker=MARKER)}
    for name, data in others.items():
        assert records[name] == record_of(name, data)


# Whole saves, of which a file is damaged once all is written and before the step is published.


class Striking:
    """Damages a file of each save right before it is looked at."""

    def __init__(self, monkeypatch):
        self.strike = None
        self.names = []
        self.hit = None
        monkeypatch.setattr(save_job, "check_files", self._check)

    def _check(self, folder, meant, *, marker):
        self.names = sorted(entry.name for entry in open_files(folder).walk() if not entry.is_dir)
        if self.strike is not None:
            number, damage = self.strike
            self.hit = self.names[number]
            harm(ObjectStore(folder), self.hit, damage)
        return check_files(folder, meant, marker=marker)


@pytest.fixture
def striking(monkeypatch):
    return Striking(monkeypatch)


def kind(name):
    """A name without what is random in it."""
    return name.rpartition("/")[0] if is_data_file(name) or "/b/" in name else name


def is_looked_at(uri, name, damage):
    """Whether a save sees damage to a file: to values of the same size only where GCS lists it."""
    return uri.scheme == "gs" or not is_data_file(name) or damage not in OF_ONE_SIZE


def small(seed):
    """Two items of few files."""
    sharded = put(floats(16, 8, seed=seed), "fsdp", None)
    return {"model": {"w": sharded}, "optimizer": {"m": floats(4, seed=seed)}}


@pytest.mark.parametrize(
    ("some_root_uri", "damage"),
    [*itertools.product(("file", "gcs"), DAMAGES)]
    if is_long()
    else [("file", "flipped"), ("gcs", "gone")],
    indirect=["some_root_uri"],
)
def test_a_file_that_is_damaged_before_the_step_is_published_fails_the_save(
    some_root_uri, striking, damage
):
    durable = [0]
    with Checkpointer(some_root_uri / "run", writer_id="job") as made:
        made.save(0, small(0), meta={"step": 0}).wait()
        run = Run.open(some_root_uri / "run")
        names = striking.names
        assert {"model/d", "model/b", "model/manifest.ocdbt", "meta/data.json",
                "_CHECKPOINT_METADATA", COMMIT_FILE} < {*map(kind, names)}  # fmt: skip
        kinds = set()
        for number, name in enumerate(names):
            if name == "orbax.checkpoint":
                continue  # Orbax's own, and without content
            if kind(name) in kinds and not is_long():
                continue
            kinds.add(kind(name))
            striking.strike = (number, damage)
            step = number + 1
            handle = made.save(step, small(step), meta={"step": step})
            if is_looked_at(some_root_uri, name, damage):
                with pytest.raises(SaveError, match="are not what was written") as caught:
                    handle.wait()
                (problem,) = caught.value.problems
                assert problem.startswith(f"{striking.hit}: expected ")
                assert ObjectStore(handle.uri).read(INDEX_FILE) is None
            else:
                handle.wait()
                durable.append(step)
                report = verify_step(run, step)
                assert any(one.startswith(f"{striking.hit}: ") for one in report.problems)
                assert not report.loads
                with pytest.raises(CorruptionError, match=r"(model|optimizer): "):
                    load(handle.uri, step)
            assert [info.step for info in run.steps()] == durable
        striking.strike = None
        last = made.save(99, small(99), meta={"step": 99})
        last.wait()
    assert [info.step for info in run.steps()] == [*durable, 99]
    assert verify_step(run, 99).ok
    load(last.uri, 99)


def load(uri, seed):
    for item, tree in small(seed).items():
        assert_same(restore_item(uri, item, abstract(tree)), tree)
