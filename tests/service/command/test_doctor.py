"""`cairn doctor`: each thing that can be wrong is found, and what mends it is said."""

import json
import os
import re
import sqlite3
import threading
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from cairn import StoreCheckError, parse_uri
from cairn.installation import CHECKED, installed_version
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.roots import Roots
from cairn.service.command.doctor import (
    databases,
    environment,
    findings,
    installation,
    server,
    stores,
)
from cairn.storage.store.clock import utc_now
from tests.service.commands import cairn_here, cairn_on_a_terminal
from tests.service.migrated import version_to_come
from tests.service.planes import running_plane
from tests.service.seams import database, variables
from tests.service.servers import reply, scripted, silent_server

Outcome = findings.Outcome
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def of(found, outcome):
    return [one for one in found if one.outcome is outcome]


def only(found, outcome):
    (one,) = of(found, outcome)
    return one


def doctor(*arguments, status=0, **variables):
    done = cairn_here("doctor", "--json", *arguments, **variables)
    assert done.returncode == status
    assert all(line.startswith("Of the ") for line in done.stderr.splitlines())
    told = json.loads(done.stdout)
    assert told["ok"] is (status == 0)
    return told["findings"]


def test_the_password_of_no_address_is_shown(root, tmp_path):
    variables = {"CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(tmp_path / "data")}
    address = "http://me:hidden@127.0.0.1:9"
    found = doctor("--url", address, status=1, CAIRN_URL=address, **variables)
    assert "http://me:***@127.0.0.1:9" in str(found)
    assert "hidden" not in str(found)


def test_the_first_lines_say_what_is_looked_at(root, tmp_path):
    said = cairn_here(
        "doctor",
        "--no-probe",
        "--url=http://me:hidden@127.0.0.1:9",
        CAIRN_ROOT=str(root),
        CAIRN_DATA_DIR=str(tmp_path / "data"),
        CAIRN_DATABASE_URL="postgresql+psycopg://me:hidden@127.0.0.1:9/cairn",
    ).stderr
    assert said.splitlines() == [
        f"Of the store file://{root}, in postgresql+psycopg://me:***@127.0.0.1:9/cairn, "
        f"sqlite:///{tmp_path}/data/jobs.sqlite",
        "Of the server http://me:***@127.0.0.1:9",
    ]


def test_a_sound_installation_fails_nothing_and_is_left_as_it_was(root, tmp_path):
    variables = {"CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(tmp_path / "data")}
    found = doctor(**variables)
    assert {one["outcome"] for one in found} <= {"ok", "warn"}
    names = {one["check"] for one in found}
    assert names - {"names", "emulators"} == {  # those two speak up only of what is odd
        *("settings", "versions", "entry points", "command"),
        *("data folder", "root default", "catalog", "added roots", "jobs", "server"),
    }
    assert list(tmp_path.iterdir()) == [root]
    assert list(root.iterdir()) == []


def test_every_finding_that_is_not_fine_has_a_fix(root, tmp_path):
    found = doctor(
        status=1,
        CAIRN_ROOT=f"{root}/nowhere",
        CAIRN_ROTO="x",
        CAIRN_DATABASE_URL="nonsense",
        STORAGE_EMULATOR_HOST="localhost:1",
        CAIRN_DATA_DIR=str(tmp_path / "data"),
        CAIRN_URL="http://127.0.0.1:9",
    )
    assert [one["check"] for one in found if one["outcome"] == "fail"] == ["catalog", "server"]
    assert [one for one in found if (one["outcome"] == "ok") == bool(one["fix"])] == []


def test_a_terminal_shows_fixes_below_what_they_mend(root, tmp_path):
    (tmp_path / "plane").mkdir()
    with running_plane(root, tmp_path / "plane") as (url, _):
        status, shown = cairn_on_a_terminal("doctor", "--no-probe", url=url)
    assert status in (0, 1)
    assert "server: " in shown
    assert "fix: " in shown


# Settings.


def test_a_misspelt_setting_is_told_with_the_nearest():
    found = list(environment.check_settings({"CAIRN_ROTO": "gs://b/runs"}))
    one = only(found, Outcome.WARN)
    assert "CAIRN_ROTO" in one.found
    assert "the nearest is CAIRN_ROOT" in one.found
    assert one.fix == 'export CAIRN_ROOT="$CAIRN_ROTO"; unset CAIRN_ROTO'
    one = only(environment.check_settings({"CAIRN_SOMETHING_ELSE": "1"}), Outcome.WARN)
    assert one.fix == "unset CAIRN_SOMETHING_ELSE"


def test_every_variable_that_the_code_reads_is_known():
    packages = PROJECT.parent
    read = {
        name
        for package in ("interop", "service", "state", "storage")
        for path in (packages / package).rglob("*.py")
        if "doctor" not in path.parts
        for name in re.findall(r"\bCAIRN_[A-Z]+(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8"))
    }
    assert read - set(variables.known_variables()) == set()
    assert set(variables.OTHERS) <= read


def test_no_password_is_shown():
    url = "postgresql+psycopg://me:se/cret@host/db"
    found = list(environment.check_settings({"CAIRN_DATABASE_URL": url, "CAIRN_ROTO": url}))
    assert "se/cret" not in str(found)
    assert "postgresql+psycopg://me:***@host/db" in found[0].found
    for value in ("postgresql://me:a@b:c@host/db", "postgresql://host/db?password=a@b&x=1"):
        assert "a@b" not in str(list(environment.check_settings({"CAIRN_DATABASE_URL": value})))
    assert "abc" not in str(list(environment.check_settings({"CAIRN_SOME_KEY": "abc"})))


def test_a_setting_that_cannot_work_fails_and_the_rest_is_looked_at(tmp_path):
    found = doctor(status=1, CAIRN_ROOT="ftp://host/runs", CAIRN_DATA_DIR=str(tmp_path))
    (one,) = [one for one in found if one["outcome"] == "fail"]
    assert "CAIRN_ROOT: root 'default' = 'ftp://host/runs'" in one["found"]
    assert "versions" in {one["check"] for one in found}


# Emulators.


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({"STORAGE_EMULATOR_HOST": "localhost:1"}, "fail"),
        ({"TENSORSTORE_GCS_HTTP_URL": "http://localhost:1"}, "fail"),
        (
            {
                "STORAGE_EMULATOR_HOST": "localhost:1",
                "TENSORSTORE_GCS_HTTP_URL": "http://localhost:2",
            },
            "fail",
        ),
        (
            {
                "STORAGE_EMULATOR_HOST": "localhost:1",
                "TENSORSTORE_GCS_HTTP_URL": "http://localhost:1/",
            },
            "warn",
        ),
        ({"AWS_ENDPOINT_URL": "http://minio:9000"}, "ok"),
    ],
)
def test_emulators_that_were_left_on_are_told(variables, outcome):
    (one,) = environment.check_emulators(variables, frozenset({"gs"}))
    assert one.outcome == outcome
    (one,) = environment.check_emulators(variables, frozenset({"file"}))
    assert one.outcome == ("warn" if outcome == "fail" else outcome)
    assert list(environment.check_emulators({}, frozenset({"gs"}))) == []


