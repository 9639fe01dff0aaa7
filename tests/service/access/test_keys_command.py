"""`cairn keys`, and the key of a client: in the environment or in a file."""

import json
import logging
import os
from importlib.metadata import entry_points

import httpx
import pytest

from cairn import Client, SettingsError
from cairn.service.errors import ProblemResponseError
from tests.service.access.conftest import bearer
from tests.service.commands import cairn_here
from tests.service.servers import serve
from tests.service.stores import make_run
from tests.service.trail import audit_trail


@pytest.fixture
def shell(settings, root, tmp_path):
    """Runs the command with the server's settings."""
    given = {"CAIRN_DATA_DIR": str(settings.data_dir), "CAIRN_ROOT": str(root)}
    return lambda *arguments, **more: cairn_here(*arguments, **given, **more)


def test_key_is_made_listed_and_revoked_at_the_shell(shell, http, keys):
    done = shell("keys", "create", "--name", "ci", "--scope", "operate", "--expires", "90d")
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    assert key.split("_")[1] in done.stderr
    assert key not in done.stderr
    assert http.get("/v1/runs", headers=bearer(key)).status_code == 200
    listed = shell("keys", "list")
    row = dict(zip(*(line.split("\t") for line in listed.stdout.splitlines()), strict=True))
    assert (row["name"], row["scope"], row["roots"], row["active"]) == (
        "ci",
        "operate",
        "all",
        "yes",
    )
    assert row["expires"] > row["created (UTC)"]
    assert key.split("_", 2)[2] not in listed.stdout
    assert shell("keys", "revoke", row["key"]).stdout == f"key {row['key']} revoked\n"
    assert "\tno\t" in shell("keys", "list").stdout
    entries = audit_trail(http, bearer(keys.make("boss", "admin")))
    assert [entry.action for entry in entries] == ["key.create", "key.revoke"]
    assert all(entry.caller.startswith("shell:") for entry in entries)
    assert key not in str(entries)


def test_key_goes_into_a_file_for_its_owner_alone_that_was_not_there(shell, http, tmp_path):
    create = ("keys", "create", "--name", "ci", "--output")
    file, missing = tmp_path / "ci.key", tmp_path / "missing" / "ci.key"
    file.symlink_to(tmp_path / "elsewhere")
    for path, part in ((file, "expected no file, found one"), (missing, "No such file")):
        done = shell(*create, str(path))
        assert (done.returncode != 0, done.stdout) == (True, "")
        assert part in " ".join(done.stderr.split()).replace("│ ", "")
    assert not (tmp_path / "elsewhere").exists()
    file.unlink()
    assert shell(*create[:-2], "loopback", "--output", str(file)).returncode != 0
    assert not file.exists()
    before = os.umask(0o022)
    try:
        done = shell(*create, str(file))
    finally:
        os.umask(before)
    assert (done.returncode, done.stdout, file.stat().st_mode & 0o777) == (0, "", 0o600)
    assert http.get("/v1/runs", headers=bearer(file.read_text().strip())).status_code == 200
    assert f"saved in {file}; set CAIRN_KEY_FILE" in done.stderr
    again = shell(*create[:-2], "other", "--output", str(tmp_path / "other.key"), "--json")
    assert json.loads(again.stdout)["name"] == "other"
    assert (tmp_path / "other.key").read_text().strip() not in again.stdout


