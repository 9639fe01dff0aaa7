import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from fastapi.testclient import TestClient
from sqlalchemy import inspect, select

from cairn import (
    Run,
    SettingsError,
    create_app,
    delete_alias,
    list_runs,
    parse_uri,
    promote_step,
)
from cairn.service.catalog import rows
from cairn.service.catalog.audit import AuditEntry, audit_events
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.filters.fields import AUDIT_FIELDS
from cairn.service.filters.search import Search
from cairn.storage.store.records import RecordLocation
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import migrate, models, refresh
from tests.service.stores import (
    add_steps,
    annotate,
    begin_saving,
    end_saving,
    make_run,
    publish,
    trash,
)
from tests.stores import DATABASES

BOTH = pytest.mark.parametrize("some_database_url", DATABASES, indirect=True)
"""Where the databases differ: tables, references, and how many rows a statement takes."""


@pytest.fixture
def catalog(some_database_url):
    catalog = Catalog.open(some_database_url)
    yield catalog
    catalog.close()


@pytest.fixture
def index(catalog):
    return Index(catalog)


def everything(http):
    """All that the API lists of a store."""
    found = {}
    for run in http.get("/v1/runs").json()["runs"]:
        path = f"/v1/roots/{run['root']}/runs/{run['name']}"
        found[path] = [
            run,
            http.get(f"{path}/checkpoints", params={"state": "all"}).json(),
            http.get(f"{path}/aliases").json(),
        ]
    return found


def test_deleted_catalog_comes_back_from_the_store(root, settings):
    first = make_run(root / "first", [1, 2, 3], labels={"team": "nlp"})
    add_steps(first, [3, 4], base_step=2)
    annotate(first, 4, 2, labels={"eval": "passed"}, metrics={"loss": 0.5})
    trash(first, 1)
    make_run(root / "second", [10])
    path = "/v1/roots/default/runs/first/checkpoints"
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        for step, alias in ((4, "production"), (2, "staging")):
            http.post(
                f"{path}/{step}:promote", json={"alias": alias}, headers={"If-None-Match": "*"}
            )
        before = everything(http)
        for alias in before["/v1/roots/default/runs/first"][2]["aliases"]:
            assert alias.pop("audited") is True
    for file in settings.data_dir.glob("catalog.sqlite*"):
        file.unlink()
    catalog = Catalog.open(settings.database_url)
    rebuilt = Index(catalog).rebuild(settings.root_uris)
    assert (rebuilt.runs, rebuilt.checkpoints, rebuilt.aliases) == (2, 6, 2)
    catalog.close()
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        after = everything(http)
    for alias in after["/v1/roots/default/runs/first"][2]["aliases"]:
        assert alias.pop("audited") is None  # the audit trail is gone
    assert after == before
    assert len(before) == 2


def test_deleted_catalog_needs_no_rebuild_to_list(root, settings):
    make_run(root / "run", [1, 2])
    listings = []
    for _ in range(2):
        with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
            listings.append(everything(http))
        for file in settings.data_dir.glob("catalog.sqlite*"):
            file.unlink()
    assert listings[0] == listings[1]


def test_a_run_that_has_lost_its_record_stays_in_the_catalog_and_is_named(
    index, catalog, root, caplog
):
    run = make_run(root / "run", [1, 2])
    index.refresh_root("default", parse_uri(root))
    run.objects.delete("run.json")
    for look in (index.rebuild, lambda roots: index.refresh_root("default", roots["default"])):
        look({"default": parse_uri(root)})
        with catalog.read() as session:
            assert [row.name for row in session.scalars(select(models.RunRow))] == ["run"]
    assert "run/run.json: expected the record that a run begins with" in caplog.text