# The data folder.


def test_a_data_folder_that_others_may_read_is_told(tmp_path):
    tmp_path.chmod(0o755)
    one = only(environment.check_data_folder(tmp_path), Outcome.WARN)
    assert "expected mode 700, found 755" in one.found
    assert one.fix == f"chmod 700 {tmp_path}"
    tmp_path.chmod(0o700)
    assert of(environment.check_data_folder(tmp_path), Outcome.WARN) == []


def test_a_data_folder_without_room_or_rights_is_told(tmp_path, monkeypatch):
    usage = environment.shutil.disk_usage(tmp_path)
    for free, outcome in ((5 * 10**8, Outcome.WARN), (5 * 10**7, Outcome.FAIL)):
        monkeypatch.setattr(
            environment.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        found = list(environment.check_data_folder(tmp_path / "new"))
        assert "expected 1.0 GB free, found" in only(found, outcome).found
    monkeypatch.setattr(environment.os, "access", lambda *_: False)
    assert "may write" in only(environment.check_data_folder(tmp_path), Outcome.FAIL).found
    (tmp_path / "file").write_text("")
    found = environment.check_data_folder(tmp_path / "file" / "data")
    assert "found a file" in only(found, Outcome.FAIL).found


# Roots.


def look(uri, **options):
    return list(stores.check_root("default", parse_uri(uri), seconds=10, **options))


def test_a_sound_root_is_said_to_be_sound_and_nothing_of_the_probe_stays(root, gcs):
    for uri in (str(root), f"{gcs.bucket_uri}/root"):
        found = look(uri, probe=True)
        assert [one.outcome for one in found] == [Outcome.OK] * 3
        assert "compare-and-swap works" in found[1].found
        assert "clock" in found[2].found
    assert list(root.iterdir()) == []
    assert gcs.names() == []


def test_without_the_probe_nothing_is_written(gcs):
    gcs.server.requests.clear()
    assert len(look(f"{gcs.bucket_uri}/root", probe=False)) == 1
    assert {request.method for request in gcs.server.requests} == {"GET"}


def test_a_store_that_forgets_conditions_fails(root, monkeypatch):
    def broken(folder):
        raise StoreCheckError("the store does not keep it", problems=["a write: done"])

    monkeypatch.setattr(stores, "probe_now", broken)
    one = only(look(str(root), probe=True), Outcome.FAIL)
    assert one.found == "the store does not keep it; a write: done"


def test_a_root_that_is_nowhere_is_told_and_not_made(tmp_path):
    one = only(look(f"{tmp_path}/nowhere", probe=True), Outcome.WARN)
    assert one.fix == f"mkdir -p {tmp_path}/nowhere"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "expected a folder" in only(look(f"{tmp_path}/file", probe=True), Outcome.FAIL).found


def test_a_bucket_that_is_not_there_fails(gcs):
    assert only(look("gs://no-such-bucket/root", probe=False), Outcome.FAIL).fix


@pytest.mark.parametrize(
    ("ahead", "outcome", "words"),
    [
        (0.1, Outcome.OK, ""),
        (7, Outcome.WARN, "7.0 s ahead of it"),
        (-7, Outcome.WARN, "7.0 s behind it"),
        (20, Outcome.FAIL, "20.0 s ahead of it: leases end too soon"),
    ],
)
def test_a_clock_that_leases_can_not_go_by_is_told(root, monkeypatch, ahead, outcome, words):
    monkeypatch.setattr(stores, "seconds_ahead", lambda uri: ahead)
    found = look(str(root), probe=True)[-1]
    assert found.outcome is outcome
    assert words in found.found


def test_a_bucket_that_is_silent_is_given_up_in_time(gcs):
    gcs.faults.add("hang", operation="objects.list")
    found = list(
        stores.check_root("default", parse_uri(f"{gcs.bucket_uri}/x"), probe=True, seconds=0.5)
    )
    assert "within 0.5 s" in only(found, Outcome.FAIL).found


# Databases.


def test_databases_that_are_not_there_yet_are_fine_and_are_not_made(tmp_path):
    for check in (databases.check_catalog, databases.check_jobs):
        (one,) = check(f"sqlite:///{tmp_path}/some.sqlite", seconds=5)
        assert one.outcome is Outcome.OK
    assert list(tmp_path.iterdir()) == []


def test_a_catalog_is_of_this_version_behind_or_ahead(database_url, tmp_path):
    Catalog.open(database_url).close()

    def look():
        (one,) = databases.check_catalog(database_url, seconds=5)
        return one

    def set_version(version):
        engine = create_engine(database_url)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
        engine.dispose()

    assert look().outcome is Outcome.OK
    with version_to_come(tmp_path / "migrations"):
        assert (look().outcome, look().fix) == (Outcome.WARN, "cairn upgrade")
        assert "found 0001" in look().found
    set_version("9999")
    assert look().outcome is Outcome.FAIL
    assert "newer Cairn" in look().found


def test_a_server_that_would_not_start_for_lack_of_a_key_is_told(root, tmp_path):
    reachable = {
        "CAIRN_ROOT": str(root),
        "CAIRN_DATA_DIR": str(tmp_path / "data"),
        "CAIRN_AUTH": "keys",
        "CAIRN_HOST": "0.0.0.0",
    }

    def look(status):
        told = doctor("--no-probe", status=status, **reachable)
        return [one for one in told if one["check"] == "keys"]

    (finding,) = look(1)
    assert (finding["outcome"], finding["fix"]) == (
        "fail",
        "cairn keys create --name NAME --scope admin",
    )
    made = cairn_here("keys", "create", "--name", "ops", "--scope", "admin", **reachable)
    assert made.returncode == 0, made.stderr
    (finding,) = look(0)
    assert finding["outcome"] == "ok"


def test_jobs_are_looked_for_where_the_engine_keeps_them(database_url):
    (one,) = databases.check_jobs(database_url, seconds=5)
    assert one.outcome is (Outcome.OK if database_url.startswith("sqlite") else Outcome.WARN)
    database.open_database(database_url).destroy()
    (one,) = databases.check_jobs(database_url, seconds=5)
    assert one.outcome is Outcome.OK
    assert "has the tables" in one.found


def test_what_is_no_database_fails(tmp_path):
    (tmp_path / "some.sqlite").write_text("no database at all, but long enough to be looked at")
    (tmp_path / "some.sqlite").chmod(0o600)
    (one,) = databases.check_catalog(f"sqlite:///{tmp_path}/some.sqlite", seconds=5)
    assert one.outcome is Outcome.FAIL
    assert "CAIRN_DATABASE_URL" in one.found
    assert "not a database" in one.found
    (one,) = databases.check_jobs("postgresql+psycopg://me:secret@127.0.0.1:9/x", seconds=2)
    assert one.outcome is Outcome.FAIL
    assert "secret" not in one.found
    (one,) = databases.check_catalog("nonsense", seconds=2)
    assert one.outcome is Outcome.FAIL


def test_files_with_secrets_that_others_may_read_are_told(tmp_path):
    Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite").close()
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "cairn.env", "my.key"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    found = of(
        databases.check_catalog(f"sqlite:///{tmp_path}/catalog.sqlite", seconds=5), Outcome.WARN
    )
    assert [one.fix for one in found] == [
        f"chmod 600 {tmp_path}/catalog.sqlite",
        f"chmod 600 {tmp_path}/catalog.sqlite-wal",
    ]
    named = {"CAIRN_ENV_FILE": f"{tmp_path}/cairn.env", "CAIRN_KEY_FILE": f"{tmp_path}/my.key"}
    found = of(environment.check_settings(named), Outcome.WARN)
    assert [one.fix for one in found] == [f"chmod o= {path}" for path in named.values()]
    (tmp_path / "cairn.env").chmod(0o640)  # of root, for the group of a service
    (tmp_path / "my.key").chmod(0o600)
    assert of(environment.check_settings(named), Outcome.WARN) == []


def test_looking_changes_no_database(tmp_path):
    url = f"sqlite:///{tmp_path}/catalog.sqlite"
    Catalog.open(url).close()
    with sqlite3.connect(tmp_path / "catalog.sqlite") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = (tmp_path / "catalog.sqlite").read_bytes()
    list(databases.check_catalog(url, seconds=5))
    assert (tmp_path / "catalog.sqlite").read_bytes() == before


# The installation.


def test_entry_points_are_those_that_the_project_names():
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    named = {("console_scripts", name): value for name, value in project["scripts"].items()}
    for group, points in project["entry-points"].items():
        named |= {(group, name): value for name, value in points.items()}
    assert named == installation.ENTRY_POINTS


def installed(folder, entry_points):
    place = folder / "cairn_checkpoints-0.0.1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Name: cairn-checkpoints\nVersion: 0.0.1\n")
    (place / "entry_points.txt").write_text(entry_points)
    return str(folder)


