"""Lists that are searched, on both databases: what is found, in what order, page by page.

`make faults` has every test on both, and more examples.
"""

import base64
import itertools
import json
import math
import random
import threading
from datetime import UTC, datetime

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import Settings, annotate_step, create_app, delete_step, parse_uri, promote_step
from cairn.service.catalog.entries import written_number
from cairn.service.filters.expressions import quote
from cairn.service.filters.fields import CHECKPOINT_FIELDS
from cairn.service.filters.search import Search
from cairn.service.schemas import Checkpoint
from cairn.storage.runs.annotate import note_verified
from tests.faults.report import trials
from tests.service.conftest import BASE_URL, PEER
from tests.service.filters.expressions import KEYS, NUMBERS, TEXTS, filters, holds
from tests.service.stores import (
    add_steps,
    annotate,
    begin_attempt,
    begin_saving,
    make_run,
    publish,
    trash,
)
from tests.stores import DATABASES

RUN = "/v1/roots/default/runs/run"
CHECKPOINTS = f"{RUN}/checkpoints"
FEW = settings(max_examples=trials(short=8, long=100))  # each reads many pages
BAD = (math.nan, math.inf, -math.inf)
BOTH = pytest.mark.parametrize("some_database_url", DATABASES, indirect=True)
"""Where the databases differ: how they compare, and what a column or a statement holds."""


@pytest.fixture(scope="module", params=DATABASES)
def served(request, tmp_path_factory):
    """A run whose steps have labels and metrics of every kind, behind a server."""
    folder = tmp_path_factory.mktemp("searched")
    url = f"sqlite:///{folder}/catalog.sqlite"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql").create()
    run = make_run(folder / "store" / "run", range(1, 25))
    chance = random.Random(7)
    for step in range(2, 25):  # the first has none
        labels = {key: chance.choice(TEXTS) for key in KEYS if chance.random() < 0.5}
        metrics = {key: chance.choice((*NUMBERS, *BAD)) for key in KEYS if chance.random() < 0.5}
        annotate(run, step, labels=labels, metrics=metrics)
    for step in (2, 7, 9):
        note_verified(run, run.step(step))
    for alias, step in (("production", 7), ("best", 7), ("old", 3)):
        promote_step(run, step, alias, expect=None)
    trash(run, 5)
    add_steps(run, [24], base_step=23)  # the first attempt at it is superseded
    begin_saving(run, 30)
    served = Settings(
        root=str(folder / "store"), data_dir=folder / "data", database_url=url, scan_seconds=0
    )
    with TestClient(create_app(served, jobs=False), BASE_URL, client=PEER) as http:
        yield http


@pytest.fixture(scope="module")
def every(served):
    """All checkpoints, as the list without a filter has them."""
    found = pages(served, CHECKPOINTS, state="all")
    assert len(found) == 26
    return found


def pages(http, path, *, size=1000, between=lambda: None, **parameters):
    found, token = [], None
    while True:
        asked = {**parameters, "page_size": size} | ({"page_token": token} if token else {})
        answer = http.get(path, params=asked)
        assert answer.status_code == 200, answer.text
        (entries,) = (value for value in answer.json().values() if isinstance(value, list))
        found += entries
        token = answer.json()["next_page_token"]
        if token is None:
            return found
        assert entries
        between()


def steps(http, filter="", order_by="", **parameters):
    found = pages(http, CHECKPOINTS, filter=filter, order_by=order_by, **parameters)
    return [one["step"] for one in found]


def test_verified_steps_are_found_and_the_others(served):
    assert steps(served, "verified:*") == [9, 7, 2]
    assert steps(served, "verified:*", "verified") == [2, 7, 9]
    others = steps(served, "NOT verified:*")
    assert not {2, 7, 9} & {*others}
    assert len(others) + 3 == len(steps(served))


def key(entry):
    return entry["step"], entry["attempt"]


