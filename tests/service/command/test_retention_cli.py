"""`cairn delete`, `undelete` and `prune` against a control plane in a process of its own."""

import pytest
import typer

from cairn import Run
from tests.service.command.test_cli import refused, result, rows
from tests.service.commands import cairn_here, cairn_on_a_terminal
from tests.service.planes import running_plane
from tests.service.seams import options
from tests.service.stores import annotate, make_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def url(root, tmp_path_factory):
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def listed(root, run):
    return [info.step for info in Run.open(root / run).steps()]


def test_step_is_deleted_and_had_back(url, root):
    make_run(root / "taken-back", [1, 2])
    done = cairn_here("delete", "taken-back/steps/1", "--reason", "bad data", url=url)
    assert (done.returncode, done.stdout) == (0, "taken-back/steps/1 (attempt 1) is in trash\n")
    assert "`cairn undelete taken-back/steps/1` takes it back, until 20" in done.stderr
    assert listed(root, "taken-back") == [2]
    (row,) = rows(cairn_here("checkpoints", "taken-back", "--state", "trashed", url=url))
    assert row["step"] == "1"
    again = cairn_here("delete", "taken-back/steps/1", url=url)
    refused(again, "(step 1 trashed)", status=3)
    done = cairn_here("undelete", "taken-back/steps/1", url=url)
    assert (done.returncode, done.stdout) == (0, "taken-back/steps/1 (attempt 1) is available\n")
    assert listed(root, "taken-back") == [1, 2]
    again = cairn_here("undelete", "taken-back/steps/1", url=url)
    refused(again, "expected step 1 in the trash", status=3)


def test_grace_time_is_given_as_people_say_it(url, root):
    run = make_run(root / "graceful", [1, 2, 3])
    assert cairn_here("delete", "graceful/steps/1", "--grace", "0s", url=url).returncode == 0
    assert cairn_here("delete", "graceful/steps/2", "--grace", "2w", url=url).returncode == 0
    assert [row["name"] for row in rows(cairn_here("gc", str(root / "graceful")))] == [
        "attempts/1/1"
    ]
    wrong = cairn_here("delete", "graceful/steps/3", "--grace", "soon", url=url)
    assert wrong.returncode == 2
    assert "found 'soon'" in " ".join(wrong.stderr.split())
    assert run.latest_step() == 3


@pytest.mark.parametrize("address", ["kept", "kept@production"])
def test_only_a_step_named_by_its_number_is_deleted(url, root, address):
    make_run(root / "kept", [1, 2])
    done = cairn_here("delete", address, url=url)
    refused(done, f"'{address}': expected a step as RUN/steps/N", status=2)
    assert listed(root, "kept") == [1, 2]


def test_step_that_an_alias_names_is_refused_in_one_line(url, root):
    make_run(root / "named", [1, 2])
    assert cairn_here("promote", "named", "1", "production", "--create", url=url).returncode == 0
    done = cairn_here("delete", "named/steps/1", url=url)
    refused(done, "found alias production", "Move or delete", status=4)


def test_policy_is_shown_and_then_applied(url, root):
    run = make_run(root / "pruned", range(1, 9))
    annotate(run, 2, labels={"eval": "passed"}, metrics={"eval/loss": 0.5})
    annotate(run, 3, metrics={"eval/loss": 0.1})
    policy = ["--keep-last", "2", "--keep-best", "eval/loss:min:1", "--keep-label", "eval"]
    shown = cairn_here("prune", "pruned", *policy, url=url)
    found = {row["step"]: (row["what"], row["why"]) for row in rows(shown)}
    assert list(found) == [str(step) for step in range(8, 0, -1)]
    assert found["8"] == ("keep", "latest, last 2")
    assert found["3"] == ("keep", "best 1 by eval/loss (min)")
    assert found["2"] == ("keep", "label eval")
    assert found["1"] == ("delete", "no rule keeps it")
    assert (
        "Keeps 4 steps, would delete 4 (256 B). Run again with --apply to delete them."
        in shown.stderr
    )
    assert listed(root, "pruned") == list(range(1, 9))
    done = cairn_here("prune", "pruned", *policy, "--grace", "1h", "--apply", "--watch", url=url)
    assert result(done)["kept"] == "4"
    assert listed(root, "pruned") == [2, 3, 7, 8]
    jobs = rows(cairn_here("operations", url=url))
    assert [(row["kind"], row["state"], row["run"]) for row in jobs] == [
        ("retention", "succeeded", "pruned")
    ]
    status, table = cairn_on_a_terminal("prune", "pruned", "--keep-within", "7d", url=url)
    assert status == 0
    assert "within 604800 s" in table


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "expected a rule at least"),
        (["--apply"], "expected a rule at least"),
        (["--keep-last", "0"], "--keep-last"),
        (["--keep-within", "-1d"], "found '-1d'"),
        (["--keep-best", ":min"], "expected METRIC[:min|max][:COUNT]"),
        (["--keep-best", "loss:0"], "found 'loss:0'"),
    ],
)
def test_rule_that_cannot_work_is_wrong_usage(url, root, options, part):
    make_run(root / "whole", [1, 2])
    done = cairn_here("prune", "whole", *options, url=url)
    assert done.returncode == 2
    assert part in " ".join(done.stderr.split())
    assert listed(root, "whole") == [1, 2]


@pytest.mark.parametrize("apply", [[], ["--apply"]])
@pytest.mark.parametrize(
    ("rule", "part"),
    [
        (["--keep-best", "los"], "the metric 'los': the nearest known is 'loss'"),
        (["--keep-best", "loss:mn:2"], "the metric 'loss:mn': the nearest known is 'loss'"),
        (["--keep-label", "finl"], "the label 'finl': the nearest known is 'final'"),
    ],
)
def test_name_that_no_step_carries_deletes_nothing(url, root, rule, part, apply):
    run = make_run(root / f"typo-{len(apply)}-{rule[1].replace(':', '')}", [1, 2, 3])
    annotate(run, 1, labels={"final": ""}, metrics={"loss": 0.1})
    done = cairn_here("prune", run.uri.name, "--keep-last", "1", *rule, *apply, url=url)
    assert done.returncode != 0
    assert part in " ".join(done.stderr.split())
    assert listed(root, run.uri.name) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("2w", 1209600)],
)
def test_duration_is_read_as_people_write_it(text, seconds):
    assert options.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "7 d", "7D", "1e3", "inf", "nan", "٣d", "1y"])
def test_text_that_is_no_duration_is_refused(text):
    with pytest.raises(typer.BadParameter, match="such as 12h or 7d, found"):
        options.parse_duration(text)
