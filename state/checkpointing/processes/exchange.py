"""Rounds of messages between a job's processes: each sends a text, process 0 answers all.

A round uses JAX's coordination service and no device, so it does not wait for training steps that
devices still run. Process 0 waits for the others up to a deadline; after that, all processes raise
an error that names the stragglers. Each process counts its rounds, and rounds of the same number
belong together: all processes must take part in the same ones, in the same order.
"""

import functools
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax

from cairn.state.checkpointing.processes.coordination import Coordination, coordination
from cairn.state.checkpointing.processes.straggler_log import FIRST_LOG_SECONDS, StragglerLog
from cairn.storage.errors import LateProcessError

__all__ = [
    "LATE_SECONDS",
    "MOST_NAMED",
    "POLL_SECONDS",
    "absent",
    "exchange",
    "is_primary",
    "is_set",
    "named",
]

LATE_SECONDS: Final = 1800.0
"""Seconds that a process waits for others that are late."""

POLL_SECONDS: Final = 1
"""Seconds between two checks of a waiting process."""

_PIECE_CHARACTERS: Final = 1 << 20
"""Maximum characters per value; longer texts are divided. The service's limit is 4 MiB."""

MOST_NAMED: Final = 32
"""Maximum processes that an error or a log line names. In larger jobs only process 0 names any."""

_rounds = itertools.count()
_numbering = threading.Lock()
_answered: list[str] = []
"""Keys of rounds whose answers can be deleted once all processes are in a later round."""


def is_primary() -> bool:
    """Return True on process 0, which reads and writes the run's records for all."""
    return int(jax.process_index()) == 0


def exchange(place: str, message: str, answer: Callable[[Sequence[str]], str]) -> str:
    """Send a text to process 0 and return its answer, on every process. All must call this.

    Args:
        place: name of the call site, for the log and for errors.
        message: the text of this process; a few KiB.
        answer: function from all texts, in order of the processes, to the answer; called on
            process 0 only.

    Raises:
        LateProcessError: a process did not call this within `LATE_SECONDS`, or called it at
            another call site. Raised on every process, also on one that calls too late.
    """
    client = coordination()
    with _numbering:
        key = f"cairn/round/{next(_rounds)}"
    mine = json.dumps({"place": place, "message": message})
    _send(client, f"{key}/messages/{jax.process_index()}", mine)
    if is_primary():
        return _answer(client, key, place, answer)
    reply = json.loads(_wait_for_answer(client, key, place))
    if "late" in reply:
        raise LateProcessError(**reply["late"])
    text: str = reply["answer"]
    return text


def _first_answer(client: Coordination, key: str, mine: Mapping[str, Any]) -> str:
    """Set a round's answer unless it has one already; return the answer that it then has."""
    try:
        _send(client, f"{key}/answer", json.dumps(mine))
    except jax.errors.JaxRuntimeError as exc:
        if "ALREADY_EXISTS" not in str(exc):
            raise
    return _receive(client, f"{key}/answer")


def _answer(
    client: Coordination, key: str, place: str, answer: Callable[[Sequence[str]], str]
) -> str:
    messages = _wait_for_all(client, f"{key}/messages", place)
    late = _missing(messages, place) or _at_other_calls(messages, place)
    if late:
        _first_answer(client, key, {"late": late})
        raise LateProcessError(**late)
    text = answer([messages[index]["message"] for index in range(jax.process_count())])
    counting = json.loads(_first_answer(client, key, {"answer": text}))
    if "late" in counting:  # another process stopped waiting for this one
        raise LateProcessError(**counting["late"])
    client.key_value_delete(f"{key}/messages/")
    for earlier in _answered:  # all have read these: they are in this round
        client.key_value_delete(f"{earlier}/")
    _answered[:] = [key]
    return text


def _wait_for_all(client: Coordination, place_key: str, place: str) -> dict[int, Mapping[str, str]]:
    """Wait for all processes' messages; return those that came in time, by process."""
    stragglers = StragglerLog(place)
    while missing := _absent(messages := _messages(client, place_key)):
        if stragglers.waited(functools.partial(named, missing)) > LATE_SECONDS:
            break
        is_set(client, f"{place_key}/{missing[0]}.0")
    in_time: dict[int, Mapping[str, str]] = {}
    for index in sorted(set(range(jax.process_count())) - set(missing)):
        # Each piece begins with the number of pieces.
        count, _, first = messages[f"{index}.0"].partition(" ")
        others = [messages[f"{index}.{number}"] for number in range(1, int(count))]
        text = "".join([first, *(piece.partition(" ")[2] for piece in others)])
        in_time[index] = json.loads(text)
    return in_time


