"""`cairn top`: one frame for a pipe, a screen for people, and what it takes for a rate."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from cairn import Client
from cairn.storage.runs.records.layout import step_dir
from tests.service.commands import CAIRN, cairn_here, environment
from tests.service.planes import running_plane
from tests.service.seams import activity, command_addresses
from tests.service.stores import begin_saving, make_run

SECTIONS = ("root\trun\tlatest", "root\trun\tstep", "operation\tkind")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("watched") / "store"


@pytest.fixture(scope="module")
def saving(store):
    run = make_run(store / "llama-sft", [1])
    return run, begin_saving(run, 2)


@pytest.fixture(scope="module")
def url(store, saving):
    make_run(store / "other", [9])
    (store.parent / "data").mkdir()
    with running_plane(store, store.parent / "data") as (url, _):
        yield url


def sections(done):
    assert (done.returncode, done.stderr) == (0, "")
    return [part.splitlines() for part in done.stdout.split("\n\n")]


def test_a_pipe_gets_one_look_in_three_tables(url):
    runs, saves, jobs = sections(cairn_here("top", url=url))
    for part, title in zip((runs, saves, jobs), SECTIONS, strict=True):
        assert part[0].startswith(title)
    assert {line.split("\t")[1] for line in runs[1:]} == {"llama-sft", "other"}
    (save,) = saves[1:]
    assert save.split("\t")[:5] == ["default", "llama-sft", "2", "2", "4"]
    assert save.split("\t")[6] == ""  # one look tells no rate
    assert jobs[1:] == []


def test_json_has_what_the_look_has(url):
    found = json.loads(cairn_here("top", "llama-sft", "--json", url=url).stdout)
    assert [run["name"] for run in found["runs"]] == ["llama-sft"]
    (save,) = found["saves"]
    assert (save["step"], save["bytes"], found["operations"]) == (2, 4, [])
    assert save["latest_bytes"] == 0  # this run's steps hold no values


def test_only_so_many_runs_are_looked_at_and_the_rest_is_told(url):
    found = json.loads(cairn_here("top", "--most", "1", "--json", url=url).stdout)
    assert ([run["name"] for run in found["runs"]], found["more_runs"]) == (["other"], True)
    assert found["saves"] == []  # the other run's: it was not asked about


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [(("nobody",), 3, "nobody"), (("my run",), 2, "run name"), (("--every", "0"), 2, "--every")],
)
def test_odd_questions_are_refused(url, arguments, status, named):
    done = cairn_here("top", *arguments, url=url)
    assert (done.returncode, done.stdout) == (status, "")
    assert named in done.stderr


def test_a_rate_is_what_came_between_two_looks(url, saving):
    run, attempt = saving
    clock = iter(range(0, 1000, 5))
    with Client(url) as client:
        places = [command_addresses.RunPlace("default", "llama-sft")]
        source = activity.SnapshotSource(client, None, places, 10, clock=lambda: next(clock))
        (first,) = source.snapshot().saves
        half = f"{step_dir(attempt.number, 2)}/model/more"
        run.objects.write(half, b"x" * 1000)
        (second,) = source.snapshot().saves
        (third,) = source.snapshot().saves
        run.objects.delete(half)
        (fourth,) = source.snapshot().saves
    assert (first.written.bytes, first.written.rate) == (4, None)
    assert (second.written.bytes, second.written.rate) == (1004, 200.0)
    assert (third.written.rate, fourth.written.rate) == (0, 0)  # never below


class Screen:
    """The command on a terminal of 120 columns, whose settings it may change."""

    def __init__(self, *arguments, url):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (40, 120))
        self.before = termios.tcgetattr(self.slave)
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, *CAIRN, "top", *arguments],
            env=environment(url, TERM="xterm") | {"COLUMNS": "120"},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )

    def until(self, text):
        deadline = time.monotonic() + 100
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], deadline - time.monotonic())
            assert ready, f"expected {text!r}, found {self.shown!r}"
            self.shown += os.read(self.master, 65536).decode()

    def press(self, key):
        os.write(self.master, key)

    def end(self):
        status = self.process.wait(100)
        after = termios.tcgetattr(self.slave)
        os.close(self.slave)
        os.close(self.master)
        return status, after == self.before


@pytest.mark.parametrize("ending", ["q", "Ctrl-C"])
def test_a_screen_shows_looks_until_it_is_ended_and_leaves_the_terminal_as_it_was(url, ending):
    screen = Screen("--every", "0.3", url=url)
    for text in ("saves in flight (1)", "llama-sft", "0 B/s"):  # the last one: it looked again
        screen.until(text)
    if ending == "q":
        screen.press(b"xq")
    else:
        screen.process.send_signal(signal.SIGINT)
    screen.until("\x1b[?1049l")  # back from the alternate screen
    assert screen.end() == (0, True)


def test_a_server_that_goes_away_is_told_and_asked_again(tmp_path):
    make_run(tmp_path / "store" / "run", [1])
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        screen = Screen("--every", "0.3", url=url)
        screen.until("runs (1)")
    screen.until("What is below is older")
    screen.press(b"q")
    assert screen.end() == (0, True)
