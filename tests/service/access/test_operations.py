"""What a caller of some roots is shown of the operations of all, and what that costs."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cairn import create_app
from cairn.service.access.callers import Caller, Scope
from cairn.service.actions import operations
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.stores import make_run

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Started:
    created: datetime
    id: str
    request: dict[str, Any]


@dataclass
class Engine:
    """Many operations, every hundredth of which is of the root `ours`."""

    asked: int = 0
    all: list[Started] = field(
        default_factory=lambda: [
            Started(
                BEGAN - timedelta(seconds=number),
                f"op-{number}",
                {"root": "theirs" if number % 100 else "ours"},
            )
            for number in range(3000)
        ]
    )

    @property
    def jobs(self):
        return self

    def list(self, *, limit, after, state):
        self.asked += 1
        found = [one for one in self.all if after is None or one.created < after[0]]
        return found[:limit]


@pytest.mark.parametrize("limit", [1, 7, 29, 30, 31, 1000])
def test_caller_of_one_root_is_shown_all_of_it_and_asks_the_database_seldom(limit):
    """Whoever may see little cannot have the server look, two by two, through all that there is."""
    ours = Caller("ci", Scope.READ, frozenset({"ours"}))
    nothing = Caller("ci", Scope.READ, frozenset({"nowhere"}))
    engine, found, after, more = Engine(), [], None, True
    while more:
        page, more = operations.list_operations(engine, ours, after=after, limit=limit, state=None)
        assert 0 < len(page) <= limit
        found += page
        after = page[-1].created, page[-1].id
    assert [one.id for one in found] == [f"op-{number}" for number in range(0, 3000, 100)]
    engine = Engine()
    assert operations.list_operations(engine, nothing, after=None, limit=limit, state=None) == (
        [],
        False,
    )
    assert engine.asked <= 7


def test_idempotency_keys_are_apart_by_caller_and_by_root(settings):
    """Whoever uses one that another has used is neither refused nor told of it."""
    (other,) = set(settings.root_uris) - {"default"}
    for place in settings.root_uris.values():
        make_run(place / "run", [1])
    settings.prepare()
    keys = Keys(settings.database_url)
    callers = {
        "everywhere": bearer(keys.make("everywhere", "operate")),
        "local": bearer(keys.make("local", "operate", roots=["default"])),
    }
    once = {"Idempotency-Key": "nightly"}
    with TestClient(create_app(settings), ADDRESS, client=ELSEWHERE) as http:

        def verify(caller, root, body):
            path = f"/v1/roots/{root}/runs/run:verify"
            return http.post(path, json=body, headers=callers[caller] | once)

        asked = [("everywhere", other), ("everywhere", "default"), ("local", "default")]
        first = [verify(*one, {}) for one in asked]
        assert [answer.status_code for answer in first] == [202, 202, 202]
        ids = [answer.json()["id"] for answer in first]
        assert len(set(ids)) == 3
        assert [verify(*one, {}).json()["id"] for one in asked] == ids
        for one in asked:
            answer = verify(*one, {"steps": "none"})
            assert answer.status_code == 422
            assert "Idempotency-Key 'nightly' belongs to the request of operation" in answer.text
            assert f"another one than its verify of {one[1]}/run" in answer.text
            assert [identity in answer.text for identity in ids] == [one == this for this in asked]
