"""Rounds of talk, in which processes come late, fail, or make another call; runs in all of them."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import jax

from cairn.storage.training import processes
from cairn.storage.training.processes import exchange
from cairn.storage.training.processes.coordination import coordination
from tests.multi_process.scenarios import error_of

LATE_SECONDS = 4.0


def talk(large: int) -> dict[str, Any]:
    """What each kind of round gave this process."""
    index = int(jax.process_index())
    found: dict[str, Any] = {}

    def decided() -> str:
        return "x" * large

    def other() -> str:
        return "somewhere else"

    def late(who: int) -> dict[str, Any]:
        began = time.monotonic()
        if index == who:
            time.sleep(3 * LATE_SECONDS)
        told = error_of(lambda: processes.agree(decided))
        time.sleep(max(0.0, 4 * LATE_SECONDS - (time.monotonic() - began)))
        return told

    with mock.patch.object(exchange, "LATE_SECONDS", LATE_SECONDS):
        found["large"] = len(processes.agree(decided))
        found["collected"] = processes.collect({"index": index})
        found["process 2 is late"] = late(2)
        found["after that"] = processes.collect(index)
        found["process 0 is late"] = late(0)
        found["and after that"] = processes.collect(index)
        call = decided if index else other
        found["another call"] = error_of(lambda: processes.agree(call))
        found["interrupted"] = error_of(lambda: processes.together(interrupted(index)))
    for _ in range(50):
        processes.agree(decided)
    processes.collect(index)
    found["kept"] = len(coordination().key_value_dir_get("cairn/round/"))
    processes.collect(index)  # nobody leaves while another counts
    return found


def interrupted(index: int) -> Any:
    """A call that somebody stops by hand on process 1."""

    def prepare() -> int:
        if index == 1:
            raise KeyboardInterrupt("stopped by hand")
        return index

    return prepare
