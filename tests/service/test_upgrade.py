"""Databases are brought to this version on request, while those of the version before go on."""

import json
import re
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, inspect, make_url

from cairn import Settings, SettingsError, create_app
from cairn.service.catalog.engine import Catalog, upgrade_catalog
from cairn.service.jobs.dbos_engine.jobs import open_jobs
from tests.service.commands import cairn_here
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import save_llama, serving, watch
from tests.service.migrated import made_once, version_to_come
from tests.service.seams import database, migrate
from tests.service.stores import make_run

pytestmark = pytest.mark.usefixtures("migrations")


def revision_of(url):
    engine = create_engine(url)
    with engine.connect() as connection:
        found = migrate.revisions(connection)
    engine.dispose()
    return found


def upgraded_by_a_version_to_come(url, tmp_path, **said):
    """Its revisions before and after."""
    with version_to_come(tmp_path / "migrations", **said):
        return upgrade_catalog(url)


def take_back(url, revision):
    """The tables as an older version has made them."""
    engine = create_engine(url)
    with engine.begin() as connection:
        command.downgrade(migrate.configuration(connection), revision)
    engine.dispose()


def upgrade(url, jobs_url, tmp_path):
    return cairn_here(
        "upgrade",
        "--data-dir",
        str(tmp_path / "data"),
        CAIRN_DATABASE_URL=url,
        CAIRN_JOBS_DATABASE_URL=jobs_url,
    )


def doctor_says(url):
    """Outcome and finding of `cairn doctor` about a catalog."""
    told = json.loads(cairn_here("doctor", "--no-probe", "--json", CAIRN_DATABASE_URL=url).stdout)
    (found,) = [one for one in told["findings"] if one["check"] == "catalog"]
    return found["outcome"], found["found"]


def beside(database_url, folder):
    """Where the jobs are kept of a server with that catalog."""
    if make_url(database_url).get_backend_name() == "sqlite":
        return f"sqlite:///{folder}/jobs.sqlite"
    return database_url


@pytest.fixture
def jobs_url(database_url, tmp_path):
    return beside(database_url, tmp_path)


@pytest.fixture
def some_jobs_url(some_database_url, tmp_path):
    return beside(some_database_url, tmp_path)


def test_upgrade_says_what_it_did_and_can_be_asked_for_again(database_url, jobs_url, tmp_path):
    said = upgrade(database_url, jobs_url, tmp_path)
    assert said.returncode == 0, said.stderr
    _, known = revision_of(database_url)
    catalog, jobs = said.stdout.splitlines()
    assert catalog == f"catalog: made, at revision {known}"
    assert jobs.startswith("jobs: made, at revision ")
    again = upgrade(database_url, jobs_url, tmp_path)
    assert [line.endswith(" already") for line in again.stdout.splitlines()] == [True, True]
    with version_to_come(tmp_path / "migrations"):
        assert upgrade(database_url, jobs_url, tmp_path).stdout.splitlines() == [
            f"catalog: revision {known} -> 9999",
            jobs.replace("made, at", "at") + " already",
        ]


def test_two_upgrades_at_once_are_one(database_url, tmp_path):
    Catalog.open(database_url).close()
    _, known = revision_of(database_url)
    with version_to_come(tmp_path / "migrations"), ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: upgrade_catalog(database_url), range(4)))
    assert sorted(before for before, _ in done) == [known, "9999", "9999", "9999"]
    assert {after for _, after in done} == {"9999"}


def test_a_newer_database_is_refused_and_left_alone(some_database_url, some_jobs_url, tmp_path):
    catalog = Catalog.open(some_database_url)
    with catalog.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    catalog.close()
    said = upgrade(some_database_url, some_jobs_url, tmp_path)
    assert (said.returncode, said.stdout) == (1, "")
    assert "made by a newer Cairn" in said.stderr
    assert revision_of(some_database_url)[0] == "9999"


