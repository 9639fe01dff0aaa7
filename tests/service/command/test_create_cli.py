"""`cairn create`: through a control plane, and straight in a store."""

import json

import pytest

from cairn import Client, Run
from cairn.service.errors import ProblemResponseError
from tests.service.commands import cairn_here
from tests.service.planes import running_plane


@pytest.fixture
def url(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        yield url


@pytest.mark.parametrize("through", ["server", "store"])
def test_a_run_is_made_once_with_its_labels(url, tmp_path, through):
    asked = ("--url", url) if through == "server" else ()
    name = "run" if through == "server" else str(tmp_path / "store" / "run")
    done = cairn_here("create", name, "--label", "team=nlp", "--label", "a=b=c", *asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"file://{tmp_path}/store/run\n"
    made = Run.open(tmp_path / "store" / "run").info()
    assert made.labels == {"team": "nlp", "a": "b=c"}
    again = cairn_here("create", name, *asked)
    assert again.returncode == 4
    assert "expected no run of this name" in again.stderr
    done = cairn_here("create", f"{name}-2", "--json", *asked)
    assert json.loads(done.stdout) == {
        "name": "run-2",
        "uri": f"file://{tmp_path}/store/run-2",
        "created": json.loads(done.stdout)["created"],
        "labels": {},
    }
    listed = cairn_here("checkpoints", "run-2", "--url", url)
    assert (listed.returncode, listed.stderr) == (0, "")
    none_yet = cairn_here("path", "run-2", "--url", url)
    assert none_yet.returncode == 3
    assert "run-2" in none_yet.stderr


def test_what_is_written_wrong_is_told():
    wrong = cairn_here("create", "run", "--label", "team")
    assert (wrong.returncode, "expected NAME=TEXT, found 'team'" in wrong.stderr) == (2, True)
    wrong = cairn_here("create", "my run")
    assert (wrong.returncode, "invalid run name" in wrong.stderr) == (2, True)


def test_the_client_makes_a_run(url):
    with Client(url) as client:
        made = client.create_run("run", labels={"team": "nlp"})
        assert client.run("run") == made
        with pytest.raises(ProblemResponseError, match="run: expected no run") as caught:
            client.create_run("run")
        assert caught.value.status == 409