def test_an_installation_from_before_an_entry_point_fails(tmp_path):
    script = "[console_scripts]\ncairn = cairn.service.command.cli:main\n"
    old = installed(tmp_path / "old", script)
    one = only(installation.check_entry_points([old]), Outcome.FAIL)
    assert "cairn.durable_steps: announce = " in one.found
    assert "--force-reinstall" in one.fix
    now = f"{script}[cairn.durable_steps]\nannounce = cairn.service.client.announcing:announce\n"
    found = list(installation.check_entry_points([installed(tmp_path / "now", now)]))
    assert [one.outcome for one in found] == [Outcome.OK]
    both = list(installation.check_entry_points([str(tmp_path / "now"), old]))
    assert "expected one installation" in only(both, Outcome.WARN).found


def versions_found_with(monkeypatch, package, version):
    """The findings about versions where a package has this one."""
    real = installation.metadata.version
    monkeypatch.setattr(
        "cairn.installation.metadata.version",
        lambda name: version if name == package else real(name),
    )
    return list(installation.check_versions())


def test_versions_outside_of_what_was_tested_fail(monkeypatch):
    found = versions_found_with(monkeypatch, "jax", "0.0.1")
    one = only(found, Outcome.FAIL)
    assert re.match(r"expected jax \S+, found 0\.0\.1", one.found)
    assert one.fix.startswith("python -m pip install 'jax")
    assert "tensorstore" in only(found, Outcome.OK).found
    assert "jax" in CHECKED


