"""`cairn pull`: an export on a machine that serves it."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from cairn import Client, Damage, Run, Settings, create_app
from cairn.service.client.addresses import Address
from cairn.service.client.lookup import find_checkpoint
from cairn.service.client.pull import pull
from cairn.service.command.failures import ExitStatus
from cairn.service.errors import PullConflictError, PullError
from cairn.storage.runs.annotate import note_verified
from tests.bad_input.disks import can_mount, on_small_disk
from tests.programs.program import Program
from tests.service.access.conftest import Keys
from tests.service.commands import CAIRN, cairn_here, cairn_on_a_terminal, environment
from tests.service.jobs import CONFIG, save_llama
from tests.service.planes import running_plane
from tests.service.servers import serve
from tests.storage.held_names import HeldNames

EMBEDDING = ("model/embed_tokens/embedding", "model.embed_tokens.weight")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pulled")
    leaves = save_llama(folder / "store" / "llama", (1, 2, 3))
    (folder / "data").mkdir()
    with running_plane(folder / "store", folder / "data") as (url, _):
        yield url, leaves, folder / "store"


@pytest.fixture
def client(saved):
    with Client(saved[0]) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(saved, tmp_path_factory):
    """A control plane of the same store that asks for keys, and the keys of its database."""
    data = tmp_path_factory.mktemp("guarded")
    settings = Settings(root=str(saved[2]), data_dir=data, scan_seconds=0, auth="keys")
    settings.prepare()
    with serve(create_app(settings, jobs=False)) as url:
        yield url, Keys(settings.database_url)


def move(client, step, run="llama"):
    seen = [one.sequence for one in client.aliases(run) if one.alias == "production"]
    client.promote(run, step, "production", expect=seen[0] if seen else None)


def started(arguments, url):
    """The command in a process of its own, which goes on."""
    return Program(
        [*CAIRN, *arguments],
        env=environment(url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def served(folder):
    """The embedding that a folder serves."""
    return load_file(folder / "current" / "model.safetensors")[EMBEDDING[1]]


def same(folder, leaves, step):
    np.testing.assert_array_equal(served(folder), leaves[step][EMBEDDING[0]])


def test_a_folder_serves_what_the_alias_names(saved, client, tmp_path):
    url, leaves, _ = saved
    move(client, 1)
    done = cairn_here("pull", "llama@production", str(tmp_path / "models"), "--json", url=url)
    told = json.loads(done.stdout)
    assert (told["step"], told["changed"]) == (1, True)
    same(tmp_path / "models", leaves, 1)
    assert {"config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "models" / "current").iterdir()
    }
    move(client, 2)
    before = os.readlink(tmp_path / "models" / "current")
    done = cairn_here("pull", "llama@production", str(tmp_path / "models"), url=url)
    assert done.stdout == f"llama/steps/2: {(tmp_path / 'models' / 'versions').resolve()}/" + (
        os.readlink(tmp_path / "models" / "current").partition("/")[2] + "\n"
    )
    same(tmp_path / "models", leaves, 2)
    assert (tmp_path / "models" / before / "model.safetensors").is_file(), "the old one stays"
    trail = cairn_here("audit", "--json", url=url).stdout
    again = cairn_here("pull", "llama@production", str(tmp_path / "models"), "--json", url=url)
    assert json.loads(again.stdout)["changed"] is False
    assert cairn_here("audit", "--json", url=url).stdout == trail, "no export was asked for"
    cairn_here("pull", "llama@production", str(tmp_path / "models"), "--keep", "0", url=url)
    assert len(list((tmp_path / "models" / "versions").iterdir())) == 1


def test_a_command_runs_once_for_each_version_that_is_served(saved, client, tmp_path):
    models, told = tmp_path / "models", tmp_path / "told"
    show = f'cat "$PULLED_FOLDER/config.json" >/dev/null && echo $PULLED_STEP >> {told}'

    def pull_with(command, step):
        move(client, step)
        return cairn_here("pull", "llama@production", str(models), "--exec", command, url=saved[0])

    failed = pull_with(f"exit 3 # {'a restart ' * 20}", 1)
    assert failed.returncode != 0
    assert "cairn: exit status 3 of the command of --exec, 'exit 3 # a restart " in failed.stderr
    assert f"…', after {models}/current changed to 000000000001-" in failed.stderr
    for step in (1, 1, 2):
        assert pull_with(show, step).returncode == 0
    assert told.read_text() == "1\n2\n"
    # Back after a version that does not start: the command has to run again.
    assert pull_with("exit 3", 1).returncode != 0
    assert pull_with(show, 2).returncode == 0
    assert told.read_text() == "1\n2\n2\n"


def test_a_folder_may_serve_one_file_for_llama_cpp(saved, client, tmp_path):
    move(client, 1)
    arguments = ("pull", "llama@production", str(tmp_path / "models"))
    assert cairn_here(*arguments, "--format", "gguf", url=saved[0]).returncode == 0
    current = tmp_path / "models" / "current"
    assert {file.name for file in current.iterdir()} == {"model.gguf", "pulled.json"}
    assert (current / "model.gguf").read_bytes()[:4] == b"GGUF"
    refused = cairn_here(*arguments, "--dtype", "float16", url=saved[0])
    assert refused.returncode == ExitStatus.CONFLICT
    assert "is an export with format=gguf, and this pull asks for one with dtype=float16" in (
        refused.stderr
    )
    assert (current / "model.gguf").is_file(), "it serves what it served"
    current.unlink()
    assert cairn_here(*arguments, "--dtype", "float16", url=saved[0]).returncode == 0


def test_a_folder_says_what_it_serves(saved, client, tmp_path):
    pulled = pull(client, "llama", 1, tmp_path, root="default", options={"dtype": "float32"})
    said = json.loads((tmp_path / "current" / "pulled.json").read_text())
    assert said.pop("options")["dtype"] == "float32"
    place = {"root": "default", "run": "llama", "step": 1, "attempt": 1}
    assert said == {"id": pulled.artifact, **place}


def test_an_export_that_exists_is_pulled_with_a_key_that_may_read(saved, client, guarded, tmp_path):
    url, keys = guarded
    client.wait(client.convert("llama", 2).id)
    asked = {"url": url, "CAIRN_KEY": keys.make("serving")}
    assert cairn_here("pull", "llama/steps/2", str(tmp_path / "a"), **asked).returncode == 0
    same(tmp_path / "a", saved[1], 2)
    new = ("pull", "llama/steps/2", str(tmp_path / "b"), "--max-shard-size", "14KB")
    refused = cairn_here(*new, **asked)
    assert (refused.returncode, (tmp_path / "b").exists()) == (ExitStatus.NOT_FOUND, False)
    assert "expected max_shard_size=14kB, found exports with default options" in refused.stderr
    assert "`cairn convert default/llama/steps/2 --max-shard-size 14KB --watch`" in refused.stderr
    assert "Your key may not make it" in refused.stderr


def test_artifacts_of_a_step_are_listed(saved, client):
    made = [
        client.wait(client.convert("llama", 3, **options).id).result["artifact_id"]
        for options in ({"dtype": "float16"}, {"format": "gguf"})
    ]
    done = cairn_here("artifacts", "llama/steps/3", "--json", url=saved[0])
    listed = json.loads(done.stdout)["artifacts"]
    assert [one["id"] for one in listed] == made[::-1]
    move(client, 3)
    table = cairn_here("artifacts", "llama@production", url=saved[0]).stdout.splitlines()
    titles, *rows = (line.split("\t") for line in table)
    gguf, floats = (dict(zip(titles, row, strict=True)) for row in rows)
    assert (floats["options"], floats["id"]) == ("dtype=float16", made[0])
    exports = f"{saved[0]}/v1/roots/default/runs/llama/exports/production"
    assert floats["address"] == f"{exports}/files/NAME?dtype=float16"
    assert listed[1]["address"] == floats["address"].replace("production", "3")
    file = httpx.get(gguf["address"].replace("NAME", "model.gguf"))
    assert file.content[:4] == b"GGUF"
    status, shown = cairn_on_a_terminal("artifacts", "llama@production", url=saved[0])
    assert "convert with dtype=float16: 4 files, " in shown
    assert status == 0
    assert cairn_here("artifacts", "llama/steps/99", url=saved[0]).returncode == 3


def test_a_step_without_artifacts_says_which_steps_have_some(saved, client):
    url, _, root = saved
    save_llama(root / "without", (1, 2))
    none = cairn_here("artifacts", "without", url=url).stderr
    assert none == "none of step 2; `cairn convert default/without/steps/2` makes an export\n"
    client.wait(client.convert("without", 1).id)
    other = cairn_here("artifacts", "without", url=url).stderr
    assert other == "none of step 2; steps with artifacts: 1\n"


def test_a_watched_folder_follows_the_alias(saved, client, tmp_path):
    url, leaves, _ = saved
    move(client, 1)
    arguments = ["pull", "llama@production", str(tmp_path / "models"), "--watch", "--every", "0.2s"]
    with started(arguments, url) as process:
        assert "llama/steps/1: " in process.stdout.readline()
        move(client, 3)
        assert "llama/steps/3: " in process.stdout.readline()
        same(tmp_path / "models", leaves, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_watch_says_once_that_what_it_serves_was_found_damaged(saved, monkeypatch, tmp_path):
    run = Run.open(saved[2] / "llama")

    def another_look(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            note_verified(run, run.step(3), damage=Damage(at="2026-01-02T03:04:05Z"))
            cairn_here("show", "llama/steps/3", url=saved[0])  # has the server look, too
        if len(looks) == 4:
            raise KeyboardInterrupt

    looks = []
    monkeypatch.setattr("cairn.service.command.pull.time.sleep", another_look)
    done = cairn_here("pull", "llama/steps/3", str(tmp_path / "models"), "--watch", url=saved[0])
    note_verified(run, run.step(3))
    cairn_here("show", "llama/steps/3", url=saved[0])
    assert done.stderr.count("llama/steps/3 was found damaged after it was pulled") == 1
    same(tmp_path / "models", saved[1], 3)


def partial_of(folder):
    return list((folder / "partial").rglob("model.safetensors"))


def test_a_fetch_that_broke_off_goes_on_where_it_was(saved, client, tmp_path):
    leaves = saved[1]
    fetched = []

    class Broken(Exception):
        pass

    def break_off(name, done, total):
        if name == "model.safetensors":
            raise Broken

    def take(tell):
        return pull(client, "llama", 2, tmp_path, root="default", options={}, tell=tell)

    with pytest.raises(Broken):
        take(break_off)
    (part,) = partial_of(tmp_path)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1000])
    assert not (tmp_path / "current").exists()
    real = client.artifact_blocks

    def counted(artifact, name, *, start=0):
        fetched.append((name, start))
        return real(artifact, name, start=start)

    client.artifact_blocks = counted
    take(lambda *told: None)
    assert ("model.safetensors", len(whole) - 1000) in fetched
    same(tmp_path, leaves, 2)


def test_what_is_not_what_was_exported_is_fetched_anew_and_never_served(saved, client, tmp_path):
    leaves = saved[1]
    pulled = pull(client, "llama", 1, tmp_path / "a", root="default", options={})
    part = tmp_path / "b" / "partial" / pulled.folder.name
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"x" * 1000)
    (part / "stray").write_bytes(b"x")
    pull(client, "llama", 1, tmp_path / "b", root="default", options={})
    same(tmp_path / "b", leaves, 1)
    assert not (tmp_path / "b" / "current" / "stray").exists()
    client.artifact_blocks = lambda artifact, name, start=0: iter([b"forged"])
    with pytest.raises(PullError, match="crc32c"):
        pull(client, "llama", 2, tmp_path / "b", root="default", options={})
    same(tmp_path / "b", leaves, 1)


def test_two_that_pull_into_one_folder_do_not(saved, client, tmp_path):
    def also(name, done, total):
        pull(client, "llama", 2, tmp_path, root="default", options={})

    with pytest.raises(PullConflictError, match="no other process"):
        pull(client, "llama", 1, tmp_path, root="default", options={}, tell=also)


def test_something_else_called_current_is_left_alone(saved, client, tmp_path):
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "mine").touch()
    with pytest.raises(PullConflictError, match="a link that Cairn made"):
        pull(client, "llama", 1, tmp_path, root="default", options={})
    assert (tmp_path / "current" / "mine").exists()


@pytest.mark.parametrize("there", [True, False])
def test_somebodys_own_link_called_current_is_left_alone(saved, client, tmp_path, there):
    own = tmp_path / "own"
    if there:
        own.mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "current").symlink_to(own)
    with pytest.raises(PullConflictError, match=f"found one to {own}"):
        pull(client, "llama", 1, tmp_path / "models", root="default", options={})
    assert (tmp_path / "models" / "current").readlink() == own


def test_a_watch_goes_back_after_a_version_that_does_not_start(saved, client, tmp_path):
    url = saved[0]
    arguments = ["pull", "llama@production", str(tmp_path / "models"), "--watch"]
    arguments += ["--every", "0.1s", "--exec", "[ $PULLED_STEP = 2 ]"]
    move(client, 2)
    with started(arguments, url) as process:
        assert "llama/steps/2: " in process.stdout.readline()
        for step in (1, 2):
            move(client, step)
            assert f"llama/steps/{step}: " in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(30)


def test_a_watch_outlives_a_server_that_goes_away(tmp_path):
    leaves = save_llama(tmp_path / "store" / "llama", (1,))
    (tmp_path / "data").mkdir()
    models = tmp_path / "models"
    arguments = ["pull", "llama", str(models), "--watch", "--every", "0.1s"]
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        process = started(arguments, url)
        assert "llama/steps/1: " in process.stdout.readline()
        watching = r"[-\d]{10} [:\d]{8} UTC llama: watching for new steps; press Ctrl-C to stop.\n"
        assert re.fullmatch(watching, process.stderr.readline())
    away = process.stderr.readline()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC llama: ", away)
    assert away.endswith("Trying again every 0.1 s.\n")
    same(models, leaves, 1)
    port = int(url.rpartition(":")[2])
    with running_plane(tmp_path / "store", tmp_path / "data", port=port):
        assert "llama: the control plane answers again." in process.stderr.readline(), (
            "one line, however often it was asked meanwhile"
        )
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_a_step_that_was_saved_anew_is_served_and_not_called_what_an_alias_names(
    saved, client, tmp_path
):
    url, _, root = saved
    before = save_llama(root / "anew", (1, 2))
    models, other = tmp_path / "models", tmp_path / "other"
    move(client, 2, "anew")
    arguments = ["pull", "anew/steps/2", str(models), "--watch", "--every", "0.2s"]
    with started(arguments, url) as process:
        assert "anew/steps/2: " in process.stdout.readline()
        same(models, before, 2)
        arguments = ("anew/steps/1", "--strand", "production", "--watch")
        assert cairn_here("rollback", *arguments, url=url).returncode == 0
        smaller = replace(CONFIG, vocab_size=96)
        anew = save_llama(root / "anew", (2,), config=smaller)
        assert client.announce("anew", 2).attempt == 3
        refused = cairn_here("pull", "anew@production", str(other), url=url)
        assert "expected step 2 of attempt 1" in refused.stderr
        assert not other.exists()
        assert "anew/steps/2: " in process.stdout.readline()
        same(models, anew, 2)
        process.send_signal(signal.SIGINT)
        process.wait(30)


def test_a_full_disk_serves_what_it_served_and_goes_on_once_there_is_room(saved, tmp_path):
    url, leaves, _ = saved
    for step in (1, 2):
        assert cairn_here("convert", f"llama/steps/{step}", "--watch", url=url).returncode == 0
    pull = f"{sys.executable} -m cairn pull --keep 0 --url {url}"
    refused = f"{pull} llama/steps/2 models; echo $?"
    full, complaint = f"(ulimit -f 20; {refused})", "File too large"
    if can_mount():
        full, complaint = (
            f"head -c 130000 /dev/zero > x; {refused}; rm x",
            "No space left on device",
        )
    script = f"""
        {pull} llama/steps/1 models && cp -r models/current/. {tmp_path}/first
        {full}
        cp -r models/current/. {tmp_path}/kept
        {pull} llama/steps/2 models && cp -r models/current/. {tmp_path}/second
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["sh", "-c", f"cd {disk}; {script}"]
    command = on_small_disk(disk, "330k", *command) if can_mount() else command
    done = subprocess.run(command, capture_output=True, text=True)
    assert complaint in done.stderr, done.stderr
    assert "\n1\n" in done.stdout, done.stdout
    for name, step in (("first", 1), ("kept", 1), ("second", 2)):
        found = load_file(tmp_path / name / "model.safetensors")[EMBEDDING[1]]
        np.testing.assert_array_equal(found, leaves[step][EMBEDDING[0]])