def _missing(messages: Mapping[int, Any], place: str) -> dict[str, str] | None:
    late = [index for index in range(jax.process_count()) if index not in messages]
    if not late:
        return None
    return {
        "path": place,
        "expected": f"all {jax.process_count()} processes within {LATE_SECONDS:.0f} s",
        "found": f"{named(late)} missing",
        "next_step": "See their logs; all processes must make the same calls.",
    }


def _at_other_calls(messages: Mapping[int, Mapping[str, str]], place: str) -> dict[str, str] | None:
    others = [index for index, message in messages.items() if message["place"] != place]
    if not others:
        return None
    return {
        "path": place,
        "expected": "the same call on every process",
        "found": f"{named(others)} at {messages[others[0]]['place']}",
        "next_step": "Make the same calls on every process, in the same order.",
    }


def _wait_for_answer(client: Coordination, key: str, place: str) -> str:
    """Return process 0's answer, or an answer that names it as late.

    If process 0 takes part in the round, this waits longer than process 0 itself waits for the
    others, so that its answer can name the stragglers.
    """
    stragglers = StragglerLog(place)
    while not is_set(client, f"{key}/answer.0"):
        waited = stragglers.waited(lambda: "an answer")
        if waited <= LATE_SECONDS:
            continue
        has_come = client.key_value_try_get(f"{key}/messages/0.0") is not None
        # Process 0 may have begun to wait just now, and it too waits for LATE_SECONDS.
        if has_come and waited <= 2 * LATE_SECONDS + FIRST_LOG_SECONDS:
            continue
        late = {
            "path": place,
            "expected": f"an answer of process 0 within {LATE_SECONDS:.0f} s",
            "found": "none" if has_come else "process 0 missing",
            "next_step": "See its log; all processes must make the same calls.",
        }
        return _first_answer(client, key, {"late": late})
    return _receive(client, f"{key}/answer")


def _send(client: Coordination, key: str, text: str) -> None:
    """Store a text of any length in pieces, each prefixed by their number; set the first one last.

    Once the first piece has a value, all have.
    """
    pieces = [
        text[start : start + _PIECE_CHARACTERS]
        for start in range(0, max(1, len(text)), _PIECE_CHARACTERS)
    ]
    for number, piece in reversed([*enumerate(pieces)]):
        client.key_value_set(f"{key}.{number}", f"{len(pieces)} {piece}")


def _receive(client: Coordination, key: str) -> str:
    """Return a text that `_send` has stored completely."""
    count, _, text = client.blocking_key_value_get(f"{key}.0", POLL_SECONDS).partition(" ")
    rest = [
        client.blocking_key_value_get(f"{key}.{number}", POLL_SECONDS).partition(" ")[2]
        for number in range(1, int(count))
    ]
    return "".join([text, *rest])


def absent(client: Coordination, place: str) -> list[int]:
    """Return the processes that have set nothing below `place`."""
    return _absent(_messages(client, place))


def _messages(client: Coordination, place: str) -> dict[str, str]:
    """Return all values below `place` by the last part of their key, with one request."""
    return {name.rpartition("/")[2]: text for name, text in client.key_value_dir_get(f"{place}/")}


def _absent(messages: Mapping[str, str]) -> list[int]:
    there = {name.partition(".")[0] for name in messages if name.partition(".")[2] in ("", "0")}
    return [index for index in range(jax.process_count()) if str(index) not in there]


def is_set(client: Coordination, name: str) -> bool:
    """Return True as soon as a key has a value; False if it has none after `POLL_SECONDS`."""
    try:
        client.blocking_key_value_get(name, POLL_SECONDS)
    except jax.errors.JaxRuntimeError as exc:
        if "DEADLINE_EXCEEDED" not in str(exc):
            raise
        return False
    return True


def named(numbers: Sequence[int]) -> str:
    """Return process numbers as text for errors and the log; only the first `MOST_NAMED`."""
    first = ", ".join(map(str, numbers[:MOST_NAMED]))
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return f"process{'es' if len(numbers) > 1 else ''} {first}{more}"
