"""What goes around the control plane: a writer of the store moves an alias itself."""

import pytest
from sqlalchemy import select

from cairn.service.actions import promotion as promoting
from cairn.service.app import create_app
from cairn.service.catalog import count_outside
from cairn.service.catalog.models import AuditRow
from cairn.storage.errors import StoreUnavailableError
from cairn.storage.runs.records.aliases import AliasWriter
from cairn.storage.runs.run import Run
from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/run"
ALIAS = f"{RUN}/aliases/production"
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6, 9])


def move(run, step, expect):
    aliases = AliasWriter(Run.open(run.uri).objects)
    return aliases.move("production", step=step, attempt=1, by="ann@host", expect=expect)


def promote(http, step, headers):
    path = f"{RUN}/checkpoints/{step}:promote"
    return http.post(path, json={"alias": "production"}, headers=headers)


def audited(http):
    return http.get(ALIAS, params={"refresh": "true"}).json()["audited"]


def entries(http):
    with http.app.state.plane.catalog.read() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.id)).all()
    return [(row.action, row.outcome, row.actor, row.detail["sequence"]) for row in rows]


def counted(http):
    with http.app.state.plane.catalog.read() as session:
        return count_outside(session)


def test_move_around_the_service_is_shown_entered_and_counted_once(http, run):
    assert promote(http, 3, CREATE).json()["audited"] is True
    assert audited(http) is True
    move(run, 9, expect=1)
    for _ in range(3):
        assert audited(http) is False
    assert entries(http) == [
        ("alias.promote", "done", "loopback", 1),
        ("alias.promote", "outside", "ann@host", 2),
    ]
    assert counted(http) == {("default", "alias.promote"): 1}
    assert promote(http, 6, {"If-Match": '"2"'}).json()["audited"] is True
    assert audited(http) is True
    assert counted(http) == {("default", "alias.promote"): 1}


def test_first_alias_of_a_known_run_is_not_taken_for_one_that_was_always_there(http, run):
    http.get(RUN)
    move(run, 3, expect=None)
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_what_was_there_at_the_first_look_is_nobodys_fault(http, run):
    move(run, 3, expect=None)
    assert audited(http) is None
    assert counted(http) == {}


def test_deletion_around_the_service_is_entered_and_one_through_it_is_not(http, run):
    promote(http, 3, CREATE)
    assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 204
    http.get(RUN, params={"refresh": "true"})
    assert counted(http) == {}
    promote(http, 6, CREATE)
    AliasWriter(run.objects).delete("production", by="ann@host", expect=3)
    http.get(RUN, params={"refresh": "true"})
    assert counted(http) == {("default", "alias.delete"): 1}


def test_move_that_is_seen_before_its_entry_is_completed_counts_as_asked_for(
    http, run, monkeypatch
):
    write = promoting.promote_step

    def then_looked_at(*arguments, **options):
        moved = write(*arguments, **options)
        assert audited(http) is True
        return moved

    monkeypatch.setattr(promoting, "promote_step", then_looked_at)
    http.get(RUN)
    assert promote(http, 3, CREATE).status_code == 200
    assert counted(http) == {}


def test_move_that_was_reported_as_failed_counts_as_asked_for(http, run, monkeypatch):
    write = promoting.promote_step

    def without_an_answer(*arguments, **options):
        write(*arguments, **options)
        raise StoreUnavailableError("no answer", path=run.uri)

    monkeypatch.setattr(promoting, "promote_step", without_an_answer)
    http.get(RUN)
    assert promote(http, 3, CREATE).status_code == 503
    assert audited(http) is True
    assert counted(http) == {}


def test_move_of_another_is_not_excused_by_a_request_that_was_refused(http, run):
    promote(http, 3, CREATE)
    http.get(RUN)
    move(run, 9, expect=1)
    assert promote(http, 6, {"If-Match": '"1"'}).status_code == 412
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_another_run_of_the_same_name_begins_anew(http, run, root):
    import shutil

    promote(http, 3, CREATE)
    shutil.rmtree(root / "run")
    again = make_run(root / "run", [1])
    AliasWriter(again.objects).move("production", step=1, attempt=1, by="ann@host", expect=None)
    assert audited(http) is None
    assert counted(http) == {}


def test_two_servers_on_one_catalog_account_for_each_others_moves(http, run, settings):
    from fastapi.testclient import TestClient

    other = create_app(settings, jobs=False)
    with TestClient(other, base_url=BASE_URL, client=PEER) as second:
        promote(http, 3, CREATE)
        assert audited(second) is True
        assert promote(second, 9, {"If-Match": '"1"'}).status_code == 200
        assert audited(http) is True
    assert counted(http) == {}
