"""What a lost or damaged record stops, what it does not, and who says so; docs/howto/verify.md."""

import pytest

from cairn import (
    CorruptionError,
    ObjectStore,
    Run,
    StorageError,
    check_run,
    collect_garbage,
    delete_step,
    find_deletable_step,
    parse_uri,
    promote_step,
)
from cairn.storage.runs.records.layout import (
    RUN_FILE,
    alias_file,
    annotation_file,
    manifest_file,
    trash_file,
)
from tests.storage.records import LEASE_FILE, attempt_file, hold_file, intent_file
from tests.storage.runs.test_history import flip, job, lose
from tests.storage.runs.test_repair import make_run

HOLD = hold_file(20, 1, "1" * 16)
INTENT = intent_file(20, 1)
ALIAS = alias_file("production")
LABELS = annotation_file(40, 3)
TOMBSTONE = trash_file(10, 1)
NEWEST, OLDER, ALIASED = manifest_file(40, 3), manifest_file(30, 1), manifest_file(20, 1)
ATTEMPTS = [attempt_file(number) for number in (1, 2, 3)]
EVERY = [RUN_FILE, LEASE_FILE, *ATTEMPTS, NEWEST, OLDER, ALIASED]
EVERY += [ALIAS, LABELS, TOMBSTONE, INTENT, HOLD]


@pytest.fixture
def uri(tmp_path, copies):
    """The run of the tests of repair; 30 was rolled back, 10 is deleted, 20 and 40 have aliases."""
    uri = parse_uri(tmp_path / "root/my-run")
    copies.put(make_run, uri)
    return uri


def opened(uri):
    """The run as who has not looked at it before sees it."""
    return Run(uri, objects=ObjectStore(uri))


def refuses(uri):
    """What is refused of a save, the deletion of a step and a collection of garbage."""

    def save():
        Run.begin(uri, environment={})
        job(opened(uri), 50)

    def delete():
        run = opened(uri)
        delete_step(run, find_deletable_step(run, 30, 1), by="me")

    asked = {"delete": delete, "gc": lambda: collect_garbage(opened(uri), by="me"), "save": save}
    refused = set()
    for name, ask in asked.items():
        try:
            ask()
        except StorageError:
            refused.add(name)
    return refused


@pytest.mark.parametrize("name", EVERY)
def test_a_damaged_record_of_whatever_kind_is_named_by_the_check(uri, name):
    flip(opened(uri), name)
    assert [one for one in check_run(opened(uri)).problems if one.startswith(f"{name}: ")]


@pytest.mark.parametrize("name", [RUN_FILE, LEASE_FILE, *ATTEMPTS, NEWEST, ALIASED])
def test_the_check_names_a_lost_record_that_others_name(uri, name):
    lose(opened(uri), name)
    assert [one for one in check_run(opened(uri)).problems if name in one]


def test_of_an_older_manifest_that_is_lost_the_check_names_the_folder(uri):
    lose(opened(uri), OLDER)
    report = check_run(opened(uri))
    assert (report.ok, report.unlisted) == (True, ("attempts/1/30",))


@pytest.mark.parametrize("name", [ALIAS, LABELS, TOMBSTONE, INTENT, HOLD])
def test_what_no_other_record_names_is_lost_without_a_word(uri, name):
    lose(opened(uri), name)
    report = check_run(opened(uri))
    assert (report.ok, report.unlisted) == (True, ())
    assert refuses(uri) == set()


def test_an_alias_that_is_put_back_as_it_was_is_taken_for_the_newest(uri):
    run = opened(uri)
    before = run.objects.read(ALIAS).value
    promote_step(run, 40, "production", expect=1)
    run.objects.write(ALIAS, before)
    report = check_run(opened(uri))
    assert (report.ok, report.unlisted) == (True, ())
    assert opened(uri).aliases.get("production").step == 20


def test_a_step_whose_tombstone_is_lost_is_listed_again(uri):
    lose(opened(uri), TOMBSTONE)
    assert [one.step for one in opened(uri).steps()] == [10, 20, 40]


@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("damage", [flip, lose])
def test_without_an_attempt_nothing_is_saved_and_nothing_deleted(uri, name, damage):
    damage(opened(uri), name)
    assert refuses(uri) == {"save", "delete", "gc"}


def test_a_damaged_lease_stops_saves_and_deletions_and_a_lost_one_stops_nothing(uri):
    flip(opened(uri), LEASE_FILE)
    assert refuses(uri) == {"save", "delete", "gc"}
    lose(opened(uri), LEASE_FILE)
    assert refuses(uri) == set()


@pytest.mark.parametrize("damage", [flip, lose])
def test_without_the_record_of_the_run_nothing_is_saved(uri, damage):
    damage(opened(uri), RUN_FILE)
    assert refuses(uri) == {"save"}


def test_without_the_manifest_that_was_durable_last_nothing_is_saved_or_collected(uri):
    lose(opened(uri), NEWEST)
    with pytest.raises(CorruptionError, match="the manifest of a durable step is lost"):
        opened(uri).latest()
    assert refuses(uri) == {"save", "gc"}


@pytest.mark.parametrize("name", [NEWEST, ALIASED, OLDER])
def test_a_damaged_manifest_hides_no_other_step_and_stops_nothing(uri, name):
    flip(opened(uri), name)
    listed = {one.step: one.problem for one in opened(uri).steps()}
    assert list(listed) == [20, 40]
    assert [step for step, problem in listed.items() if problem] == [
        step for step, manifest in ((20, ALIASED), (40, NEWEST)) if manifest == name
    ]
    assert refuses(uri) == set()


def test_a_damaged_alias_stops_deletions_alone(uri):
    flip(opened(uri), ALIAS)
    assert refuses(uri) == {"delete", "gc"}


@pytest.mark.parametrize(
    ("name", "refused"), [(TOMBSTONE, {"gc"}), (INTENT, {"gc"}), (HOLD, {"delete", "gc"})]
)
def test_what_is_damaged_in_the_trash_lists_nothing_again_and_stops_no_save(uri, name, refused):
    flip(opened(uri), name)
    assert [one.step for one in opened(uri).steps()] == [20, 40]
    assert refuses(uri) == refused


def test_damaged_labels_stop_nothing(uri):
    flip(opened(uri), LABELS)
    assert refuses(uri) == set()
