"""A training job announces what it has saved, and never waits for the server."""

import os
import socket
import threading

import pytest

from cairn import Client
from tests.programs.program import run as run_program
from tests.service.planes import running_plane

JOB = """
import logging, sys
import jax.numpy as jnp
from cairn import Checkpointer

logging.basicConfig(format="%(message)s")
with Checkpointer(sys.argv[1]) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": jnp.zeros(4)}).wait()
    print("durable", checkpointer.steps())
"""


def train(run, **environment):
    ended = run_program(["-c", JOB, str(run)], env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "durable [1, 2, 3]\n"
    return ended.stderr


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    """A server that finds nothing on its own: its URL, and its root's folder."""
    folder = tmp_path_factory.mktemp("plane")
    for name in ("store", "data"):
        (folder / name).mkdir()
    with running_plane(folder / "store", folder / "data", {"CAIRN_SCAN_SECONDS": "0"}) as (url, _):
        yield url, folder / "store"


def test_what_a_job_saves_is_listed_by_the_server_that_it_names(plane):
    url, root = plane
    with Client(url) as client:
        assert list(client.runs()) == []
        log = train(root / "run", CAIRN_URL=url)
        assert [found.step for found in client.checkpoints("run")] == [3, 2, 1]
        (run,) = client.runs()
    assert (run.name, run.latest_step) == ("run", 3)
    assert "not told" not in log


def test_a_job_whose_run_the_server_does_not_have_says_so_once(plane, tmp_path):
    url, root = plane
    log = train(tmp_path / "elsewhere", CAIRN_URL=url)
    assert log.count("so nobody is told of what is saved here") == 1
    assert f"Name the root that is file://{tmp_path} by CAIRN_ANNOUNCE_ROOT" in log
    train(root / "namesake")
    log = train(tmp_path / "namesake", CAIRN_URL=url)
    assert log.count(f"has another run namesake in its root 'default': file://{root}/") == 1
    log = train(root / "other", CAIRN_URL=url, CAIRN_ANNOUNCE_ROOT="archive")
    assert log.count("'archive'") == 1


def test_a_job_whose_server_is_dead_says_so_once(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    log = train(tmp_path / "run", CAIRN_URL=url)
    assert log.count(f"{url} was not told of step 1 of file://{tmp_path}/run") == 1
    assert log.count("was not told") == 1


def test_no_save_waits_for_a_server_that_never_answers(tmp_path):
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take():
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take)
        thread.start()
        train(tmp_path / "run", CAIRN_URL=f"http://127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    asked = [one.recv(4096).split(b"\r\n")[0] for one in taken]
    for one in taken:
        one.close()
    assert asked[0] == b"POST /v1/roots/default/runs/run/checkpoints HTTP/1.1"