def test_newer_versions_than_were_tested_are_told(monkeypatch):
    found = versions_found_with(monkeypatch, "optax", "7.0")
    one = only(found, Outcome.WARN)
    assert one.found == "expected optax <0.3, found 7.0"
    assert one.fix == "python -m pip install 'optax<0.3'"
    assert "optax" not in only(found, Outcome.OK).found


def test_names_that_are_shadowed_are_told(tmp_path):
    (tmp_path / "a" / "storage").mkdir(parents=True)
    (tmp_path / "a" / "storage" / "__init__.py").write_text("")
    (tmp_path / "b" / "cairn").mkdir(parents=True)
    (tmp_path / "b" / "cairn" / "__init__.py").write_text("")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cairn.py").write_text("")
    (tmp_path / "d" / "state").mkdir(parents=True)  # a folder without modules
    path = [str(tmp_path / name) for name in "abcd"]
    told = [one.found for one in of(installation.check_names(path), Outcome.WARN)]
    assert any(f"storage is another package, at {tmp_path}/a" in text for text in told)
    assert any(f"{tmp_path}/b/cairn/__init__.py" in text for text in told)
    assert any(f"{tmp_path}/c/cairn.py" in text for text in told)
    assert not any("state" in text.split() for text in told)
    told = [one.found for one in installation.check_names([str(PROJECT.parent)])]
    assert any("import storage would find second copies" in text for text in told)


