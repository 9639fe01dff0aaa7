"""`cairn serve` as a process: how it starts, refuses to, is watched, and ends."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cairn import Client
from cairn.service.schemas import OperationState
from tests.programs.program import Program
from tests.service.commands import CAIRN, cairn, cairn_here, environment
from tests.service.tiny_run import copy_tiny_run

SLOW = ("-m", "tests.service.slow_server", "0.3")
JOB = ("convert", "tiny", "--watch", "--max-shard-size", "6KB")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("store")
    copy_tiny_run(root)
    return root


@contextmanager
def serving(
    root: Path, data: Path, *, program: tuple[str, ...] = CAIRN, port: int = 0
) -> Iterator[tuple[str, Program]]:
    """The URL that a server announces, and its process."""
    command = [*program, "serve", "--root", str(root), "--data-dir", str(data)]
    with Program(
        [*command, "--port", str(port)], env=environment(), stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"cairn: root default is file://{root}\n"
            assert process.stdout.readline() == f"cairn: databases are in {data}\n"
            yield process.stdout.readline().removeprefix("cairn: ").strip(), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(root, tmp_path_factory) -> Iterator[str]:
    """Of a server that nobody ends."""
    with serving(root, tmp_path_factory.mktemp("data")) as (url, _):
        yield url


@contextmanager
def watching(url: str) -> Iterator[tuple[Program, str]]:
    """`cairn convert --watch` that has shown that its job runs, and the job's id."""
    with Program(
        [*CAIRN, *JOB], env=environment(url), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            assert any("writing" in line for line in process.stderr)
            with Client(url) as client:
                operation = next(client.operations())
            yield process, operation.id
        finally:
            process.kill()


def test_server_announces_an_address_that_answers(url):
    with Client(url) as client:
        assert set(client.ready().checks) == {"catalog", "jobs", "root default", "index default"}
        assert [run.name for run in client.runs()] == ["tiny"]


def test_interrupted_watch_says_how_to_follow_the_job_which_goes_on(root, tmp_path):
    with serving(root, tmp_path, program=SLOW) as (url, _), Client(url) as client:
        with watching(url) as (watcher, operation):
            watcher.send_signal(signal.SIGINT)
            output, progress = watcher.communicate(timeout=30)
        assert watcher.returncode == 130
        assert output == ""
        assert "Traceback" not in progress
        last = progress.splitlines()[-1]
        assert f"operation {operation} goes on" in last
        assert f"`cairn watch {operation}`" in last
        assert client.operation(operation).state is OperationState.RUNNING
        done = cairn_here("cancel", operation, url=url)
        assert done.stdout == f"operation {operation} cancelled\n"
        again = cairn_here("watch", operation, url=url)
        assert again.returncode == 8
        assert again.stderr.splitlines()[-1] == f"cairn: operation {operation} cancelled"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_with_a_job_and_an_event_stream_under_way(root, tmp_path, number):
    with serving(root, tmp_path, program=SLOW) as (url, server), watching(url) as (_, operation):
        stream = f"{url}/v1/operations/{operation}/events"
        with httpx.stream("GET", stream, timeout=30) as events:
            lines = events.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(number)
            assert server.wait(10) == 0
            list(lines)  # ends, and is not cut off


def test_a_server_that_others_can_reach_says_in_one_line_that_it_needs_a_key(root, tmp_path):
    done = cairn(
        *("serve", "--root", str(root), "--data-dir", str(tmp_path), "--port", "0"),
        CAIRN_AUTH="keys",
        CAIRN_HOST="0.0.0.0",
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "`cairn keys create --name NAME --scope admin`" in done.stderr


def test_watch_outlives_a_restart_of_the_server(root, tmp_path):
    with serving(root, tmp_path, program=SLOW) as (url, server), watching(url) as (watcher, _):
        server.terminate()
        assert server.wait(10) == 0
        with serving(root, tmp_path, port=httpx.URL(url).port or 0):
            output, progress = watcher.communicate(timeout=60)
    assert watcher.returncode == 0, progress
    folder = dict(line.split(": ", 1) for line in output.splitlines())["folder"]
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 10


def test_second_server_on_one_data_folder_is_refused(root, tmp_path):
    """It would take the first one's jobs up, and look for their runs in its own root."""
    with serving(root, tmp_path) as (url, server):
        refused = cairn("serve", "--root", "./other", "--port", "0", "--data-dir", str(tmp_path))
        assert refused.returncode == 1
        assert f"found process {server.pid}" in refused.stderr
        assert "--data-dir" in refused.stderr
        assert httpx.get(f"{url}/readyz").status_code == 200
    with serving(root, tmp_path) as (url, _):  # the first was killed: its lock went with it
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_proxy_on_this_machine_may_tell_whom_it_speaks_for(url):
    headers = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}
    assert httpx.get(f"{url}/v1/runs", headers=headers).status_code == 200


def test_taken_port_is_refused_before_anything_is_made(root, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        data = tmp_path / "data"
        done = cairn("serve", "--root", str(root), "--data-dir", str(data), "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"cairn: 127.0.0.1:{port}: expected a free address to listen on, "
        "found: Address already in use. Choose another with --port"
    )
    assert not data.exists()


@pytest.mark.parametrize(
    ("command", "variable"), [("serve", "CAIRN_PORT"), ("worker", "CAIRN_WORKER_PORT")]
)
def test_misspelt_setting_is_named_by_the_process_that_would_do_without_it(
    root, tmp_path, command, variable
):
    with socket.create_server(("127.0.0.1", 0)) as taken:  # ends it as soon as it has started
        port = str(taken.getsockname()[1])
        given = {variable: port, "CAIRN_ROTO": str(root), "CAIRN_SOMEBODY_ELSES": "1"}
        done = cairn(command, "--data-dir", str(tmp_path / "data"), **given)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if " warning " in line]
    assert line.endswith("CAIRN_ROTO: nothing reads a variable of that name; is CAIRN_ROOT meant?")


@pytest.mark.parametrize(
    ("arguments", "variables", "part"),
    [
        (["--port", "0", "--host", "0.0.0.0"], {}, "CAIRN_HOST: expected a loopback address"),
        (["--port", "0"], {"CAIRN_HOST": "example.com"}, "CAIRN_HOST: expected a loopback address"),
        (
            ["--port", "0", "--root", "ftp://host/runs"],
            {},
            "CAIRN_ROOT: root 'default' = 'ftp://host/runs'",
        ),
        (["--port", "99999"], {}, "CAIRN_PORT: "),
        ([], {"CAIRN_PORT": "http"}, "CAIRN_PORT: "),
        (["--port", "0"], {"CAIRN_ROOTS": "{bad"}, "CAIRN_ROOTS: expected a JSON object"),
        (["--port", "0"], {"CAIRN_ROOTS": "[1]"}, "CAIRN_ROOTS: "),
        (
            ["--port", "0"],
            {"CAIRN_DATABASE_URL": "nonsense"},
            "CAIRN_DATABASE_URL: expected one such as",
        ),
    ],
)
def test_setting_that_cannot_work_is_named(tmp_path, arguments, variables, part):
    done = cairn_here("serve", "--data-dir", str(tmp_path / "data"), *arguments, **variables)
    assert done.returncode == 1
    assert f"cairn: {part}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["catalog", "jobs"])
def test_damaged_database_is_named(root, tmp_path, name):
    (tmp_path / f"{name}.sqlite").write_text("no database at all, but long enough to be looked at")
    done = cairn("serve", "--root", str(root), "--data-dir", str(tmp_path), "--port", "0")
    assert done.returncode == 1
    setting = {"catalog": "CAIRN_DATABASE_URL", "jobs": "CAIRN_JOBS_DATABASE_URL"}[name]
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"cairn: {setting}: ")
    assert "file is not a database" in last
