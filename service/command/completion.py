"""Shell completion: names that the control plane has, and values of options.

The control plane has one second to answer. If it does not, there are no completions and no error
text, which would appear in the middle of the line that the user types.
"""

import threading
from collections.abc import Callable, Iterable, MutableMapping
from itertools import islice
from typing import Any, Final

import typer

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_ROOT

DTYPES: Final = ("bfloat16", "float16", "float32", "float64")

_SECONDS: Final = 1.0
"""Deadline of a completion: the user waits for it while typing."""

_MOST: Final = 500
"""Largest number of names to offer."""

_BASH: Final = "complete_bash"
_JOINTS: Final = ("@", "=")
"""Characters at which Bash splits a word; it passes each of them as a word of its own."""


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of runs."""
    return _fetch(context, lambda client: (run.name for run in client.runs(root=_root(context))))


def roots(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of roots."""
    return _fetch(context, lambda client: (root.name for root in client.roots()))


def checkpoints(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the next part of RUN, RUN@ALIAS or RUN/steps/N."""
    run, alias, _ = incomplete.partition("@")
    if alias:
        return [f"{run}@{name}" for name in _aliases(context, run)]
    run, steps, _ = incomplete.partition("/")
    if steps:
        return [f"{run}/steps/{step}" for step in _steps(context, run)]
    return runs(context, incomplete)


def steps(context: typer.Context, incomplete: str) -> list[str]:
    """Complete steps of the run that the line already names."""
    return _steps(context, str(context.params.get("run")))


def aliases(context: typer.Context, incomplete: str) -> list[str]:
    """Complete aliases of the run that the line already names."""
    return _aliases(context, str(context.params.get("run")))


def operations(context: typer.Context, incomplete: str) -> list[str]:
    """Complete ids of operations, newest first."""
    return _fetch(context, lambda client: (operation.id for operation in client.operations()))


def workers(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of dead workers."""
    return _fetch(
        context, lambda client: (worker.name for worker in client.workers() if not worker.alive)
    )


def dtypes(incomplete: str) -> list[str]:
    """Complete dtypes of an export."""
    return list(DTYPES)


def rejoin_words(environment: MutableMapping[str, str]) -> str:
    """Join words that Bash split at `@` and `=`, so that a completer sees them whole.

    Args:
        environment: Variables of Bash's completion; COMP_WORDS has one word on each line. Changed
            in place.

    Returns:
        The prefix to cut from each completion: Bash completes only the part after the last `@`.
    """
    if environment.get("_CAIRN_COMPLETE") != _BASH:
        return ""
    try:
        words = environment["COMP_WORDS"].split("\n")
        last = int(environment["COMP_CWORD"])
    except (KeyError, ValueError):
        return ""
    joined: list[str] = []
    glue = False
    for word in words[: last + 1]:
        if joined and (glue or word in _JOINTS):
            joined[-1] += word
        else:
            joined.append(word)
        glue = word in _JOINTS
    if len(joined) == last + 1:
        return ""
    environment["COMP_WORDS"] = "\n".join(joined)
    environment["COMP_CWORD"] = str(len(joined) - 1)
    head, joint, _ = joined[-1].rpartition("@")
    return head + joint


def _root(context: typer.Context) -> str:
    return str(context.params.get("root") or DEFAULT_ROOT)


def _aliases(context: typer.Context, run: str) -> list[str]:
    return _fetch(
        context, lambda client: (alias.alias for alias in client.aliases(run, root=_root(context)))
    )


def _steps(context: typer.Context, run: str) -> list[str]:
    return _fetch(
        context,
        lambda client: (
            str(checkpoint.step) for checkpoint in client.checkpoints(run, root=_root(context))
        ),
    )


def _fetch(context: typer.Context, question: Callable[[Client], Iterable[str]]) -> list[str]:
    """Return the names that a query yields before the deadline; an empty list after an error.

    Args:
        context: Context of the completion, with the options that the line already has.
        question: Function that yields the names, with a client of the control plane.
    """
    names: list[str] = []
    url: Any = context.params.get("url")

    def ask() -> None:
        try:
            with Client(url, timeout=_SECONDS) as client:
                names.extend(islice(question(client), _MOST))
        except Exception:  # no error text in the line that the user types
            return

    # join() bounds the whole query, retries included; a daemon thread does not delay the exit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return list(names)