@settings(max_examples=trials(short=20, long=300))  # on each database
@given(filters)
def test_filter_lets_through_what_it_says(served, every, expression):
    if len(str(expression)) > 2000:
        return
    expected = [key(one) for one in every if holds(expression, dict(Checkpoint(**one)))]
    found = pages(served, CHECKPOINTS, filter=str(expression), state="all")
    assert [key(one) for one in found] == expected


PATHS = ["step", "attempt", "state", "created", "verified", "bytes", "leaves", "model_type"]
PATHS += [f"{field}.{quote(name)}" for field in ("labels", "metrics") for name in KEYS]


def ordered(entries, order_by):
    """Sorted by Python, one field after the other from the last to the first."""
    found = sorted(entries, key=key, reverse=True)
    for term in reversed(Search.parse("", order_by, CHECKPOINT_FIELDS).order):

        def value(entry, term=term, path=term.path):
            got = dict(Checkpoint(**entry))[path.field]
            got = got.get(path.key) if path.key is not None else got
            if got is None or got != got:
                return None
            if path.field != "labels":
                return got
            number = written_number(got)
            # Numbers come before texts in both directions.
            if number is None:
                return (not term.descending, 0.0, got)
            return (term.descending, number, "")

        there = [one for one in found if value(one) is not None]
        there.sort(key=value, reverse=term.descending)
        found = there + [one for one in found if value(one) is None]
    return found


@st.composite
def orders(draw):
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True))
    return ", ".join(path + draw(st.sampled_from(("", " desc", " asc"))) for path in paths)


@FEW
@given(orders(), st.integers(3, 30))
def test_order_is_what_it_says_on_pages_of_any_size(served, every, order_by, size):
    found = pages(served, CHECKPOINTS, order_by=order_by, state="all", size=size)
    assert [key(one) for one in found] == [key(one) for one in ordered(every, order_by)]


@FEW
@given(filters, orders(), st.integers(2, 6))
def test_pages_of_a_filter_and_an_order_fit_together(served, every, expression, order_by, size):
    if len(str(expression)) > 2000:
        return
    asked = {"filter": str(expression), "order_by": order_by, "state": "all"}
    parted = pages(served, CHECKPOINTS, size=size, **asked)
    assert parted == pages(served, CHECKPOINTS, **asked)


def test_search_is_among_listed_steps_unless_the_filter_asks_about_states(served):
    assert 5 not in steps(served, "step <= 5")
    assert steps(served, 'state = "trashed"') == [5]
    assert steps(served, 'state = "trashed"', state="listed") == []
    assert steps(served, "NOT state = listed") == [30, 24, 5]
    assert steps(served, "step <= 5", state="trashed") == [5]
    assert 5 not in steps(served, order_by="state")


def test_missing_values_and_nan_come_last_in_either_direction(served, every):
    name = KEYS[0]
    there = [one["step"] for one in every if one["metrics"].get(name, "nan") != "nan"]
    for direction in ("asc", "desc"):
        found = steps(served, order_by=f"metrics.{name} {direction}", state="all")
        assert set(found[: len(there)]) == set(there)
        assert found[len(there) :] == sorted(found[len(there) :], reverse=True)


def test_runs_are_searched(served):
    assert [run["name"] for run in pages(served, "/v1/runs", filter="aliases:production")] == [
        "run"
    ]
    assert pages(served, "/v1/runs", filter="aliases:nobody") == []
    assert pages(served, "/v1/runs", filter="NOT labels:*")[0]["name"] == "run"
    assert pages(served, "/v1/roots/default/runs", filter="latest_step > 24") == []
    answer = served.get("/v1/runs", params={"filter": "leaves < 1"})
    assert answer.status_code == 422
    assert "expected a field: root, name, created" in answer.json()["detail"]


@pytest.fixture
def http(some_database_url, root, tmp_path):
    settings = Settings(
        root=str(root), data_dir=tmp_path / "data", database_url=some_database_url, scan_seconds=0
    )
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as client:
        yield client