def test_another_command_of_the_name_is_told(tmp_path):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cairn").write_text("#!/bin/sh\n")
        (tmp_path / name / "cairn").chmod(0o755)
    own, other = tmp_path / "own", tmp_path / "other"

    def look(*folders):
        (one,) = installation.check_commands(os.pathsep.join(map(str, folders)), own)
        return one

    assert look(own).outcome is Outcome.OK
    assert look(own, tmp_path, own).outcome is Outcome.OK
    assert f"found others: {other}/cairn" in look(own, other).found
    assert look(other, own).fix == f'export PATH="{own}:$PATH"; hash -r'
    assert "found none" in look(tmp_path).found


# The server, and checks that hang.


def ask(url, **variables):
    found = server.check_server(url, variables, version=installed_version(), seconds=5)
    return list(found)


def test_a_server_of_another_version_is_told():
    health = reply(200, b'{"status": "ok", "version": "9.9"}', Content_Type="application/json")
    ready = reply(200, b'{"status": "ready", "checks": {}}', Content_Type="application/json")
    with scripted(health, ready) as (url, _):
        (one,) = ask(url)
    assert (one.outcome, "found 9.9" in one.found) == (Outcome.WARN, True)


def test_a_server_that_is_not_ready_fails_with_what_it_names():
    health = reply(200, b'{"status": "ok", "version": "9.9"}', Content_Type="application/json")
    body = {"type": "x", "detail": "no", "errors": [{"field": "catalog", "detail": "silent"}]}
    no = reply(503, json.dumps(body).encode(), Content_Type="application/problem+json")
    with scripted(health, no) as (url, _):
        assert only(ask(url), Outcome.FAIL).found == "not ready: catalog: silent"


def test_a_server_that_was_named_must_answer_and_one_that_was_not_need_not():
    assert only(ask(None, CAIRN_URL="http://127.0.0.1:9"), Outcome.FAIL).fix == "cairn serve"
    assert only(ask("http://127.0.0.1:9"), Outcome.FAIL)
    elsewhere = only(ask("http://localhost.invalid"), Outcome.FAIL)
    assert "cairn serve" not in elsewhere.found + elsewhere.fix


def test_a_check_that_hangs_is_given_up_and_the_others_are_told():
    for_good = threading.Event()

    def broken():
        raise ZeroDivisionError("oh")

    checks = {
        "hangs": for_good.wait,
        "breaks": broken,
        "works": lambda: [findings.Finding("works", Outcome.OK, "yes")],
    }
    found = findings.run_checks(checks, seconds=0.3)
    for_good.set()
    assert [(one.check, one.outcome) for one in found] == [
        ("hangs", Outcome.FAIL),
        ("breaks", Outcome.FAIL),
        ("works", Outcome.OK),
    ]
    assert "within 0.3 s" in found[0].found
    assert "ZeroDivisionError: oh" in found[1].found


