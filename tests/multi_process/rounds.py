"""Rounds of talk, in which processes come late, fail, or make another call; runs in all of them."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import jax

from cairn.state.checkpointing.processes import agreement, exchange
from tests.multi_process.scenarios import error_of, tell, wait_for
from tests.multi_process.seams import background, coordination, straggler_log

LATE_SECONDS = 4.0


def talk(large: int, folder: str) -> dict[str, Any]:
    """What each kind of round gave this process; they tell each other of events in a folder."""
    index = int(jax.process_index())
    found: dict[str, Any] = {}

    def decided() -> str:
        return "x" * large

    def other() -> str:
        return "somewhere else"

    def late(who: int) -> dict[str, Any]:
        if index == who:
            wait_for(folder, f"without {who}", {0, 1, 2} - {who})
        error = error_of(lambda: agreement.agree(decided))
        tell(folder, f"without {who}")
        return error

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
    found["warned"] = warned(index, folder)
    for _ in range(10):
        agreement.agree(lambda: "short")
    agreement.collect(index)
    found["kept"] = len(coordination.coordination().key_value_dir_get("cairn/round/"))
    agreement.collect(index)  # nobody leaves while another counts
    return found


def warned(index: int, folder: str) -> list[str]:
    """What the log of this process says of a save to which 2 comes late, and which 0 ends late."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        for who in (0, 2):
            if f"for process {who}" in said[-1]:
                tell(folder, f"waits for {who}")

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logger = logging.getLogger("cairn.processes")
    logger.addHandler(handler)
    with mock.patch.object(straggler_log, "FIRST_LOG_SECONDS", 0.5):
        if index == 2:
            wait_for(folder, "waits for 2", [0, 1])
        background.meet("cairn/warned", "start")
        if index == 0:
            wait_for(folder, "waits for 0", [1, 2])
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
