"""A store that falls silent for a job of several processes; every function runs in all of them."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from tests.multi_process.deaths import SAVE_SECONDS, save, threads_left
from tests.storage.seams import deadlines


def fall_silent(run: str, steps: int, deadline: float) -> dict[str, Any]:
    """Saves steps, after some of whose requests the store says nothing more.

    Gives for each step that failed the error that this process was told, and the threads it left
    behind; and the last step with its attempt.
    """
    found: dict[str, Any] = {}
    save(run, 1).wait(SAVE_SECONDS)
    known = set(threading.enumerate())
    # Only where the store is silent: a busy machine may take longer for what is answered.
    with mock.patch.object(deadlines, "DEADLINE_SECONDS", deadline):
        for step in range(2, steps):
            try:
                save(run, step).wait(SAVE_SECONDS)
            except Exception as exc:
                names = [kind.__name__ for kind in type(exc).__mro__]
                found[str(step)] = [names, str(exc), threads_left(known)]
    last = save(run, steps)
    last.wait(SAVE_SECONDS)
    return {**found, "last": [last.step, last.attempt]}
