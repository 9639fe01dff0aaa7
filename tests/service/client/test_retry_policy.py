"""Which requests the client sends again."""

import time

import pytest

from cairn import Client
from cairn.service.errors import ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import Health
from tests.service.servers import reply, scripted

HEALTHY = reply(200, Health(version="1").model_dump_json().encode())
PROBLEM = b'{"type": "urn:cairn:problem:%s", "title": "", "status": 503, "detail": ""}'
JSON = {"Content_Type": "application/problem+json"}
ALIAS = b"""{"alias": "production", "step": 3, "attempt": 1, "manifest_digest": null, "by": "me",
"reason": "", "at": "2026-11-21T10:00:00Z", "sequence": 1}"""


STARTED = b"""{"id": "op-1", "kind": "verify", "state": "pending", "progress": {}, "request":
{}, "created": "2026-11-21T10:00:00Z", "updated": "2026-11-21T10:00:00Z"}"""


def refusal(status, kind, **headers):
    return reply(status, PROBLEM % kind.encode(), **JSON, **headers)


NO_TURN = refusal(503, "not-ready")
AWAY = refusal(503, "store-unavailable")
TOO_MANY = refusal(429, "too-many-requests")
BROKEN = reply(200, b"{", length=100)


def promote(client):
    return client.promote("run", 3, "production", expect=None)


def verify(client):
    return client.verify("run", 3, idempotency_key="once")


@pytest.mark.parametrize("answers", [[NO_TURN, NO_TURN], [AWAY], [TOO_MANY], [BROKEN, AWAY]])
def test_what_changes_nothing_is_asked_again(answers):
    with scripted(*answers, HEALTHY) as (url, requests), Client(url) as client:
        assert client.health().version == "1"
        assert len(requests) == len(answers) + 1


@pytest.mark.parametrize("answer", [NO_TURN, TOO_MANY])
def test_a_change_that_was_not_begun_is_asked_for_again(answer):
    with scripted(answer, reply(200, ALIAS)) as (url, requests), Client(url) as client:
        assert promote(client).step == 3
        assert len(requests) == 2


@pytest.mark.parametrize(
    ("answer", "error"), [(AWAY, ProblemResponseError), (BROKEN, ServerUnreachableError)]
)
def test_a_change_that_may_have_been_made_is_asked_for_once(answer, error):
    with scripted(answer, reply(200, ALIAS)) as (url, requests), Client(url) as client:
        with pytest.raises(error):
            promote(client)
        assert len(requests) == 1


@pytest.mark.parametrize("answer", [AWAY, BROKEN])
def test_a_request_with_a_key_is_sent_again(answer):
    with scripted(answer, reply(202, STARTED)) as (url, requests), Client(url) as client:
        assert verify(client).id == "op-1"
        keys = {request.headers["Idempotency-Key"] for request in requests}
        assert (len(requests), keys) == (2, {"once"})


def test_who_is_told_when_to_come_back_waits_until_then():
    soon = refusal(429, "too-many-requests", Retry_After="1")
    with scripted(soon, HEALTHY) as (url, _), Client(url) as client:
        began = time.monotonic()
        client.health()
        assert time.monotonic() - began >= 1


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_it_is_given_up_in_time(seconds):
    long = refusal(503, "not-ready", Retry_After="60")
    with scripted(long) as (url, requests), Client(url, retry_seconds=seconds) as client:
        with pytest.raises(ProblemResponseError) as caught:
            client.health()
        assert (caught.value.retry_after, len(requests)) == (60, 1)


@pytest.mark.parametrize("status", [400, 404, 409, 412, 500, 502, 504])
def test_other_refusals_are_final(status):
    with scripted(refusal(status, "x"), HEALTHY) as (url, requests), Client(url) as client:
        with pytest.raises(ProblemResponseError):
            client.health()
        assert len(requests) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://127.0.0.1/", "127.0.0.1:8321"])
def test_a_server_that_is_not_there_is_not_waited_for(url):
    nobody = Client(url, retry_seconds=1e6)
    with nobody as client, pytest.raises(ServerUnreachableError):
        client.health()
