import functools
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from fastapi.openapi.models import OpenAPI
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.interop.conversion.tensor_streams import FLOAT_NAMES
from tests.programs.program import run
from tests.service.commands import environment
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import policies, schemas
from tests.service.stores import make_run

METHODS = {"get", "post", "put", "patch", "delete"}
# A value for every path parameter that is well-formed and names nothing.
UNKNOWN = {
    "root": "nowhere",
    "run": "nothing",
    "step": "7",
    "alias": "nobody",
    "checkpoint": "nobody",
    "operation": "op-" + "0" * 32,
    "artifact": "default~nothing~7~1~convert-0123456789ab",
    "name": "config.json",
    "key": "a" * 12,
    "webhook": "a" * 12,
    "delivery": "7",
    "leaf": "nothing/kernel",
    "kind": "retention",
    "policy": "weekly",
}
# The same, malformed.
INVALID = {
    "root": "-",
    "run": ".hidden",
    "step": "seven",
    "alias": "-",
    "checkpoint": "-",
    "operation": "x",
    "artifact": "%",
    "name": "x" * 300,
    "key": "A" * 12,
    "webhook": "A" * 12,
    "delivery": "first",
    "leaf": "x" * 4001,
    "kind": "A",
    "policy": "-",
}
QUERIES = {"diff": "?other=1"}
"""By the last word of a path, what a request must ask."""


@functools.cache
def described():
    """The document; made once, for it takes the better part of a second."""
    return create_app(Settings(), jobs=False).openapi()


@pytest.fixture(scope="module")
def document():
    return described()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """With the job engine, so that every route answers for itself."""
    folder = tmp_path_factory.mktemp("served")
    make_run(folder / "store/trained", [900, 1000])
    app = create_app(Settings(root=str(folder / "store"), data_dir=folder / "data"))
    with TestClient(app, base_url=BASE_URL, client=PEER) as http:
        yield http


def operations(document):
    for path, item in document["paths"].items():
        for method in METHODS & set(item):
            yield method, path, item[method]


def routes():
    """Every route of the API, for parametrized tests."""
    return [
        pytest.param(method, path, id=operation["operationId"])
        for method, path, operation in sorted(
            operations(described()), key=lambda entry: entry[1::-1]
        )
    ]


def example_body(method, path):
    """The document's example of the body that a route takes; None: it takes none."""
    document = described()
    body = document["paths"][path][method].get("requestBody")
    if body is None:
        return None
    schema = body["content"]["application/json"]["schema"]
    reference = schema.get("anyOf", [schema])[0]["$ref"]
    (example,) = document["components"]["schemas"][reference.rpartition("/")[2]]["examples"]
    return example


def ask(http, method, path, values):
    verb = path.partition("?")[0].rpartition(":")[2].rpartition("/")[2]
    url = path + QUERIES.get(verb, "")
    for name, value in values.items():
        url = url.replace("{" + name + "}", value)
    body = example_body(method, path.partition("?")[0])
    if verb == "roots" and body is not None:
        body = body | {"uri": str(Path(__file__).parent)}  # the example is a bucket
    return http.request(method, url, json=body, headers={"If-Match": '"1"'})


def check_declared(document, method, path, answer):
    declared = document["paths"][path][method]["responses"][str(answer.status_code)]
    assert "application/problem+json" in declared["content"]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == answer.status_code


def test_document_is_valid_openapi(document):
    assert OpenAPI.model_validate(document).openapi.startswith("3.1")


def test_every_reference_leads_somewhere(document):
    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(document))
    assert "#/components/schemas/Problem" in found
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_no_entry_of_a_request_is_let_through_for_its_name(document):
    """What `patternProperties` do not match is allowed to be anything, unless that is refused."""
    open_ended = [
        (name, field)
        for name, schema in document["components"]["schemas"].items()
        for field, entries in schema.get("properties", {}).items()
        if "patternProperties" in entries and entries.get("additionalProperties") is not False
    ]
    assert open_ended == []
    labels = document["components"]["schemas"]["CreateRunRequest"]["properties"]["labels"]
    assert labels["additionalProperties"]["type"] == "string"


