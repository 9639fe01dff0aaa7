"""`cairn tensors` and `cairn diff`: through a control plane, and straight in a store."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from cairn import Checkpointer, Run
from tests.service.commands import cairn_here
from tests.service.planes import running_plane

KERNEL = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looked")
    (folder / "data").mkdir()
    layers = {"0": {"kernel": KERNEL}, "1": {"kernel": KERNEL.astype(ml_dtypes.bfloat16)}}
    model = {"layers": layers, "odd/name": np.asarray([np.nan, 1, -np.inf], np.float32)}
    with Checkpointer(str(folder / "store" / "run")) as checkpointer:
        optimizer = {"count": np.int32(1)}
        metrics = {"eval/loss": 0.5}
        checkpointer.save(
            3, {"model": model, "optimizer": optimizer}, meta={}, metrics=metrics
        ).wait()
        model["layers"] = layers | {"0": {"kernel": KERNEL * 2}}
        checkpointer.save(6, {"model": model, "optimizer": optimizer}, meta={}).wait()
    with Checkpointer(str(folder / "store" / "plain")) as checkpointer:
        checkpointer.save(1, {"loop": {"w": KERNEL}}, meta={}).wait()
        checkpointer.save(2, {"loop": {"w": KERNEL}, "ema": {"w": KERNEL}}, meta={}).wait()
    return Run.open(str(folder / "store" / "run"))


@pytest.fixture(scope="module")
def served(run):
    store = Path(run.uri.parent.local_path)
    with running_plane(store, store.parent / "data") as (url, _):
        yield url


@pytest.fixture(params=["server", "store"])
def ask(request, run, served):
    """Runs a command that asks a control plane, or the store; "{}" is the run."""
    name = "run" if request.param == "server" else str(run.uri)
    plain = "plain" if request.param == "server" else str(run.uri.parent / "plain")
    asked = served if request.param == "server" else "http://127.0.0.1:1"

    def answer(*arguments):
        given = [str(one).replace("{}", name).replace("{plain}", plain) for one in arguments]
        return cairn_here(*given, "--url", asked)

    return answer


@pytest.fixture
def shown(ask):
    def answer(*arguments):
        done = ask(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return answer


@pytest.fixture
def told(shown):
    return lambda *arguments: json.loads(shown(*arguments, "--json"))


def test_leaves_are_listed(shown, told):
    lines = [line.split("\t") for line in shown("tensors", "{}/steps/3").splitlines()]
    assert lines[0] == ["item", "path", "dtype", "shape", "size", "sharding", "digest"]
    assert [line[:5] for line in lines[1:]] == [
        ["model", "layers/0/kernel", "float32", "4x6", "96"],
        ["model", "layers/1/kernel", "bfloat16", "4x6", "48"],
        ["model", "odd%2Fname", "float32", "3", "12"],
        ["optimizer", "count", "int32", "()", "4"],
    ]
    found = told("tensors", "{}", "--prefix", "layers/", "--item", "model")["tensors"]
    assert [one["path"] for one in found] == ["layers/0/kernel", "layers/1/kernel"]


def test_values_of_a_leaf_are_shown(shown, told):
    assert shown("tensors", "{}/steps/3", "layers/1/kernel", "--slice", "1:3,-1") == (
        "[11.0, 17.0]\n"
    )
    assert shown("tensors", "{}", "odd%2Fname") == "[nan, 1.0, -inf]\n"
    assert shown("tensors", "{}", "count", "--item", "optimizer") == "1\n"
    assert told("tensors", "{}", "layers/0/kernel", "--slice", "0,:2")["values"] == [0.0, 2.0]


def test_the_only_item_is_meant_where_none_is_named_and_several_are_listed(ask, tmp_path):
    done = ask("tensors", "{plain}/steps/1", "w", "--slice", "0,:2")
    assert done.stdout == "[0.0, 1.0]\n", done.stderr
    done = ask("tensors", "{plain}/steps/1", "w", "--out", tmp_path / "w.npy")
    assert done.returncode == 0, done.stderr
    done = ask("tensors", "{plain}/steps/2", "w", "--stats")
    assert done.returncode == 3
    assert "one of ema, loop" in done.stderr
    assert "--item NAME" in done.stderr


def test_statistics_of_a_leaf_are_shown(shown, told):
    lines = shown("tensors", "{}/steps/3", "layers/0/kernel", "--stats").splitlines()
    assert {"shape: 4x6", "count: 24", "min: 0.0", "max: 23.0", "nan: 0"} <= set(lines)
    bars = [line for line in lines if "#" in line]
    assert [int(line.split()[-1]) for line in bars] == [1] * 24
    found = told("tensors", "{}", "odd%2Fname", "--stats")
    assert (found["nan"], found["negative_infinity"], found["max"]) == (1, 1, 1.0)


def test_a_leaf_is_written_to_a_file(ask, shown, tmp_path):
    step = "{}/steps/3"
    shown("tensors", step, "layers/0/kernel", "--slice", ":,1", "--out", tmp_path / "part.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "part.npy"), KERNEL[:, 1])
    out = tmp_path / "whole.safetensors"
    assert shown("tensors", step, "layers/1/kernel", "--out", out) == f"{out}\n"
    (tensor,) = load_file(out).values()
    np.testing.assert_array_equal(tensor, KERNEL.astype(ml_dtypes.bfloat16))
    done = ask("tensors", step, "layers/1/kernel", "--out", tmp_path / "whole.npy")
    assert done.returncode == 2
    assert "format=safetensors" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.npy", "whole.safetensors"]


def test_differences_are_shown(shown, told):
    steps = ("{}/steps/3", "{}/steps/6")
    lines = shown("diff", *steps, "--values").splitlines()
    assert lines[0] == "leaves: 3 equal, 1 with other values"
    assert lines[1] == "metric eval/loss: 0.5 -> (none)"
    assert lines[3].split("\t") == [
        "values",
        "model",
        "layers/0/kernel",
        "float32[4,6]",
        "float32[4,6]",
        "23 of 24",
        "23",
        "1",
    ]
    found = told("diff", *steps)
    assert found["leaves"]["values"] == len(found["differences"]) == 1
    assert told("diff", steps[0], steps[0])["equal"] is True


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (("tensors", "{}", "layers/9/kernel"), 3, "layers/9/kernel"),
        (("tensors", "{}/steps/4"), 3, "4"),
        (("tensors", "{}", "layers/0/kernel", "--slice", "9"), 2, "slice"),
        (("tensors", "{}", "layers/0/kernel", "--out", "leaf.txt"), 2, ".npy or .safetensors"),
        (("tensors", "{}", "--stats"), 2, "LEAF"),
        (("tensors", "{}", "layers/0/kernel", "--prefix", "x"), 2, "LEAF"),
        (("diff", "{}", "{}/steps/4"), 3, "4"),
    ],
)
def test_odd_questions_are_refused_with_what_is_wrong(ask, arguments, status, named):
    done = ask(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert named in done.stderr
