import inspect
import sqlite3

import pytest
import sqlalchemy.exc
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from cairn import StorageError
from cairn.service.errors import InvalidRequestError, ProblemError
from cairn.service.http.field_errors import field_detail
from cairn.service.http.problems import install_handlers, problem_from
from cairn.service.schemas import SIZE_PATTERN
from cairn.storage import errors as storage_errors
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import errors as service_errors
from tests.service.stores import make_run

STORAGE_ERRORS = [
    kind
    for _, kind in inspect.getmembers(storage_errors, inspect.isclass)
    if issubclass(kind, StorageError)
]
STATUSES = {
    "AliasNotFoundError": 404,
    "ArtifactNotFoundError": 404,
    "ConfinementError": 409,
    "CorruptionError": 409,
    "SourceRefusedError": 409,
    "FencedError": 409,
    "InvalidURIError": 422,
    "InvalidSliceError": 422,
    "IteratorMismatchError": 422,
    "LateProcessError": 503,
    "LeafNotFoundError": 404,
    "LeaseHeldError": 409,
    "NotACheckpointError": 422,
    "NotFoundError": 404,
    "PolicyError": 422,
    "RecordNotLostError": 422,
    "PreconditionFailedError": 412,
    "RunNotFoundError": 404,
    "SaveError": 500,
    "StepExistsError": 409,
    "StepInFlightError": 409,
    "StepChangedError": 409,
    "StepDamagedError": 409,
    "StepInUseError": 409,
    "StepNotFoundError": 404,
    "StorageError": 500,
    "StoreFullError": 507,
    "StoreUnavailableError": 503,
    "TreeMismatchError": 422,
    "StoreCheckError": 409,
    "UnsupportedFormatError": 422,
    "UnsupportedLeafError": 422,
}


def check_problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert {"type", "title", "status", "detail", "instance"} <= set(problem)
    assert problem["status"] == status
    assert problem["type"].startswith("urn:cairn:problem:")
    assert problem["detail"]
    return problem


def test_every_storage_error_has_its_status():
    found = {
        kind.__name__: problem_from(kind("broken", path="p"), instance="/x").status
        for kind in STORAGE_ERRORS
    }
    assert found == STATUSES


DATABASE_STATUSES = {
    "OperationalError": (503, "database-unavailable"),
    "InterfaceError": (503, "database-unavailable"),
    "InternalError": (503, "database-unavailable"),
    "IntegrityError": (409, "conflict"),
    "DataError": (500, "database"),
    "ProgrammingError": (500, "database"),
}


@pytest.mark.parametrize("name", DATABASE_STATUSES)
def test_database_errors_have_their_status_and_tell_no_statement(name):
    secret = "INSERT INTO keys VALUES ('hush')"
    exc = getattr(sqlalchemy.exc, name)(secret, {"p": "hush"}, Exception("driver says hush"))
    problem = problem_from(exc, instance="/x")
    status, slug = DATABASE_STATUSES[name]
    assert (problem.status, problem.type) == (status, f"urn:cairn:problem:{slug}")
    assert "hush" not in problem.model_dump_json()


@pytest.mark.parametrize(
    "words",
    ["database or disk is full", 'could not extend file "base/1": No space left on device'],
)
def test_full_database_is_told_apart(words):
    exc = sqlalchemy.exc.OperationalError("INSERT", {}, Exception(words))
    problem = problem_from(exc, instance="/x")
    assert (problem.status, problem.type) == (507, "urn:cairn:problem:database-full")


def test_every_error_of_the_database_library_is_in_the_table():
    for _, kind in inspect.getmembers(sqlalchemy.exc, inspect.isclass):
        if issubclass(kind, sqlalchemy.exc.SQLAlchemyError):
            exc = kind.__new__(kind)
            Exception.__init__(exc, "broken")
            assert problem_from(exc, instance="/x").type != "urn:cairn:problem:internal"


def test_every_kind_of_problem_has_a_name_of_its_own():
    types = [problem_from(kind("broken"), instance="/x").type for kind in STORAGE_ERRORS]
    assert len(set(types)) == len(types)
    assert "urn:cairn:problem:internal" not in types


def patterns_of(node):
    """Every regular expression that a document of OpenAPI has for a text."""
    if isinstance(node, dict):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from patterns_of(inner)


def test_a_text_that_does_not_match_is_told_in_words_what_does(app):
    # Headers and sizes have errors of their own.
    texts = [one for one in {*patterns_of(app.openapi())} - {SIZE_PATTERN} if '"' not in one]
    for pattern in texts:
        mismatch = {"type": "string_pattern_mismatch", "ctx": {"pattern": pattern}, "input": "?"}
        assert field_detail(mismatch).startswith("'?' can't be used here: "), pattern


def test_error_tree_in_the_docstring_is_the_tree():
    classes = [
        kind
        for _, kind in inspect.getmembers(service_errors, inspect.isclass)
        if kind.__module__ == "cairn.service.errors"
    ]
    missing = [kind.__name__ for kind in classes if kind.__name__ not in service_errors.__doc__]
    assert missing == []
    for kind in classes:
        if issubclass(kind, ProblemError) and kind is not ProblemError:
            line = next(
                line for line in service_errors.__doc__.splitlines() if kind.__name__ in line
            )
            assert line.split()[-1] == str(kind.status)


