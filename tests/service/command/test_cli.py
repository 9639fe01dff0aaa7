"""The `cairn` command against a control plane in a process of its own."""

import json
import math
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cairn import Client, Manifest, Run, annotate_step, delete_step
from cairn.storage.runs.annotate import note_verified
from tests.service.commands import (
    MEANINGS,
    ExitStatus,
    cairn,
    cairn_here,
    cairn_on_a_terminal,
    whole_command,
)
from tests.service.planes import running_plane
from tests.service.stores import begin_saving, make_run, publish
from tests.service.tiny_run import copy_tiny_run

LONG_NAME = "llama-3.2-1b-instruct-sft-with-a-name-that-is-longer-than-one-line-of-eighty-columns"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A store with a real run, a damaged copy, one with a long name, and one without steps."""
    root = tmp_path_factory.mktemp("store")
    copy_tiny_run(root)
    shutil.copytree(root / "tiny", root / "damaged")
    for data in (root / "damaged" / "attempts" / "1" / "2" / "model").glob("**/d/*"):
        data.write_bytes(bytes(data.stat().st_size))
    make_run(root / LONG_NAME, [10])
    publish(Run.open(root / LONG_NAME), 1, 20, iterators={"train": 4, "test": 4})
    begin_saving(make_run(root / "saving", [1]), 2)
    make_run(root / "empty")
    return root


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def refused(done: subprocess.CompletedProcess[str], *parts: str, status: int = 1) -> None:
    """One line on standard error that says these things, and nothing on standard output."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.strip()
    assert line.count("\n") == 0, line
    assert line.startswith("cairn: ")
    for part in parts:
        assert part in line


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    titles, *lines = done.stdout.splitlines()
    return [dict(zip(titles.split("\t"), line.split("\t"), strict=True)) for line in lines]