def test_a_step_that_is_saved_anew_before_it_is_exported_is_not_served_as_the_one_meant(
    saved, client, tmp_path
):
    move(client, 2)
    for address, step in (("llama@production", 2), ("llama/steps/2", 2), ("llama", 3)):
        found = find_checkpoint(client, Address.parse(address), "default")
        assert (found.run, found.step, found.attempt) == ("llama", step, 1)
    asked = {"root": "default", "options": {}}
    with pytest.raises(PullError, match=r"expected that of attempt 7, found that of attempt 1"):
        pull(client, "llama", 2, tmp_path / "models", attempt=7, **asked)
    assert not (tmp_path / "models").exists()
    assert pull(client, "llama", 2, tmp_path / "models", attempt=1, **asked).changed


def test_an_address_that_can_not_be_exported_fails(saved, tmp_path):
    done = cairn_here("pull", "llama/steps/9", str(tmp_path / "models"), url=saved[0])
    assert done.returncode == 3
    assert not (tmp_path / "models").exists()
    assert Path(tmp_path).is_dir()


def test_what_a_folder_serves_outlasts_a_power_failure(saved, client, tmp_path, monkeypatch):
    folder = tmp_path / "made" / "models"
    held = HeldNames(monkeypatch)

    def pulled(step):
        serves = pull(client, "llama", step, folder, root="default", options={}).folder
        link = f"versions/{serves.name}"
        assert (held.names(folder) or {}).get("current") == link
        assert held.lost(serves, below=tmp_path) == []
        fetched = held.names(folder / "partial" / serves.name)  # as it was called then
        assert fetched.keys() == {path.name for path in serves.iterdir()}
        held.names(serves.parent).clear()
        held.names(folder).clear()
        return serves

    serves = pulled(1)
    pull(client, "llama", 1, folder, root="default", options={})  # as if that one had died
    assert held.names(folder)["current"] == f"versions/{serves.name}"
    assert serves.name in held.names(serves.parent)
    pulled(2)