@BOTH
def test_rebuild_keeps_the_audit_trail_and_drops_what_is_gone(index, catalog, root):
    run = make_run(root / "run", [1, 2])
    make_run(root / "gone", [1])
    roots = {"default": parse_uri(root), "closed": parse_uri(root)}
    index.rebuild(roots)
    what = {"actor": "a", "root": "default", "run": "gone", "detail": {}}
    AuditEntry.begin(catalog, "alias.promote", **what)
    run.objects.delete("manifests/2.1.json")
    shutil.rmtree(root / "gone")
    rebuilt = index.rebuild({"default": parse_uri(root)})
    assert (rebuilt.runs, rebuilt.checkpoints, rebuilt.aliases) == (1, 2, 0)
    with catalog.query() as connection:
        everything = Search.parse("", "", AUDIT_FIELDS)
        (entry,) = audit_events(connection, everything, after=(), limit=10)
    assert entry.run == "gone"


def test_rebuild_mends_rows_that_say_other_than_the_store(index, catalog, root):
    make_run(root / "run", [1])
    index.rebuild({"default": parse_uri(root)})
    with catalog.write() as session:
        row = session.scalars(select(models.CheckpointRow)).one()
        row.nbytes, row.items = 7, ["nothing"]
    index.rebuild({"default": parse_uri(root)})
    with catalog.read() as session:
        row = session.scalars(select(models.CheckpointRow)).one()
    assert (row.nbytes, row.items) == (64, ["model", "optimizer"])


@pytest.mark.usefixtures("migrations")
@BOTH
def test_models_are_what_the_migrations_make(catalog):
    with catalog.engine.connect() as connection:
        command.check(migrate.configuration(connection))


@pytest.mark.usefixtures("migrations")
@BOTH
def test_migrations_go_down_and_up_again(catalog):
    with catalog.engine.begin() as connection:
        command.downgrade(migrate.configuration(connection), "base")
    assert inspect(catalog.engine).get_table_names() == ["alembic_version"]
    with catalog.engine.begin() as connection:
        command.upgrade(migrate.configuration(connection), "head")
    assert "runs" in inspect(catalog.engine).get_table_names()


def test_sqlite_waits_for_writers_and_keeps_references(tmp_path):
    catalog = Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite")
    with catalog.read() as session:
        connection = session.connection()
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000
    catalog.close()


@pytest.mark.usefixtures("migrations")
def test_servers_that_start_together_migrate_once(database_url):
    with ThreadPoolExecutor(4) as pool:
        catalogs = list(pool.map(lambda _: Catalog.open(database_url), range(4)))
    for catalog in catalogs:
        catalog.close()


def test_catalog_of_a_newer_version_is_left_alone(database_url):
    catalog = Catalog.open(database_url)
    with catalog.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    catalog.close()
    with pytest.raises(SettingsError, match=r"CAIRN_DATABASE_URL: .*made by a newer Cairn"):
        Catalog.open(database_url)


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "catalog.sqlite").write_text("a text of some length, but no database at all" * 9)
    with pytest.raises(SettingsError, match=r"cannot be opened: file is not a database"):
        Catalog.open(f"sqlite:///{tmp_path}/catalog.sqlite")


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite", "oracle+nothing://x", "sqlite:////proc/x/y.sqlite"]
)
def test_database_url_that_names_no_database_is_refused(url):
    with pytest.raises(SettingsError, match="CAIRN_DATABASE_URL"):
        Catalog.open(url)


def test_run_created_anew_under_an_old_name_has_nothing_of_the_old(index, catalog, root):
    run = make_run(root / "run", [1, 2])
    promote_step(run, 2, "production", expect=None)
    index.refresh_run("default", run)
    shutil.rmtree(root / "run")
    again = make_run(root / "run", [2])
    index.refresh_run("default", again)
    with catalog.read() as session:
        row = rows.find_run(session, "default", "run")
        assert rows.count(session) == (1, 1, 0)
        digest = session.scalars(select(models.CheckpointRow.manifest_digest)).one()
    assert row.latest_step == 2
    assert digest == again.step(2).manifest_digest


def test_root_that_was_moved_has_nothing_of_the_old(index, catalog, tmp_path):
    make_run(tmp_path / "old" / "run", [1, 2, 3])
    make_run(tmp_path / "new" / "run", [7])
    index.refresh_root("default", parse_uri(tmp_path / "old"))
    index.refresh_root("default", parse_uri(tmp_path / "new"))
    with catalog.read() as session:
        row = rows.find_run(session, "default", "run")
    assert (row.latest_step, row.uri) == (7, f"file://{tmp_path}/new/run")


