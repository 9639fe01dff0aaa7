"""Shell completion: names that the control plane has, and values of options.

The control plane has one second to answer. If it does not, there are no completions and no error
text, which would appear in the middle of the line that the user types.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import islice
from typing import Any, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import resolve_run

DTYPES: Final = ("bfloat16", "float16", "float32", "float64")

_SECONDS: Final = 1.0
"""Deadline of a completion: the user waits for it while typing."""

_MOST: Final = 500
"""Largest number of names to offer."""

STEPS: Final = "steps"
"""Name between a run and the number of a step."""

_BASH: Final = "complete_bash"
_JOINTS: Final = ("@", "=")
"""Characters at which Bash splits a word; it passes each of them as a word of its own."""


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of runs; ROOT/RUN if several roots have the name."""

    def names(client: Client) -> list[str]:
        listed = list(islice(client.runs(root=_root(context)), _MOST))
        counts = Counter(run.name for run in listed)
        return [run.name if counts[run.name] == 1 else f"{run.root}/{run.name}" for run in listed]

    return _fetch(context, names)


def roots(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of roots."""
    return _fetch(context, lambda client: (root.name for root in client.roots()))


def policies(context: typer.Context, incomplete: str) -> list[str]:
    """Complete KIND/NAME of policies."""

    def names(client: Client) -> list[str]:
        listed = client.policies().policies
        return [*dict.fromkeys(f"{state.kind}/{state.name}" for state in listed)]

    return _fetch(context, names)


def checkpoints(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the next part of RUN, RUN@ALIAS or RUN/steps/N, also after ROOT/."""
    run, alias, _ = incomplete.partition("@")
    if alias:
        return [f"{run}@{name}" for name in _aliases(context, run)]
    head, slash, tail = incomplete.rpartition("/")
    if not slash:
        return runs(context, incomplete)
    if head.endswith("/steps") or STEPS.startswith(tail):
        run = head.removesuffix("/steps")
        return [f"{run}/steps/{step}" for step in _steps(context, run)]
    return _fetch(context, lambda client: (f"{head}/{run.name}" for run in client.runs(root=head)))


def steps(context: typer.Context, incomplete: str) -> list[str]:
    """Complete steps of the run that the line already names."""
    return _steps(context, _run(context))


def aliases(context: typer.Context, incomplete: str) -> list[str]:
    """Complete aliases of the run that the line already names."""
    return _aliases(context, _run(context))


def steps_and_aliases(context: typer.Context, incomplete: str) -> list[str]:
    """Complete steps, then aliases, of the run that the line already names."""
    return steps(context, incomplete) + aliases(context, incomplete)


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


def _root(context: typer.Context) -> str | None:
    return context.params.get("root")


def _run(context: typer.Context) -> str:
    text = str(context.params.get("run") or context.params.get("checkpoint"))
    return text.partition("@")[0].partition(f"/{STEPS}/")[0]


def _aliases(context: typer.Context, run: str) -> list[str]:
    def names(client: Client) -> Iterator[str]:
        place = resolve_run(client, run, _root(context))
        yield from (alias.alias for alias in client.aliases(place.run, root=place.root))

    return _fetch(context, names)


def _steps(context: typer.Context, run: str) -> list[str]:
    def numbers(client: Client) -> Iterator[str]:
        place = resolve_run(client, run, _root(context))
        for checkpoint in client.checkpoints(place.run, root=place.root):
            yield str(checkpoint.step)

    return _fetch(context, numbers)


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
