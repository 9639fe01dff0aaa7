"""The log: every line says when, where, and whose; and none has a secret in it."""

import io
import json
import logging
import re
import subprocess
from contextlib import contextmanager
from datetime import UTC, datetime

import httpx
import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from cairn.service.catalog.engine import Catalog
from cairn.service.observability.logs import start_logging
from cairn.service.observability.redaction import redact
from tests.programs.program import Program
from tests.service.commands import CAIRN, cairn, environment
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import save_llama, serving, watch
from tests.service.seams import logs
from tests.service.stores import make_run

SECRET = "hunter2"
KEPT = {"timestamp", "level", "logger", "event", "request_id"}


@contextmanager
def written(form=logs.JsonLines):
    """What is logged meanwhile, in a form."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form())
    root, ours = logging.getLogger(), logging.getLogger("cairn")
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        ours.setLevel(level)
        root.removeHandler(handler)


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def access(stream):
    return [line for line in lines(stream) if line["logger"] == "cairn.access"]


def test_every_request_has_one_line_that_says_what_became_of_it(http, root):
    make_run(root / "run", [1])
    with written() as log:
        http.get("/v1/roots/default/runs/run")
        http.get("/v1/roots/default/runs/nothing?refresh=true")
    first, second = access(log)
    assert set(first) >= KEPT
    assert datetime.fromisoformat(first["timestamp"]).tzinfo == UTC
    assert (first["level"], first["event"], first["actor"]) == ("info", "request", "loopback")
    assert (first["method"], first["status"], second["status"]) == ("GET", 200, 404)
    assert {first["route"], second["route"]} == {"/v1/roots/{root}/runs/{run}"}
    assert 0 < first["seconds"] < 60
    assert first["request_id"] != second["request_id"]


@pytest.mark.parametrize("asked", ["abc-123", "4bf92f35-77b3.4da6:a_3"])
def test_a_request_keeps_the_id_that_it_came_with(http, asked):
    with written() as log:
        answer = http.get("/v1/roots/nowhere/runs", headers={"X-Request-ID": asked})
    assert answer.headers["X-Request-ID"] == answer.json()["request_id"] == asked
    assert [line["request_id"] for line in access(log)] == [asked]


@pytest.mark.parametrize("asked", ["", "a b", "x" * 129, '"}', "é", "-x", "a\tb"])
def test_an_id_that_is_not_plain_is_replaced(http, asked):
    answer = http.get("/healthz", headers={"X-Request-ID": asked.encode()})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-ID"])


def test_refusals_and_unexpected_errors_name_their_request_too(app):
    def fail():
        raise RuntimeError("boom")

    app.add_api_route("/fail", fail)
    with (
        written() as log,
        TestClient(app, base_url=BASE_URL, client=PEER, raise_server_exceptions=False) as http,
    ):
        answers = [http.get("/fail"), http.get("/x", headers={"Host": "evil.example"})]
        answers.append(http.put("/v1/runs"))
    assert [answer.status_code for answer in answers] == [500, 403, 405]
    for answer in answers:
        assert answer.json()["request_id"] == answer.headers["X-Request-ID"]
    assert [line["request_id"] for line in access(log)] == [
        answer.headers["X-Request-ID"] for answer in answers
    ]
    (error,) = [line for line in lines(log) if line["level"] == "error"]
    assert error["request_id"] == answers[0].headers["X-Request-ID"]
    assert error["exception"]["type"] == "builtins.RuntimeError"
    assert error["exception"]["message"] == "boom"
    assert "in fail" in error["exception"]["stack"]
    assert access(log)[1]["actor"] is None


def test_lines_of_a_job_name_it_and_the_request_that_started_it(root, tmp_path):
    save_llama(root / "run")
    with written() as log, serving(root, tmp_path / "data", scan_seconds=0) as http:
        step = "/v1/roots/default/runs/run/checkpoints/1:convert"
        started = http.post(step, json={}, headers={"X-Request-ID": "who-asked"})
        watch(http, started.json()["id"])
    told = [line for line in lines(log) if line["logger"] == "cairn.service.jobs.observation"]
    assert [line["event"] for line in told] == ["job begins", "job ends"]
    assert {line["operation_id"] for line in told} == {started.json()["id"]}
    assert {line["request_id"] for line in told} == {"who-asked"}
    assert (told[1]["kind"], told[1]["outcome"]) == ("convert", "succeeded")


def test_text_lines_are_read_by_people_and_no_value_makes_a_line_of_its_own():
    with written(logs.TextLines) as log:
        logging.getLogger("cairn.test").warning("a thing", extra={"why": 'two\nlines "x"', "n": 3})
    (line,) = log.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\S+ warning  cairn\.test a thing "
        r'why="two\\nlines \\"x\\"" n=3',
        line,
    )


def test_a_message_of_a_client_makes_no_line_of_its_own(http):
    with written(logs.TextLines) as log:
        logging.getLogger("cairn.test").error("asked for %s", "x\n2026-01-01 info forged")
        try:
            raise ValueError("y\r\n2026-01-01 info forged")
        except ValueError:
            logging.getLogger("cairn.test").exception("failed")
    assert [line for line in log.getvalue().splitlines() if line.startswith("2026-01-01")] == []


SECRETS = {
    "key of ours": "ck_a1b2_hunter2",
    "secret of a webhook": "whsec_hunter2",
    "URL": "postgresql+psycopg://cairn:hunter2@db/cairn",
    "URL with odd password": "postgresql://cairn:a@b/hunter2@db:5432/cairn?sslmode=require",
    "header": "Authorization: Bearer hunter2hunter2",
    "basic": "authorization: Basic aHVudGVyMg-hunter2==",
    "headers as Python": "[(b'authorization', b'Bearer hunter2'), (b'cookie', b'session=hunter2')]",
    "map of headers": "{'Authorization': 'hunter2', 'Cookie': 'a=hunter2; b=hunter2'}",
    "cookie": "Cookie: a=1; session=hunter2",
    "set-cookie": "set-cookie: session=hunter2; HttpOnly",
    "query": "GET /v1/runs?token=hunter2&api_key=hunter2&X-Goog-Signature=hunter2",
    "key in a query": "GET /v1/runs?key=hunter2",
    "connection string": "host=db user=cairn password=hunter2 dbname=x",
    "JSON": '{"client_secret": "hunter2"}',
    "other header": "X-Api-Key: hunter2",
    "row": "duplicate key\nDETAIL:  Key (name)=(hunter2) already exists.\nHINT: none",
    "parameters": "[SQL: SELECT 1]\n[parameters: {'name': 'hunter2'}]\n(Background)",
}


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("form", [logs.JsonLines, logs.TextLines])
def test_no_secret_is_written_wherever_it_stands(name, form):
    logger = logging.getLogger("cairn.test")
    with written(form) as log:
        logger.warning("found %s", SECRETS[name])
        logger.warning("found", extra={"headers": {"x": [SECRETS[name]]}, "path": SECRETS[name]})
        try:
            raise ValueError(SECRETS[name])
        except ValueError:
            logger.exception("failed")
    assert SECRET not in log.getvalue()
    assert log.getvalue().count("***") >= 3


def test_fields_whose_name_says_so_are_hidden():
    with written() as log:
        logging.getLogger("cairn.test").warning("x", extra={"authorization": SECRET, "token": "b"})
    (line,) = lines(log)
    assert (line["authorization"], line["token"]) == ("***", "***")


@pytest.mark.parametrize(
    "plain",
    [
        "gs://bucket/runs/llama/steps/12",
        "http://127.0.0.1:8321/v1/runs?page_size=50",
        "page_token: expected one of this list",
        "the authorization of this server is missing",
        "root default is file:///srv/store",
        "op-019f3c0ffee0 ended",
    ],
)
def test_what_is_no_secret_stays(plain):
    assert redact(plain) == plain


def test_failures_of_requests_write_no_secret_of_theirs(app):
    def fail(request: Request):
        raise RuntimeError(f"{request.url} {request.headers.raw}")

    app.add_api_route("/fail", fail)
    with (
        written() as log,
        TestClient(app, base_url=BASE_URL, client=PEER, raise_server_exceptions=False) as http,
    ):
        headers = {"Authorization": "Bearer hunter2", "Cookie": "session=hunter2"}
        assert http.get("/fail?token=hunter2", headers=headers).status_code == 500
        http.get("/v1/runs?access_token=hunter2", headers={"Authorization": "ck_x_hunter2"})
    assert SECRET not in log.getvalue()
    assert "RuntimeError" in log.getvalue()


def test_failures_of_the_database_write_no_parameter(database_url):
    catalog = Catalog.open(database_url)
    with written() as log:
        try:
            with catalog.write() as session:
                session.execute(
                    text("INSERT INTO roots (name, uri, nothing) VALUES (:name, :name, :name)"),
                    {"name": SECRET},
                )
        except DBAPIError:
            logging.getLogger("cairn.test").exception("failed")
    catalog.close()
    assert "INSERT INTO roots" in log.getvalue()
    assert SECRET not in log.getvalue()


def test_a_database_that_refuses_is_told_without_its_password(tmp_path):
    url = "postgresql+psycopg://cairn:hunter2@127.0.0.1:1/cairn"
    for variable in ("CAIRN_DATABASE_URL", "CAIRN_JOBS_DATABASE_URL"):
        given = {"CAIRN_DATA_DIR": str(tmp_path / "data"), variable: url}
        done = cairn("serve", "--root", str(tmp_path / "store"), "--port", "0", **given)
        assert done.returncode == 1
        assert variable in done.stderr
        assert SECRET not in done.stdout + done.stderr


def test_all_lines_of_a_server_go_one_way(root, tmp_path):
    """Those of libraries too, from the start to the end."""
    save_llama(root / "run")
    process = Program(
        [*CAIRN, "serve", "--root", str(root), "--port", "0"],
        env=environment(
            CAIRN_DATA_DIR=str(tmp_path / "data"), CAIRN_LOG_FORMAT="JSON", CAIRN_LOG_LEVEL="debug"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        url = next(line.split()[1] for line in process.stdout if line.startswith("cairn: http"))
        with httpx.Client(base_url=url) as http:
            step = "/v1/roots/default/runs/run/checkpoints/1:convert"
            watch(http, http.post(step, json={}).json()["id"])
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    told = [json.loads(line) for line in errors.splitlines()]
    assert all(set(line) >= KEPT for line in told)
    loggers = {line["logger"] for line in told}
    assert {"cairn.access", "uvicorn.error", "dbos", "cairn.service.jobs.observation"} <= loggers
    assert len([line for line in told if line["logger"] == "cairn.access"]) == 2


@pytest.fixture
def _logging_as_it_was():
    loggers = [logging.getLogger(name) for name in ("", "cairn", "uvicorn", "dbos", "sqlalchemy")]
    loggers += [logging.getLogger(f"uvicorn.{name}") for name in ("error", "access")]
    before = [(one, one.level, [*one.handlers], one.propagate) for one in loggers]
    yield
    logging.captureWarnings(False)
    for one, level, handlers, propagate in before:
        one.setLevel(level)
        one.handlers[:] = handlers
        one.propagate = propagate


@pytest.mark.usefixtures("_logging_as_it_was")
@pytest.mark.parametrize(
    ("level", "ours", "others"),
    [("debug", 10, 20), ("info", 20, 30), ("warning", 30, 30), ("error", 40, 40)],
)
def test_the_level_is_that_of_our_lines_and_libraries_say_less(level, ours, others):
    start_logging("text", level)
    assert logging.getLogger("cairn.service").getEffectiveLevel() == ours
    for name in ("uvicorn.error", "dbos", "alembic"):
        assert logging.getLogger(name).getEffectiveLevel() == others
    assert logging.getLogger("sqlalchemy.engine").getEffectiveLevel() == max(ours, 30)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "part",
    ["a.", "a-", "x://a:", "x://", "token ", "ck_", "whsec_", "cookie", "x-", "secret.", "bearer "],
)
def test_a_long_text_that_a_client_made_up_takes_no_time(part):
    assert redact(part * 50_000).startswith(part[:1])


def test_numbers_that_json_does_not_have_are_text():
    with written() as log:
        logging.getLogger("cairn.test").warning("x", extra={"loss": float("nan"), "n": 1.5})
    (line,) = [json.loads(one, parse_constant=pytest.fail) for one in log.getvalue().splitlines()]
    assert (line["loss"], line["n"]) == ("nan", 1.5)