@pytest.mark.parametrize(
    ("kind", "message", "sentence", "detail"),
    [
        (
            storage_errors.StepNotFoundError,
            "no such step",
            'There is no step 4 in run "run" (steps 1, 2).',
            'There is no step 4 in run "run" (steps 1, 2). Wait.',
        ),
        (
            storage_errors.StepInFlightError,
            "it is being saved",
            "It is being saved.",
            "it is being saved: gs://b/run: expected step 4, found steps 1, 2. Wait.",
        ),
    ],
)
def test_members_carry_path_expected_found_and_next_step(kind, message, sentence, detail):
    parts = {"expected": "step 4", "found": "steps 1, 2", "next_step": "Wait."}
    problem = problem_from(kind(message, path="gs://b/run", **parts), instance="/v1/x")
    assert problem.instance == "/v1/x"
    assert problem.detail == detail
    members = problem.model_dump(mode="json")
    assert {name: members[name] for name in ("message", "path", *parts)} == {
        "message": sentence,
        "path": "gs://b/run",
        **parts,
    }


def test_members_without_a_value_are_left_out():
    problem = problem_from(InvalidRequestError("no"), instance="/x").model_dump(mode="json")
    assert set(problem) == {"type", "title", "status", "detail", "instance"}


def test_extension_members_carry_what_a_client_needs():
    held = storage_errors.LeaseHeldError("held", holder="me@host")
    assert problem_from(held, instance="/x").model_dump()["holder"] == "me@host"
    for kind in (storage_errors.TreeMismatchError, storage_errors.StoreCheckError):
        several = problem_from(kind("no fit", problems=["a: missing", "b: shape"]), instance="/x")
        assert several.model_dump()["problems"] == ["a: missing", "b: shape"]


@pytest.mark.parametrize(
    "error_of",
    [
        lambda lines: storage_errors.TreeMismatchError("no fit", problems=lines),
        lambda lines: ProblemError("; ".join(lines), extra={"problems": lines}),
    ],
    ids=["storage", "service"],
)
def test_problem_is_of_bounded_size_whatever_was_found(error_of):
    lines = [f"leaf {number}: missing" for number in range(30_000)]
    problem = problem_from(error_of(lines), instance="/x").model_dump()
    assert problem["problems"] == lines[:100]
    assert len(problem["detail"]) <= 8000
    long = problem_from(error_of(["x" * 100_000]), instance="/x").model_dump()
    assert len(str(long)) < 20_000


def test_errors_beyond_the_first_are_counted():
    errors = [{"field": f"body.{number}", "detail": "no"} for number in range(21)]
    problem = problem_from(InvalidRequestError("no", errors=errors), instance="/x")
    assert ([one.field for one in problem.errors][-1], len(problem.errors)) == ("body.19", 20)
    assert problem.error_count == 21
    problem = problem_from(InvalidRequestError("no", errors=errors[:20]), instance="/x")
    assert (len(problem.errors), problem.error_count) == (20, None)


@pytest.fixture
def raising(monkeypatch):
    """An application with one route, which raises what the test puts here."""
    app = FastAPI()
    install_handlers(app)
    box = []

    @app.get("/")
    def fail() -> None:
        raise box[0]

    with TestClient(app, base_url=BASE_URL, client=PEER, raise_server_exceptions=False) as http:
        yield http, box


def test_unexpected_error_says_nothing_of_the_inside(raising, caplog):
    http, box = raising
    box.append(RuntimeError("password=hunter2"))
    problem = check_problem(http.get("/"), 500)
    assert problem["type"] == "urn:cairn:problem:internal"
    assert "hunter2" not in str(problem)
    assert "hunter2" in caplog.text


@pytest.mark.parametrize("kind", STORAGE_ERRORS)
def test_storage_error_in_a_route_is_a_problem(raising, kind):
    http, box = raising
    box.append(kind("broken", path="run"))
    problem = check_problem(http.get("/"), STATUSES[kind.__name__])
    assert "run" in problem["detail"]


def test_problem_error_in_a_route_keeps_its_fields(raising):
    http, box = raising
    box.append(InvalidRequestError("no", errors=[{"field": "a", "detail": "b"}], extra={"x": 1}))
    problem = check_problem(http.get("/"), 422)
    assert (problem["errors"], problem["x"]) == ([{"field": "a", "detail": "b"}], 1)


@pytest.mark.parametrize(
    ("cause", "status", "kind", "found"),
    [
        ("database or disk is full", 507, "database-full", "has no space left."),
        ("database is locked", 503, "database-unavailable", "does not answer."),
    ],
)
def test_a_database_that_cannot_be_written_is_told_and_the_connection_stays(
    raising, cause, status, kind, found
):
    http, box = raising
    box.append(OperationalError("INSERT", {"secret": 1}, sqlite3.OperationalError(cause)))
    problem = check_problem(http.get("/"), status)
    assert problem["type"] == f"urn:cairn:problem:{kind}"
    assert found in problem["detail"]
    assert "INSERT" not in problem["detail"]


