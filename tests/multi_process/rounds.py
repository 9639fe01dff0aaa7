"""Rounds of talk, in which processes come late, fail, or make another call; runs in all of them."""

from __future__ import annotations

import logging
import time
from typing import Any
from unittest import mock

import jax

from cairn.state.checkpointing.processes import agreement, background, exchange, straggler_log
from cairn.state.checkpointing.processes.coordination import coordination
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
        told = error_of(lambda: agreement.agree(decided))
        time.sleep(max(0.0, 4 * LATE_SECONDS - (time.monotonic() - began)))
        return told

    with mock.patch.object(exchange, "LATE_SECONDS", LATE_SECONDS):
        found["large"] = len(agreement.agree(decided))
        found["collected"] = agreement.collect({"index": index})
        found["process 2 is late"] = late(2)
        found["after that"] = agreement.collect(index)
        found["process 0 is late"] = late(0)
        found["and after that"] = agreement.collect(index)
        call = decided if index else other
        found["another call"] = error_of(lambda: agreement.agree(call))
        found["interrupted"] = error_of(lambda: agreement.all_or_none(interrupted(index)))
    found["warned"] = warned(index)
    for _ in range(50):
        agreement.agree(decided)
    agreement.collect(index)
    found["kept"] = len(coordination().key_value_dir_get("cairn/round/"))
    agreement.collect(index)  # nobody leaves while another counts
    return found


def warned(index: int) -> list[str]:
    """What the log of this process says of a save to which 2 comes late, and which 0 ends late."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cairn.processes")
    logger.addHandler(handler)
    with mock.patch.object(straggler_log, "FIRST_LOG_SECONDS", 0.5):
        if index == 2:
            time.sleep(LATE_SECONDS)
        background.meet("cairn/warned", "start")
        if index == 0:
            time.sleep(LATE_SECONDS)
        background.share_outcome("cairn/warned/outcome", None)
    logger.removeHandler(handler)
    return said


def interrupted(index: int) -> Any:
    """A call that somebody stops by hand on process 1."""

    def prepare() -> int:
        if index == 1:
            raise KeyboardInterrupt("stopped by hand")
        return index

    return prepare
