"""Keys as they are made, kept, told apart and revoked."""

import re
import threading
from datetime import timedelta

import pytest
from sqlalchemy import select

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow
from cairn.service.errors import KeyNameTakenError
from tests.service.access.conftest import Keys, bearer


@pytest.fixture
def boss(keys):
    """Headers with the key of an administrator."""
    return bearer(keys.make("boss", "admin"))


def make(http, boss, **asked):
    answer = http.post("/v1/keys", json={"name": "ci", **asked}, headers=boss)
    assert answer.status_code == 201, answer.text
    return answer.json()


def revoke(http, boss, key):
    return http.delete(f"/v1/keys/{key}", headers=boss)


def refusal(http, key):
    answer = http.get("/v1/runs", headers=bearer(key))
    assert answer.status_code == 401
    return answer.json()["detail"]


def test_of_a_key_the_database_has_no_more_than_its_digest(keys):
    key = keys.make("ci")
    assert re.fullmatch(r"ck_[a-z2-7]{12}_[A-Za-z0-9_-]{43}", key)
    with keys.catalog() as catalog, catalog.read() as session:
        stored = session.execute(select(KeyRow.__table__)).one()
    assert stored.id == key.split("_")[1]
    assert key.split("_", 2)[2] not in str(tuple(stored))


def test_key_is_its_callers_until_it_is_revoked(http, boss, monkeypatch):
    monkeypatch.setattr("cairn.service.access.ttl_cache.TTL_SECONDS", 0.0)
    made = make(http, boss, scope="operate", roots=["other", "default"])
    key, details = made["key"], made["details"]
    assert details["roots"] == ["default", "other"]
    assert http.get("/v1/runs", headers=bearer(key)).status_code == 200
    assert revoke(http, boss, details["id"]).status_code == 204
    told = refusal(http, key)
    assert re.search(f"Key {details['id']} of 'ci' was revoked at 20", told)


def test_another_secret_under_a_known_id_is_refused_and_says_nothing_of_the_key(http, boss):
    made = make(http, boss)
    other = made["key"][:-1] + ("A" if made["key"][-1] != "A" else "B")
    told = refusal(http, other)
    assert "This server does not know the key." in told
    revoke(http, boss, made["details"]["id"])
    unknown = "ck_" + "a" * 12 + made["key"][15:]
    assert refusal(http, other) == refusal(http, unknown) == told
    assert "ci" not in told.replace("once it is made", "")


def test_one_key_that_counts_has_a_name(http, boss, keys):
    first = make(http, boss)["details"]["id"]
    taken = http.post("/v1/keys", json={"name": "ci"}, headers=boss)
    assert (taken.status_code, f"Key {first} has the name" in taken.json()["detail"]) == (409, True)
    revoke(http, boss, first)
    second = keys.make("ci", lifetime=timedelta(0))
    third = make(http, boss)["details"]["id"]
    listed = http.get("/v1/keys", headers=boss).json()["keys"]
    assert {one["id"] for one in listed if one["name"] == "ci"} == {
        *(first, second.split("_")[1], third),
    }


def test_of_keys_made_at_once_under_one_name_one_is_made(database_url):
    Catalog.open(database_url).close()
    made, refused = [], []

    def ask():
        try:
            made.append(Keys(database_url).make("ci"))
        except KeyNameTakenError:
            refused.append(1)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(made), len(refused)) == (1, 5)


def test_revoking_is_for_good_and_keeps_its_first_moment(http, boss):
    key = make(http, boss)["details"]["id"]

    def listed():
        rows = http.get("/v1/keys", headers=boss).json()["keys"]
        return next((row["revoked"], row["counts"]) for row in rows if row["id"] == key)

    assert revoke(http, boss, key).status_code == 204
    first = listed()
    assert first[1] is False
    assert revoke(http, boss, key).status_code == 204
    assert listed() == first
    unknown = revoke(http, boss, "a" * 12)
    assert unknown.status_code == 404
    assert "There is no key with the id" in unknown.json()["detail"]
