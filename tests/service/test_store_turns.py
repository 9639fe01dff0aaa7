"""Whose requests the store works for: some of each caller, and nothing stays of who has left."""

import asyncio

import pytest

from cairn.service.errors import NotReadyError
from cairn.service.http import store_turns
from cairn.service.http.store_turns import AT_ONCE, SHARE, StoreTurns


def test_caller_who_floods_a_root_leaves_turns_to_others(monkeypatch):
    monkeypatch.setattr(store_turns, "WAIT_SECONDS", 0.2)

    async def scenario():
        turns, over, began = StoreTurns(), asyncio.Event(), []

        async def ask(caller):
            async with turns.turn("default", caller):
                began.append(caller)
                await over.wait()

        flood = [asyncio.create_task(ask("busy")) for _ in range(5 * AT_ONCE)]
        await asyncio.sleep(0)
        calm = [asyncio.create_task(ask("calm")) for _ in range(AT_ONCE - SHARE)]
        refused, _ = await asyncio.wait(flood, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.sleep(0.1)
        counts = began.count("busy"), began.count("calm")
        over.set()
        results = await asyncio.gather(*flood, *calm, return_exceptions=True)
        assert refused
        assert {type(one) for one in results} <= {type(None), NotReadyError}
        return counts

    assert asyncio.run(scenario()) == (SHARE, AT_ONCE - SHARE)


def test_turns_that_a_caller_does_not_use_are_anybodys():
    async def scenario():
        turns, inside = StoreTurns(), 0

        async def ask(number):
            nonlocal inside
            async with turns.turn("default", f"caller {number}"):
                inside += 1
                while inside < AT_ONCE:
                    await asyncio.sleep(0.01)

        await asyncio.wait_for(asyncio.gather(*map(ask, range(AT_ONCE))), 5)

    asyncio.run(scenario())


@pytest.mark.parametrize("query", ["", "?refresh=true"])
def test_roots_that_are_none_leave_nothing_behind(http, app, query):
    """A caller chooses the name, of up to 16 KiB: kept for each, it would fill the memory."""
    for number in range(5):
        path = f"/v1/roots/{'x' * 1000}{number}/runs/run/checkpoints"
        assert http.get(path + query).status_code in (404, 422)
        assert http.post(path, json={"step": 1}).status_code in (404, 422)
    assert not app.state.turns._lines
