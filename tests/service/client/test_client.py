import json
import socket
import time

import pytest

from cairn import Client, Settings, create_app
from cairn.service.errors import ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import OperationState
from tests.plain_orbax import manager
from tests.service.servers import reply, scripted, serve
from tests.service.stores import make_run

STREAM = {"Content_Type": "text/event-stream"}


def operation(state, done=0, **more):
    return {
        "id": "op-1",
        "kind": "convert",
        "state": state,
        "progress": {"done_bytes": done, "total_bytes": 100, "message": ""},
        "request": {},
        "created": "2026-11-21T10:00:00Z",
        "updated": "2026-11-21T10:00:00Z",
        **more,
    }


def event(number, state, done=0, **more):
    return f"id: {number}\ndata: {json.dumps(operation(state, done, **more))}\n\n".encode()


@pytest.fixture
def cairn(app):
    with serve(app) as url, Client(url) as client:
        yield client


def test_client_lists_promotes_and_deletes(cairn, root):
    make_run(root / "b", [1])
    make_run(root / "a", range(5), labels={"team": "nlp"})
    assert cairn.health().status == "ok"
    assert [entry.name for entry in cairn.roots()] == ["default"]
    assert [run.name for run in cairn.runs(page_size=1)] == ["a", "b"]
    assert [run.name for run in cairn.runs(root="default")] == ["a", "b"]
    assert cairn.run("a").labels == {"team": "nlp"}
    assert [entry.step for entry in cairn.checkpoints("a", page_size=2)] == [4, 3, 2, 1, 0]
    assert list(cairn.checkpoints("a", state="trashed")) == []
    first = cairn.promote("a", 3, "production", expect=None, reason="first")
    second = cairn.promote("a", 4, "production", expect=first.sequence)
    assert cairn.alias("a", "production") == second
    assert cairn.aliases("a") == [second]
    assert cairn.checkpoint("a", 4).aliases == ["production"]
    cairn.delete_alias("a", "production", expect=second.sequence)
    history = cairn.alias_history("a", "production").events
    assert [(entry.step, entry.deleted) for entry in history] == [
        (4, True),
        (4, False),
        (3, False),
    ]


def test_problem_answer_is_an_error_with_the_problem(cairn, root):
    make_run(root / "run", [1, 2])
    with pytest.raises(ProblemResponseError, match="No such run") as caught:
        cairn.run("none")
    assert caught.value.status == 404
    cairn.promote("run", 1, "production", expect=None)
    with pytest.raises(ProblemResponseError) as caught:
        cairn.promote("run", 2, "production", expect=None)
    assert caught.value.status == 412
    assert caught.value.problem["current"]["step"] == 1
    with pytest.raises(ProblemResponseError) as caught:
        cairn.ready()
    assert caught.value.problem["errors"][0]["field"] == "jobs"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\\b", "a?b", "a#b", "%2e%2e", "é"])
def test_name_that_is_no_segment_never_reaches_another_path(cairn, root, name):
    make_run(root / "a", [1])
    with pytest.raises(ProblemResponseError) as caught:
        cairn.run(name)
    assert caught.value.status in (404, 422)


def test_server_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with (
            Client(url) as client,
            pytest.raises(ServerUnreachableError, match=rf"{url}: .*cairn serve"),
        ):
            client.health()


def test_answer_that_is_no_problem_is_one_to_the_caller():
    page = reply(502, b"<html>bad gateway</html>", Content_Type="text/html")
    with (
        scripted(page) as (url, _),
        Client(url) as client,
        pytest.raises(ProblemResponseError, match="bad gateway") as caught,
    ):
        client.health()
    assert caught.value.status == 502


def test_url_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("CAIRN_URL", "http://127.0.0.1:9/")
    with Client() as client:
        assert client.url == "http://127.0.0.1:9"


def test_operation_is_followed_over_a_broken_stream_without_repeats():
    first = event(1, "pending") + event(2, "running", 10) + event(3, "running", 20)[:25]
    second = event(2, "running", 10) + event(3, "running", 20) + event(4, "succeeded", 100)
    with (
        scripted(reply(200, first, length=10_000, **STREAM), reply(200, second, **STREAM)) as (
            url,
            requests,
        ),
        Client(url) as client,
    ):
        seen = list(client.follow("op-1"))
    assert [(state.state, state.progress.done_bytes) for state in seen] == [
        (OperationState.PENDING, 0),
        (OperationState.RUNNING, 10),
        (OperationState.RUNNING, 20),
        (OperationState.SUCCEEDED, 100),
    ]
    assert [request.headers["Last-Event-ID"] for request in requests] == [None, "2"]
    assert requests[0].headers["Accept"] == "text/event-stream"
    assert requests[0].path == "/v1/operations/op-1/events"


