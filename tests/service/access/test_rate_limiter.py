"""How often a caller may ask, and how often an address may be wrong."""

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from tests.service.access.conftest import ADDRESS, ELSEWHERE, bearer
from tests.service.seams import rate_limiter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def go_on(rates, name, times):
    """How many of so many are let through at once."""
    passed = 0
    for _ in range(times):
        if rates.wait(name) == 0:
            rates.take(name)
            passed += 1
    return passed


def test_so_many_at_once_and_so_many_a_second_from_then_on():
    clock = Clock()
    limit = rate_limiter.RateLimiter(10, 20, clock=clock)
    assert go_on(limit, "a", 100) == 20
    assert limit.wait("a") == pytest.approx(0.1)
    clock.now += 0.5
    assert go_on(limit, "a", 100) == 5
    clock.now += 3600
    assert go_on(limit, "a", 100) == 20  # what was not used does not add up


def test_names_do_not_wait_for_each_other():
    limit = rate_limiter.RateLimiter(1, 1, clock=Clock())
    assert [go_on(limit, name, 2) for name in "aabb"] == [1, 0, 1, 0]


def test_no_limit_lets_everybody_through():
    assert go_on(rate_limiter.RateLimiter(0, 0, clock=Clock()), "a", 1000) == 1000


def test_slow_limit_lets_one_through():
    clock = Clock()
    limit = rate_limiter.RateLimiter(0.1, 0.2, clock=clock)
    assert go_on(limit, "a", 5) == 1
    assert limit.wait("a") == pytest.approx(10)


def test_names_from_outside_do_not_fill_the_memory():
    clock = Clock()
    limit = rate_limiter.RateLimiter(1, 1, clock=clock)
    for name in range(3 * rate_limiter.MAX_NAMES):
        limit.take(str(name))
        assert len(limit._used) <= rate_limiter.MAX_NAMES
        clock.now += 0.001


@pytest.fixture
def limited(settings):
    chosen = Settings(**settings.model_dump() | {"rate_limit": 2.0})
    with TestClient(create_app(chosen, jobs=False), base_url=ADDRESS, client=ELSEWHERE) as http:
        yield http


def statuses(http, times, path="/v1/runs", **arguments):
    return [http.get(path, **arguments).status_code for _ in range(times)]


def test_caller_who_asks_too_often_is_told_when_to_come_back_and_others_go_on(limited, keys):
    busy, calm = bearer(keys.make("busy")), bearer(keys.make("calm"))
    assert set(statuses(limited, 4, headers=busy)) == {200}
    answer = limited.get("/v1/runs", headers=busy)
    assert answer.status_code == 429
    assert answer.json()["type"] == "urn:cairn:problem:too-many-requests"
    assert answer.headers["retry-after"] == "1"
    assert "busy" in answer.json()["detail"]
    assert limited.get("/v1/runs", headers=calm).status_code == 200
    assert limited.get("/healthz").status_code == 200


def test_nobody_asks_the_store_by_probing_without_a_key(limited):
    assert statuses(limited, 6, "/readyz").count(429) >= 1


def test_address_that_is_wrong_too_often_is_told_so_and_locks_nobody_out(http, keys):
    wrong = bearer("ck_" + "a" * 12 + "_" + "b" * 43)
    found = statuses(http, 25, headers=wrong)
    assert found[:20] == [401] * 20
    answer = http.get("/v1/runs", headers=wrong)
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)
    assert http.get("/v1/runs", headers=bearer(keys.make("ci"))).status_code == 200
    assert http.get("/v1/runs").status_code == 401  # nothing was shown
    form = http.post("/sign-in", data={"key": "ck_x"}, headers={"Origin": ADDRESS})
    assert (form.status_code, "Try again in" in form.text) == (429, True)