def test_refresh_reads_nothing_while_the_folders_rest(index, root, monkeypatch):
    run = make_run(root / "run", [1])
    settle(root / "run", monkeypatch)
    taken = count_snapshots(monkeypatch)
    index.refresh_run("default", run)
    index.refresh_run("default", run)
    assert len(taken) == 1
    publish(run, 1, 2)
    index.refresh_run("default", run)
    assert len(taken) == 2


@pytest.mark.parametrize("look", ["refresh_run", "scan"])
def test_step_whose_writer_ends_in_its_middle_is_written_no_more(index, root, monkeypatch, look):
    run = make_run(root / "run", [1])
    attempt = begin_saving(run, 2)
    settle(root / "run", monkeypatch)
    taken = count_snapshots(monkeypatch)

    def state():
        if look == "scan":
            index.scan("default", parse_uri(root))
        else:
            index.refresh_run("default", run)
        with index.catalog.read() as session:
            states = select(models.CheckpointRow.state).where(models.CheckpointRow.step == 2)
            return session.scalars(states).one()

    assert [state(), state()] == ["in_flight", "in_flight"]
    assert len(taken) == 1  # while it is being written there is nothing to be read
    end_saving(run, attempt)
    assert state() == "abandoned"


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.objects.delete("manifests/1.1.json"),
        lambda run: promote_step(run, 1, "production", expect=1),
        lambda run: delete_alias(run, "production", expect=1),
        lambda run: trash(run, 1),
        lambda run: add_steps(run, [], base_step=0) or publish(run, 2, 1),
        lambda run: run.objects.write("run.json", run.info().to_bytes()),
    ],
)
def test_refresh_reads_again_after_every_change(index, root, monkeypatch, change):
    run = make_run(root / "run", [1])
    promote_step(run, 1, "production", expect=None)
    settle(root / "run", monkeypatch)
    taken = count_snapshots(monkeypatch)
    index.refresh_run("default", run)
    change(run)
    index.refresh_run("default", run)
    assert len(taken) == 2


def test_refresh_reads_again_what_has_just_changed(index, root, monkeypatch):
    run = make_run(root / "run", [1])
    taken = count_snapshots(monkeypatch)
    index.refresh_run("default", run)
    index.refresh_run("default", run)
    assert len(taken) == 2


def test_callers_that_come_together_share_a_refresh(index, root, monkeypatch):
    run = make_run(root / "run", [1])
    index.refresh_run("default", run)
    reading, proceed = threading.Event(), threading.Event()
    taken, take_snapshot = [], refresh.take_snapshot

    def slow_snapshot(*args):
        taken.append(args)
        if len(taken) == 1:
            reading.set()
            assert proceed.wait(30)
        return take_snapshot(*args)

    monkeypatch.setattr(refresh, "take_snapshot", slow_snapshot)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(index.refresh_run, "default", run)
        assert reading.wait(30)
        publish(run, 1, 2)  # the first reader may have missed it: those who come now must not
        others = [pool.submit(index.refresh_run, "default", run) for _ in range(8)]
        proceed.set()
        for future in (first, *others):
            future.result(30)
    assert 2 <= len(taken) <= 9
    with index.catalog.read() as session:
        assert rows.find_run(session, "default", "run").latest_step == 2


