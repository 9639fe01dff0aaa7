"""Stores that are served one after another on one machine, and nobody says where their data is."""

import os
import socket
import sqlite3

import pytest
from fastapi.testclient import TestClient

from cairn import SettingsError, create_app
from cairn.service.settings import load_settings
from tests.service.commands import cairn, cairn_here
from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Of somebody who sets nothing."""
    for name in [*os.environ]:
        if name.startswith("CAIRN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    for store in "abc":
        make_run(tmp_path / store / f"run-{store}", [1])


def serve_once(store, folder=None):
    """Serve a store as `cairn serve --root` does; its runs, and where its data is."""
    settings = load_settings(root=store, data_dir=folder)
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as http:
        runs = [one["name"] for one in http.get("/v1/runs?refresh=true").json()["runs"]]
        http.post(f"/v1/roots/default/runs/{runs[0]}/checkpoints", json={"step": 1})
    return runs, settings.data_dir


def test_each_store_has_its_own_folder_and_finds_it_again(tmp_path):
    first = serve_once("a")
    assert first == (["run-a"], tmp_path / "state/cairn")
    second = serve_once("b")
    assert second[0] == ["run-b"]
    assert second[1].parent == tmp_path / "state/cairn/stores"
    assert second[1].name.startswith("b-")
    assert serve_once("a") == first
    assert serve_once(f"file://{tmp_path}/b") == second
    assert serve_once("c")[1] not in (first[1], second[1])


def test_what_an_older_release_has_left_stays_that_of_its_store(tmp_path):
    base = tmp_path / "state/cairn"
    serve_once("a", base)  # as an older release did, wherever the store was
    before = sqlite3.connect(base / "catalog.sqlite").execute("SELECT * FROM roots").fetchall()
    assert serve_once("b")[1] != base
    after = sqlite3.connect(base / "catalog.sqlite").execute("SELECT * FROM roots").fetchall()
    assert after == before
    assert serve_once("a")[1] == base


def test_a_folder_that_is_said_is_taken_whosever_it_is(tmp_path):
    serve_once("a")
    assert serve_once("b", tmp_path / "state/cairn") == (["run-b"], tmp_path / "state/cairn")


def test_keys_that_are_made_before_the_first_start_are_those_of_the_first_store(tmp_path):
    made = cairn_here("keys", "create", "--name", "ana", "--scope", "admin")
    assert made.returncode == 0, made.stderr
    assert serve_once("a")[1] == tmp_path / "state/cairn"
    listed = cairn_here("keys", "list")
    assert "ana" in listed.stdout
    assert f"Of the store file://{tmp_path}/a, in {tmp_path}/state/cairn" in listed.stderr
    elsewhere = {"CAIRN_DATABASE_URL": "postgresql+psycopg://me:hidden@127.0.0.1:9/cairn"}
    named = cairn_here("backup", str(tmp_path / "copy"), **elsewhere)
    assert "in postgresql+psycopg://me:***@127.0.0.1:9/cairn, sqlite:///" in named.stderr
    assert "hidden" not in named.stderr


def test_who_administers_one_of_several_stores_is_asked_which(tmp_path):
    _, first = serve_once("a")
    _, second = serve_once("b")
    asked = cairn_here("keys", "list")
    assert asked.returncode != 0
    for told in (f"{first} of file://{tmp_path}/a", f"{second} of file://{tmp_path}/b"):
        assert told in asked.stderr
    assert "Say which by CAIRN_ROOT=STORE" in asked.stderr
    assert cairn_here("keys", "create", "--name", "ben", CAIRN_ROOT="b").returncode == 0
    assert "ben" in cairn_here("keys", "list", "--data-dir", str(second)).stdout
    assert "ben" not in cairn_here("keys", "list", CAIRN_ROOT="a").stdout


def test_catalog_that_can_not_be_read_is_never_taken_for_nobodys(tmp_path):
    base = tmp_path / "state/cairn"
    base.mkdir()
    (base / "catalog.sqlite").write_bytes(b"no database, but something that was one" * 100)
    with pytest.raises(SettingsError, match=r"catalog\.sqlite: expected a catalog that says"):
        load_settings(root="a")


def test_store_that_begins_anew_beside_others_says_so(tmp_path):
    def told(store, **variables):
        with socket.create_server(("127.0.0.1", 0)) as taken:  # ends it as soon as it has started
            port = str(taken.getsockname()[1])
            done = cairn("serve", "--root", store, "--port", port, **variables)
        assert done.returncode == 1
        return [line for line in done.stderr.splitlines() if " warning " in line]

    assert told("a") == []
    _, first = serve_once("a")
    assert told("a") == []
    (tmp_path / "a").rename(tmp_path / "moved")
    (line,) = told("moved")
    assert f"there are {first} of file://{tmp_path}/a. If the store was moved" in line
    assert told("moved", CAIRN_DATA_DIR=str(first)) == []
    serve_once("moved")
    assert told("moved") == []
