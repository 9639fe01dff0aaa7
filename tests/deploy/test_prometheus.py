"""Alerts and dashboards ask for metrics that exist, and each alert has a page that helps."""

import json
import re

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.catalog.external_changes import OUTSIDE_KINDS
from cairn.service.schemas import OperationState
from tests.deploy.metrics import ADDED, FAMILIES, SERIES, asked, families
from tests.deploy.repository import DEPLOY, ROOT, documents
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import database

(RULES,) = documents(DEPLOY / "prometheus/alerts.yaml")
(CASES,) = documents(DEPLOY / "prometheus/alerts.test.yaml")
ENTRIES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ENTRIES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in ENTRIES if "record" in rule}
BOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
PANELS = {
    f"{path.stem}: {panel['title']}": panel
    for path in BOARDS
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
}
QUERIES = [
    *((name, rule["expr"]) for name, rule in {**ALERTS, **RECORDS}.items()),
    *((name, one["expr"]) for name, panel in PANELS.items() for one in panel["targets"]),
]
HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)


@pytest.mark.parametrize(("place", "query"), QUERIES, ids=[place for place, _ in QUERIES])
def test_every_query_is_promql_that_asks_for_metrics_and_labels_that_exist(place, query):
    series = {**SERIES, **{name: set() for name in RECORDS}}
    found = list(asked(query))
    assert found
    for name, labels in found:
        assert name in series
        assert labels - series[name] - ADDED == set(), name


@pytest.mark.parametrize("query", ["rate(cairn_jobs[5m]", "sum by (kind) cairn_jobs"])
def test_what_is_no_promql_is_noticed(query):
    with pytest.raises(ValueError, match=r"unclosed|invalid promql"):
        list(asked(query))


def test_a_label_of_an_aggregation_is_asked_of_what_is_inside():
    query = "max by (kind) (rate(cairn_jobs{state='x'}[5m])) > on (root) cairn_index_lag_seconds"
    assert dict(asked(query)) == {
        "cairn_jobs": {"kind", "state", "root"},
        "cairn_index_lag_seconds": {"root"},
    }


@pytest.fixture
def http(tmp_path):
    (tmp_path / "store").mkdir()
    settings = Settings(
        root=str(tmp_path / "store"), data_dir=tmp_path / "data", scan_seconds=0, worker=True
    )
    with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as client:
        yield client


def test_the_metrics_are_those_that_a_server_has(http):
    answer = http.get("/metrics")
    if answer.status_code == 404:  # there are none yet: these are what was agreed on
        return
    assert FAMILIES - families(answer.text) == set()


def test_values_of_labels_that_queries_name_are_ones_of_the_code():
    text = " ".join(query for _, query in QUERIES)
    states = set(re.findall(r'state="(\w+)"', text))
    assert states <= {state.value for state in OperationState}
    assert set(re.findall(r'alive="(\w+)"', text)) <= {"true", "false"}
    kinds = set(re.findall(r'kind="(\w+)"', (DEPLOY / "prometheus/alerts.test.yaml").read_text()))
    assert kinds <= {*database.LIMITS, *OUTSIDE_KINDS}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    page = (ROOT / "docs/reference/service/runbooks.md").read_text(encoding="utf-8")
    assert HEADING.findall(page) == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"reference/service/runbooks.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    told = [case for test in CASES["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in told if case.get("exp_alerts")}
    silent = {case["alertname"] for case in told if not case.get("exp_alerts")}
    assert fires == silent == set(ALERTS)


def test_what_is_recorded_is_used():
    for name in RECORDS:
        assert any(name in query for _, query in QUERIES)


def test_every_metric_is_seen_somewhere():
    text = " ".join(query for _, query in QUERIES)
    assert [name for name in FAMILIES if name not in text] == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_stands_on_the_data_source_that_is_provisioned(path):
    board = json.loads(path.read_text(encoding="utf-8"))
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    source = {"type": "prometheus", "uid": sources["datasources"][0]["uid"]}
    assert board["uid"] == f"cairn-{path.stem}"
    variables = board["templating"]["list"]
    for panel in board["panels"]:
        assert [one["datasource"] for one in (panel, *panel["targets"])].count(source) == 1 + len(
            panel["targets"]
        )
        assert panel["description"]
    assert all(one["datasource"] == source for one in variables)
    named = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert named == {one["name"] for one in variables}
    for one in variables:
        ((name, label),) = re.findall(r"^label_values\((\w+), (\w+)\)$", one["definition"])
        assert label in SERIES[name]
        assert one["query"]["query"] == one["definition"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_lie_on_each_other(path):
    taken = set()
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
