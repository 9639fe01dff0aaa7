"""`cairn init`, and the file of variables that it makes."""

import json
import os
import stat
import subprocess

import pytest

from cairn.service.settings import load_settings
from tests.service.commands import cairn, cairn_here, environment
from tests.service.planes import running_plane
from tests.service.seams import variables


def test_what_init_sets_up_is_what_every_other_command_goes_by(tmp_path):
    folder = tmp_path / "my runs"
    made = cairn_here("init", str(folder))
    assert (made.returncode, made.stdout) == (0, f"{folder}/cairn.env\n")
    assert f"export CAIRN_ENV_FILE='{folder}/cairn.env'" in made.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["cairn.env", "data", "store"]
    assert stat.S_IMODE((folder / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "cairn.env").stat().st_mode) == 0o600
    assert list((folder / "store").iterdir()) == []  # nothing of the probe stays
    told = cairn_here("--env-file", str(folder / "cairn.env"), "doctor", "--json", "--timeout", "1")
    found = [one["found"] for one in json.loads(told.stdout)["findings"]]
    assert f"CAIRN_ROOT={folder}/store" in found
    assert any("http://127.0.0.1:8321" in one for one in found), "the server that is asked"


def test_a_shell_reads_the_file_as_the_command_does(tmp_path):
    odd = tmp_path / "it's $HOME"
    cairn_here("init", str(odd), "--port", "9000")
    ours: dict[str, str] = {}
    variables.read_env_file(odd / "cairn.env", ours)
    script = 'set -a; . "$1"; env -0'
    shell = subprocess.run(
        ["env", "-i", "sh", "-c", script, "sh", str(odd / "cairn.env")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    assert {line for line in shell if line.startswith("CAIRN_")} == {
        f"{name}={value}" for name, value in ours.items()
    }
    assert ours["CAIRN_ROOT"] == str(odd / "store")


def test_init_again_changes_nothing_and_other_settings_are_never_replaced(tmp_path):
    path = tmp_path / "cairn.env"
    cairn_here("init", str(tmp_path))
    assert cairn_here("init", str(tmp_path)).returncode == 0
    path.write_text(path.read_text() + "CAIRN_POLICIES='[]'\n")
    mine = path.read_bytes()
    refused = cairn_here("init", str(tmp_path))
    assert (refused.returncode, refused.stdout) == (4, "")
    assert f"{path}: expected nothing, or what would be written there" in refused.stderr
    assert path.read_bytes() == mine


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    refused = cairn_here("init", str(tmp_path / "new"), "--root", str(tmp_path / "file" / "runs"))
    assert refused.returncode not in (0, 2)
    assert str(tmp_path / "file") in refused.stderr
    assert not (tmp_path / "new" / "cairn.env").exists()
    wrong = cairn_here("init", str(tmp_path / "new"), "--root", "ftp://host/runs")
    assert (wrong.returncode, "ftp" in wrong.stderr) == (2, True)


def test_another_root_is_named_and_what_wins_over_the_file_is_told(tmp_path):
    made = cairn_here(
        "init", str(tmp_path), "--root", str(tmp_path / "runs"), "--json", CAIRN_PORT="9"
    )
    told = json.loads(made.stdout)
    assert (told["root"], told["env_file"]) == (f"{tmp_path}/runs", f"{tmp_path}/cairn.env")
    assert not (tmp_path / "store").exists()
    again = cairn_here("init", str(tmp_path), "--root", str(tmp_path / "runs"), CAIRN_PORT="9")
    assert "CAIRN_PORT is set to '9' here, and wins" in again.stderr


def test_commands_ask_the_server_that_the_file_names_unless_the_environment_names_one(tmp_path):
    (tmp_path / "store").mkdir()
    with running_plane(tmp_path / "store", tmp_path) as (url, _):
        file = tmp_path / "other.env"
        file.write_text(f"# ours\n\nexport CAIRN_URL={url}\n")
        assert cairn("--env-file", str(file), "runs").returncode == 0
        assert cairn("runs", CAIRN_ENV_FILE=str(file)).returncode == 0
        nobody = "http://127.0.0.1:1"
        assert cairn("runs", url=nobody, CAIRN_ENV_FILE=str(file)).returncode == 6


@pytest.mark.parametrize("line", ["CAIRN_KEY hunter2", "'hunter2", "A=1 B=hunter2", "1A=hunter2"])
def test_a_line_that_is_no_setting_is_named_without_what_it_says(tmp_path, line):
    file = tmp_path / "odd.env"
    file.write_text(f"CAIRN_PORT=9000\n{line}\n")
    done = cairn_here("--env-file", str(file), "runs")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{file}: expected NAME=VALUE" in done.stderr
    assert "line 2" in done.stderr
    assert "hunter2" not in done.stderr


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    done = cairn_here("--env-file", str(tmp_path / "none.env"), "runs")
    assert (done.returncode, "`cairn init` makes one" in done.stderr) == (1, True)


def test_values_with_json_in_them_are_settings(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("CAIRN_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "gates.env"
    gate = '{"kind": "gate", "name": "checked", "alias": "production", "verified": true}'
    file.write_text(f"CAIRN_POLICIES='[{gate}]'  # a comment\n")
    given = environment()
    variables.read_env_file(file, given)
    monkeypatch.setenv("CAIRN_POLICIES", given["CAIRN_POLICIES"])
    assert load_settings().policies[0].verified
