import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from cairn import Settings, SettingsError, create_app
from cairn.service.catalog.engine import Catalog, upgrade_catalog
from cairn.service.errors import BackupError
from cairn.service.jobs.dbos_engine.database import upgrade_jobs
from cairn.service.jobs.dbos_engine.jobs import open_jobs
from cairn.service.jobs.worker_names import worker_name
from cairn.service.settings import is_loopback, load_settings
from tests.service.seams import backup


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("CAIRN_"):
            monkeypatch.delenv(name)


def test_defaults_name_a_store_here_and_databases_in_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = Settings()
    assert str(settings.root_uris["default"]) == f"file://{tmp_path}/cairn-store"
    assert settings.data_dir == tmp_path / "state" / "cairn"
    assert settings.database_url == f"sqlite:///{tmp_path}/state/cairn/catalog.sqlite"
    assert settings.jobs_database_url == f"sqlite:///{tmp_path}/state/cairn/jobs.sqlite"
    assert (settings.host, settings.port) == ("127.0.0.1", 8321)


def test_a_setting_that_does_not_exist_is_refused_and_other_variables_are_not(monkeypatch):
    with pytest.raises(ValidationError, match="rooot"):
        Settings(rooot="/data/runs")
    with pytest.raises(SettingsError, match="ROOOT"):
        load_settings(rooot="/data/runs")
    for name in ("CAIRN_URL", "CAIRN_WRITER_ID", "CAIRN_ROOOT", "CAIRN"):  # of the client, of jobs
        monkeypatch.setenv(name, "http://127.0.0.1:9000")
    assert Settings(root="/data/runs").root == "/data/runs"


def test_environment_is_read(monkeypatch, tmp_path):
    for name, value in {
        "ROOT": "gs://bucket/runs",
        "ROOTS": '{"archive": "file:///srv/archive"}',
        "DATA_DIR": str(tmp_path),
        "DATABASE_URL": "sqlite:////srv/catalog.sqlite",
        "HOST": "::1",
        "PORT": "9000",
        "EXECUTOR_ID": "worker-1",
    }.items():
        monkeypatch.setenv(f"CAIRN_{name}", value)
    settings = Settings()
    assert {name: str(uri) for name, uri in settings.root_uris.items()} == {
        "default": "gs://bucket/runs",
        "archive": "file:///srv/archive",
    }
    assert settings.database_url == "sqlite:////srv/catalog.sqlite"
    assert (settings.host, settings.port, settings.executor_id) == ("::1", 9000, "worker-1")


def test_data_folder_is_made_for_this_user_only(tmp_path):
    settings = Settings(data_dir=tmp_path / "a" / "b")
    settings.prepare()
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700


def test_databases_lie_where_nobody_else_writes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for folder, settings in (
        ("store/data", {}),
        ("link/data", {}),
        ("more/data", {"roots": {"more": str(tmp_path / "more")}}),
        ("old", {"adopt_from": {"default": [str(tmp_path / "old")]}}),
    ):
        with pytest.raises(SettingsError, match="CAIRN_DATA_DIR: expected a place outside"):
            Settings(root=str(tmp_path / "store"), data_dir=tmp_path / folder, **settings)
    for setting in ("database_url", "jobs_database_url"):
        inside = {setting: f"sqlite:///{tmp_path / 'link/own.sqlite'}"}
        with pytest.raises(SettingsError, match=f"CAIRN_{setting.upper()}: expected a place"):
            Settings(root=str(tmp_path / "store"), data_dir=tmp_path / "data", **inside)
    for folder in ("store-data", "store/../data", "100%"):
        assert Settings(root=str(tmp_path / "store"), data_dir=tmp_path / folder).data_dir


def test_folders_to_adopt_from_are_of_a_root_that_there_is(tmp_path):
    with pytest.raises(SettingsError, match=r"CAIRN_ADOPT_FROM: expected roots .* 'defualt'"):
        Settings(root=str(tmp_path), data_dir=tmp_path / "x", adopt_from={"defualt": ["/old"]})


def test_data_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"CAIRN_DATA_DIR: .*/file/data cannot be made"):
        Settings(data_dir=tmp_path / "file" / "data").prepare()


def test_state_folder_that_cannot_be_written_gives_way_to_one_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert Settings().data_dir == tmp_path / ".cairn"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.com", ""])
def test_address_that_others_can_reach_is_refused(host):
    with pytest.raises(SettingsError, match=r"CAIRN_HOST: expected a loopback address"):
        Settings(host=host)


def test_address_that_others_can_reach_takes_keys():
    assert Settings(host="0.0.0.0", auth="keys").host == "0.0.0.0"
    with pytest.raises(ValidationError, match="auth"):
        Settings(host="0.0.0.0", auth="none")


