import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn import (
    Alias,
    AliasNotFoundError,
    InvalidURIError,
    PreconditionFailedError,
    RunInfo,
    UnsupportedFormatError,
)
from cairn.storage.runs.records.layout import alias_file
from tests.storage.records import HISTORY_KEPT, AliasWriter, write_run_info


@pytest.fixture
def objects(some_objects):
    """Those of a run that exists."""
    objects = some_objects
    write_run_info(objects, RunInfo(name="run", created="2026-01-01T00:00:00Z"))
    return objects


@pytest.fixture
def aliases(objects):
    return AliasWriter(objects)


def move(aliases, step, expect, **more):
    return aliases.move("production", step=step, attempt=1, expect=expect, **more)


def test_an_alias_is_created_moved_and_read(aliases):
    assert aliases.get("production") is None
    first = move(aliases, 300, None, by="ann", reason="good", manifest_digest="sha256:1")
    assert aliases.get("production") == first
    assert (first.step, first.sequence, first.by, first.reason) == (300, 1, "ann", "good")
    second = move(aliases, 600, 1)
    assert (second.step, second.sequence) == (600, 2)
    assert aliases.get("production") == second


def test_create_only_refuses_an_alias_that_exists(aliases):
    current = move(aliases, 300, None)
    with pytest.raises(PreconditionFailedError, match="expected no alias, found sequence 1") as e:
        move(aliases, 600, None)
    assert e.value.current == current


@pytest.mark.parametrize("expect", [0, 1, 3])
def test_a_stale_move_is_refused_and_shows_the_current_alias(aliases, expect):
    move(aliases, 300, None)
    current = move(aliases, 600, 1)
    with pytest.raises(PreconditionFailedError, match=f"expected sequence {expect}") as caught:
        move(aliases, 900, expect)
    assert caught.value.current == current
    assert aliases.get("production").step == 600


def test_moving_an_absent_alias_is_refused(aliases):
    with pytest.raises(PreconditionFailedError, match="found no alias") as caught:
        move(aliases, 300, 1)
    assert caught.value.current is None


def test_a_deleted_alias_is_gone_but_its_sequence_goes_on(aliases):
    move(aliases, 300, None)
    tombstone = aliases.delete("production", expect=1, by="ann", reason="bad")
    assert (tombstone.sequence, tombstone.deleted) == (2, True)
    assert aliases.get("production") is None
    assert aliases.list() == []
    with pytest.raises(PreconditionFailedError) as caught:
        move(aliases, 600, 2)
    assert caught.value.current is None
    assert move(aliases, 600, None).sequence == 3
    assert [(e.sequence, e.step, e.deleted) for e in aliases.history("production")] == [
        (3, 600, False),
        (2, 300, True),
        (1, 300, False),
    ]


def test_a_stale_or_repeated_deletion_is_refused(aliases):
    with pytest.raises(AliasNotFoundError):
        aliases.delete("production", expect=1)
    move(aliases, 300, None)
    move(aliases, 600, 1)
    with pytest.raises(PreconditionFailedError):
        aliases.delete("production", expect=1)
    aliases.delete("production", expect=2)
    with pytest.raises(AliasNotFoundError):
        aliases.delete("production", expect=3)


def test_aliases_are_listed_by_name(aliases, objects):
    for name in ("production", "a.json", "best", "Z-1"):
        aliases.move(name, step=1, attempt=1, expect=None)
    objects.write("aliases/latest.json", b"not ours")
    objects.write("aliases/notes.txt", b"not ours")
    assert [alias.alias for alias in aliases.list()] == ["Z-1", "a.json", "best", "production"]


def test_history_keeps_the_last_moves(aliases):
    for sequence in range(HISTORY_KEPT + 5):
        move(aliases, sequence, sequence or None)
    events = aliases.history("production")
    assert len(events) == HISTORY_KEPT
    assert events[0].sequence == HISTORY_KEPT + 5
    assert [event.step for event in events] == list(range(HISTORY_KEPT + 4, 4, -1))


def test_history_of_an_alias_that_never_was(aliases):
    move(aliases, 1, None)
    with pytest.raises(AliasNotFoundError, match=r"'best'.*aliases: production"):
        aliases.history("best")


@pytest.mark.parametrize("name", ["latest", "300", "../x", "a/b", ""])
def test_names_that_could_mislead_are_refused(aliases, name):
    for action in (
        aliases.get,
        aliases.history,
        lambda alias: aliases.move(alias, step=1, attempt=1, expect=None),
        lambda alias: aliases.delete(alias, expect=1),
    ):
        with pytest.raises(InvalidURIError):
            action(name)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":"cairn.alias","version":9}', b"[1]"])
def test_an_alias_that_cannot_be_read_is_told(aliases, objects, data):
    objects.write(alias_file("production"), data)
    with pytest.raises(UnsupportedFormatError, match=r"aliases/production\.json"):
        aliases.get("production")
    with pytest.raises(UnsupportedFormatError, match=r"aliases/production\.json"):
        move(aliases, 1, None)


def test_an_alias_reads_back(aliases):
    alias = move(aliases, 300, None, reason="é")
    assert Alias.parse(alias.to_bytes(), "p") == alias


def race(aliases, movers, moves):
    """Every mover makes `moves` moves, trying again when it loses."""
    start = threading.Barrier(movers)

    def run(index):
        start.wait()
        for number in range(moves):
            while True:
                seen = aliases.get("production")
                try:
                    move(aliases, index * 1000 + number, seen.sequence if seen else None)
                    break
                except PreconditionFailedError:
                    continue

    with ThreadPoolExecutor(movers) as pool:
        list(pool.map(run, range(movers)))
    events = list(reversed(aliases.history("production")))
    assert [event.sequence for event in events] == list(range(1, movers * moves + 1))
    assert {event.step for event in events} == {
        index * 1000 + number for index in range(movers) for number in range(moves)
    }


def test_racing_movers_lose_nothing(aliases):
    race(aliases, movers=4, moves=5)


def test_of_many_equal_moves_exactly_one_wins(aliases):
    movers = 12
    start = threading.Barrier(movers)

    def run(index):
        start.wait()
        try:
            return move(aliases, 300, None, by="same", reason="same")
        except PreconditionFailedError:
            return None

    with ThreadPoolExecutor(movers) as pool:
        won = [one for one in pool.map(run, range(movers)) if one]
    assert won == [aliases.get("production")]


def test_a_move_whose_answer_was_lost_has_still_happened_once(gcs):
    from cairn.storage.store.objects import ObjectStore

    aliases = AliasWriter(ObjectStore.open(f"{gcs.bucket_uri}/run"))
    lost = gcs.faults.add("lost_response", operation=r".*(insert|upload).*")
    assert move(aliases, 300, None).sequence == 1
    assert lost.fired == 1
    assert len(aliases.history("production")) == 1
