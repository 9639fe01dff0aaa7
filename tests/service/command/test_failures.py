"""Which exit status and which words each kind of failure has."""

import inspect
import json

import pytest

from cairn import Client, StorageError
from cairn.service.errors import ProblemError, ProblemResponseError
from cairn.storage import errors as storage_errors
from tests.service.commands import cairn_here
from tests.service.seams import failures
from tests.service.servers import reply, scripted

USAGE, NOT_FOUND, CONFLICT, REFUSED, NOT_READY, DAMAGED = range(2, 8)
STATUSES = {
    "InvalidURIError": USAGE,
    "InvalidSliceError": USAGE,
    "UnsupportedLeafError": USAGE,
    "PolicyError": USAGE,
    "NotACheckpointError": USAGE,
    "UnsupportedFormatError": USAGE,
    "RecordNotLostError": USAGE,
    "TreeMismatchError": USAGE,
    "IteratorMismatchError": USAGE,
    "NotFoundError": NOT_FOUND,
    "RunNotFoundError": NOT_FOUND,
    "StepNotFoundError": NOT_FOUND,
    "AliasNotFoundError": NOT_FOUND,
    "ArtifactNotFoundError": NOT_FOUND,
    "LeafNotFoundError": NOT_FOUND,
    "PreconditionFailedError": CONFLICT,
    "StepExistsError": CONFLICT,
    "StepInFlightError": CONFLICT,
    "StepInUseError": CONFLICT,
    "StepChangedError": CONFLICT,
    "StepDamagedError": DAMAGED,
    "LeaseHeldError": CONFLICT,
    "FencedError": CONFLICT,
    "CorruptionError": DAMAGED,
    "ConfinementError": DAMAGED,
    "SourceRefusedError": CONFLICT,
    "StoreCheckError": CONFLICT,
    "LateProcessError": NOT_READY,
    "StoreUnavailableError": NOT_READY,
}


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for _, kind in inspect.getmembers(storage_errors, inspect.isclass)
        if issubclass(kind, StorageError)
    ],
)
def test_an_error_of_the_store_has_the_status_of_its_kind(kind):
    error = kind("it failed", path="here")
    assert failures.exit_status(error) == STATUSES.get(kind.__name__, 1)
    problem = failures.problem_of(error)
    assert problem["type"].startswith("urn:cairn:problem:")
    assert (problem["path"], problem["detail"]) == ("here", "it failed: here")


def test_all_that_is_wrong_at_once_is_in_the_problem():
    error = storage_errors.CorruptionError("it failed", problems=["one", "two"])
    assert failures.problem_of(error)["problems"] == ["one", "two"]


def answer(status, slug="x", **more):
    problem = {"type": f"urn:cairn:problem:{slug}", "status": status, "detail": "It is so."}
    return ProblemResponseError(problem, status, **more)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((status, USAGE) for status in (400, 413, 422)),
        *((status, REFUSED) for status in (401, 403)),
        (404, NOT_FOUND),
        *((status, CONFLICT) for status in (409, 412, 428)),
        *((status, NOT_READY) for status in (429, 502, 503, 504)),
        *((status, 1) for status in (405, 500, 507)),
    ],
)
def test_an_answer_has_the_status_of_its_kind(status, expected):
    assert failures.exit_status(answer(status)) == expected


@pytest.mark.parametrize("slug", ["corrupt", "damaged"])
def test_damage_that_the_control_plane_tells_of_has_its_own_status(slug):
    assert failures.exit_status(answer(500, slug)) is failures.ExitStatus.DAMAGED


def test_a_page_of_somebody_elses_is_no_missing_run():
    foreign = ProblemResponseError({"type": "about:blank", "status": 404}, 404)
    assert failures.exit_status(foreign) is failures.ExitStatus.NOT_READY


def test_every_error_of_the_service_that_is_an_answer_has_the_status_of_the_answer():
    class Gone(ProblemError):
        status, slug, title = 404, "gone", "Gone"

    assert failures.exit_status(Gone("no")) is failures.ExitStatus.NOT_FOUND
    assert failures.problem_of(Gone("no"))["type"] == "urn:cairn:problem:gone"


def test_a_slow_store_is_told_of_with_what_to_do():
    text = failures.line_of(answer(503, retry_after=5))
    assert text == "It is so. Try again in 5 s. `cairn doctor` looks for the cause."
    assert failures.line_of(answer(503)) == "It is so. `cairn doctor` looks for the cause."
    assert failures.line_of(answer(409)) == "It is so."


def test_retry_after_of_an_answer_is_kept():
    body = b'{"type": "urn:cairn:problem:store-unavailable", "detail": "No answer."}'
    busy = reply(503, body, Retry_After="60", Content_Type="application/problem+json")
    with scripted(busy) as (url, _):
        with Client(url) as client, pytest.raises(ProblemResponseError) as caught:
            client.runs().__next__()
        assert caught.value.retry_after == 60
        done = cairn_here("runs", url=url)
    assert (done.returncode, done.stdout) == (6, "")
    assert "Try again in 60 s. `cairn doctor` looks for the cause." in done.stderr


@pytest.mark.parametrize(
    ("status", "expected"), [(401, REFUSED), (403, REFUSED), (500, 1), (503, NOT_READY)]
)
def test_what_the_control_plane_answers_decides_the_status(status, expected):
    body = json.dumps({"type": "urn:cairn:problem:x", "detail": "No."}).encode()
    with scripted(
        reply(status, body, Retry_After="60", Content_Type="application/problem+json")
    ) as (url, _):
        assert cairn_here("runs", url=url).returncode == expected