def test_operation_ids_are_unique(document):
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))


def test_every_route_declares_its_success_with_a_type(document):
    for method, path, operation in operations(document):
        successes = [code for code in operation["responses"] if code.startswith("2")]
        assert successes, (method, path)
        for code in successes:
            for media, content in operation["responses"][code].get("content", {}).items():
                assert content.get("schema") or content["itemSchema"], (method, path, code, media)
                if media == "application/json":
                    schemas = content["schema"].get("anyOf", [content["schema"]])
                    assert all("$ref" in one for one in schemas), (method, path, code)


def test_every_route_declares_problems_and_only_as_problem_json(document):
    for method, path, operation in operations(document):
        errors = {code: body for code, body in operation["responses"].items() if code >= "400"}
        always = {"401", "403", "422", "429", "431", "500", "503", "507"}
        assert always <= set(errors), (method, path)
        assert {"400", "413"} <= set(errors) or "requestBody" not in operation, (method, path)
        reads_a_store = "{root}" in path  # which may be damaged
        assert (method != "get" or reads_a_store) == ("409" in errors), (method, path)
        names = "{" in path or (method, path) == ("post", "/v1/keys")  # its body names roots
        assert names == ("404" in errors), (method, path)
        for code, body in errors.items():
            assert list(body["content"]) == ["application/problem+json"], (method, path, code)


@pytest.mark.parametrize("auth", ["loopback", "keys"])
def test_every_route_of_the_api_says_how_callers_are_known(auth):
    document = create_app(Settings(auth=auth), jobs=False).openapi()
    schemes = set(document["components"]["securitySchemes"])
    assert schemes == {"bearer", "session"}
    for method, path, operation in operations(document):
        named = {name for one in operation["security"] for name in one}
        assert named == (schemes if path.startswith("/v1/") else set()), (method, path)
        needless = {} in operation["security"]
        assert needless == (auth == "loopback" and path.startswith("/v1/")), (method, path)


def test_no_secret_stands_in_the_document(document):
    assert not re.search(r"ck_[a-z2-7]{12}_", json.dumps(document))


def test_every_parameter_and_field_of_a_request_is_typed(document):
    for method, path, operation in operations(document):
        for parameter in operation.get("parameters", []):
            schema = parameter["schema"]
            assert {"type", "$ref", "anyOf", "enum", "const"} & set(schema), (method, path, schema)
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize(("method", "path"), routes())
def test_route_answers_what_names_nothing_with_a_declared_problem(served, document, method, path):
    answer = ask(served, method, path, UNKNOWN)
    if "{" not in path:
        assert answer.is_success
        return
    assert answer.status_code == 404, answer.text
    check_declared(document, method, path, answer)


@pytest.mark.parametrize(("method", "path"), routes())
def test_route_answers_what_is_malformed_with_a_declared_problem(served, document, method, path):
    named = [name for name in INVALID if "{" + name + "}" in path]
    for name in named:
        answer = ask(served, method, path, UNKNOWN | {name: INVALID[name]})
        assert answer.status_code in (404, 422), (name, answer.text)
        check_declared(document, method, path, answer)


@pytest.mark.parametrize(("method", "path"), routes())
def test_a_query_parameter_that_a_route_does_not_have_is_refused(served, document, method, path):
    answer = ask(served, method, f"{path}?atempt=1&reason_=x", UNKNOWN)
    if not path.startswith("/v1/"):
        assert answer.status_code == 200  # probes add what they like
        return
    check_declared(document, method, path, answer)
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (422, "urn:cairn:problem:invalid-request")
    assert {"query.atempt", "query.reason_"} <= {error["field"] for error in problem["errors"]}
    for parameter in document["paths"][path][method].get("parameters", []):
        assert parameter["in"] != "query" or parameter["name"] in problem["detail"]


NOT_RUN = {
    "adopt": schemas.AdoptRequest,  # a folder of Orbax
    "convert": schemas.ConvertRequest,  # a step with a model
    "takeOver": schemas.TakeOverRequest,  # a job that saves
}
"""By the last word of a path, the model of a body whose example needs more than is stored here."""