def test_a_server_upgrades_its_own_sqlite_and_no_postgresql_that_others_use(
    database_url, jobs_url, root, tmp_path
):
    given = {"root": str(root), "data_dir": tmp_path / "data", "scan_seconds": 0}
    settings = Settings(**given, database_url=database_url, jobs_database_url=jobs_url)

    def starts(settings):
        with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
            assert http.get("/v1/runs").is_success

    starts(settings)  # what is empty is nobody's
    _, known = revision_of(database_url)
    with version_to_come(tmp_path / "migrations"):
        if make_url(database_url).get_backend_name() == "sqlite":
            starts(settings)
        else:
            with pytest.raises(SettingsError, match=f"at revision {known}.* needs 9999.*upgrade"):
                starts(settings)
            assert revision_of(database_url)[0] == known
            starts(settings.model_copy(update={"auto_upgrade": True}))
        assert revision_of(database_url)[0] == "9999"


def test_migrations_leave_all_that_the_version_before_reads_and_writes(database_url):
    Catalog.open(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        scripts = ScriptDirectory.from_config(migrate.configuration(connection))
    revisions = [script.revision for script in scripts.walk_revisions()][::-1]
    take_back(database_url, revisions[0])
    for before, after in pairwise(revisions):
        old = tables(engine)
        with engine.begin() as connection:
            command.upgrade(migrate.configuration(connection), after)
        new = tables(engine)
        assert old.keys() <= new.keys(), (before, after)
        for name, columns in old.items():
            assert {key: new[name].get(key) for key in columns} == columns, (before, after)
            added = [new[name][key] for key in new[name].keys() - columns.keys()]
            assert all(nullable or default for _, nullable, default in added), (before, after)
    engine.dispose()


def tables(engine):
    """By name, of each column its type, whether it may be empty, and whether it has a default."""
    found = inspect(engine)
    return {
        name: {
            column["name"]: (str(column["type"]), column["nullable"], column["default"] is not None)
            for column in found.get_columns(name)
        }
        for name in found.get_table_names()
    }


def test_a_server_goes_on_while_and_after_the_catalog_is_upgraded_below_it(
    database_url, root, tmp_path
):
    """By a version to come, whose migration adds to every table."""
    make_run(root / "run", [1, 2])
    settings = Settings(
        root=str(root), data_dir=tmp_path / "data", scan_seconds=0, database_url=database_url
    )
    statuses, over = [], threading.Event()
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:

        def list_again():
            while not over.wait(0.01):
                statuses.append(http.get("/v1/runs?refresh=true").status_code)
                statuses.append(http.get("/v1/roots/default/runs/run/checkpoints").status_code)

        thread = threading.Thread(target=list_again)
        thread.start()
        try:
            while len(statuses) < 20:  # every statement has been prepared by the driver
                assert thread.is_alive()
                time.sleep(0.01)
            _, known = revision_of(database_url)
            assert upgraded_by_a_version_to_come(database_url, tmp_path) == (known, "9999")
            so_far = len(statuses)
            while len(statuses) < so_far + 20:
                assert thread.is_alive()
                time.sleep(0.01)
        finally:
            over.set()
            thread.join()
        assert set(statuses) == {200}
        promote = "/v1/roots/default/runs/run/checkpoints/1:promote"
        answer = http.post(promote, json={"alias": "best"}, headers={"If-None-Match": "*"})
        assert answer.is_success
        aliases = http.get("/v1/roots/default/runs/run/aliases").json()["aliases"]
        assert [one["step"] for one in aliases] == [1]


@pytest.mark.parametrize("auto_upgrade", [False, True])
def test_a_server_that_is_started_anew_works_with_a_catalog_that_a_newer_version_left_it(
    some_database_url, some_jobs_url, root, tmp_path, auto_upgrade
):
    make_run(root / "run", [1, 2])
    Catalog.open(some_database_url).close()
    _, known = revision_of(some_database_url)
    says = f"works_with = {known!r}"
    assert upgraded_by_a_version_to_come(some_database_url, tmp_path, says=says) == (known, "9999")
    given = {"root": str(root), "data_dir": tmp_path / "data", "scan_seconds": 0}
    settings = Settings(**given, database_url=some_database_url, auto_upgrade=auto_upgrade)
    for _ in range(2):
        with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
            assert len(http.get("/v1/runs?refresh=true").json()["runs"]) == 1
            promote = "/v1/roots/default/runs/run/checkpoints/1:promote"
            http.post(promote, json={"alias": "best"}, headers={"If-None-Match": "*"})
            assert [
                one["alias"]
                for one in http.get("/v1/roots/default/runs/run/aliases").json()["aliases"]
            ] == ["best"]
    said = upgrade(some_database_url, some_jobs_url, tmp_path)
    assert said.stdout.splitlines()[0] == "catalog: at revision 9999 already"
    assert revision_of(some_database_url)[0] == "9999"
    outcome, found = doctor_says(some_database_url)
    assert outcome == "ok"
    assert f"tables of version 9999, with which this one, {known}, works" in found


@pytest.mark.parametrize(
    ("says", "before_it"),
    [("", ""), ("works_with = '9999'", ""), ("works_with = {known!r}", "works_with = '9998'")],
    ids=["that says nothing", "that says so", "one of whose migrations says so"],
)
def test_a_newer_catalog_that_this_version_cannot_work_with_is_refused(
    some_database_url, tmp_path, says, before_it
):
    Catalog.open(some_database_url).close()
    _, known = revision_of(some_database_url)
    says = says.format(known=known)
    upgraded_by_a_version_to_come(some_database_url, tmp_path, says=says, before_it=before_it)
    for open_it in (Catalog.open, partial(Catalog.open, auto_upgrade=False), upgrade_catalog):
        with pytest.raises(SettingsError, match="made by a newer Cairn"):
            open_it(some_database_url)
    assert revision_of(some_database_url)[0] == "9999"
    assert doctor_says(some_database_url)[0] == "fail"


def test_every_migration_says_which_older_version_works_with_what_it_leaves(some_database_url):
    Catalog.open(some_database_url).close()
    engine = create_engine(some_database_url)
    with engine.connect() as connection:
        scripts = ScriptDirectory.from_config(migrate.configuration(connection))
        noted = migrate.works_with(connection, migrate.revisions(connection)[1])
    engine.dispose()
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    assert noted in known
    for script in scripts.walk_revisions():
        assert known.index(script.module.works_with) <= known.index(script.revision)


@pytest.mark.parametrize("more", [{}, {"added_later": {"by": "a newer version"}}])
def test_a_job_that_another_version_has_enqueued_is_executed(root, tmp_path, more):
    """Before any worker of this one is there; it may know more than we do."""
    save_llama(root / "llama")
    data = tmp_path / "data"
    settings = Settings(root=str(root), data_dir=data, scan_seconds=0)
    settings.prepare()
    with closing(open_jobs(settings)) as jobs:
        request = {"root": "default", "run": "llama", "steps": "all", **more}
        asked = jobs.start("verify", request)
    with serving(root, data) as http:
        ended = watch(http, asked.id)
    assert (ended["state"], ended["request"]) == ("succeeded", request)


def test_what_tests_make_without_migrations_is_what_migrations_make(tmp_path):
    def made(kind):
        folder = tmp_path / kind
        folder.mkdir()
        Catalog.open(f"sqlite:///{folder}/catalog.sqlite").close()
        database.open_database(f"sqlite:///{folder}/jobs.sqlite").destroy()
        for name in ("catalog.sqlite", "jobs.sqlite"):
            with closing(sqlite3.connect(folder / name)) as opened:
                assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                tables = opened.execute("SELECT name, sql FROM sqlite_master ORDER BY name")
                # Alembic names a table's constraints in any order.
                yield {name: sorted(re.split(r"[\s,]*\n", sql or "")) for name, sql in tables}
                revisions = "alembic_version" if name == "catalog.sqlite" else "dbos_migrations"
                yield opened.execute(f"SELECT * FROM {revisions}").fetchall()

    migrated = list(made("migrated"))
    (tmp_path / "first").mkdir()
    with made_once(tmp_path / "first"), patch.object(command, "upgrade") as upgrading:
        assert list(made("at once")) == migrated
    assert not upgrading.called
