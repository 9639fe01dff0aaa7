"""A step that somebody begins to hold while it is deleted or removed, in every order of the looks.

Who has just begun to hold a step asks at once for its intent, its tombstone and its manifest; the
store answers each at a moment of its own. `test_protocol.py` searches at random; here one process
is stopped at each of its calls, the other at each of its own in every order of those made at once,
and the first goes on.
"""

from itertools import permutations
from unittest.mock import patch

import pytest

from cairn import collect_garbage, delete_step, find_deletable_step, promote_step
from tests.faults.report import trials
from tests.storage.records import AliasWriter, held
from tests.storage.runs.test_protocol import actor, problems, world_after
from tests.storage.seams import trash

LOOKS = 3
ORDERS = list(permutations(range(LOOKS)))[:: trials(short=5, long=1)]
STOPS_APART = trials(short=5, long=1)


def needing(made):
    """Holds the step that it saw before, and points an alias to it."""

    def body():
        with held(made.run(), (1, 1), by="p", reason="promote it"):
            AliasWriter(made.store, made.clock).move("production", step=1, attempt=1, expect=None)

    return actor("who needs it", body)


def promoting(made):
    return actor(
        "who promotes it",
        lambda: promote_step(made.run(), 1, "production", by="p", expect=None),
    )


def removing(made):
    """The step is deleted, and its bytes may go."""
    delete_step(made.run(), find_deletable_step(made.run(), 1), by="d", grace=0, clock=made.clock)
    return actor("collector", lambda: collect_garbage(made.run(), by="gc", clock=made.clock))


def deleting(made):
    going = find_deletable_step(made.run(), 1)

    def body():
        delete_step(made.run(), going, by="d", grace=0, clock=made.clock)

    return actor("deleter", body)


def every_schedule(goes, needs, orders):
    """What is broken where one stops and the other goes first for a while, and how that came.

    Of the orders in which the same looks were made before the other went on, one is enough: what
    has happened is the same, and what is left is made once the other has ended.
    """
    tried = set()
    for order in orders:
        _, alone = carried_out(goes, needs, order, {})
        going = sum(not line.startswith("who") for line in alone)
        _, first = carried_out(goes, needs, order, {0: 1})
        asking = sum(line.startswith("who") for line in first)
        for calls in range(1, asking + 1):
            looks = sum(line.startswith("who needs it/") for line in first[:calls])
            if (made := (calls, frozenset(order[:looks]))) in tried:
                continue
            tried.add(made)
            for stopped in range(calls % STOPS_APART, going, STOPS_APART):
                yield carried_out(goes, needs, order, {stopped: 1, stopped + calls: 0})


def carried_out(goes, needs, order, switches):
    made = world_after((1, 2), switches, closed=True, kills=0, pauses=0)
    made.deleted.append(1)
    at_once(made, order)
    made.scheduler.run(goes(made), needs(made))
    for _ in range(2):
        collect_garbage(made.run(), by="gc", clock=made.clock)
    return problems(made), made.scheduler.history


def at_once(made, order):
    """Have the looks begin in this order."""
    asked = made.store.gather

    def in_order(*calls):
        if not made.scheduler.current.startswith("who"):
            return [call() for call in calls]  # one of the orders: it is stopped between any two
        if len(calls) not in (LOOKS, LOOKS + 1):
            return asked(*calls)
        whole = (*order, *range(LOOKS, len(calls)))  # a promotion also asks what is noted
        found = dict(zip(whole, asked(*(calls[at] for at in whole)), strict=True))
        return [found[at] for at in range(len(calls))]

    made.store.gather = in_order


@pytest.mark.parametrize(
    ("goes", "needs", "orders"),
    [(removing, needing, ORDERS), (deleting, needing, ORDERS), (deleting, promoting, ORDERS[-1:])],
    ids=["removed", "deleted", "deleted while it is promoted"],
)
def test_nobody_comes_to_need_a_step_that_goes_in_whatever_order_they_look(goes, needs, orders):
    tried = set()
    for broken, history in every_schedule(goes, needs, orders):
        assert not broken, "\n".join([*broken, *history])
        tried.add(tuple(history))
    assert len(tried) > 100 / STOPS_APART


def test_a_collector_that_does_not_look_again_takes_away_what_was_just_promoted():
    """Why the tombstone stays while somebody holds the step: the manifest may be seen first."""
    holds = trash._holds

    def none_of_one_step(run, within=trash.TRASH):
        return holds(run) if within == trash.TRASH else []

    with patch.object(trash, "_holds", none_of_one_step):
        broken = [one for one in every_schedule(removing, needing, ORDERS) if one[0]]
    assert broken
    for found, history in broken:
        assert found == ["alias production names step 1, whose bytes are gone"]
        told = [
            next(at for at, line in enumerate(history) if line.startswith(who) and call in line)
            for who, call in (
                ("who needs it/", "read manifests/1.1.json"),
                ("collector", "delete manifests/1.1.json"),
                ("collector", "delete trash/1.1.json"),
                ("who needs it/", "read trash/1.1.json"),
            )
        ]
        assert told == sorted(told)