OF_A_RUN = [case for case in routes() if "{root}" in case.values[1] and example_body(*case.values)]


@pytest.mark.parametrize(("method", "path"), OF_A_RUN)
def test_the_example_of_a_body_is_accepted(served, method, path):
    """Those of the routes without a name are sent above."""
    verb, body = path.rpartition(":")[2], example_body(method, path)
    if verb in NOT_RUN:
        assert NOT_RUN[verb].model_validate(body)
        return
    names = {"run": "trained", "step": 900 if verb == "undelete" else 1000}
    names |= {name: UNKNOWN[name] for name in ("kind", "policy")}
    url = path.replace(":name}", "}").format(root="default", **names)
    if verb == "undelete":
        assert served.delete(url.partition(":")[0]).is_success
    creates = verb == "promote" or method == "put"
    headers = {"If-None-Match": "*"} if creates else {"If-Match": "*"}
    answer = served.request(method, url, json=body, headers=headers)
    assert answer.is_success, answer.text


LONG = {"StepDiff", "StepPlan"}
"""Answers whose example would be longer than what says more: the description of its parts."""


def test_the_example_of_an_answer_is_one_that_its_model_gives(document):
    references = {
        schema["$ref"].rpartition("/")[2]
        for _, _, operation in operations(document)
        for code, answer in operation["responses"].items()
        if code.startswith("2") and "application/json" in answer.get("content", {})
        for content in [answer["content"]["application/json"]["schema"]]
        for schema in content.get("anyOf", [content])
    }
    for name in {"Problem", *references} - LONG:
        model = getattr(schemas, name, None) or getattr(policies, name)
        (example,) = document["components"]["schemas"][name]["examples"]
        assert model.model_validate(example).model_dump(mode="json") == example, name


def test_every_tag_has_a_text(document):
    used = {tag for _, _, operation in operations(document) for tag in operation["tags"]}
    assert {tag["name"] for tag in document["tags"] if tag["description"]} == used


def test_verbs_that_do_not_exist_are_problems(served):
    for path in ("/v1/roots/default/runs/a/checkpoints/1", "/v1/operations/op-0"):
        answer = served.post(f"{path}:explode", json={})
        assert answer.status_code in (404, 405)
        assert answer.headers["content-type"] == "application/problem+json"


def test_document_is_printed_by_a_command_that_starts_nothing(document, tmp_path):
    data = tmp_path / "data"
    done = run(["-m", "cairn.service.command.openapi"], env=environment(CAIRN_DATA_DIR=str(data)))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document
    assert not data.exists()


def test_dtypes_of_exports_are_those_that_conversion_knows():
    assert get_args(schemas.Dtype) == FLOAT_NAMES


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/roots/default/runs/run/checkpoints/7", "DELETE, GET, PATCH"),
        ("GET", "/v1/roots/default/runs/run/checkpoints/7:promote", "POST"),
        ("DELETE", "/v1/roots/default/runs/run:gc", "POST"),
        ("POST", "/v1/runs", "GET"),
        ("DELETE", "/v1/roots/default/runs/run/checkpoints", "GET, POST"),
        ("POST", "/healthz", "GET"),
    ],
)
def test_method_that_a_path_does_not_have_is_told_all_that_it_has(served, method, path, allowed):
    answer = served.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("run:gc", {"dry_run": "no"}, "body.dry_run"),
        ("run:gc", {"dry_run": 0}, "body.dry_run"),
        ("run/checkpoints", {"step": "7"}, "body.step"),
        ("run/checkpoints", {"step": True}, "body.step"),
        ("run/checkpoints", {"step": 7.5}, "body.step"),
        ("run:applyRetention", {"policy": {"keep_last": "3"}}, "body.policy.keep_last"),
        ("run:applyRetention", {"policy": {}, "grace_seconds": "9"}, "body.grace_seconds"),
        ("run/checkpoints/7:promote", {"alias": 7}, "body.alias"),
    ],
)
def test_json_of_another_type_is_not_taken_for_what_was_meant(served, path, body, field):
    url = f"/v1/roots/default/runs/{path}"
    answer = served.post(url, json=body, headers={"If-None-Match": "*"})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