def test_unknown_path_and_method_are_problems(http):
    assert check_problem(http.get("/nothing/here"), 404)["instance"] == "/nothing/here"
    answer = http.put("/v1/runs")
    check_problem(answer, 405)
    assert answer.headers["allow"] == "GET"
    check_problem(http.get("/v1/runs/"), 404)


def test_body_that_is_no_json_or_too_large_is_a_problem(http, root):
    make_run(root / "run", [1])
    path = "/v1/roots/default/runs/run/checkpoints/1:promote"
    headers = {"If-None-Match": "*", "Content-Type": "application/json"}
    assert check_problem(http.post(path, content=b"{", headers=headers), 400)["errors"]
    assert check_problem(http.post(path, content=b"[]", headers=headers), 422)["errors"]
    check_problem(http.post(path, headers=headers), 422)
    plain = headers | {"Content-Type": "text/plain"}
    check_problem(http.post(path, content=b'{"alias": "production"}', headers=plain), 422)
    check_problem(http.post(path, content=b" " * (2 << 20), headers=headers), 413)
    chunks = iter([b" " * (1 << 20)] * 2)  # a length that is not told beforehand
    check_problem(http.post(path, content=chunks, headers=headers), 413)
    assert not (root / "run" / "aliases").exists()


@pytest.mark.parametrize("depth", [100, 400, 900, 500_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_body_that_is_nested_deeply_is_a_problem_of_the_caller(http, root, depth, opening):
    make_run(root / "run", [1])
    closing = "]" if opening == "[" else "}"
    nested = (opening * depth + "1" + closing * depth)[: 1 << 19]
    for path in ("checkpoints/1:promote", "checkpoints/1:gather"):
        answer = http.post(
            f"/v1/roots/default/runs/run/{path}",
            content=f'{{"alias": "best", "reason": {nested}}}',
            headers={"Content-Type": "application/json", "If-None-Match": "*"},
        )
        assert answer.status_code in (400, 422), answer.text


@pytest.mark.parametrize("size", ["0", "-1", "1001", "many"])
def test_page_size_has_limits(http, root, size):
    make_run(root / "run", [1])
    for path in ("/v1/runs", "/v1/roots/default/runs/run/checkpoints"):
        problem = check_problem(http.get(path, params={"page_size": size}), 422)
        assert problem["errors"][0]["field"] == "query.page_size"


@pytest.mark.parametrize(
    "token", ["x", "é", "WzFd", "W10", "bnVsbA", "WyJydW5zIiwxLDJd", "A" * 1025]
)
def test_page_token_that_is_none_of_ours_is_refused(http, token):
    problem = check_problem(http.get("/v1/runs", params={"page_token": token}), 422)
    assert problem["errors"][0]["field"] == "query.page_token"


def test_unknown_root_names_no_other_and_says_where_they_are_listed(http):
    problem = check_problem(http.get("/v1/roots/nowhere/runs"), 404)
    assert problem["type"] == "urn:cairn:problem:root-not-found"
    assert "GET /v1/roots list" in problem["detail"]
    assert "default" not in problem["detail"]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "%2E%2E%2F%2E%2E%2Fetc",
        "a%2Fb",
        "a%5Cb",
        "%5C%5Chost%5Cshare",
        ".hidden",
        "a%00b",
        "a%0Ab",
        "%252e%252e",
        "a::b",
        "file:%2F%2F%2Fetc",
        "gs:%2F%2Fbucket",
        "x" * 129,
        "%C3%A9",
        "a%20b",
        "~root",
        "-rf",
    ],
)
def test_name_that_leads_elsewhere_is_refused_and_nothing_touched(http, root, tmp_path, name):
    outside = tmp_path / "outside"
    make_run(outside / "run", [1])
    before = snapshot(tmp_path)
    for path in (
        f"/v1/roots/default/runs/{name}",
        f"/v1/roots/default/runs/{name}/checkpoints",
        f"/v1/roots/default/runs/{name}/aliases",
        f"/v1/roots/{name}/runs/run",
        f"/v1/roots/default/runs/run/aliases/{name}",
    ):
        answer = http.get(path)
        if answer.url.path == "/v1/roots/default":  # who asks has tidied the rest away
            own = {
                "name": "default",
                "uri": f"file://{root}",
                "source": "settings",
                "adopt_from": [],
            }
            assert (name, answer.json()) == ("..", own)
            continue
        assert answer.status_code in (404, 422), (path, answer.text)
        check_problem(answer, answer.status_code)
    answer = http.post(
        f"/v1/roots/default/runs/{name}/checkpoints/1:promote",
        json={"alias": "production"},
        headers={"If-None-Match": "*"},
    )
    assert answer.status_code in (404, 405, 422)
    check_problem(answer, answer.status_code)
    assert snapshot(tmp_path) == before


def snapshot(folder):
    """Every file below a folder, the server's own databases aside, with its bytes."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "data" not in path.relative_to(folder).parts
    }
