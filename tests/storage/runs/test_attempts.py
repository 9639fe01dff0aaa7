import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import (
    Attempt,
    FencedError,
    Lease,
    LeaseHeldError,
    PreconditionFailedError,
    RunInfo,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from cairn.storage.runs.lease import CLOCK_MARGIN_SECONDS, read_lease
from cairn.storage.runs.records.attempts import find_superseded
from cairn.storage.runs.records.layout import RUN_FILE
from cairn.storage.store.clock import from_rfc3339, rfc3339
from cairn.storage.store.records import RecordLocation
from tests.storage.records import (
    LEASE_FILE,
    attempt_file,
    begin_attempt,
    counting,
    create_attempt,
    ensure_newest,
    holds_lease,
    list_attempts,
    put_record,
    release,
    renew,
)
from tests.storage.seams import lease


class SetClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def objects(some_objects):
    """Those of a run that exists."""
    objects = some_objects
    info = RunInfo(name="run", created="2026-01-01T00:00:00Z")
    objects.write(RUN_FILE, info.with_location(RecordLocation("1" * 32, RUN_FILE)).to_bytes())
    return objects


@pytest.fixture
def clock():
    return SetClock()


def attempt(number, base_step):
    return Attempt(number, base_step, "w", "2026-01-01T00:00:00Z")


steps = st.integers(0, 30)
histories = st.lists(st.integers(-1, 30), max_size=8).map(
    lambda bases: [attempt(number, base) for number, base in enumerate(bases, 1)]
)
manifests = st.sets(st.tuples(steps, st.integers(1, 9)), max_size=40)


@given(manifests, histories)
def test_counting_never_lists_a_step_that_was_superseded(published, attempts):
    held = counting(published, attempts)
    for step, number in held.items():
        assert (step, number) in published
        assert all(one.base_step >= step for one in attempts if one.number > number)


@given(manifests, histories)
def test_counting_lists_every_step_that_was_not_superseded(published, attempts):
    held = counting(published, attempts)
    for step, number in published:
        if all(one.base_step >= step for one in attempts if one.number > number):
            assert held[step] >= number
    assert list(held) == sorted(held)


@given(manifests, histories, st.randoms())
def test_the_order_of_listings_does_not_matter(published, attempts, random):
    shuffled = sorted(published, key=lambda _: random.random())
    turned = sorted(attempts, key=lambda _: random.random())
    assert counting(shuffled, turned) == counting(published, attempts)


@given(manifests, histories, st.integers(-1, 30))
def test_going_back_sets_aside_exactly_the_later_steps(published, attempts, base):
    before = counting(published, attempts)
    newest = max([one.number for one in attempts] + [number for _, number in published], default=0)
    after = counting(published, [*attempts, attempt(newest + 1, base)])
    assert after == {step: number for step, number in before.items() if step <= base}


def test_an_overwrite_replaces_one_step_and_drops_those_after_it():
    published = [(3, 1), (6, 1), (9, 1), (6, 2)]
    assert counting(published, [attempt(1, -1), attempt(2, 5)]) == {3: 1, 6: 2}


def test_a_writer_that_wakes_up_after_a_takeover_is_not_seen():
    published = [(3, 1), (6, 2), (9, 1)]
    assert counting(published, [attempt(1, -1), attempt(2, 3)]) == {3: 1, 6: 2}


def test_superseded_looks_at_later_attempts_only():
    is_superseded = find_superseded([attempt(1, -1), attempt(2, 5), attempt(4, 7)], ())
    assert is_superseded(6, 1)
    assert not is_superseded(5, 1)
    assert not is_superseded(7, 2)
    assert is_superseded(8, 2)
    assert is_superseded(8, 3)
    assert not is_superseded(100, 4)


def an_overwrite(then=()):
    """Attempt 2 was begun to overwrite 6 of 3, 6 and 9; `then` are later attempts."""
    second = replace(attempt(2, 9), base_attempt=1, overwrites=6)
    return [attempt(1, -1), second, *then]


def test_an_overwrite_replaces_nothing_until_it_is_published_and_all_at_once_then():
    before = {(3, 1), (6, 1), (9, 1)}
    assert counting(before, an_overwrite()) == {3: 1, 6: 1, 9: 1}
    assert counting(before | {(6, 2)}, an_overwrite()) == {3: 1, 6: 2}
    assert counting(before | {(6, 2), (9, 2)}, an_overwrite()) == {3: 1, 6: 2, 9: 2}
    third = replace(attempt(3, 9), base_attempt=2)
    went_on = counting(before | {(6, 2), (9, 2), (12, 3)}, an_overwrite([third]))
    assert went_on == {3: 1, 6: 2, 9: 2, 12: 3}


def test_an_overwrite_that_comes_once_another_has_gone_on_from_what_it_replaces_does_not_count():
    went_on = [replace(attempt(3, 9), base_attempt=1)]
    saved = {(3, 1), (6, 1), (9, 1), (6, 2), (12, 3)}
    assert counting(saved, an_overwrite(went_on)) == {3: 1, 6: 1, 9: 1, 12: 3}


def test_the_first_attempt_is_one_and_is_stored(objects, clock):
    begun = begin_attempt(objects, writer="trainer", base_step=-1, clock=clock, ttl=60)
    assert begun == Attempt(1, -1, "trainer", "2026-11-21T12:00:00.000000Z")
    assert list_attempts(objects) == [begun]
    lease = read_lease(objects)
    assert (lease.writer, lease.attempt) == ("trainer", 1)
    assert from_rfc3339(lease.expires) == clock.now + timedelta(seconds=60)


def test_the_same_writer_takes_over_at_once(objects, clock):
    first = begin_attempt(objects, writer="trainer", base_step=-1, clock=clock)
    second = begin_attempt(objects, writer="trainer", base_step=3, clock=clock)
    assert (second.number, second.base_step) == (2, 3)
    assert list_attempts(objects) == [first, second]
    assert read_lease(objects).attempt == 2


def test_another_writer_waits_for_the_expiry_and_the_margin(objects, clock):
    begin_attempt(objects, writer="first", base_step=-1, clock=clock, ttl=60)
    for seconds in (0, 60, CLOCK_MARGIN_SECONDS - 1):
        clock.pass_seconds(seconds)
        with pytest.raises(LeaseHeldError, match=r"first .attempt 1. until 2026-11-21T12:01") as e:
            begin_attempt(objects, writer="second", base_step=-1, clock=clock)
        assert e.value.holder == "first"
    assert len(list_attempts(objects)) == 1
    clock.pass_seconds(1)
    assert begin_attempt(objects, writer="second", base_step=-1, clock=clock).number == 2


def test_a_released_lease_is_free_at_once(objects, clock):
    first = begin_attempt(objects, writer="first", base_step=-1, clock=clock)
    release(objects, first, clock=clock)
    assert not read_lease(objects).is_alive(clock())
    assert begin_attempt(objects, writer="second", base_step=-1, clock=clock).number == 2


def test_only_the_holder_releases(objects, clock):
    first = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    release(objects, first, clock=clock)
    assert read_lease(objects).is_alive(clock())


def test_releasing_nothing_is_fine(objects, clock):
    release(objects, attempt(1, -1), clock=clock)
    assert read_lease(objects) is None


def test_renewing_moves_the_expiry(objects, clock):
    begun = begin_attempt(objects, writer="w", base_step=-1, clock=clock, ttl=60)
    clock.pass_seconds(50)
    renew(objects, begun, clock=clock, ttl=60)
    clock.pass_seconds(50)
    with pytest.raises(LeaseHeldError):
        begin_attempt(objects, writer="other", base_step=-1, clock=clock)


def test_a_renewal_that_comes_late_does_not_take_back_what_was_given_back(objects, clock):
    begun = begin_attempt(objects, writer="w", base_step=-1, clock=clock, instance="a job")
    release(objects, begun, clock=clock)
    with pytest.raises(FencedError, match="found that it was given back"):
        renew(objects, begun, clock=clock)
    assert begin_attempt(objects, writer="other", base_step=-1, clock=clock).number == 2


def test_a_late_writer_renews_if_nobody_came(objects, clock):
    begun = begin_attempt(objects, writer="w", base_step=-1, clock=clock, ttl=60)
    clock.pass_seconds(1000)
    renew(objects, begun, clock=clock)
    assert read_lease(objects).is_alive(clock())
    objects.delete(LEASE_FILE)
    renew(objects, begun, clock=clock)
    assert read_lease(objects).is_alive(clock())


def test_a_replaced_writer_is_fenced_off(objects, clock):
    first = begin_attempt(objects, writer="first", base_step=-1, clock=clock, ttl=60)
    ensure_newest(objects, first)
    clock.pass_seconds(60 + CLOCK_MARGIN_SECONDS)
    second = begin_attempt(objects, writer="second", base_step=-1, clock=clock)
    ensure_newest(objects, second)
    for action in (lambda: ensure_newest(objects, first), lambda: renew(objects, first)):
        with pytest.raises(FencedError, match=r"this writer was replaced.*attempt 2"):
            action()
    assert read_lease(objects).writer == "second"


def test_a_lease_that_others_change_each_time_is_given_up_and_said_to_be_contended(
    objects, clock, monkeypatch
):
    begun = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    tries = []

    def beaten(written, *args, **options):
        # Other runs of this process may renew their leases meanwhile.
        if written is objects:
            tries.append(args)
        raise PreconditionFailedError("changed by someone else")

    monkeypatch.setattr(lease, "write_record", beaten)
    for action in (
        lambda: begin_attempt(objects, writer="w", base_step=-1, clock=clock),
        lambda: renew(objects, begun, clock=clock),
    ):
        with pytest.raises(LeaseHeldError, match=r"the lease is contended.*one writer id"):
            action()
    assert len(tries) == 2 * lease._CAS_TRIES
    assert [one.number for one in list_attempts(objects)] == [1]


def test_a_fenced_writer_does_not_make_a_lease_again(objects, clock):
    first = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    objects.delete(LEASE_FILE)
    with pytest.raises(FencedError):
        renew(objects, first, clock=clock)
    assert read_lease(objects) is None


def test_a_writer_whose_run_was_removed_is_fenced_off_and_makes_no_lease(objects, clock):
    begun = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    objects.delete(attempt_file(begun.number))
    objects.delete(LEASE_FILE)
    for action in (lambda: ensure_newest(objects, begun), lambda: renew(objects, begun)):
        with pytest.raises(FencedError, match=r"the run was removed.*attempts/1\.json.*found none"):
            action()
    assert read_lease(objects) is None


def test_the_base_step_is_asked_for_once_the_lease_is_held(objects, clock):
    seen = []

    def base_step():
        seen.append(read_lease(objects).writer)
        return 7

    assert begin_attempt(objects, writer="w", base_step=base_step, clock=clock).base_step == 7
    assert seen == ["w"]


def test_a_start_that_comes_second_asks_again_what_to_keep(objects, clock):
    """What the first one saved meanwhile must not be superseded by what the second saw before."""
    asked = []

    def base_step():
        asked.append(read_lease(objects).attempt)
        if len(asked) == 1:
            begin_attempt(objects, writer="w", base_step=3, clock=clock)
            return 3
        return 7

    begun = begin_attempt(objects, writer="w", base_step=base_step, clock=clock)
    assert (begun.number, begun.base_step) == (2, 7)
    assert asked == [1, 2]
    assert read_lease(objects).attempt == 2


def test_a_start_that_fails_gives_the_lease_back(objects, clock):
    def broken():
        raise StoreUnavailableError("the store does not answer")

    with pytest.raises(StoreUnavailableError):
        begin_attempt(objects, writer="w", base_step=broken, clock=clock)
    assert begin_attempt(objects, writer="other", base_step=-1, clock=clock).number == 1


def test_the_lease_is_held_until_another_start_takes_it(objects, clock):
    first = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    assert holds_lease(objects, first)
    second = begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    assert not holds_lease(objects, first)
    release(objects, second, clock=clock)
    other = begin_attempt(objects, writer="other", base_step=-1, clock=clock)
    assert [holds_lease(objects, one) for one in (first, second, other)] == [False, False, True]


def test_a_number_is_never_used_twice(objects, clock):
    create_attempt(objects, Attempt(7, -1, "w", rfc3339(clock()), previous=(0, -1)))
    assert begin_attempt(objects, writer="w", base_step=-1, clock=clock).number == 8


def test_of_racing_starts_of_one_writer_the_newest_goes_on(objects):
    starters = 6
    start = threading.Barrier(starters)

    def begin(_):
        start.wait()
        try:
            return begin_attempt(objects, writer="w", base_step=-1)
        except FencedError:
            return None

    with ThreadPoolExecutor(starters) as pool:
        begun = [one for one in pool.map(begin, range(starters)) if one]
    assert len({one.number for one in begun}) == len(begun)
    attempts = list_attempts(objects)
    assert len(attempts) == starters
    newest = max(begun, key=lambda one: one.number)
    assert newest == attempts[-1]
    ensure_newest(objects, newest)
    renew(objects, newest)
    for one in begun:
        if one != newest:
            with pytest.raises(FencedError):
                ensure_newest(objects, one)


def test_a_start_does_not_take_the_lease_back_from_a_later_one(objects, clock):
    begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    later = Lease(writer="w", attempt=9, expires="2026-11-21T12:01:00Z")
    put_record(objects, LEASE_FILE, later)
    assert begin_attempt(objects, writer="w", base_step=-1, clock=clock).number == 9
    assert read_lease(objects).attempt == 9


def test_racing_starts_of_many_writers_give_one_lease(objects, clock):
    starters = 6
    start = threading.Barrier(starters)

    def begin(index):
        start.wait()
        try:
            return begin_attempt(objects, writer=f"w{index}", base_step=-1, clock=clock)
        except LeaseHeldError:
            return None

    with ThreadPoolExecutor(starters) as pool:
        begun = [one for one in pool.map(begin, range(starters)) if one]
    assert len(begun) == 1
    assert read_lease(objects).writer == begun[0].writer


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":"cairn.attempt","version":9}', b"[]"])
def test_an_attempt_that_cannot_be_read_stops_the_judgement(objects, data):
    objects.write(attempt_file(1), data)
    with pytest.raises(UnsupportedFormatError, match=r"attempts/1\.json"):
        list_attempts(objects)


def test_other_names_among_the_attempts_are_ignored(objects, clock):
    begin_attempt(objects, writer="w", base_step=-1, clock=clock)
    objects.write("attempts/1/300/data", b"1")
    objects.write("attempts/notes.json", b"1")
    assert [one.number for one in list_attempts(objects)] == [1]


def test_a_lease_reads_back(clock):
    lease = Lease(writer="w", attempt=3, expires="2026-11-21T12:00:00Z")
    assert Lease.parse(lease.to_bytes(), "p") == lease
    assert lease.is_alive(clock())
    clock.pass_seconds(CLOCK_MARGIN_SECONDS)
    assert not lease.is_alive(clock())