def test_runs_are_in_the_order_that_is_asked_for_on_pages(http, root):
    for number, team in enumerate(("nlp", "vision", None, "nlp", "Audio", "", None)):
        labels = {} if team is None else {"team": team}
        make_run(root / f"run-{number}", range(number % 3), labels=labels)

    def names(**asked):
        return [run["name"][4:] for run in pages(http, "/v1/runs", size=2, **asked)]

    assert names(order_by="labels.team, name desc") == ["5", "4", "3", "0", "1", "6", "2"]
    assert names(order_by="labels.team desc") == ["1", "0", "3", "4", "5", "2", "6"]
    assert names(order_by="latest_step desc, name desc") == ["5", "2", "4", "1", "6", "3", "0"]
    assert names(filter='labels.team = "nlp"') == ["0", "3"]
    assert names(filter='NOT labels.team = "nlp"', order_by="name desc") == [
        "6",
        "5",
        "4",
        "2",
        "1",
    ]
    assert names(filter='labels.team != "nlp"') == ["1", "4", "5"]
    assert names(filter="NOT latest_step:*") == ["0", "3", "6"]
    assert names(filter="checkpoint_count >= 2 OR name = run-0") == ["0", "2", "5"]


def test_search_that_looks_first_finds_what_nobody_has_announced(http, root):
    run = make_run(root / "run", [1])
    other = make_run(root / "other", [1])
    assert pages(http, "/v1/runs", filter="latest_step > 1") == []
    publish(run, 1, 2)
    publish(other, 1, 3)
    found = pages(http, "/v1/runs", filter="latest_step > 1", refresh=True, size=1)
    assert [one["name"] for one in found] == ["other", "run"]
    annotate(run, 2, metrics={"loss": 0.5})
    assert steps(http, "metrics.loss < 1", refresh=True) == [2]


def test_page_token_belongs_to_its_filter_and_its_order(http, root):
    make_run(root / "run", range(5))
    asked = {"filter": "step > 0", "order_by": "created", "page_size": 2}
    token = http.get(CHECKPOINTS, params=asked).json()["next_page_token"]
    again = {**asked, "page_token": token, "filter": "(step>0)", "page_size": 3}
    assert http.get(CHECKPOINTS, params=again).status_code == 200
    for other in ({"filter": "step > 1"}, {"filter": ""}, {"order_by": ""}, {"order_by": "step"}):
        answer = http.get(CHECKPOINTS, params={**asked, "page_token": token, **other})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "query.page_token"
        assert "the same filters and the same order" in answer.json()["detail"]


def test_pages_have_once_what_is_there_all_the_time_while_others_come_go_and_change(http, root):
    run = make_run(root / "run", range(0, 60, 2))
    for step in range(0, 60, 2):
        annotate(run, step, metrics={"loss": float(step % 7)})
    pages(http, CHECKPOINTS)
    changes = iter(range(1, 60, 2))

    def change():
        step = next(changes)
        publish(run, 1, step)
        annotate(run, step, metrics={"loss": float(step % 7)})
        delete_step(run, run.step(step - 1), by="test")
        annotate(run, step, metrics={"loss": -1.0}, labels={"changed": "yes"})
        http.post(CHECKPOINTS, json={"step": step})

    seen = pages(http, CHECKPOINTS, size=3, between=change, order_by="metrics.loss")
    deleted = range(0, next(changes) - 1, 2)
    kept = set(range(0, 60, 2)) - set(deleted)
    found = [one["step"] for one in seen if one["step"] in kept]
    assert sorted(found) == sorted(kept)
    assert len({one["step"] for one in seen}) == len(seen)