def test_failed_refresh_is_tried_again_by_the_next_caller(index, root, monkeypatch):
    run = make_run(root / "run", [1])
    with monkeypatch.context() as patched:
        patched.setattr("cairn.service.catalog.refresh.take_snapshot", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.refresh_run("default", run)
    index.refresh_run("default", run)
    with index.catalog.read() as session:
        assert rows.count(session)[1] == 1


def test_list_of_runs_is_what_the_store_lists(index, root):
    for name in ("b", "a", "c"):
        make_run(root / name)
    uri = parse_uri(root)
    assert index.refresh_root("default", uri) == list_runs(uri) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        {"objects": [{"name": "x", "size": 10**30}]},
        {"objects": [{"name": name, "size": 2**53 - 1} for name in "xy"]},
        {"model": {"model_type": "\ud800"}},
        {"created": "yesterday"},
    ],
)
def test_manifest_that_no_database_could_hold_is_left_out(index, root, change, caplog):
    run = make_run(root / "run", [1, 2])
    manifests = root / "run" / "manifests"
    body = json.loads((manifests / "2.1.json").read_text()) | {"step": 3, "version": 1} | change
    del body["checksum"]
    (manifests / "3.1.json").write_text(json.dumps(body))
    index.refresh_run("default", run)
    with index.catalog.read() as session:
        assert rows.find_run(session, "default", "run").latest_step == 2
    assert "manifests/3.1.json" in caplog.text


@BOTH
def test_large_run_is_indexed_whole(index, catalog, root):
    run = make_run(root / "run", [0])
    manifest = run.manifest(run.step(0))
    for step in range(1, 1500):
        other = manifest.model_copy(update={"step": step})
        body = other.with_location(
            RecordLocation(run.info().id, f"manifests/{step}.1.json")
        ).to_bytes()
        (root / "run" / "manifests" / f"{step}.1.json").write_bytes(body)
    index.refresh_run("default", Run.open(run.uri))
    with catalog.read() as session:
        row = rows.find_run(session, "default", "run")
    assert (row.checkpoint_count, row.latest_step) == (1500, 1499)
    trash(run, 1499)
    index.refresh_run("default", Run.open(run.uri))
    with catalog.read() as session:
        row = rows.find_run(session, "default", "run")
    assert (row.checkpoint_count, row.latest_step) == (1499, 1498)


def settle(folder, monkeypatch):
    """Let a minute pass, for those who look at the folder's times."""
    newest = max(path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")])
    monkeypatch.setattr(
        "cairn.service.catalog.change_tokens.time.time_ns", lambda: newest + 60_000_000_000
    )


def count_snapshots(monkeypatch):
    taken, take_snapshot = [], refresh.take_snapshot

    def counted(*args):
        taken.append(args)
        return take_snapshot(*args)

    monkeypatch.setattr(refresh, "take_snapshot", counted)
    return taken


def test_roots_that_lead_to_one_folder_are_each_indexed(index, root, monkeypatch):
    run = make_run(root / "run", [1])
    settle(root / "run", monkeypatch)
    index.refresh_run("one", run)
    index.refresh_run("two", run)
    publish(run, 1, 2)
    settle(root / "run", monkeypatch)
    index.refresh_run("one", run)
    index.refresh_run("two", run)
    with index.catalog.read() as session:
        found = [rows.find_run(session, name, "run").latest_step for name in ("one", "two")]
    assert found == [2, 2]


def test_run_indexed_while_a_root_is_listed_stays(index, root, monkeypatch):
    def listed_too_early(uri, **known):
        names = list_runs(uri, **known)
        index.refresh_run("default", make_run(root / "new", [1]))
        return names

    monkeypatch.setattr("cairn.service.catalog.refresh.list_runs", listed_too_early)
    index.refresh_root("default", parse_uri(root))
    with index.catalog.read() as session:
        assert rows.find_run(session, "default", "new") is not None


def test_older_state_written_by_another_process_is_mended(
    index, root, monkeypatch, some_database_url
):
    """A slow `cairn index rebuild` on the database of a running server."""
    run = make_run(root / "run", [1])
    index.refresh_run("default", run)
    other, take_snapshot = Index(Catalog.open(some_database_url)), refresh.take_snapshot
    with monkeypatch.context() as patched:

        def slow_snapshot(*args):
            patched.undo()
            snapshot = take_snapshot(*args)
            publish(run, 1, 2)
            settle(root / "run", monkeypatch)
            index.refresh_run("default", run)
            return snapshot

        patched.setattr(refresh, "take_snapshot", slow_snapshot)
        other.rebuild({"default": parse_uri(root)})
    other.catalog.close()
    index.refresh_run("default", run)
    with index.catalog.read() as session:
        assert rows.find_run(session, "default", "run").latest_step == 2