def test_passwords_of_databases_are_not_shown():
    secret = "postgresql+psycopg://cairn:hunter2@db/cairn"
    settings = Settings(database_url=secret, jobs_database_url=secret)
    assert "hunter2" not in f"{settings!r} {settings}"
    with pytest.raises(SettingsError) as raised:
        load_settings(database_url=secret, host="0.0.0.0", port=-1)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "root", ["http://169.254.169.254/", "file:///a/../b", "memory", "gs-x/../../etc", "dir::x"]
)
def test_root_that_is_no_store_uri_is_refused_or_plain(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if root == "memory":  # a plain folder name
        assert Settings(root=root).root_uris["default"].local_path == str(tmp_path / "memory")
        return
    with pytest.raises(SettingsError, match=r"CAIRN_ROOT: root 'default' = "):
        Settings(root=root)


def test_root_name_that_could_not_be_asked_for_is_refused():
    with pytest.raises(SettingsError, match=r"CAIRN_ROOTS: root 'a/b'"):
        Settings(roots={"a/b": "/srv"})


def test_settings_do_not_change_while_running():
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.8.9.1", True),
        ("[::1]", True),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
        ("0.0.0.0", False),
    ],
)
def test_loopback_names(host, expected):
    assert is_loopback(host) is expected


def test_every_setting_is_documented_in_the_readme():
    readme = (Path(__file__).parents[2] / "service" / "README.md").read_text()
    missing = [name for name in Settings.model_fields if f"`CAIRN_{name.upper()}`" not in readme]
    assert missing == []


def test_a_database_that_takes_connections_and_says_nothing_is_away(tmp_path, monkeypatch):
    """Whoever opens it, all at once here: each waits for as long."""
    for module in ("catalog.engine", "jobs.worker_names", "jobs.dbos_engine.database"):
        least = 2  # that PostgreSQL's library waits
        monkeypatch.setattr(f"cairn.service.{module}.CONNECT_SECONDS", least)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        url = f"postgresql+psycopg://me@127.0.0.1:{silent.getsockname()[1]}/db"
        settings = Settings(jobs_database_url=url, data_dir=tmp_path)
        opening = [
            pool.submit(Catalog.open, url),
            pool.submit(upgrade_catalog, url),
            pool.submit(open_jobs, settings),
            pool.submit(upgrade_jobs, url),
            pool.submit(worker_name(settings, "one").acquire, lambda: None),
        ]
        for opened in opening:
            with pytest.raises(SettingsError, match="timeout"):
                opened.result()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me@127.0.0.1:1/db?password=hunter2&connect_timeout=2",
        "postgresql+psycopg://me:hunter2@127.0.0.1:1/db?connect_timeout=2",
    ],
)
def test_a_database_that_cannot_be_opened_is_named_without_its_password(url, tmp_path):
    settings = Settings(database_url=url, jobs_database_url=url, data_dir=tmp_path)
    opening = [
        lambda: Catalog.open(url),
        lambda: upgrade_catalog(url),
        lambda: upgrade_jobs(url),
        lambda: worker_name(settings, "one").acquire(lambda: None),
        lambda: backup.back_up(settings, tmp_path / "copies"),
    ]
    for each in opening:
        with pytest.raises((SettingsError, BackupError), match=r"me.*@127\.0\.0\.1:1/db") as raised:
            each()
        assert "hunter2" not in str(raised.value)


def test_rules_that_fit_no_root_are_known_by_their_settings_and_names():
    found = Settings(
        roots={"far": "/far"},
        policies=(
            {"kind": "gate", "name": "checked", "alias": "production", "root": "fra"},
            {"kind": "schedule", "name": "one", "cron": "0 3 * * *", "action": "verify"}
            | {"root": "far?"},
            {"kind": "automation", "name": "two", "alias": "best", "action": "convert"}
            | {"root": "f*"},
        ),
    )
    assert found.policies_without_roots(()) == [
        "CAIRN_POLICIES: gate 'checked': root 'fra'",
        "CAIRN_POLICIES: schedule 'one': root 'far?'",
    ]
    assert found.policies_without_roots(["farm", "fra"]) == []


def test_a_server_says_which_rules_fit_no_root_yet(tmp_path, caplog):
    gate = {"kind": "gate", "name": "checked", "alias": "production", "root": "later"}
    settings = Settings(root=str(tmp_path / "store"), data_dir=tmp_path / "data", policies=(gate,))
    with TestClient(create_app(settings, jobs=False)):
        assert "CAIRN_POLICIES: gate 'checked': root 'later': fits no root" in caplog.text