def test_pages_are_right_while_another_thread_publishes_deletes_and_annotates(http, root):
    run = make_run(root / "run", range(0, 40, 2))
    for step in range(0, 40, 2):
        annotate(run, step, metrics={"loss": float(step % 5)}, labels={"stays": "yes"})
    pages(http, CHECKPOINTS)
    over = threading.Event()
    failures = []

    def churn():
        try:
            for step in itertools.cycle(range(41, 61, 2)):
                if over.is_set():
                    return
                publish(run, 1, step + 1000 * churn.turn)
                annotate(run, step + 1000 * churn.turn, metrics={"loss": float(step % 5)})
                http.post(CHECKPOINTS, json={"step": step + 1000 * churn.turn})
                if step == 59:
                    delete_step(run, run.step(41 + 1000 * churn.turn), by="test")
                    churn.turn += 1
        except BaseException as exc:
            failures.append(exc)
            raise

    churn.turn = 0
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for order_by in ("metrics.loss", "metrics.loss desc", "created, labels.stays", ""):
            seen = pages(http, CHECKPOINTS, size=3, order_by=order_by, filter="labels:stays")
            assert sorted(one["step"] for one in seen) == list(range(0, 40, 2))
            seen = pages(http, CHECKPOINTS, size=7, order_by=order_by or "attempt")
            found = [one["step"] for one in seen]
            assert len(found) == len(set(found))
            assert set(range(0, 40, 2)) <= set(found)
    finally:
        over.set()
        thread.join()
    assert failures == []


@BOTH
@pytest.mark.parametrize("field", ["labels", "metrics"])
def test_names_and_texts_of_a_filter_are_never_sql(http, root, field):
    make_run(root / "run", [1, 2])
    for evil in (
        "'",
        "''",
        "x' OR '1'='1",
        "'; DROP TABLE checkpoints; --",
        "%",
        ":x",
        "\\'",
        "$1",
    ):
        name = f"{field}.{quote(evil)}"
        value = quote(evil) if field == "labels" else "1"
        assert steps(http, f"{name} = {value}") == []
        assert steps(http, f"NOT {name} = {value}", f"{name} desc") == [2, 1]
    assert steps(http) == [2, 1]


@BOTH
def test_text_beyond_what_a_column_holds_equals_nothing(http, root):
    name = "r" * 128
    make_run(root / name)
    promote_step(make_run(root / "run", [1]), 1, "a" * 64, expect=None)
    assert len(pages(http, "/v1/runs", filter=f"name = {name}")) == 1
    assert pages(http, "/v1/runs", filter=f"name = {name}x") == []
    assert len(pages(http, "/v1/runs", filter=f"aliases:{'a' * 64}")) == 1
    assert pages(http, "/v1/runs", filter=f"aliases:{'a' * 200}") == []


@BOTH
def test_labels_with_odd_characters_keep_no_list_from_being_searched(http, root):
    run = make_run(root / "run", [1, 2, 3])
    annotate(run, 1, labels={"stage": "final", "note": "a\0b", "x\0y": "z"})
    annotate(run, 2, labels={"stage": "final\0", "path": "a\\u0000b\\"})
    annotate(run, 3, labels={"stage": "x" * 1999 + "\N{GRINNING FACE}"}, metrics={"a\0": 1.0})
    assert steps(http, "labels.stage = final") == [1]
    assert steps(http, "labels.note:*") == [1]
    assert steps(http, f"labels.path = {quote(chr(92).join(('a', 'u0000b', '')))}") == [2]
    assert steps(http, "labels.stage = 'final\N{REPLACEMENT CHARACTER}'") == [2]
    assert steps(http, "labels:'x\N{REPLACEMENT CHARACTER}y'") == [1]
    assert len(steps(http, order_by="labels.stage", size=1)) == 3
    assert len(steps(http, order_by="metrics.a desc, labels.note", size=1)) == 3


@pytest.mark.parametrize(
    ("parameters", "field", "complaint"),
    [
        ({"filter": "stpe = 3"}, "query.filter", "at character 1: expected a field: step"),
        ({"order_by": "step up"}, "query.order_by", "at character 6: expected asc, desc"),
        ({"filter": "x" * 2001}, "query.filter", "at most 2000 characters"),
        ({"page_token": "W10"}, "query.page_token", "this is no next_page_token"),
    ],
)
def test_what_can_not_be_read_is_refused_with_its_place(http, root, parameters, field, complaint):
    make_run(root / "run", [1])
    answer = http.get(CHECKPOINTS, params=parameters)
    assert (answer.status_code, answer.json()["type"]) == (
        422,
        "urn:cairn:problem:invalid-request",
    )
    assert answer.json()["errors"][0]["field"] == field
    assert complaint in answer.json()["detail"]


