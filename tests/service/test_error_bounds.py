"""Whatever a request holds, an answer names the first twenty errors, and no more are collected."""

import json

import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter, ValidationError

from cairn import Settings, create_app
from cairn.service.schemas import MAX_ERRORS, Operation
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import job_start, schemas
from tests.service.stores import make_run

MANY = 3_000
MOST_COLLECTED = 2_000
"""Errors that pydantic may collect of one body: no field's limit is higher, and none multiply."""

BODIES = [
    one
    for one in vars(schemas).values()
    if isinstance(one, type) and issubclass(one, schemas.Request) and one is not schemas.Request
]
PLAN = "/v1/roots/default/runs/run/checkpoints/1:plan"


def hostile(schema, definitions):
    """Values for a schema that have as many errors in one place as fit, one for each place."""
    for branch in schema.get("anyOf", [schema]):
        kind = definitions[branch["$ref"].rpartition("/")[2]] if "$ref" in branch else branch
        if kind.get("type") == "object":
            yield {f"field {number}": 0 for number in range(MANY)}
            for name, inner in kind.get("properties", {}).items():
                yield from ({name: value} for value in hostile(inner, definitions))
        elif kind.get("type") == "array":
            yield [0] * MANY
            items = kind.get("prefixItems") or [kind.get("items", {})]
            count = 1 if "prefixItems" in kind else min(kind.get("maxItems", MANY), 100)
            columns = [[*hostile(item, definitions)] or ["x"] for item in items]
            for number in range(max(map(len, columns))):
                yield [column[min(number, len(column) - 1)] for column in columns] * count


def errors_of(adapter, value):
    try:
        adapter.validate_python(value, from_attributes=True)
    except ValidationError as exc:
        return exc.error_count()
    return 0


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_body_has_many_errors_collected(body):
    schema = body.model_json_schema()
    adapter = TypeAdapter(body)
    for value in hostile(schema, schema.get("$defs", {})):
        assert errors_of(adapter, value) <= MOST_COLLECTED, str(value)[:200]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    make_run(folder / "store" / "run", [1])
    settings = Settings(root=str(folder / "store"), data_dir=folder / "data")
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({f"odd {number}": number for number in range(MANY)}, MANY),
        ({"mesh": {"axes": {"a": 8}}, "x" * 700_000: 1}, 1),
        ({"mesh": {"axes": {"a": 8}}, "items": ["-" * 9_000] * 90}, 90),
        ({"mesh": {"axes": {"a": 8}}, "rules": [["x", [0] * 64]] * 1000}, 128),
    ],
    ids=["unknown", "long name", "items", "rules"],
)
def test_answer_has_the_first_errors_and_how_many_there_are(http, body, count):
    answer = http.post(PLAN, json=body)
    problem = answer.json()
    assert answer.status_code == 422
    assert len(problem["errors"]) == min(count, MAX_ERRORS)
    assert problem.get("error_count", count) == count
    assert (f"and {count - MAX_ERRORS} more" in problem["detail"]) is (count > MAX_ERRORS)
    assert len(answer.content) < 20_000


def test_errors_of_parameters_are_bounded_too(http):
    query = "&".join(f"p{number}" for number in range(3_000))
    answer = http.get(f"/v1/runs?{query}&{'x' * 3000}=1")
    problem = answer.json()
    assert (len(problem["errors"]), problem["error_count"]) == (MAX_ERRORS, 3_001)
    assert problem["errors"][0]["field"] == "query.p0"
    assert len(answer.content) < 20_000


def test_key_that_was_used_for_a_large_request_names_the_first_differences():
    old, new = ({"model": {f"{word}{n}": 0 for n in range(30_000)}} for word in ("a", "b"))
    place = {"root": "default", "run": "run"}
    used = Operation.model_construct(kind="adopt", request=place | old)
    told = job_start.describe_key_reuse(used, "adopt", place | new)
    assert told.startswith("another one than its adopt of default/run: model.a0 not given where")
    assert told.endswith(f"and {60_000 - MAX_ERRORS} more")
    assert len(told) < 4000


def test_text_that_no_database_holds_is_refused_wherever_it_is(http):
    for odd in ("\0", "\ud800"):
        for body in ({"name": odd}, {odd: 1}, {"labels": {odd: "x"}}, {"labels": [{"x": [odd]}]}):
            sent = json.dumps(body)
            answer = http.post(
                "/v1/roots/default/runs", content=sent, headers={"Content-Type": "application/json"}
            )
            assert "expected text without NUL" in answer.text, (body, answer.text)
