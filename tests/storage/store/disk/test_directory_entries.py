"""A file survives a power failure only if each folder above it was synced after it was made."""

import os
import shutil

import pytest

from cairn import ObjectStore, StoreFullError, open_files
from tests.storage.held_names import HeldNames
from tests.storage.seams import directory_entries


@pytest.fixture
def held(monkeypatch):
    return HeldNames(monkeypatch)


def write_object(folder, name):
    ObjectStore.open(folder).write_if(name, b"{}", generation=None)


def write_file(folder, name):
    with open_files(folder).open_write(name) as file:
        file.write(b"{}")


def delete_tree(folder):
    open_files(folder.parent).delete_tree(folder.name)


WRITES = pytest.mark.parametrize("write", [write_object, write_file])


@WRITES
def test_folders_that_a_write_made_are_held(tmp_path, held, write):
    write(tmp_path / "root/run", "aliases/a.json")
    assert held.lost(tmp_path / "root/run/aliases", below=tmp_path) == []
    write(tmp_path / "root/run", "exports/1.1/kind/file")
    assert held.lost(tmp_path / "root/run/exports/1.1/kind", below=tmp_path) == []


@WRITES
def test_folders_that_another_process_made_and_may_not_have_synced_are_held(tmp_path, held, write):
    (tmp_path / "root/run/aliases").mkdir(parents=True)
    write(tmp_path / "root/run", "aliases/a.json")
    assert held.lost(tmp_path / "root/run/aliases", below=tmp_path) == []


@WRITES
@pytest.mark.parametrize("remove", [shutil.rmtree, delete_tree])
def test_folders_that_were_removed_and_made_again_are_held(tmp_path, held, write, remove):
    run = tmp_path / "root/run"
    write(run, "aliases/a.json")
    remove(run)
    held.forget()
    write(run, "aliases/a.json")
    assert held.lost(run / "aliases", below=tmp_path / "root") == []


def test_known_folders_are_not_synced_again(tmp_path, monkeypatch):
    store = ObjectStore.open(tmp_path / "run")
    store.write("aliases/a.json", b"1")
    synced = []
    monkeypatch.setattr(directory_entries, "fsync_path", synced.append)
    store.write("aliases/a.json", b"2")
    assert synced == []
    store.write("trash/b.json", b"3")
    assert synced == [str(tmp_path / "run")]


def test_of_many_folders_the_last_ones_are_known_and_all_are_held(tmp_path, held, monkeypatch):
    """A job makes folders for each step, for as long as it runs."""
    monkeypatch.setattr(directory_entries, "_MAX_SYNCED", 8)
    for step in range(30):
        write_object(tmp_path / "root/run", f"steps/{step}/a.json")
        assert held.lost(tmp_path / f"root/run/steps/{step}", below=tmp_path) == []
        assert len(directory_entries._synced) <= 8
    write_object(tmp_path / "root/run", "steps/0/b.json")
    assert held.lost(tmp_path / "root/run/steps/0", below=tmp_path) == []


def test_folders_above_that_are_not_ours_to_look_into_were_not_made_by_us(tmp_path, monkeypatch):
    synced = []

    def refused(path):
        if path == str(tmp_path):
            raise PermissionError(13, "no", path)
        synced.append(path)

    monkeypatch.setattr(directory_entries, "fsync_path", refused)
    ObjectStore.open(tmp_path / "run").write("aliases/a.json", b"1")
    assert str(tmp_path / "run") in synced


def test_a_disk_that_fails_to_hold_a_name_fails_the_write(tmp_path, monkeypatch):
    def failing(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreFullError, match="a power failure may undo") as caught:
        ObjectStore.open(tmp_path / "run").write("aliases/a.json", b"1")
    assert "aliases/a.json" in caught.value.path
