"""Tests' files lie in memory where there is room, and nothing of them stays there."""

import subprocess
import tempfile

import pytest

from tests import folders


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder instead of the machine's, in which there is room."""
    monkeypatch.setattr(folders, "MEMORY", tmp_path)
    monkeypatch.setattr(folders, "NEEDED_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    monkeypatch.delenv("TMPDIR", raising=False)
    return tmp_path


def test_a_run_gets_a_folder_that_others_can_go_through_and_gives_it_back(memory):
    found = folders.in_memory()
    (folder,) = memory.iterdir()
    assert found == {"TMPDIR": str(folder), folders.DISK: "/somewhere"}
    assert folder.stat().st_mode & 0o777 == 0o711
    (folder / "file").write_bytes(b"left")
    folders.remove()
    assert list(memory.iterdir()) == []


def test_what_a_run_that_was_killed_has_left_is_removed(memory):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, other = memory / f"{folders.PREFIX}{ended.pid}-x", memory / f"{folders.PREFIX}1-x"
    for folder in (left, other, memory / "theirs"):
        folder.mkdir()
    folders.in_memory()
    assert not left.exists()
    assert other.exists()
    assert (memory / "theirs").exists()


def test_a_folder_that_is_asked_for_and_one_without_room_are_left_alone(memory, monkeypatch):
    monkeypatch.setattr(folders, "NEEDED_BYTES", 1 << 60)
    assert folders.in_memory() == {}
    monkeypatch.setattr(folders, "NEEDED_BYTES", 0)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert folders.in_memory() == {}
    assert list(memory.iterdir()) == []
