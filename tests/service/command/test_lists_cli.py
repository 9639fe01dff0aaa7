"""`cairn runs`, `checkpoints` and `audit` with a filter, an order, and as JSON."""

import json
import math

import pytest

import cairn
from cairn import Writer, delete_step
from cairn.service.schemas import (
    AliasHistory,
    AliasList,
    AuditEventList,
    CheckpointList,
    RunWriter,
)
from tests.service.commands import ExitStatus, cairn_here
from tests.service.planes import running_plane
from tests.service.stores import annotate, begin_attempt, make_run, publish


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listed")
    (folder / "data").mkdir()
    run = make_run(folder / "store" / "llama-sft", [1, 2, 3, 4], labels={"team": "nlp"})
    for step, loss in ((1, 0.75), (2, 0.25), (3, 0.5), (4, float("nan"))):
        annotate(run, step, metrics={"eval/loss": loss}, labels={"stage": "mid"})
    make_run(folder / "store" / "other", [8, 9])
    with running_plane(folder / "store", folder / "data") as (url, _):
        yield url


def rows(done):
    assert (done.returncode, done.stderr) == (0, "")
    titles, *lines = done.stdout.splitlines()
    return [dict(zip(titles.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_checkpoints_are_filtered_and_in_order(url):
    asked = ["--filter", "metrics.eval/loss <= 0.5", "--order-by", "metrics.eval/loss"]
    found = rows(cairn_here("checkpoints", "llama-sft", *asked, url=url))
    assert [one["step"] for one in found] == ["2", "3"]
    done = cairn_here("checkpoints", "llama-sft", "--json", *asked, url=url)
    found = json.loads(done.stdout)
    assert [one.step for one in CheckpointList.model_validate(found).checkpoints] == [2, 3]
    found = rows(cairn_here("checkpoints", "llama-sft", "--filter", "state = trashed", url=url))
    assert found == []


def test_runs_are_filtered_and_in_order(url):
    found = rows(cairn_here("runs", "--order-by", "latest_step desc", url=url))
    assert [one["run"] for one in found] == ["other", "llama-sft"]
    found = rows(cairn_here("runs", "--filter", "labels.team = nlp", url=url))
    assert [one["run"] for one in found] == ["llama-sft"]


def test_what_can_not_be_read_is_wrong_usage_and_says_where(url):
    done = cairn_here("checkpoints", "llama-sft", "--filter", "stpe = 3", url=url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "at character 1: expected a field: step" in done.stderr


def test_audit_shows_what_was_asked_and_by_whom(url):
    promoted = cairn_here("promote", "llama-sft", "2", "best", "--reason", "low loss", url=url)
    assert promoted.returncode == 0
    assert cairn_here("promote", "llama-sft", "3", "best", "--create", url=url).returncode == 4
    refused, done = rows(cairn_here("audit", "--run", "llama-sft", url=url))
    assert (refused["outcome"], done["outcome"]) == ("refused", "done")
    assert (done["action"], done["caller"]) == ("alias.promote", "loopback")
    assert json.loads(done["detail"])["reason"] == "low loss"
    for asked, count in (
        (["--filter", "outcome = done OR outcome = failed", "--since", "7d"], 1),
        (["--caller", "nobody"], 0),
        (["--action", "alias.promote", "--root", "default", "--limit", "1"], 1),
        (["--since", "99999999d", "--limit", "0"], 2),
    ):
        body = json.loads(cairn_here("audit", "--json", *asked, url=url).stdout)
        assert len(AuditEventList.model_validate(body).audit_events) == count


def test_texts_of_options_are_no_filters(url):
    body = json.loads(
        cairn_here("audit", "--json", "--run", 'x" OR run:* OR run="', url=url).stdout
    )
    assert body["audit_events"] == []


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """A server of runs whose steps say which values are good, and the folder of its root."""
    folder = tmp_path_factory.mktemp("noted")
    (folder / "data").mkdir()
    store = folder / "store"
    for name, ways in (("run", ("min",)), ("torn", ("min", "max")), ("silent", ())):
        run = make_run(store / name, range(1, 7))
        values = (2.0, 0.5, math.nan, 0.5, math.inf, 3.0)
        for step, loss in enumerate(values, start=1):
            annotate_step(run, {"eval/loss": loss, 'say "x".y': -loss}, step)
        for step, way in enumerate(ways, start=1):
            annotate_step(run, {}, step, {"eval/loss": way})
        delete_step(run, run.step(4), by="test")
    wide = make_run(store / "wide")
    attempt = begin_attempt(wide, base_step=-1)
    publish(wide, attempt.number, 1, config={f"c{number:03}": number for number in range(201)})
    annotate(wide, 1, metrics={f"m{number:04}": 1.0 for number in range(1001)})
    with running_plane(store, folder / "data") as (url, _):
        yield url, store


def annotate_step(run, metrics, step, better=None):
    cairn.annotate(f"{run.uri}/steps/{step}", metrics=metrics, better=better or {})


def test_columns_tell_what_no_step_says_and_what_lists_do_not_keep(noted):
    url, _ = noted
    asked = ("runs", "--filter", "name = silent", "--columns", "best.eval/loss, metrics.eval/loss")
    done = cairn_here(*asked, url=url)
    assert done.stdout.splitlines()[1].split("\t")[-3:] == ["", "", "3"]
    assert "no step of these runs says whether lower or higher is better" in done.stderr
    assert done.stderr.rstrip().endswith("`cairn annotate RUN --better eval/loss=min`")
    names = "config.c199, config.c200, metrics.m0999, metrics.m1000, best.m1000"
    done = cairn_here("runs", "--filter", "name = wide", "--columns", names, url=url)
    cells = done.stdout.splitlines()[1].split("\t")[-6:]
    assert cells == ["199", "unknown", "1", "unknown", "unknown", ""]
    assert done.stderr.splitlines() == [
        "wide: more than 1,000 metrics; lists know the first 1,000",
        "wide: more than 200 config entries; lists know the first 200",
    ]
    columns = json.loads(cairn_here(*asked, "--json", url=url).stdout)["runs"][0]["columns"]
    assert all("unknown" not in column for column in columns)


def path_of(checkpoint, url):
    done = cairn_here("path", checkpoint, url=url)
    return done.returncode, done.stdout.strip().removeprefix("file://") or done.stderr.strip()


@pytest.mark.parametrize(
    "best",
    [
        "run@best:eval/loss",
        "run@best:eval/loss:min",
        'run@best:say "x".y:max',
        'run@best:say "x".y:min',
        "silent@best:eval/loss:max",
        "silent@best:eval/loss:min",
    ],
)
def test_best_by_a_metric_is_the_same_step_by_a_server_as_in_the_store(noted, best):
    url, store = noted
    served, stored = path_of(best, url), path_of(f"{store}/{best}", url)
    assert served == stored
    assert served[0] == 0


@pytest.mark.parametrize(
    ("best", "status", "complaint"),
    [
        ("silent@best:eval/loss", 2, "Ask for silent@best:eval/loss:min or"),
        ("run@best:eval/loss:max", 2, "found that steps say min. Ask for the best as the steps"),
        ("torn@best:eval/loss", 2, "found that steps say min and max"),
        ("run@best:eval/los:min", 3, "Did you mean 'eval/loss'?"),
        ("none@best:eval/loss:min", 3, 'There is no run "none"'),
        ("run@best:", 2, "expected RUN, RUN@ALIAS, RUN@best:METRIC or RUN/steps/N"),
    ],
)
def test_best_that_nothing_tells_is_refused_as_in_the_store(noted, best, status, complaint):
    url, store = noted
    found, text = path_of(best, url)
    assert (found, complaint in text) == (status, True), text
    assert path_of(f"{store}/{best}", url)[0] == status


def test_best_is_taken_wherever_a_command_takes_a_checkpoint(noted):
    url, _ = noted
    done = cairn_here("annotate", "run@best:eval/loss", "--label", "good=yes", url=url)
    assert done.returncode == 0, done.stderr
    found = rows(cairn_here("checkpoints", "run", "--filter", "labels.good = yes", url=url))
    assert [one["step"] for one in found] == ["2"]
    done = cairn_here("annotate", "run@best:eval/loss", "--run", "--label", "a=b", url=url)
    assert (done.returncode, "--run takes a RUN alone" in done.stderr) == (2, True)
    done = cairn_here("delete", "run@best:eval/loss", url=url)
    assert (done.returncode, "expected a step as RUN/steps/N" in done.stderr) == (2, True)


def test_aliases_say_where_they_point_and_who_moved_them(url):
    first = ("8", "candidate", "--create", "--reason", "first")
    for arguments in (first, ("9", "candidate", "--reason", "lower loss")):
        assert cairn_here("promote", "other", *arguments, url=url).returncode == 0
    (found,) = rows(cairn_here("aliases", "other", url=url))
    assert (found["alias"], found["step"], found["reason"]) == ("candidate", "9", "lower loss")
    moves = rows(cairn_here("aliases", "other", "candidate", url=url))
    assert [(one["step"], one["sequence"], one["by"], one["reason"]) for one in moves] == [
        ("9", "2", "loopback", "lower loss"),
        ("8", "1", "loopback", "first"),
    ]
    assert found["sequence"] == "2"
    done = cairn_here("aliases", "other", "candidate", "--json", url=url)
    assert [one.step for one in AliasHistory.model_validate_json(done.stdout).events] == [9, 8]
    done = cairn_here("aliases", "other", "--json", url=url)
    assert [one.step for one in AliasList.model_validate_json(done.stdout).aliases] == [9]
    done = cairn_here("aliases", "other", "nobody", url=url)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nobody" in done.stderr


def test_writer_is_told_and_a_run_taken_from_it_as_it_was_seen(tmp_path):
    run = make_run(tmp_path / "store" / "held", [1, 2])
    holding = Writer(run, writer="job-7")
    holding.begin()
    (tmp_path / "data").mkdir()
    with running_plane(tmp_path / "store", tmp_path / "data") as (url, _):
        (found,) = rows(cairn_here("writer", "held", url=url))
        assert (found["writer"], found["attempt"], found["holds the run"]) == ("job-7", "2", "yes")
        stale = cairn_here("take-over", "held", "--attempt", "1", url=url)
        assert stale.returncode == ExitStatus.CONFLICT
        assert "job-7, by attempt 2" in stale.stderr
        done = cairn_here("take-over", "held", "--attempt", "2", "--reason", "gone", url=url)
        assert (done.returncode, done.stdout) == (0, "attempt 2 of job-7 ended; latest step 2\n")
        told = json.loads(cairn_here("writer", "held", "--json", url=url).stdout)
        assert (RunWriter.model_validate(told).attempt, told["holds"]) == (3, False)
        (event,) = (
            one
            for one in json.loads(cairn_here("audit", "--json", url=url).stdout)["audit_events"]
            if one["outcome"] == "done"
        )
        assert (event["action"], event["detail"]["reason"]) == ("run.takeOver", "gone")
        asked = ("promote", "held", "2", "production", "--attempt")
        other = cairn_here(*asked, "7", url=url)
        assert (other.returncode, other.stdout) == (ExitStatus.CONFLICT, "")
        assert cairn_here(*asked, "1", url=url).returncode == 0
        wrong = cairn_here("take-over", "held", "--reason", "gone", url=url)
        assert wrong.returncode == ExitStatus.USAGE
    holding.drop()
