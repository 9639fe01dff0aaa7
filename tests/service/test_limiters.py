"""Whose requests the store works for: some of each caller, and nothing stays of who has left."""

import asyncio

import pytest

from cairn.service.errors import NotReadyError
from cairn.service.http.limiters import AT_ONCE, MemoryLimiter, StoreLimiter
from tests.service.seams import limiters


def test_caller_who_floods_a_root_leaves_turns_to_others(monkeypatch):
    monkeypatch.setattr(limiters, "WAIT_SECONDS", 0.2)

    async def scenario():
        limiter, over, began = StoreLimiter(), asyncio.Event(), []

        async def ask(caller):
            async with limiter.slot("default", caller):
                began.append(caller)
                await over.wait()

        flood = [asyncio.create_task(ask("busy")) for _ in range(5 * AT_ONCE)]
        await asyncio.sleep(0)
        calm = [asyncio.create_task(ask("calm")) for _ in range(AT_ONCE - limiters.SHARE)]
        refused, _ = await asyncio.wait(flood, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.sleep(0.1)
        counts = began.count("busy"), began.count("calm")
        over.set()
        results = await asyncio.gather(*flood, *calm, return_exceptions=True)
        assert refused
        assert {type(one) for one in results} <= {type(None), NotReadyError}
        return counts

    assert asyncio.run(scenario()) == (limiters.SHARE, AT_ONCE - limiters.SHARE)


def test_turns_that_a_caller_does_not_use_are_anybodys():
    async def scenario():
        limiter, inside = StoreLimiter(), 0

        async def ask(number):
            nonlocal inside
            async with limiter.slot("default", f"caller {number}"):
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
    assert not app.state.store_limiter._semaphores


# Memory.


def test_answers_have_no_more_memory_together_than_there_is():
    async def scenario():
        memory, most = MemoryLimiter(1000, 600), 0

        async def ask(number):
            nonlocal most
            async with memory.reserve((f"caller {number % 7}",), 100 + number % 3 * 200):
                most = max(most, memory._by_owner.total())
                assert max(memory._by_owner.values()) <= 600
                await asyncio.sleep(0)

        await asyncio.gather(*map(ask, range(100)))
        assert not memory._by_owner
        assert not memory._waiting
        return most

    assert asyncio.run(scenario()) == 1000


@pytest.mark.parametrize("nbytes", [601, 1000, 10**12])
def test_who_needs_more_than_a_share_is_alone(nbytes):
    async def scenario():
        memory, inside = MemoryLimiter(1000, 600), 0

        async def ask():
            nonlocal inside
            async with memory.reserve(("greedy",), nbytes):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(ask() for _ in range(5)))

    asyncio.run(scenario())


def test_who_leaves_as_room_is_made_takes_nobody_with_them():
    async def scenario():
        memory, over = MemoryLimiter(1000, 600), asyncio.Event()

        async def ask(until=None):
            async with memory.reserve(("one",), 600):
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(ask(over))
        await asyncio.sleep(0)
        leaving, last = (asyncio.create_task(ask()) for _ in range(2))
        await asyncio.sleep(0)
        over.set()
        leaving.cancel()
        results = await asyncio.gather(first, leaving, last, return_exceptions=True)
        assert [type(one) for one in results] == [type(None), asyncio.CancelledError, type(None)]

    asyncio.run(scenario())


def test_who_needs_much_is_not_passed_for_good():
    async def scenario():
        memory, order, over = MemoryLimiter(1000, 600), [], asyncio.Event()

        async def ask(name, nbytes):
            async with memory.reserve((name,), nbytes):
                order.append(name)
                await over.wait()

        tasks = [asyncio.create_task(ask("first", 500))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("large", 600)))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("small", 10)))
        await asyncio.sleep(0)
        assert order == ["first"]
        over.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["first", "large", "small"]


def test_who_finds_no_memory_is_told_so_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(limiters, "WAIT_SECONDS", 0.05)

    async def scenario():
        memory = MemoryLimiter(1000, 600)
        async with memory.reserve(("a",), 600), memory.reserve(("b",), 400):
            with pytest.raises(NotReadyError, match="it is in use"):
                async with memory.reserve(("c",), 1):
                    raise AssertionError("there was none")
            assert not memory._waiting
        async with memory.reserve(("c",), 600):
            pass
        with pytest.raises(TimeoutError):  # of what is done with it
            async with memory.reserve(("c",), 1):
                raise TimeoutError
        assert not memory._by_owner

    asyncio.run(scenario())


def test_a_root_leaves_memory_for_the_values_of_others(monkeypatch):
    monkeypatch.setattr(limiters, "WAIT_SECONDS", 0.01)

    async def scenario():
        memory = MemoryLimiter(1000, 600)
        async with (
            memory.reserve(("root a", "caller x"), 300),
            memory.reserve(("root a", "caller y"), 300),
            memory.reserve(("root b", "caller z"), 300),
        ):
            for caller in ("x", "z", "w"):
                with pytest.raises(NotReadyError, match=f"root a and caller {caller}"):
                    async with memory.reserve(("root a", f"caller {caller}"), 1):
                        pass
            async with memory.reserve(("root b", "caller w"), 100):
                pass

    asyncio.run(scenario())
