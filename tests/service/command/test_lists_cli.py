"""`cairn runs`, `checkpoints` and `audit` with a filter, an order, and as JSON."""

import json

import pytest

from cairn.service.schemas import AuditEventList, CheckpointList
from tests.service.commands import cairn_here
from tests.service.planes import running_plane
from tests.service.stores import annotate, make_run


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listed")
    (folder / "data").mkdir()
    run = make_run(folder / "store" / "llama-sft", [1, 2, 3, 4], labels={"team": "nlp"})
    for step, loss in ((1, 0.75), (2, 0.25), (3, 0.5), (4, float("nan"))):
        annotate(run, step, metrics={"eval/loss": loss}, labels={"stage": "mid"})
    make_run(folder / "store" / "other", [9])
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