def result(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_runs_are_whole_tab_separated_values_in_a_pipe(url):
    done = cairn("runs", url=url)
    found = {row["run"]: row for row in rows(done)}
    assert {"tiny", LONG_NAME} <= set(found)
    assert found["tiny"]["latest"] == "2"
    assert found["tiny"]["checkpoints"] == "2"
    assert int(found["tiny"]["size"]) > 100_000
    assert found["tiny"]["created (UTC)"].endswith("Z")
    assert found["empty"]["latest"] == ""
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout


def test_runs_are_whole_on_a_narrow_terminal(url):
    status, shown = cairn_on_a_terminal("runs", url=url)
    assert status == 0
    assert LONG_NAME in shown
    assert "…" not in shown
    assert "created (UTC)" in shown


@pytest.mark.parametrize("arguments", ["runs --url {url}", "--help"])
def test_a_pipe_that_closes_early_ends_quietly_as_if_killed_by_it(url, arguments):
    command = f"{sys.executable} -m cairn {arguments.format(url=url)}"
    done = subprocess.run(
        ["bash", "-c", f"exec 3> >(true); sleep 0.1; {command} >&3"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_can_not_be_written_is_one_line(url):
    command = f"{sys.executable} -m cairn runs --url {url}"
    done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
    refused(done, "standard output", "No space left on device")
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_checkpoints_of_every_state_are_listed_when_asked_for(url, root):
    assert [row["step"] for row in rows(cairn_here("checkpoints", "tiny", url=url))] == ["2", "1"]
    assert [row["step"] for row in rows(cairn_here("checkpoints", "saving", url=url))] == ["1"]
    done = cairn_here("checkpoints", "saving", "--state", "all", url=url)
    every = rows(done)
    assert [(row["step"], row["state"]) for row in every] == [("2", "in_flight"), ("1", "listed")]
    assert cairn_here("checkpoints", f"{root}/saving", "--state", "all").stdout == done.stdout
    stored = cairn_here("checkpoints", f"{root}/tiny", "--json")
    served = cairn_here("checkpoints", "tiny", "--json", url=url)
    assert stored.stdout.replace(f'"root": "file://{root}"', '"root": "default"') == served.stdout


def test_state_that_there_is_not_is_wrong_usage(url):
    done = cairn_here("checkpoints", "tiny", "--state", "good", url=url)
    assert done.returncode == 2
    assert "in_flight" in done.stderr
    assert "found 'good'" in done.stderr


def test_alias_is_created_moved_and_refused_when_stale(url):
    def promote(step, *more):
        return cairn_here("promote", "tiny", step, "production", *more, url=url)

    assert promote("1", "--create").stdout == "tiny@production is step 1 (sequence 1)\n"
    found = "found sequence 1, step 1"
    exists = "tiny@production exists: it is step 1 (sequence 1). Leave out --create to move it."
    refused(promote("2", "--create"), exists, status=4)
    refused(
        promote("2", "--expect", "7"), f"expected sequence 7, {found}", "`--expect 1`", status=4
    )
    moved = promote("2", "--expect", "1", "--reason", "[better] loss")
    assert moved.stdout == "tiny@production is step 2 (sequence 2)\n"
    assert promote("1").stdout == "tiny@production is step 1 (sequence 3)\n"
    assert rows(cairn_here("checkpoints", "tiny", url=url))[1]["aliases"] == "production"
    with Client(url) as client:
        history = client.alias_history("tiny", "production").events
    assert [event.reason for event in history] == ["", "[better] loss", ""]
    assert promote("1", "--create", "--expect", "3").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        (["promote", "tiny", "9", "best"], 3, ["There is no step 9", "(steps 1, 2)"]),
        (
            ["promote", "nope", "1", "best"],
            3,
            ['There is no run "nope" in root "default".', "cairn runs"],
        ),
        (["promote", "tiny!", "1", "best"], 2, ["invalid run name", "'tiny!'"]),
        (["promote", "tiny", "1", "latest"], 2, ["'latest'"]),
        (["promote", "tiny", "a", "b"], 2, ["'STEP'", "write tiny@a,", "`cairn promote --help`"]),
        (["promote", "tiny", "best", "production"], 2, ["write tiny@best:METRIC,"]),
        (["promote", "tiny@best:loss"], 2, ["'ALIAS'", "such as production"]),
        (["checkpoints", "nope"], 3, ['There is no run "nope" in root "default".', "cairn runs"]),
        (["checkpoints", "my run"], 2, ["invalid run name", "'my run'"]),
        (["checkpoints", "tiny", "--state="], 2, ["expected one of listed, ", "found ''"]),
        (["checkpoints", "tiny", "--stat=all"], 2, ["No such option: --stat", "--state"]),
        (["chekpoints", "tiny"], 2, ["'chekpoints'", "Did you mean 'checkpoints'? See"]),
        (["exports", "tiny"], 2, ["'exports'", "Did you mean 'artifacts'? See"]),
        (
            ["checkpoints", "tiny", "--root", "nope"],
            3,
            ['There is no root "nope"', "`cairn roots`"],
        ),
        (
            ["runs", "--root", "nope"],
            3,
            ['There is no root "nope"', "`cairn roots`"],
        ),
        (["path", "tiny@unknown"], 3, ["There is no alias 'unknown'"]),
        (["path", "tiny/steps/9"], 3, ["There is no step 9", "(steps 1, 2)"]),
        (
            ["path", "tiny@@x"],
            2,
            ["'tiny@@x': expected RUN, RUN@ALIAS, RUN@best:METRIC or RUN/steps/N"],
        ),
        (["path", "empty"], 3, ["empty: expected a run with a checkpoint", "--state all"]),
        (
            ["convert", "saving/steps/2"],
            4,
            ["the step is being saved", "Try again once it is done"],
        ),
        (["convert", "tiny", "--dtype", "int3"], 2, ["body.dtype: Input should be", "'int3'"]),
        (["fork", "tiny", "../evil"], 2, ["invalid run name", "'../evil'"]),
        (["fork"], 2, ["Missing argument 'CHECKPOINT'"]),
        (["index"], 2, ["Missing command", "`cairn index --help`"]),
        (["watch", "op-00000000000000000000000000000000"], 3, ["There is no operation op-0"]),
        (["cancel", "nothing"], 2, ["operation"]),
    ],
)
def test_bad_input_is_one_line_and_the_status_of_its_kind(url, arguments, status, parts):
    refused(cairn_here(*arguments, url=url), *parts, status=status)


def test_convert_watched_in_a_pipe_prints_the_result_alone_to_standard_output(url, root):
    done = cairn("convert", "tiny/steps/1", "--watch", url=url)
    found = result(done)
    assert found["existing"] == "false"
    folder = Path(found["folder"])
    assert folder.is_relative_to(root)
    assert (folder / "model.safetensors").is_file()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    progress = done.stderr.splitlines()
    assert progress[-1].startswith("convert: succeeded, ")
    assert "\x1b" not in done.stderr
    assert result(cairn_here("convert", "tiny/steps/1", "--watch", url=url)) == found


def test_convert_watched_on_a_terminal_shows_a_live_bar(url):
    status, shown = cairn_on_a_terminal(
        "convert", "tiny", "--watch", "--max-shard-size", "30KB", url=url, is_live=True
    )
    assert status == 0
    assert "━" in shown
    assert "convert: succeeded" in shown
    assert shown.count("\x1b[2K") > 1  # drawn more than once, over itself
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert "artifact_id: " in shown


def test_job_that_fails_says_why_and_exits_with_8(url):
    done = cairn_here("convert", "damaged", "--watch", url=url)
    assert done.returncode == 8
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cairn: operation op-")
    assert " failed: " in last
    operation = last.split()[2]
    again = cairn_here("watch", operation, url=url)
    assert (again.returncode, again.stderr.splitlines()[-1]) == (8, last)
    asked = ("--run", "damaged", "--kind", "convert", "--since", "1h", "--filter", "NOT step = 3")
    (listed,) = rows(cairn_here("operations", *asked, "--caller", "loopback", url=url))
    assert listed["operation"] == operation
    told = ("state", "root", "run", "step", "format", "dtype", "caller")
    expected = ["failed", "default", "damaged", "2", "huggingface", "", "loopback"]
    assert [listed[name] for name in told] == expected


@pytest.mark.parametrize("size", ["much", "5 parsecs", "0", "-1GB", "5ib"])
def test_what_is_no_size_is_refused_with_the_forms_that_are(url, size):
    done = cairn_here("convert", "tiny", f"--max-shard-size={size}", url=url)
    refused(done, "'--max-shard-size'", "5GB", "512MiB", "GiB", f"found {size!r}", status=2)


def test_sizes_are_decimal_or_binary_as_they_are_written(url):
    def limit(size):
        done = cairn_here("convert", "tiny", f"--max-shard-size={size}", "--json", url=url)
        return json.loads(done.stdout)["request"]["options"]["max_shard_bytes"]

    assert [limit(size) for size in ("5GB", "5GiB", "30000")] == [5 * 10**9, 5 << 30, 30000]


def test_job_that_is_not_watched_prints_its_id_which_watch_takes(url):
    done = cairn_here("gather", "tiny", "--dtype", "bfloat16", url=url)
    assert done.returncode == 0
    operation = done.stdout.strip()
    assert f"cairn watch {operation}" in done.stderr
    found = result(cairn_here("watch", operation, url=url))
    assert int(found["bytes"]) > 0
    assert Path(found["folder"]).is_dir()


def test_forked_run_is_listed_with_its_parent(url):
    found = result(cairn_here("fork", "tiny/steps/1", "forked", "--watch", url=url))
    assert (found["run"], found["step"]) == ("forked", "1")
    assert found["checked"] == "crc32c and content sum of the copied bytes"
    assert found["checked_bytes"] == found["bytes"]
    listed = {row["run"]: row for row in rows(cairn_here("runs", url=url))}
    assert listed["forked"]["forked from"] == "tiny/steps/1"
    taken = cairn_here("fork", "tiny/steps/2", "forked", "--watch", url=url)
    refused(taken, "Choose another name", status=4)


def test_path_is_the_same_from_the_server_and_from_the_store(url, root, tmp_path):
    folder = str(root / "tiny" / "attempts" / "1" / "2")
    assert cairn_here("path", "tiny", url=url).stdout == f"{folder}\n"
    assert cairn_here("path", "tiny/steps/2", url=url).stdout == f"{folder}\n"
    nowhere = "http://127.0.0.1:9"
    assert cairn_here("path", f"file://{root}/tiny/steps/2", url=nowhere).stdout == f"{folder}\n"
    assert cairn_here("path", f"{root}/tiny", url=nowhere).stdout == f"{folder}\n"
    relative = cairn("path", "./tiny/steps/2", url=nowhere, cwd=root, PYTHONPATH=str(Path.cwd()))
    assert relative.stdout == f"{folder}\n"
    nothing = cairn_here("path", f"{tmp_path}/nothing")
    refused(nothing, 'There is no run "nothing" at ', status=3)
    refused(cairn_here("path", "ftp://host/run"), "found 'ftp:'", status=2)


def test_index_is_rebuilt_without_a_server(root, tmp_path):
    done = cairn_here("index", "rebuild", "--root", str(root), "--data-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert " checkpoints, " in done.stdout
    assert (tmp_path / "catalog.sqlite").is_file()


def test_damaged_catalog_is_named(root, tmp_path):
    (tmp_path / "catalog.sqlite").write_text("no database at all, but long enough to be looked at")
    refused(
        cairn_here("index", "rebuild", "--root", str(root), "--data-dir", str(tmp_path)),
        "CAIRN_DATABASE_URL",
        "file is not a database",
    )


def test_garbage_is_listed_and_removed_only_when_asked_for(tmp_path):
    run = make_run(tmp_path / "run", [1, 2])
    (tmp_path / "run" / "attempts" / "1" / "1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "attempts" / "1" / "1" / "data").write_bytes(b"12345")
    delete_step(run, run.step(1), by="me", reason="bad data", grace=0)
    listed = cairn_here("gc", str(tmp_path / "run"))
    (row,) = rows(listed)
    assert (row["kind"], row["name"]) == ("trash", "attempts/1/1")
    assert int(row["size"]) == 5
    assert "by me" in row["why"]
    assert "could be removed with --delete" in listed.stderr
    assert rows(cairn_here("gc", str(tmp_path / "run"))) == [row]
    removed = cairn_here("gc", str(tmp_path / "run"), "--delete")
    assert rows(removed) == [row]
    assert "removed" in removed.stderr
    assert rows(cairn_here("gc", str(tmp_path / "run"))) == []
    assert not (tmp_path / "run" / "attempts" / "1" / "1").exists()
    assert [info.step for info in run.steps()] == [2]
    nothing = cairn_here("gc", f"{tmp_path}/nothing")
    refused(nothing, 'There is no run "nothing" at ', status=3)


@pytest.mark.parametrize("command", [["runs"], ["convert", "tiny", "--watch"], ["path", "tiny"]])
def test_no_server_is_one_line_that_says_how_to_start_one(command):
    nowhere = "http://127.0.0.1:9"
    refused(cairn_here(*command, url=nowhere), nowhere, "cairn serve", status=6)


@pytest.mark.parametrize("address", ["127.0.0.1:8321", "http://a:b:c", "ftp://127.0.0.1/"])
def test_address_that_is_none_is_one_line(address):
    refused(cairn_here("runs", "--url", address), address.rstrip("/"), "CAIRN_URL", status=6)


def test_server_that_is_no_control_plane_is_one_line(url):
    refused(cairn_here("runs", "--url", f"{url}/?"), "expected RunList", "text/html", status=6)


def test_help_fits_one_line_per_command():
    done = cairn("--help")
    assert done.returncode == 0
    assert "..." not in done.stdout.split("Commands:")[1]
    assert max(map(len, done.stdout.splitlines())) <= 80
    for command in ("serve", "runs", "checkpoints", "promote", "convert", "gather", "fork", "path"):
        assert f"\n  {command} " in done.stdout
        assert cairn_here(command, "-h").stdout == cairn_here(command, "--help").stdout


def test_every_help_text_fits_eighty_columns_and_ends_with_0():
    def walk(group, words):
        yield words
        for name, found in getattr(group, "commands", {}).items():
            yield from walk(found, [*words, name])

    for words in walk(whole_command(), []):
        done = cairn_here(*words, "-h")
        assert (done.returncode, done.stderr) == (0, "")
        assert max(map(len, done.stdout.splitlines())) <= 80, words


def test_every_exit_status_is_in_the_help():
    shown = cairn_here("--help").stdout.split("Exit status:\n")[1].split("\n\n")[0]
    assert [line.split(maxsplit=1) for line in shown.splitlines()] == [
        [str(int(status)), text] for status, text in MEANINGS.items()
    ]
    assert set(MEANINGS) == set(ExitStatus)


def test_version_is_that_of_the_installation():
    done = cairn_here("--version")
    assert (done.returncode, done.stdout) == (0, f"cairn {version('cairn-checkpoints')}\n")


def test_no_command_shows_the_help_as_wrong_usage():
    done = cairn_here()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == cairn_here("--help").stdout


LIGHT = """
import sys
import cairn.service.command.cli
heavy = {"jax", "flax", "orbax", "torch", "fastapi", "dbos", "sqlalchemy", "tensorstore", "uvicorn"}
print(*heavy & set(sys.modules))
"""


def test_commands_that_ask_load_neither_jax_nor_the_server():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_iterators_whose_positions_a_checkpoint_has_are_listed(url):
    listed = rows(cairn_here("checkpoints", LONG_NAME, url=url))
    assert [one["iterators"] for one in listed] == ["test, train", ""]


def test_checkpoints_are_listed_with_their_metrics_and_when_they_were_verified(url, root):
    run = Run.open(root / LONG_NAME)
    annotate_step(run, 20, metrics={"loss": 0.123456789, "acc": math.nan})
    note_verified(run, run.step(20))
    with Client(url) as client:
        client.run(LONG_NAME, refresh=True)
    newest, first = rows(cairn_here("checkpoints", LONG_NAME, url=url))
    assert (newest["metrics"], first["metrics"]) == ("acc=nan, loss=0.123457", "")
    assert newest["verified (UTC)"] > newest["created (UTC)"]
    assert first["verified (UTC)"] == ""


def test_stored_names_are_what_the_command_prints(url, root):
    run = Run.open(root / "tiny")
    manifest: Manifest = run.manifest(run.step(2))
    listed = rows(cairn_here("checkpoints", "tiny", url=url))
    assert int(listed[0]["size"]) == manifest.nbytes
    assert int(listed[0]["leaves"]) == len(run.contents(run.step(2)).leaves)