def test_a_disk_that_does_not_keep_the_link_is_told_with_what_it_serves(
    saved, client, tmp_path, monkeypatch
):
    asked = {"root": "default", "options": {}}
    pull(client, "llama", 1, tmp_path, **asked)

    def failing(folder):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("cairn.service.client.pull.sync_entries", failing)
        with pytest.raises(PullError, match=r"leads to .*/000000000002-1-.* now, and may lead"):
            pull(client, "llama", 2, tmp_path, **asked)
    same(tmp_path, saved[1], 2)
    assert pull(client, "llama", 2, tmp_path, **asked).step == 2


def test_a_version_whose_removal_broke_off_is_not_served_again(
    saved, client, tmp_path, monkeypatch
):
    asked = {"root": "default", "options": {}}
    old = pull(client, "llama", 1, tmp_path, **asked).folder

    def broken(folder, **options):
        if (Path(folder) / "config.json").exists():
            (Path(folder) / "config.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", broken)
        with pytest.raises(KeyboardInterrupt):
            pull(client, "llama", 2, tmp_path, keep=0, **asked)
    assert pull(client, "llama", 1, tmp_path, keep=0, **asked).folder == old
    assert (tmp_path / "current" / "config.json").exists()
    same(tmp_path, saved[1], 1)
    assert list((tmp_path / "partial").iterdir()) == []