@BOTH
def test_moments_are_compared_to_the_microsecond_in_any_zone(http, root):
    run = make_run(root / "run", [1])
    created = datetime.fromisoformat(http.get(f"{CHECKPOINTS}/1").json()["created"])
    assert created.tzinfo is not None
    text = created.astimezone(UTC).isoformat()
    assert steps(http, f"created = {text}") == [1]
    assert steps(http, f"created > {text}") == []
    hours = created.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
    assert steps(http, f"created > {hours}+00:01") == [1]
    assert steps(http, f"created < {hours}-00:01") == [1]
    assert steps(http, "created > 0001-01-01T00:00:00Z AND created < 9999-12-31T23:59:59Z") == [1]
    assert run.uri.name == "run"


@BOTH
def test_the_largest_searches_are_answered(http, root):
    run = make_run(root / "run", [1, 2])
    annotate(run, 2, metrics={"loss": 0.5})
    many = " OR ".join(f"metrics.m{n} < {n}" for n in range(49)) + " OR metrics.loss = 0.5"
    deep = "NOT (" * 8 + "metrics.loss = 0.5" + ")" * 8
    order = ", ".join(f"labels.{quote('x' * 300 + str(n))} desc" for n in range(4))
    assert steps(http, many, order) == [2]
    assert steps(http, deep, order) == [2]


def test_page_token_of_long_labels_is_taken_back(http, root):
    run = make_run(root / "run", range(4))
    names = [f"l{n}" for n in range(4)]
    for step in range(4):
        annotate(run, step, labels=dict.fromkeys(names, "😀" * 200 + "x" * step))
    assert steps(http, order_by=", ".join(f"labels.{name}" for name in names), size=1) == [
        3,
        2,
        1,
        0,
    ]


def test_forged_key_of_a_token_is_refused_or_harmless(http, root):
    make_run(root / "run", range(4))
    asked = {"order_by": "leaves, created", "page_size": 2}
    token = http.get(CHECKPOINTS, params=asked).json()["next_page_token"]
    body = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    parts = (None, "x", 1.5, True, [], {}, "2026-13-01T00:00:00Z", 2**60)
    for place, part in itertools.product(range(1, len(body)), parts):
        forged = json.dumps([*body[:place], part, *body[place + 1 :]]).encode()
        given = base64.urlsafe_b64encode(forged).decode().rstrip("=")
        answer = http.get(CHECKPOINTS, params={**asked, "page_token": given})
        assert answer.status_code in (200, 422), (place, part, answer.text)


METRICS = ("loss", "eval/loss", 'say "hi"', "'; DROP TABLE runs; --", "日本")
VALUES = (*(number for number in NUMBERS if number), 0.0, *BAD)  # -0.0 is 0.0 in SQLite


@pytest.fixture(scope="module")
def swept(served, tmp_path_factory):
    """Runs whose steps have metrics, added to the searched store; and what they should show."""
    root = parse_uri(served.get("/v1/roots").json()["roots"][0]["uri"])
    chance = random.Random(11)
    expected = {}
    for number in range(10):
        name = f"swept-{number:02}"
        run = make_run(root / name, range(1, 5))
        steps = {step: {} for step in range(1, 5)}
        better = {key: chance.choice(("min", "max")) for key in METRICS[:3]}
        for step in steps:
            for _ in range(2):  # annotated again: earlier values are gone
                metrics = {key: chance.choice(VALUES) for key in METRICS if chance.random() < 0.6}
                steps[step].update(metrics)
                ways = {key: better[key] for key in metrics if key in better and step != 2}
                annotate_step(run, step, metrics=metrics, better=ways, by="test")
                if chance.random() < 0.5:
                    served.get(f"/v1/roots/default/runs/{name}", params={"refresh": True})
        if number % 3 == 0:
            delete_step(run, run.step(4), by="test")
            del steps[4]
        expected[name] = shown(steps, better)
    served.get("/v1/runs", params={"refresh": True})
    return expected