def test_what_needs_an_extra_that_is_not_installed_is_told_with_how_to_install_it():
    def needs():
        raise ModuleNotFoundError("No module named 'tensorstore'", name="tensorstore")

    (one,) = findings.run_checks({"root default": needs}, seconds=5)
    assert one.outcome is Outcome.WARN
    assert one.fix == "pip install 'cairn-checkpoints[store]'"
    assert isinstance(one, findings.Finding)


def test_a_silent_server_keeps_the_command_no_longer_than_the_time_it_was_given(root, tmp_path):
    variables = {"CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(tmp_path / "data")}
    with silent_server() as (url, was_left):
        found = doctor("--timeout", "1s", "--url", url, status=1, **variables)
        assert was_left()
    assert [one["check"] for one in found if one["outcome"] == "fail"] == ["server"]


def test_rules_of_roots_that_there_are_not_are_told(root, tmp_path):
    gates = json.dumps([{"kind": "gate", "name": "checked", "alias": "production", "root": "more"}])
    variables = {"CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(tmp_path), "CAIRN_POLICIES": gates}

    def told():
        found = doctor(**variables)
        return [one for one in found if (one["check"], one["outcome"]) == ("settings", "warn")]

    (one,) = told()
    assert one["found"].startswith("CAIRN_POLICIES: gate 'checked': root 'more' matches no root")
    with closing(Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite")) as catalog:
        (tmp_path / "more").mkdir()
        Roots(catalog, {}).add("more", parse_uri(tmp_path / "more"), by="me", now=utc_now())
    assert not told()


def test_roots_that_were_added_are_looked_at_and_those_of_the_settings_win(
    root, tmp_path, tmp_path_factory
):
    data = tmp_path_factory.mktemp("data")
    variables = {"CAIRN_ROOT": str(root), "CAIRN_DATA_DIR": str(data)}
    found = {one["check"]: one for one in doctor(**variables)}
    assert found["added roots"]["found"] == "none"
    (tmp_path / "more").mkdir()
    with closing(Catalog.open(f"sqlite:///{data}/catalog.sqlite")) as catalog:
        Roots(catalog, {}).add("more", parse_uri(tmp_path / "more"), by="me", now=utc_now())
    found = doctor(**variables)
    (one,) = [one for one in found if one["check"] == "root more" and "answers" in one["found"]]
    assert f"file://{tmp_path}/more answers" in one["found"]
    for roots, told in (
        ({"more": str(tmp_path / "theirs")}, f"more: the settings have file://{tmp_path}/theirs"),
        ({"all": str(tmp_path)}, "in root 'all'"),
        ({"in": str(tmp_path / "more" / "in")}, "around root 'in'"),
    ):
        found = doctor(**variables, CAIRN_ROOTS=json.dumps(roots))
        (one,) = [one for one in found if one["check"] == "added roots"]
        assert one["outcome"] == "warn"
        assert told in one["found"]
        assert "cairn roots remove more" in one["fix"]


RULES = """<LifecycleConfiguration>
<Rule><ID>old</ID><Status>Enabled</Status><Prefix>runs/a/</Prefix>
<Expiration><Days>30</Days></Expiration></Rule>
<Rule><ID>of others</ID><Status>Enabled</Status><Prefix>logs/</Prefix>
<Expiration><Days>1</Days></Expiration></Rule>
</LifecycleConfiguration>"""
VERSIONS = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"


def test_of_a_bucket_that_speaks_s3_it_says_who_asks_and_what_its_settings_do(s3):
    def check():
        found = list(stores.check_root("default", uri, probe=True, seconds=60))
        return [(one.outcome, one.found) for one in found]

    uri = parse_uri(f"{s3.bucket_uri}/runs")
    outcomes = dict(reversed(one) for one in check())
    assert outcomes["credentials of S3: env, key ...test"] is Outcome.OK
    assert outcomes["compare-and-swap works"] is Outcome.OK
    (rule,) = [text for text, outcome in outcomes.items() if outcome is Outcome.WARN]
    assert "uploads that nobody completes" in rule

    s3.server.settings = {(s3.bucket, "lifecycle"): RULES, (s3.bucket, "versioning"): VERSIONS}
    s3.faults.add("status", status=403, operation="buckets.setting", skip=1)
    found = check()
    assert [text for outcome, text in found if outcome is Outcome.FAIL] == [
        "the lifecycle rule 'old' deletes by age, also steps in use"
    ]
    assert "deleted bytes stay" in found[2][1]
    assert (Outcome.OK, "not told to this identity: object_lock of the bucket") in found
    s3.server.settings = {}
