"""`cairn policies`: schedules, retention, automations and gates of the servers and of roots."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_ROOT
from cairn.service.command import completion
from cairn.service.command.options import UrlOption, console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.errors import ProblemResponseError
from cairn.service.policies import PolicyState

policies_app: Final = typer.Typer(
    help="Manage policies: schedules, retention, automations and gates.", no_args_is_help=True
)

PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KIND/NAME",
        help="Such as schedule/nightly, from `cairn policies list`.",
        autocompletion=completion.policies,
    ),
]
FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="JSON of the policy; - is standard input.", allow_dash=True
    ),
]
PolicyRootOption = Annotated[
    str,
    typer.Option(
        "--root", metavar="NAME", help="Root of the policy.", autocompletion=completion.roots
    ),
]


@policies_app.command("list")
def list_policies(url: UrlOption = None, json: JsonOption = False) -> None:
    """List the policies of the servers' environment and of roots."""
    with Client(url) as client:
        listed = client.policies()
    if json:
        print_document(listed)
        return
    titles = ("kind", "name", "root", "source", "last run (UTC)", "state", "next (UTC)", "does")
    rows = (
        (
            state.kind,
            state.name,
            state.root,
            f"{state.source}, overridden" if state.overridden else state.source,
            None if state.last is None else state.last.at,
            _last(state),
            state.next_due,
            state.sentence,
        )
        for state in listed.policies
    )
    print_table(console, titles, rows)
    for problem in listed.problems:
        name = f" {problem.kind}/{problem.name}" if problem.name else ""
        errors.print(f"{problem.root}{name}: {problem.detail}", soft_wrap=True)


@policies_app.command()
def show(
    policy: PolicyArgument,
    root: PolicyRootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print a policy as JSON, which `cairn policies set` takes.

    With --json: with its source, its version, and when it acts.
    """
    with Client(url) as client:
        state = client.policy(*_split(policy), root=root)
    print_document(state if json else state.policy)
    if not json:
        by = (
            "" if state.set_at is None else f", set {state.set_at:%Y-%m-%d %H:%M} by {state.set_by}"
        )
        errors.print(f"{state.sentence} Source: {state.source}{by}.", soft_wrap=True)


@policies_app.command("set")
def set_policy(
    file: FileArgument,
    root: PolicyRootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Create or change a policy of a root.

    If somebody else changes it at the same time, one of the two is refused.
    """
    document = _document(file)
    with Client(url) as client:
        before = _current(client, document, root)
        expect = None if before is None else before.sequence
        state = client.put_policy(document, expect=expect, root=root)
    if json:
        print_document(state)
        return
    verb = "created" if expect is None else "changed"
    print(f"{state.kind}/{state.name} {verb} in root {root}. {state.sentence}")


@policies_app.command()
def delete(
    policy: PolicyArgument,
    root: PolicyRootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a policy of a root, even if its record is damaged."""
    kind, name = _split(policy)
    with Client(url) as client:
        listed = client.policies()
        sequences = [
            state.sequence
            for state in listed.policies
            if (state.kind, state.name, state.root) == (kind, name, root)
            and state.sequence is not None
        ]
        broken = [
            problem
            for problem in listed.problems
            if (problem.kind, problem.name, problem.root) == (kind, name, root)
        ]
        # Without a record the server says that there is none, or whose it is.
        expect = sequences[0] if sequences else (0 if broken else 1)
        client.delete_policy(kind, name, expect=expect, root=root)
        left = client.policies() if json else None
    if left is not None:
        print_document(left)
        return
    print(f"{kind}/{name} deleted in root {root}")


@policies_app.command("try")
def try_policy(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="FILE|KIND/NAME",
            help="JSON of a policy, - for standard input, or one that is set.",
            autocompletion=completion.policies,
        ),
    ],
    root: PolicyRootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print what a policy would do now; nothing is changed."""
    is_file = policy == "-" or policy.endswith(".json") or Path(policy).is_file()
    with Client(url) as client:
        if is_file:
            document = _document(Path(policy))
        else:
            document = client.policy(*_split(policy), root=root).policy
        trial = client.try_policy(document, root=root)
    if json:
        print_document(trial)
        return
    print(trial.sentence)
    for moment in trial.due:
        print(f"next: {moment:%Y-%m-%d %H:%M} UTC")
    if trial.effects:
        titles = ("run", "step", "alias", "effect")
        rows = ((effect.run, effect.step, effect.alias, effect.detail) for effect in trial.effects)
        print_table(console, titles, rows)
    if not trial.whole:
        errors.print("There is more than is listed here.")


def _last(state: PolicyState) -> str | None:
    if state.last is None:  # it has not acted yet
        return None
    return state.last.problem or (state.last.state and state.last.state.value)


def _split(policy: str) -> tuple[str, str]:
    kind, slash, name = policy.partition("/")
    if not (kind and slash and name) or "/" in name:
        raise typer.BadParameter(f"{policy!r}: expected KIND/NAME, such as schedule/nightly")
    return kind, name


def _document(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        BadParameter: The file can't be read, or has none.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        document = json_format.loads(text)
    except (OSError, ValueError, RecursionError) as exc:
        raise typer.BadParameter(f"{file}: expected the JSON of a policy: {exc}") from exc
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{file}: expected a JSON object, found {type(document).__name__}")
    missing = [name for name in ("kind", "name") if not isinstance(document.get(name), str)]
    if missing:
        raise typer.BadParameter(f"{file}: expected the texts {' and '.join(missing)}")
    return document


def _current(client: Client, document: dict[str, Any], root: str) -> PolicyState | None:
    try:
        return client.policy(document["kind"], document["name"], root=root)
    except ProblemResponseError as exc:
        if exc.problem.get("type") != "urn:cairn:problem:policy-not-found":
            raise
        return None