def test_operation_is_followed_over_a_restart_of_the_server():
    unavailable = reply(
        503, b'{"title": "Not ready", "status": 503}', Content_Type="application/problem+json"
    )
    ended = reply(200, event(1, "running"), **STREAM)
    last = reply(200, event(2, "failed", error=None), **STREAM)
    with (
        scripted(ended, unavailable, unavailable, last) as (url, requests),
        Client(url) as client,
    ):
        seen = list(client.follow("op-1"))
    assert [state.state.value for state in seen] == ["running", "failed"]
    assert [request.headers["Last-Event-ID"] for request in requests] == [None, "1", "1", "1"]


def test_server_that_stays_away_ends_the_following():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        with Client(url) as client, pytest.raises(ServerUnreachableError, match="op-1"):
            list(client.follow("op-1", patience=0.5))
    assert time.monotonic() - began >= 0.5


def test_unknown_operation_is_not_waited_for():
    unknown = reply(404, b'{"title": "No", "status": 404}', Content_Type="application/problem+json")
    with (
        scripted(unknown) as (url, requests),
        Client(url) as client,
        pytest.raises(ProblemResponseError),
    ):
        list(client.follow("op-1"))
    assert len(requests) == 1


def test_stream_that_has_nothing_more_to_tell_ends():
    with scripted(reply(204)) as (url, _), Client(url) as client:
        assert list(client.follow("op-1")) == []


def test_wait_raises_the_problem_of_a_failed_operation():
    problem = {
        "type": "urn:cairn:problem:corrupt",
        "title": "Stored data is corrupt",
        "status": 500,
        "detail": "leaf a",
        "instance": "/v1/operations/op-1",
    }
    body = event(1, "failed", error=problem)
    with (
        scripted(reply(200, body, **STREAM)) as (url, _),
        Client(url) as client,
        pytest.raises(ProblemResponseError, match="leaf a"),
    ):
        client.wait("op-1")


def test_wait_gives_the_last_state():
    with (
        scripted(reply(200, event(1, "succeeded", result={"artifact_id": "a"}), **STREAM)) as (
            url,
            _,
        ),
        Client(url) as client,
    ):
        assert client.wait("op-1").result == {"artifact_id": "a"}


def test_download_goes_on_where_it_broke(tmp_path):
    body = bytes(range(256)) * 100
    half = len(body) // 2
    with (
        scripted(
            reply(200, body[:half], length=len(body), ETag='"v1"'),
            reply(206, body[half:], length=len(body) - half, ETag='"v1"'),
        ) as (url, requests),
        Client(url) as client,
    ):
        assert client.download("a", "model.safetensors", tmp_path / "model") == len(body)
    assert (tmp_path / "model").read_bytes() == body
    assert requests[1].headers["Range"] == f"bytes={half}-"
    assert requests[1].headers["If-Range"] == '"v1"'
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_download_starts_again_when_the_file_has_changed(tmp_path):
    with (
        scripted(
            reply(200, b"old", length=6, ETag='"v1"'),
            reply(200, b"newer!", length=6, ETag='"v2"'),
        ) as (url, _),
        Client(url) as client,
    ):
        client.download("a", "f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"newer!"


def test_download_that_keeps_breaking_leaves_nothing(tmp_path):
    (tmp_path / "f").write_bytes(b"before")
    with (
        scripted(reply(200, b"", length=6)) as (url, requests),
        Client(url) as client,
        pytest.raises(ServerUnreachableError),
    ):
        client.download("a", "f", tmp_path / "f")
    assert len(requests) == 5
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"before")]


def test_a_server_that_is_slow_is_not_said_to_be_gone():
    with (
        scripted(lambda handler: time.sleep(1)) as (url, _),
        Client(url, timeout=0.2) as client,
        pytest.raises(ServerUnreachableError, match="it is there, and it or its store is slow"),
    ):
        client.health()


def test_client_adopts_what_orbax_has_saved(root, tmp_path):
    manager(root / "old", steps=(5,))
    app = create_app(Settings(root=str(root), data_dir=tmp_path / "jobs"))
    with serve(app) as url, Client(url) as cairn:
        ended = cairn.wait(cairn.adopt("old", "adopted").id)
        assert ended.result["adopted"] == [5]
        assert [one.step for one in cairn.checkpoints("adopted")] == [5]
        with pytest.raises(ProblemResponseError, match="nothing to adopt") as raised:
            cairn.adopt("nowhere", "new", step=7)
    assert raised.value.status == 404
