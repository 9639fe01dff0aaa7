"""`cairn roots`: what is served, added and removed."""

import json

import pytest

from cairn import Client
from cairn.service.errors import ProblemResponseError
from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.stores import make_run


@pytest.fixture
def url(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        yield url


def test_roots_are_added_listed_and_removed(url, tmp_path):
    make_run(tmp_path / "more" / "run", [3])
    own = ["default", f"file://{tmp_path}/store", "settings"]
    added = ["more", f"file://{tmp_path}/more", "catalog"]
    done = cairn_here("roots", "add", "more", str(tmp_path / "more"), url=url)
    assert (done.returncode, done.stdout) == (0, f"root more is file://{tmp_path}/more\n")
    done = cairn_here("roots", url=url)
    assert [line.split("\t") for line in done.stdout.splitlines()][-2:] == [own, added]
    done = cairn_here("roots", "--json", url=url)
    listed = json.loads(done.stdout)["roots"]
    assert [[one["name"], one["uri"], one["source"]] for one in listed] == [own, added]
    done = cairn_here("checkpoints", "run", "--root", "more", url=url)
    assert done.stdout.splitlines()[-1].startswith("3\t")
    assert cairn_here("roots", "add", "more", str(tmp_path / "more"), url=url).returncode == 4
    wrong = cairn_here("roots", "add", "new", str(tmp_path / "none"), url=url)
    assert (wrong.returncode, "does not exist on the server" in wrong.stderr) == (2, True)
    done = cairn_here("roots", "remove", "more", url=url)
    assert (done.returncode, done.stdout) == (0, "root more removed\n")
    assert cairn_here("roots", "remove", "more", url=url).returncode == 3
    assert cairn_here("roots", "remove", "default", url=url).returncode == 4


def test_the_client_adds_and_removes_roots(url, tmp_path):
    (tmp_path / "more").mkdir()
    with Client(url) as client:
        added = client.add_root("more", str(tmp_path / "more"))
        assert client.roots()[1:] == [added]
        client.remove_root("more")
        assert [one.source for one in client.roots()] == ["settings"]
        with pytest.raises(ProblemResponseError, match="CAIRN_ROOTS"):
            client.remove_root("default")
