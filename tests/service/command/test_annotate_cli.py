"""`cairn annotate`: through a control plane, and straight in a store."""

import json

import pytest

from cairn import Annotation
from cairn.storage.runs.records.layout import annotation_file
from cairn.storage.runs.records.placed import read_record
from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.stores import make_run


@pytest.fixture
def run(tmp_path):
    (tmp_path / "data").mkdir()
    return make_run(tmp_path / "store" / "run", [3, 6], labels={"team": "nlp"})


def noted(run, step):
    found = read_record(run.objects, annotation_file(step, 1), Annotation)
    return Annotation() if found is None else found[0]


NOTES = ("--label", "eval=a=b", "--metric", "eval/loss=1.5", "--better", "eval/loss=min")


@pytest.mark.parametrize("through", ["server", "store"])
def test_notes_of_a_step_are_set_and_removed(tmp_path, run, through):
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        asked = ("--url", url) if through == "server" else ()
        name = "run" if through == "server" else str(run.uri)
        done = cairn_here("annotate", f"{name}/steps/3", *NOTES, "--metric", "acc=nan", *asked)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "label eval=a=b",
            "metric acc=nan",
            "metric eval/loss=1.5 (min is better)",
        ]
        assert noted(run, 3).labels == {"eval": "a=b"}
        done = cairn_here(
            "annotate",
            f"{name}/steps/3",
            "--no-label",
            "eval",
            "--no-metric",
            "acc",
            "--json",
            *asked,
        )
        told = {"labels": {}, "metrics": {"eval/loss": 1.5}, "better": {"eval/loss": "min"}}
        assert json.loads(done.stdout) == told
        done = cairn_here("annotate", name, "--label", "a=b", *asked)  # the latest step
        assert noted(run, 6).labels == {"a": "b"}


@pytest.mark.parametrize("through", ["server", "store"])
def test_labels_of_a_run(tmp_path, run, through):
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        asked = ("--url", url) if through == "server" else ()
        name = "run" if through == "server" else str(run.uri)
        done = cairn_here("annotate", name, "--run", "--label", "owner=ann", "--json", *asked)
        assert json.loads(done.stdout) == {"labels": {"team": "nlp", "owner": "ann"}}
        assert run.info().labels == {"team": "nlp", "owner": "ann"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("run",), "expected something to note"),
        (("run", "--label", "eval"), "expected NAME=TEXT, found 'eval'"),
        (("run", "--metric", "loss=low"), "expected NAME=NUMBER, found 'loss=low'"),
        (("run", "--metric", "=1"), "expected NAME=NUMBER, found '=1'"),
        (("run", "--better", "loss=low"), "expected NAME=min or NAME=max, found 'loss=low'"),
        (("run", "--run", "--metric", "loss=1"), "a run has labels only"),
        (("run@production", "--run", "--label", "a=b"), "--run takes a RUN alone"),
        (("./run@production", "--run", "--label", "a=b"), "--run takes a RUN alone"),
    ],
)
def test_what_is_written_wrong_is_told(options, named):
    done = cairn_here("annotate", *options)
    assert done.returncode == 2
    assert named in done.stderr


def test_what_can_not_be_noted_changes_nothing(tmp_path, run):
    done = cairn_here("annotate", f"{run.uri}/steps/3", "--label", "a=b", "--better", "loss=min")
    assert done.returncode == 2
    assert "expected a metric of that name" in done.stderr
    assert noted(run, 3) == Annotation()
