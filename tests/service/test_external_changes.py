"""What goes around the control plane: a writer of the store moves an alias itself."""

import pytest

from cairn import Alias, StoreUnavailableError, create_app, delete_alias, promote_step
from cairn.service.actions import aliases as aliases_actions
from cairn.service.catalog import rows
from cairn.service.catalog.external_changes import count_outside
from cairn.storage.runs.records.layout import alias_file
from cairn.storage.runs.records.placed import read_record
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import placed
from tests.service.stores import make_run
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
ALIAS = f"{RUN}/aliases/production"
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6, 9])


def move(run, step, expect):
    return promote_step(run, step, "production", by="ann@host", expect=expect)


def write_over(run, alias):
    """Put a record in the place of an alias's, as a copy by hand does."""
    name = alias_file(alias.alias)
    _, generation = read_record(run.objects, name, Alias)
    placed.write_record(run.objects, name, alias, generation=generation)


def replace(path, data):
    path.unlink()
    path.write_bytes(data)


def promote(http, step, headers):
    path = f"{RUN}/checkpoints/{step}:promote"
    return http.post(path, json={"alias": "production"}, headers=headers)


def audited(http):
    return http.get(ALIAS, params={"refresh": "true"}).json()["audited"]


def entries(http):
    return [
        (entry.action, entry.outcome, entry.caller, entry.detail.get("sequence"))
        for entry in audit_trail(http)
    ]


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
    delete_alias(run, "production", by="ann@host", expect=3)
    http.get(RUN, params={"refresh": "true"})
    assert counted(http) == {("default", "alias.delete"): 1}


def test_move_that_is_seen_before_its_entry_is_completed_counts_as_asked_for(
    http, run, monkeypatch
):
    write = aliases_actions.promote_step

    def then_looked_at(*arguments, **options):
        moved = write(*arguments, **options)
        assert audited(http) is True
        return moved

    monkeypatch.setattr(aliases_actions, "promote_step", then_looked_at)
    http.get(RUN)
    assert promote(http, 3, CREATE).status_code == 200
    assert counted(http) == {}


def test_move_that_was_reported_as_failed_counts_as_asked_for(http, run, monkeypatch):
    write = aliases_actions.promote_step

    def without_an_answer(*arguments, **options):
        write(*arguments, **options)
        raise StoreUnavailableError("no answer", path=run.uri)

    monkeypatch.setattr(aliases_actions, "promote_step", without_an_answer)
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
    move(again, 1, expect=None)
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


def test_alias_that_is_made_again_and_seen_before_its_entry_is_completed_was_asked_for(
    http, run, monkeypatch
):
    http.get(RUN)
    promote(http, 3, CREATE)
    assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 204
    write = aliases_actions.promote_step

    def then_looked_at(*arguments, **options):
        moved = write(*arguments, **options)
        assert (moved.sequence, audited(http)) == (3, True)
        return moved

    monkeypatch.setattr(aliases_actions, "promote_step", then_looked_at)
    assert promote(http, 6, CREATE).status_code == 200
    assert audited(http) is True
    assert counted(http) == {}


def test_creation_that_failed_excuses_no_later_move_of_another(http, run, monkeypatch):
    def without_an_answer(*arguments, **options):
        raise StoreUnavailableError("no answer", path=run.uri)

    http.get(RUN)
    with monkeypatch.context() as patched:
        patched.setattr(aliases_actions, "promote_step", without_an_answer)
        assert promote(http, 9, CREATE).status_code == 503
    assert promote(http, 3, CREATE).status_code == 200
    assert move(run, 9, expect=1).sequence == 2
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_request_that_failed_excuses_no_equal_move_of_another(http, run, monkeypatch):
    def without_an_answer(*arguments, **options):
        raise StoreUnavailableError("no answer", path=run.uri)

    promote(http, 3, CREATE)
    with monkeypatch.context() as patched:
        patched.setattr(aliases_actions, "promote_step", without_an_answer)
        assert promote(http, 9, {"If-Match": '"1"'}).status_code == 503
    move(run, 9, expect=1)
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_record_that_is_written_over_is_noticed_though_its_sequence_is_the_same(http, run):
    promote(http, 3, CREATE)
    assert audited(http) is True
    write_over(run, run.aliases.require("production").model_copy(update={"step": 9}))
    for _ in range(2):
        assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_record_that_is_put_back_as_it_was_before_is_noticed(http, run):
    promote(http, 3, CREATE)
    before = run.aliases.require("production")
    promote(http, 9, {"If-Match": '"1"'})
    write_over(run, before)
    for _ in range(2):
        assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_move_that_nobody_had_looked_at_yet_is_entered_when_the_service_moves_on_from_it(http, run):
    http.get(RUN)
    promote(http, 3, CREATE)
    move(run, 9, expect=1)
    stale = promote(http, 6, {"If-Match": '"1"'})
    assert stale.json()["current"]["sequence"] == 2
    assert promote(http, 6, {"If-Match": '"2"'}).json()["audited"] is True
    assert audited(http) is True
    assert [entry[1:] for entry in entries(http) if entry[1] != "refused"] == [
        ("done", "loopback", 1),
        ("outside", "ann@host", 2),
        ("done", "loopback", 3),
    ]


def test_move_that_nobody_had_looked_at_yet_is_entered_when_the_service_deletes_the_alias(
    http, run
):
    http.get(RUN)
    promote(http, 3, CREATE)
    move(run, 9, expect=1)
    assert http.delete(ALIAS, headers={"If-Match": '"2"'}).status_code == 204
    http.get(RUN, params={"refresh": "true"})
    assert counted(http) == {("default", "alias.promote"): 1}


def test_record_that_cannot_be_read_is_not_taken_for_a_deletion_nor_its_repair_for_a_move(
    http, run, root
):
    move(run, 3, expect=None)
    assert audited(http) is None
    path = root / "run" / alias_file("production")
    whole = path.read_bytes()
    replace(path, whole[:-20])
    shown = http.get(RUN, params={"refresh": "true"}).json()
    assert any("production" in problem for problem in shown["problems"])
    assert counted(http) == {}
    replace(path, whole)
    assert audited(http) is None
    assert counted(http) == {}


def test_record_that_is_put_back_after_its_deletion_is_noticed(http, run):
    promote(http, 3, CREATE)
    before = run.aliases.require("production")
    assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 204
    write_over(run, before)
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}


def test_move_of_another_is_shown_and_not_counted_again_once_its_run_was_out_of_sight(http, run):
    http.get(RUN)
    promote(http, 3, CREATE)
    move(run, 9, expect=1)
    assert audited(http) is False
    with http.app.state.plane.catalog.write() as session:
        rows.delete_runs(session, "default", ["run"])
    assert audited(http) is False
    assert counted(http) == {("default", "alias.promote"): 1}
