"""Records that a control plane has seen and the store has lost: aliases that went back, tombstones.

A store alone can't tell; whoever saw the newer record can, and says how to put that right.
"""

import shutil
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

from cairn import (
    Settings,
    collect_garbage,
    create_app,
    delete_alias,
    delete_step,
    find_deletable_step,
    promote_step,
    undelete_step,
)
from cairn.service.catalog import rows
from cairn.storage.runs.records.layout import alias_file, trash_file
from cairn.storage.store.clock import utc_now
from tests.service.conftest import BASE_URL, PEER
from tests.service.dashboard.test_other_attempts import FORM, fields_of
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/run"
ALIAS = f"{RUN}/aliases/production"
TRASH = f"{RUN}/checkpoints/6"


@pytest.fixture
def run(http, root):
    """A run that the server has looked at."""
    made = make_run(root / "run", [3, 6, 9])
    http.get(RUN)
    return made


class Kept:
    """What records of a run were, to be put back."""

    def __init__(self, run):
        self._run = run
        self._kept = {}

    def keep(self, name):
        found = self._run.objects.read(name)
        self._kept[name] = None if found is None else found.value

    def put_back(self):
        for name, value in self._kept.items():
            if value is None:
                self._run.objects.delete(name)
            else:
                self._run.objects.write(name, value)


def promote(http, step, expect):
    headers = {"If-None-Match": "*"} if expect is None else {"If-Match": f'"{expect}"'}
    body = {"alias": "production", "reason": "why"}
    answer = http.post(f"{RUN}/checkpoints/{step}:promote", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(http):
    found = http.get(RUN, params={"refresh": True}).json()
    listed = http.get("/v1/runs").json()["runs"][0]
    assert listed["problems"] == found["problems"]
    return found


def lost(http):
    found = shown(http)
    assert len(found["problems"]) == len(found["lost_records"])
    return found["lost_records"]


def at(http):
    found = http.get(ALIAS)
    return (found.json()["step"], found.json()["sequence"]) if found.is_success else None


@pytest.fixture
def went_back(http, run):
    """An alias that was seen at step 9, move 3, and is at step 3, move 1, once more."""
    promote(http, 3, None)
    kept = Kept(run)
    kept.keep(alias_file("production"))
    promote(http, 6, 1)
    promote(http, 9, 2)
    kept.put_back()


@pytest.mark.usefixtures("went_back")
def test_an_alias_that_went_back_is_a_problem_of_its_run_until_it_is_put_back(http, run):
    for _ in range(2):
        [one] = lost(http)
    assert (one["record"], one["step"], one["sequence"]) == ("aliases/production.json", 9, 3)
    assert (one["stored_step"], one["stored_sequence"], one["by"]) == (3, 1, "loopback")
    [problem] = shown(http)["problems"]
    assert "`cairn promote run 9 production` puts it back" in problem
    assert "`cairn promote run 3 production` keeps it there" in problem
    assert at(http) == (3, 1), "what the store says is served"
    promote(http, 9, 1)
    assert (lost(http), at(http)) == ([], (9, 4))
    history = run.aliases.history("production")
    assert [(move.sequence, move.step) for move in history] == [(4, 9), (3, 9), (1, 3)]


@pytest.mark.usefixtures("went_back")
def test_what_is_there_is_accepted_by_a_promotion_to_any_step(http):
    assert len(lost(http)) == 1
    promote(http, 3, 1)
    assert (lost(http), at(http)) == ([], (3, 4))


@pytest.mark.usefixtures("went_back")
def test_an_alias_that_went_back_unseen_is_moved_on_from_where_it_was(http):
    promote(http, 6, 1)  # nobody has looked since
    assert (lost(http), at(http)) == ([], (6, 4))


@pytest.mark.usefixtures("went_back")
def test_a_move_elsewhere_ends_the_problem_once_it_is_above_what_was_seen(http, run):
    promote_step(run, 6, "production", expect=1)
    assert [one["stored_sequence"] for one in lost(http)] == [2]
    promote_step(run, 9, "production", expect=2)
    assert [one["stored_sequence"] for one in lost(http)] == []
    promote_step(run, 6, "production", expect=3)
    assert lost(http) == []


def test_the_record_that_was_seen_ends_the_problem_when_it_is_back(http, run):
    promote(http, 3, None)
    older, newer = Kept(run), Kept(run)
    older.keep(alias_file("production"))
    promote(http, 9, 1)
    newer.keep(alias_file("production"))
    older.put_back()
    assert len(lost(http)) == 1
    newer.put_back()
    assert (lost(http), at(http)) == ([], (9, 2))


def test_an_alias_that_is_gone_is_put_back_or_deleted(http, run):
    promote(http, 9, None)
    for number in (1, 2):
        run.objects.delete(alias_file("production"))
        [one] = lost(http)
        assert (one["stored_step"], one["sequence"], at(http)) == (None, number, None)
        if number == 1:
            promote(http, 9, None)
            assert lost(http) == []
    assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 412
    assert http.delete(ALIAS, headers={"If-Match": '"2"'}).status_code == 204
    assert (lost(http), at(http)) == ([], None)
    assert [move.sequence for move in run.aliases.history("production")] == [3, 2]
    assert promote(http, 3, None)["sequence"] == 4


@pytest.mark.parametrize("here", [True, False])
def test_an_alias_that_is_back_after_its_deletion_is_a_problem(http, run, here):
    promote(http, 3, None)
    kept = Kept(run)
    kept.keep(alias_file("production"))
    if here:
        assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 204
    else:
        delete_alias(run, "production", expect=1)
        assert lost(http) == []
    kept.put_back()
    for _ in range(2):
        [one] = lost(http)
    assert (one["deleted"], one["sequence"], one["stored_step"]) == (True, 2, 3)
    assert http.delete(ALIAS, headers={"If-Match": '"1"'}).status_code == 204
    assert (lost(http), at(http)) == ([], None)
    assert promote(http, 9, None)["sequence"] == 4


def test_what_was_damaged_meanwhile_is_remembered(http, run, root):
    promote(http, 3, None)
    kept = Kept(run)
    kept.keep(alias_file("production"))
    promote(http, 9, 1)
    path = root / "run" / alias_file("production")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-20])
    assert len(shown(http)["lost_records"]) == 1
    kept.put_back()
    assert [one["step"] for one in lost(http)] == [9]


