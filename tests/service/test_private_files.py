"""What the service writes is for its owner alone, in a folder that others may read."""

import os
import sqlite3
from contextlib import closing

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.private_files import make_private
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import backup


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    before = os.umask(0o022)
    yield folder
    os.umask(before)


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_files_of_a_server_are_its_owners_and_those_that_were_open_become_so(root, data):
    settings = Settings(root=str(root), data_dir=data)
    beside = {f"{name}.sqlite-{log}" for name in ("catalog", "jobs") for log in ("wal", "shm")}
    for _ in range(2):
        with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as http:
            assert http.get("/v1/runs").status_code == 200
            there = modes(data)
        assert beside | {"catalog.sqlite", "jobs.sqlite"} <= set(there)
        assert set(there.values()) == {0o600}, there
        for path in data.iterdir():
            path.chmod(0o664)
    assert data.stat().st_mode & 0o777 == 0o755


def test_copies_are_their_owners_while_they_are_made(data, tmp_path, monkeypatch):
    for name in ("catalog", "jobs"):
        with closing(sqlite3.connect(data / f"{name}.sqlite")) as database:
            database.execute("CREATE TABLE some (thing)")
    copies, seen = tmp_path / "copies", []
    copies.mkdir(mode=0o755)

    class Watched(closing):
        def __exit__(self, *ending):
            seen.append(modes(copies))
            super().__exit__(*ending)

    monkeypatch.setattr(backup, "closing", Watched)
    backup.back_up(Settings(root=str(tmp_path / "store"), data_dir=data), copies)
    assert {mode for one in (*seen, modes(copies)) for mode in one.values()} == {0o600}


def test_database_in_memory_and_a_folder_in_its_place_are_left_alone(data, monkeypatch):
    monkeypatch.chdir(data)
    for database in (None, ":memory:", "file:memory?mode=memory", str(data)):
        make_private(database)
    assert (modes(data), data.stat().st_mode & 0o777) == ({}, 0o755)