def shown(steps, better):
    """The last and the best value of each metric, of steps that are listed."""
    cells = {}
    for key in METRICS:
        values = [(step, found[key]) for step, found in sorted(steps.items()) if key in found]
        ways = [step for step, _ in values if key in better and step != 2]
        if not values:
            continue
        cells[f"metrics.{quote(key)}"] = (values[-1][1], values[-1][0])
        real = [(value, step) for step, value in values if value == value]
        if ways and real:
            sign = 1 if better[key] == "min" else -1
            value, step = min(real, key=lambda one: (sign * one[0], one[1]))
            cells[f"best.{quote(key)}"] = (value, step)
    return cells


def test_last_and_best_values_of_runs_are_those_of_their_steps(served, swept):
    paths = [f"{field}.{quote(key)}" for field in ("metrics", "best") for key in METRICS]
    found = pages(served, "/v1/runs", columns=", ".join(paths), size=5)
    for run in found:
        if run["name"] in swept:
            cells = dict(zip(paths, run["columns"], strict=True))
            there = {
                path: (float(cell["value"]), cell["step"])
                for path, cell in cells.items()
                if cell["value"] is not None
            }
            assert repr(there) == repr(
                {path: swept[run["name"]][path] for path in paths if path in swept[run["name"]]}
            )


@FEW
@given(st.data(), st.integers(2, 7))
def test_runs_are_sorted_by_metrics_on_pages_of_any_size(served, swept, data, size):
    paths = [f"{field}.{quote(key)}" for field in ("metrics", "best") for key in METRICS]
    terms = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=2, unique=True))
    downs = [data.draw(st.booleans()) for _ in terms]
    order_by = ", ".join(f"{term}{' desc' * down}" for term, down in zip(terms, downs, strict=True))
    expected = sorted(swept)
    for term, down in reversed([*zip(terms, downs, strict=True)]):
        values = {name: cells[term][0] for name, cells in swept.items() if term in cells}
        there = [name for name in expected if values.get(name, math.nan) == values.get(name)]
        there.sort(key=values.__getitem__, reverse=down)
        expected = there + [name for name in expected if name not in there]
    asked = {"filter": "name:swept", "order_by": order_by}
    found = [run["name"] for run in pages(served, "/v1/runs", size=size, **asked)]
    assert found == expected


def test_runs_are_found_and_sorted_by_the_config_of_their_newest_model(http, root):
    configs = {
        "a": {"hidden_size": 128, "act": "silu", "rope": {"theta": 1e4}, "tied": True},
        "b": {"hidden_size": 1024.5, "act": "128", "rope": {"theta": 5e5}, "dims": [1, 2]},
        "c": {"hidden_size": "large", "act": "x" * 5000, "na\0me": "a\0b", "none": None},
        "d": {},
    }
    for name, config in configs.items():
        run = make_run(root / name, (1,))
        attempt = begin_attempt(run, base_step=1)
        publish(run, attempt.number, 2, config=config)

    def names(filter="", order_by=""):
        found = pages(http, "/v1/runs", filter=filter, order_by=order_by, size=1)
        return "".join(run["name"] for run in found)

    assert names("config.hidden_size >= 128") == "ab"
    assert names("config.hidden_size = large OR config.act = '128'") == "bc"
    assert names("NOT config.act = 128") == "abcd"  # the text "128" is no number
    assert names("config.tied = true AND config.rope/theta < 1e5") == "a"
    assert names("config:*", "config.hidden_size") == "abc"
    assert names("", "config.hidden_size desc") == "bacd"
    (a, b, c, _) = pages(http, "/v1/runs", columns="config.act, config.dims, config.none")
    assert [cell["value"] for cell in a["columns"]] == ["silu", None, None]
    assert b["columns"][1]["value"] == "[1, 2]"
    assert c["columns"][0]["value"] == "x" * 199 + "…"
    answer = http.get("/v1/runs", params={"filter": "config.act < b"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.filter")
    assert "a number for config" in answer.json()["detail"]
    answer = http.get("/v1/runs", params={"columns": "best.loss, name"})
    assert answer.json()["errors"][0]["field"] == "query.columns"