def delete(run, step, **options):
    return delete_step(run, find_deletable_step(run, step), by="ann", **options)


def test_a_lost_tombstone_is_a_problem_until_the_step_is_deleted_again(http, run):
    delete(run, 6, reason="bad data")
    assert lost(http) == []
    run.objects.delete(trash_file(6, 1))
    for _ in range(2):
        [one] = lost(http)
    assert (one["record"], one["step"], one["by"]) == ("trash/6.1.json", 6, "ann")
    assert "`cairn delete run/steps/6 --attempt 1` deletes it again" in shown(http)["problems"][0]
    assert http.get(TRASH).json()["state"] == "listed"
    assert http.delete(TRASH).is_success
    assert lost(http) == []


def test_a_step_whose_tombstone_is_lost_is_kept_by_undeleting_it(http, run):
    delete(run, 6)
    assert lost(http) == []
    run.objects.delete(trash_file(6, 1))
    assert len(lost(http)) == 1
    assert http.post(f"{TRASH}:undelete", json={}).json()["state"] == "listed"
    assert lost(http) == []
    assert http.post(f"{TRASH}:undelete", json={}).status_code == 404
    delete(run, 6)
    assert lost(http) == []
    run.objects.delete(trash_file(6, 1))
    assert len(lost(http)) == 1, "that one was kept, and this is another deletion"


def test_lawful_events_are_no_problem(http, run, root):
    def look():
        assert shown(http)["problems"] == []

    promote(http, 3, None)
    for expect in (1, 3):
        delete_alias(run, "production", expect=expect)
        look()
        promote_step(run, 9, "production", expect=None)
        look()
    delete(run, 3)
    look()
    undelete_step(run, 3, 1)  # by somebody else
    look()
    delete(run, 3)
    promote_step(run, 6, "other", expect=None)
    look()
    for _ in range(2):
        collect_garbage(run, by="gc", clock=lambda: utc_now() + timedelta(days=30))
        look()
    assert run.objects.list("trash/") == []
    shutil.rmtree(root / "run")
    again = make_run(root / "run", [3, 6])
    promote_step(again, 6, "production", expect=None)
    look()


def test_who_has_seen_nothing_shows_nothing_and_who_is_told_forgets(http, run, root, tmp_path):
    delete(run, 6)
    promote(http, 3, None)
    kept = Kept(run)
    kept.keep(alias_file("production"))
    promote(http, 9, 1)
    assert lost(http) == []
    kept.put_back()
    run.objects.delete(trash_file(6, 1))
    assert len(lost(http)) == 2
    settings = Settings(root=str(root), data_dir=tmp_path / "other", scan_seconds=0)
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as other:
        assert lost(other) == []
        promote(other, 9, 1)
        assert lost(http) != [], "at move 2 there is another record than was seen"
    with http.app.state.plane.catalog.write() as session:
        rows.delete_runs(session, "default", ["run"])
    assert lost(http) == []


def press(http, button):
    sent = fields_of(http.get("/ui/default/run").text, button)
    answer = http.post(sent.pop("action"), data=sent, headers=FORM)
    assert answer.status_code == 200, answer.text
    return lost(http)


def test_the_page_of_the_run_says_so_and_puts_it_right_by_one_click(http, run):
    promote(http, 3, None)
    kept = Kept(run)
    kept.keep(alias_file("production"))
    for step in (9, 3):
        promote(http, 9, at(http)[1])
        kept.put_back()
        lost(http)
        assert "went back to" in http.get("/ui/default/run/aliases").text
        assert ">damaged" in http.get("/").text
        press(http, "Restore to step 9" if step == 9 else "Keep at step 3")
        assert (at(http)[0], lost(http)) == (step, [])
    run.objects.delete(alias_file("production"))
    assert len(lost(http)) == 1
    assert press(http, "Leave it deleted") == []
    kept.put_back()
    lost(http)
    assert press(http, "Delete again") == []
    assert at(http) is None
    for button in ("Delete again", "Keep the step"):
        delete(run, 6)
        lost(http)
        run.objects.delete(trash_file(6, 1))
        lost(http)
        assert press(http, button) == []
        if button == "Delete again":
            undelete_step(run, 6, 1)
            lost(http)
    assert http.get(TRASH).json()["state"] == "listed"
