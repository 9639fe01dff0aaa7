"""`cairn download`: the files of a checkpoint on this machine."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from cairn import Checkpointer, Client, Run, roll_back
from tests.service.commands import cairn_here
from tests.service.planes import running_plane


def save(store, steps):
    with Checkpointer(str(store / "noise")) as checkpointer:
        for step in steps:
            kernel = np.full((64, 64), step, np.float32)
            checkpointer.save(step, {"model": {"kernel": kernel}}, meta={}).wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save(folder / "store", (1, 2))
    (folder / "data").mkdir()
    with running_plane(folder / "store", folder / "data") as (url, _), Client(url) as client:
        client.promote("noise", 1, "production", expect=None)
        yield folder / "store", url


def kernel_of(folder):
    return ocp.PyTreeCheckpointer().restore(folder / "model")["kernel"]


def test_what_an_alias_names_is_copied_and_plain_orbax_reads_it(served, tmp_path):
    _, url = served
    copy = tmp_path / "new" / "copy"
    done = cairn_here("download", "noise@production", str(copy), url=url)
    assert (done.returncode, done.stdout) == (0, f"{copy}\n")
    np.testing.assert_array_equal(kernel_of(copy), np.full((64, 64), 1, np.float32))


def test_a_part_is_copied_and_counted_and_the_rest_of_another_step_is_refused(served, tmp_path):
    _, url = served
    arguments = ["download", "noise", str(tmp_path), "--prefix", "model/"]
    done = cairn_here(*arguments, "--json", url=url)
    told = json.loads(done.stdout)
    lying = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).parts[0] for path in lying} == {"model"}
    assert told == {
        "run": "noise",
        "step": 2,
        "attempt": 1,
        "folder": str(tmp_path),
        "files": len(lying),
        "bytes": sum(path.stat().st_size for path in lying),
    }
    refused = cairn_here("download", "noise/steps/1", str(tmp_path), "--prefix", "meta/", url=url)
    assert refused.returncode == 1
    assert "expected in" in refused.stderr
    assert "nothing of another step" in refused.stderr
    assert not (tmp_path / "meta").exists()


def test_a_step_that_an_alias_names_no_more_is_refused(served, tmp_path):
    store, url = served
    run = Run.open(f"{store}/noise")
    with Client(url) as client:
        client.promote("noise", 2, "doomed", expect=None)
    roll_back(run, 1, by="ana", strand=["doomed"])
    save(store, (2,))
    refused = cairn_here("download", "noise@doomed", str(tmp_path / "copy"), url=url)
    assert refused.returncode == 3
    assert "attempt" in refused.stderr
    assert not (tmp_path / "copy").exists()


def test_what_is_not_there_is_said(served, tmp_path):
    _, url = served
    refused = cairn_here("download", "noise/steps/9", str(tmp_path / "copy"), url=url)
    assert refused.returncode == 3
    assert "step 9" in refused.stderr
    assert not (tmp_path / "copy").exists()
