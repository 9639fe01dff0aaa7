"""`cairn show`: what is noted of a checkpoint, and the tree of its leaves."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cairn
from cairn import Checkpointer, Run
from cairn.service.schemas import Checkpoint
from tests.service.commands import cairn_here, cairn_on_a_terminal
from tests.service.planes import running_plane

KERNEL = np.arange(24, dtype=np.float32).reshape(4, 6)
NOTES = {"author": "me", "long": "x" * 400}
HOSTILE = "a\x1b[2J[red]b"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    (folder / "data").mkdir()
    layers = {str(n): {"kernel": KERNEL, "bias": KERNEL[0]} for n in range(12)}
    layers["11"]["kernel"] = KERNEL.astype(ml_dtypes.bfloat16)
    model = {"layers": layers, HOSTILE: np.asarray([np.nan, 1, -np.inf], np.float32)}
    with Checkpointer(str(folder / "store" / "run")) as checkpointer:
        optimizer = {"count": np.int32(1)}
        items = {"model": model, "optimizer": optimizer}
        checkpointer.save(3, items, meta={}, labels={"eval": HOSTILE}).wait()
    with ocp.CheckpointManager(folder / "store" / "theirs") as theirs:
        items = {"notes": ocp.args.JsonSave(NOTES), "state": ocp.args.StandardSave({"w": KERNEL})}
        theirs.save(4, args=ocp.args.Composite(**items))
    cairn.adopt(folder / "store" / "theirs", folder / "store" / "imported")
    run = Run.open(str(folder / "store" / "run"))
    cairn.promote_step(run, 3, "production", expect=None)
    cairn.annotate(f"{run.uri}/steps/3", metrics={"loss": 0.5}, better={"loss": "min"})
    return run


@pytest.fixture(scope="module")
def url(run):
    store = Path(run.uri.parent.local_path)
    with running_plane(store, store.parent / "data") as (url, _):
        yield url


@pytest.fixture(params=["server", "store"])
def ask(request, run, url):
    name = "run" if request.param == "server" else str(run.uri)
    asked = url if request.param == "server" else "http://127.0.0.1:1"

    def answer(*arguments):
        done = cairn_here("show", f"{name}@production", *arguments, "--url", asked)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return answer


def test_what_is_noted_comes_first_and_then_every_leaf(ask, run):
    lines = ask().splitlines()
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert told["checkpoint"] == "run/steps/3"
    assert (told["state"], told["verified"]) == ("available, attempt 1", "never")
    assert told["leaves"] == "26 in meta, model, optimizer"
    assert (told["aliases"], told["metrics"]) == ("production", "loss=0.5 (min is better)")
    assert told["labels"] == r"eval=a\x1b[2J[red]b"  # a terminal does not obey it
    assert told["folder"] == str(run.step_uri(run.step(3)))
    titles = lines.index("item\tpath\tdtype\tshape\tsize\tsharding")
    leaves = [line.split("\t") for line in lines[titles + 1 :]]
    assert len(leaves) == 26
    assert leaves[-1][:5] == ["optimizer", "count", "int32", "()", "4"]


def test_statistics_are_read_when_they_are_asked_for(ask):
    lines = ask("--stats", "--item", "model").splitlines()
    leaves = [line.split("\t") for line in lines if line.startswith("model\t")]
    found = {leaf[1]: leaf[6:] for leaf in leaves}
    assert found["layers/0/kernel"] == ["0", "23", "11.5", "6.92219", "1", "0", "0"]
    assert found[HOSTILE.replace("/", "%2F")][-2:] == ["1", "1"]


def test_json_is_the_checkpoint_and_its_leaves(ask):
    found = json.loads(ask("--json", "--prefix", "layers/0/", "--stats"))
    assert Checkpoint.model_validate(found["checkpoint"]).aliases == ["production"]
    assert [one["path"] for one in found["tensors"]] == ["layers/0/bias", "layers/0/kernel"]
    assert [one["max"] for one in found["statistics"]] == [5.0, 23.0]


@pytest.mark.parametrize("where", ["server", "store"])
def test_json_items_of_an_imported_step_and_its_owners_folder_are_shown(where, run, url):
    name = "imported" if where == "server" else f"{run.uri.parent}/imported"
    step = f"{name}/steps/4"
    shown = dict(
        line.split(": ", 1)
        for line in cairn_here("show", step, url=url).stdout.splitlines()[:12]
        if ": " in line
    )
    assert shown["folder"] == f"{run.uri.parent}/theirs/4"
    assert shown["notes (JSON)"].startswith('{"author": "me", "long": "xxx')
    assert shown["notes (JSON)"].endswith("(428 characters; --json prints all)")
    found = json.loads(cairn_here("show", step, "--json", url=url).stdout)
    assert found["json"] == {"notes": NOTES}
    found = json.loads(cairn_here("show", step, "--json", "--item", "state", url=url).stdout)
    assert (found["json"], [one["path"] for one in found["tensors"]]) == ({}, ["w"])


def test_a_terminal_gets_a_tree_in_which_like_layers_are_one_branch(url):
    status, shown = cairn_on_a_terminal("show", "run", url=url)
    assert status == 0
    assert "0 to 10, 11 alike" in shown
    assert "bfloat16[4x6]" in shown  # of the layer that differs
    assert shown.count("float32[4x6]") == 1
    assert "\x1b[2J" not in shown
    assert r"a\x1b[2J[red]b" in shown
    _, whole = cairn_on_a_terminal("show", "run", "--stats", url=url)
    assert whole.count("mean 11.5") == 12


def test_what_there_is_not_is_not_found(url):
    done = cairn_here("show", "run@nobody", url=url)
    assert (done.returncode, done.stdout) == (3, "")
