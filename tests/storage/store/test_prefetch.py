import threading

import pytest

from cairn.storage.store.prefetch import prefetch


def test_items_come_in_order():
    with prefetch((number for number in range(100)), 3) as items:
        assert list(items) == list(range(100))


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield 1
        yield 2
        raise RuntimeError("broken")

    with prefetch(source(), 5) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(RuntimeError, match="broken"):
            next(items)


def test_leaving_early_ends_the_thread_and_closes_the_source():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    with prefetch(endless(), 2) as items:
        next(items)
    assert closed.wait(10)
    assert not [t for t in threading.enumerate() if t.name == "cairn-prefetch"]