def test_keys_are_told_to_programs_as_the_api_tells_them(shell):
    made = json.loads(shell("keys", "create", "--name", "ci", "--json").stdout)
    listed = json.loads(shell("keys", "list", "--json").stdout)["keys"]
    assert (listed, made["key"][:3]) == ([made["details"]], "ck_")
    revoked = json.loads(shell("keys", "revoke", listed[0]["id"], "--json").stdout)
    assert (revoked["id"], revoked["counts"]) == (listed[0]["id"], False)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--name", "a b"), "not a valid name"),
        (("--name", "ci", "--expires", "soon"), "expected a number with"),
        (("--name", "ci", "--expires", "0d"), "not a valid lifetime"),
        (
            ("--name", "ci", "--root", "elsewhere"),
            "there is no root 'elsewhere'. Choose from",
        ),
        (("--name", "ci", "--root", "a b"), "not a valid name"),
        (("--name", "loopback"), "is reserved for callers without a key"),
        (("--name", "ci", "--expires", "999999999999w"), "years"),
        (("--name", "ci", "--scope", "root"), "--scope"),
    ],
)
def test_key_that_could_not_count_is_not_made(shell, arguments, part):
    done = shell("keys", "create", *arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    assert part in " ".join(done.stderr.split()).replace("│ ", "")
    assert shell("keys", "list").stdout.count("\n") == 1


def test_keys_of_a_server_are_made_listed_and_revoked_with_a_key_for_it(app, keys):
    with serve(app) as url:
        own = {"url": url, "CAIRN_KEY": keys.make("boss", "admin")}
        made = cairn_here("keys", "create", "--name", "ci", "--root", "other", **own)
        assert made.returncode == 0, made.stderr
        assert f"Of the control plane {url}" in made.stderr
        listed = json.loads(cairn_here("keys", "list", "--json", **own).stdout)["keys"]
        assert [(key["name"], key["roots"]) for key in listed] == [
            ("boss", None),
            ("ci", ["other"]),
        ]
        revoked = cairn_here("keys", "revoke", listed[1]["id"], "--json", **own)
        assert json.loads(revoked.stdout)["counts"] is False
        refused = cairn_here("keys", "list", url=url, CAIRN_KEY=made.stdout.strip())
        assert (refused.returncode != 0, "key" in refused.stderr) == (True, True)


def test_a_server_and_a_database_that_both_fit_are_named_and_one_has_to_be_chosen(
    app, keys, settings
):
    with serve(app) as url:
        both = {"url": url, "CAIRN_KEY": keys.make("boss", "admin")}
        both["CAIRN_DATA_DIR"] = str(settings.data_dir)
        done = cairn_here("keys", "list", **both)
        assert (done.returncode, done.stdout) == (1, "")
        for part in (url, "CAIRN_DATA_DIR", "--url URL", "--data-dir"):
            assert part in " ".join(done.stderr.split())
        for choice, place in (
            (("--url", url), f"Of the control plane {url}"),
            (("--data-dir", str(settings.data_dir)), str(settings.data_dir)),
        ):
            chosen = cairn_here("keys", "list", *choice, **both)
            assert "boss" in chosen.stdout
            assert place in chosen.stderr
        neither = cairn_here("keys", "list", "--url", url, "--data-dir", "x", **both)
        assert (neither.returncode, "Give one of them" in neither.stderr) == (1, True)


def test_key_that_is_not_there_cannot_be_revoked(shell):
    done = shell("keys", "revoke", "a" * 12)
    assert (done.returncode, "There is no key with the id" in done.stderr) == (3, True)


def test_client_takes_its_key_from_the_environment_or_a_file(
    app, keys, monkeypatch, tmp_path, root
):
    make_run(root / "run", [1])
    key, other = keys.make("ci"), keys.make("other", "admin")
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    monkeypatch.delenv("CAIRN_KEY", raising=False)
    with serve(app) as url:
        with Client(url) as client, pytest.raises(ProblemResponseError, match="CAIRN_KEY"):
            list(client.runs())
        monkeypatch.setenv("CAIRN_KEY_FILE", str(file))
        with Client(url) as client:
            assert [run.name for run in client.runs()] == ["run"]
        file.write_text(key[:-3] + "AAA")
        with Client(url) as client:
            for text in (file.read_text(), ""):  # as it was, and while it is being replaced
                file.write_text(text)
                with pytest.raises(ProblemResponseError, match="Not signed in"):
                    list(client.runs())
            file.write_text(key)  # another key, in the same file, while the client goes on
            assert [run.name for run in client.runs()] == ["run"]
        monkeypatch.setenv("CAIRN_KEY", other)
        with Client(url) as client:  # the variable comes before the file
            made = client.create_key("third", scope="operate", expires_seconds=60)
            found = client.keys()
            assert [one.name for one in found] == ["ci", "other", "third"]
            client.revoke_key(made.details.id)
        with Client(url, key=made.key) as client, pytest.raises(ProblemResponseError) as raised:
            client.roots()
    assert raised.value.status == 401
    assert made.key not in f"{raised.value} {raised.value.problem} {client!r} {client._http!r}"


@pytest.mark.parametrize("text", ["", " \n", "two words", "line\nbreak", "ключ"])
def test_text_that_can_be_no_key_is_refused_without_repeating_it(text, tmp_path, monkeypatch):
    monkeypatch.delenv("CAIRN_KEY", raising=False)
    (tmp_path / "key").write_text(text)
    monkeypatch.setenv("CAIRN_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(SettingsError, match=r"CAIRN_KEY_FILE: .*/key: expected a") as raised:
        Client("http://127.0.0.1:1")
    assert not text.strip() or text.strip() not in str(raised.value)


def test_key_file_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("CAIRN_KEY", raising=False)
    monkeypatch.setenv("CAIRN_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="none: expected a file with a key, found: No such"):
        Client("http://127.0.0.1:1")


def test_a_jobs_wrong_key_is_logged_once_and_not_told(app, keys, root, monkeypatch, caplog):
    make_run(root / "run", [1])
    run = f"file://{root}/run"
    wrong = keys.make("ci")[:-3] + "AAA"
    monkeypatch.setattr("cairn.service.client.announcing._failed", False)
    (point,) = entry_points(group="cairn.durable_steps")
    announce = point.load()
    with serve(app) as url:
        monkeypatch.setenv("CAIRN_URL", url)
        monkeypatch.setenv("CAIRN_KEY", wrong)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                announce(run, 1, 1)
            monkeypatch.setenv("CAIRN_KEY", "no key at all")
            announce(run, 1, 1)  # raises nothing
            monkeypatch.setenv("CAIRN_KEY", keys.make("trainers"))
            announce(run, 1, 1)
            monkeypatch.setenv("CAIRN_KEY", wrong)
            announce(run, 1, 1)
        assert httpx.get(f"{url}/v1/runs", headers=bearer(wrong)).status_code == 401
    lines = [one.getMessage() for one in caplog.records if "was not told" in one.getMessage()]
    assert len(lines) == 2, "once, and once more after one that was told"
    assert all("This server does not know the key" in line for line in lines)
    assert wrong not in caplog.text
