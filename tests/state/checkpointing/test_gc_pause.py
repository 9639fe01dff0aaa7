"""While many objects are made no garbage is collected, whoever asks for that, in whatever order."""

import gc
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from cairn.state.checkpointing.gc_pause import pause_gc


def test_collections_begin_again_once_all_have_left():
    assert gc.isenabled()
    first, second = ExitStack(), ExitStack()
    first.enter_context(pause_gc())
    second.enter_context(pause_gc())
    first.close()
    assert not gc.isenabled()
    with ThreadPoolExecutor(1) as pool:  # another thread than the one that entered
        pool.submit(second.close).result()
    assert gc.isenabled()


def test_who_has_none_has_none_afterwards():
    gc.disable()
    try:
        with pause_gc(), pause_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_collects_garbage():
    with pause_gc():
        child = multiprocessing.get_context("fork").Process(
            target=lambda: sys.exit(0 if _collects() else 1)
        )
        child.start()
    child.join(60)
    assert child.exitcode == 0


def _collects():
    enabled = gc.isenabled()
    with pause_gc():
        without = not gc.isenabled()
    return enabled and without and gc.isenabled()
