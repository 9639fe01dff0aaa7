"""What simulated processes meet through, and what each of them keeps for itself."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
from typing_extensions import override

from cairn.state.checkpointing.processes import coordination

__all__ = ["MESSAGE_SECONDS", "Coordination", "OfEach", "Rounds"]

MESSAGE_SECONDS: Final = 0.001
"""A request to the coordination service, and its answer."""


class Coordination(coordination.Coordination):
    """JAX's coordination service: keys that are set once, and who waits for them."""

    def __init__(self, process: Callable[[], int]) -> None:
        self._process = process
        self._values: dict[str, str] = {}
        self._folders: dict[str, dict[str, str]] = collections.defaultdict(dict)
        self._waiting: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self.messages = 0

    def _message(self) -> None:
        self.messages += 1
        if self._process() == 0:  # whose time is looked at; a thousand others would wake too often
            time.sleep(MESSAGE_SECONDS)

    @override
    def key_value_set(self, key: str, value: str) -> None:
        self._message()
        with self._lock:
            if key in self._values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self._values[key] = value
            self._folders[key.rpartition("/")[0]][key] = value
            waiting = self._waiting.pop(key, ())
        for one in waiting:
            one.set()

    @override
    def key_value_try_get(self, key: str) -> str | None:
        self._message()
        return self._values.get(key)

    @override
    def blocking_key_value_get(self, key: str, timeout_secs: int) -> str:
        self._message()
        with self._lock:
            if key in self._values:
                return self._values[key]
            there = threading.Event()
            self._waiting.setdefault(key, []).append(there)
        if not there.wait(timeout_secs):
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self._values[key]

    @override
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._message()
        with self._lock:
            return list(self._folders[key.removesuffix("/")].items())

    @override
    def key_value_delete(self, key: str) -> None:
        self._message()
        with self._lock:
            if not key.endswith("/"):
                self._values.pop(key, None)
                self._folders[key.rpartition("/")[0]].pop(key, None)
                return
            for folder in [one for one in self._folders if f"{one}/".startswith(key)]:
                for name in self._folders.pop(folder):
                    self._values.pop(name, None)


class Rounds:
    """The numbers of the rounds of talk, of each process its own."""

    def __init__(self, process: Callable[[], int]) -> None:
        self._process = process
        self._counts: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)

    def __next__(self) -> int:
        return next(self._counts[self._process()])


class OfEach(dict[Any, Any]):
    """What each process keeps for itself, in a dict that is one module's."""

    def __init__(self, process: Callable[[], int]) -> None:
        self._process = process

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((self._process(), key), default)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((self._process(), key), value)
