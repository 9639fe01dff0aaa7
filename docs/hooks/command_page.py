"""The `cairn` command as a page, from the program's own help."""

from enum import EnumType
from typing import Any

import typer

from cairn.service.command.failures import MEANINGS

HEAD = """# The `cairn` command

"""

COMPLETION = """
`-h` and `--help` show the help of `cairn` and of each command. `cairn --install-completion` has
Bash, Zsh, Fish or PowerShell complete commands, options and their values, and the names of runs,
steps, aliases, operations and roots, for which the control plane of `CAIRN_URL` is given a second.
"""

TAIL = """
## Output and exit status

What was asked for goes to standard output, tab-separated where that is no terminal; progress and
errors go to standard error. A failure is one line there, and its kind is the exit status.

With `--json` it is JSON, in the shapes of the [HTTP API](http.md), whose members stay: lists as
`RunList`, `CheckpointList` (with the run's `problems`), `OperationList` and `WorkerList`; what a
command changed as `Alias`, `Checkpoint` or `Operation`; `verify` as the result of its operation.
Each is one document. What goes on is an object a line: `watch` and `--watch` print an `Operation`
whenever it changes, and `serve` and `worker` what they announce. Moments are RFC 3339, sizes are
bytes. A failure is an RFC 9457 problem on standard error, with `type`, `title` and `detail`, as the
control plane answered it where it did; what `verify`, `repair` and `adopt` find is no failure of
theirs, and in the document.

| status | meaning |
|---|---|
"""


def command_page(app: typer.Typer) -> str:
    """Returns the page of a Typer program."""
    group = typer.main.get_command(app)
    parts = [HEAD, _text(group.help), "\n", _table(group), COMPLETION]
    parts += [_section(path, command) for path, command in commands(group)]
    rows = [f"| {status:d} | {_cell(text)} |\n" for status, text in MEANINGS.items()]
    return "".join([*parts, TAIL, *rows])


def commands(group: Any, path: tuple[str, ...] = ("cairn",)) -> list[tuple[tuple[str, ...], Any]]:
    """Returns every command of a group, with the words that call it."""
    found = []
    for name, command in group.commands.items():
        here = (*path, name)
        if getattr(command, "invoke_without_command", True):
            found.append((here, command))
        if hasattr(command, "commands"):
            found += commands(command, here)
    return found


def _section(path: tuple[str, ...], command: Any) -> str:
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", 0)]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    usage = " ".join([*path, *(one.metavar or one.name.upper() for one in arguments)])
    lines = [
        f"\n## {' '.join(path)}\n",
        _text(command.help),
        f"\n`{usage}{' [OPTIONS]' if options else ''}`\n",
    ]
    return "\n".join(lines) + "\n" + _table(command)


def _table(command: Any) -> str:
    """The arguments and options of a command."""
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", 0)]
    if not shown:
        return ""
    shown.sort(key=lambda one: one.param_type_name != "argument")  # those first
    lines = ["| argument or option | default | what |", "|---|---|---|"]
    for one in shown:
        if one.param_type_name == "argument":
            lines.append(_row(one, one.metavar or one.name.upper(), ""))
        else:
            lines.append(_row(one, ", ".join([*one.opts, *one.secondary_opts]), _value(one)))
    return "\n".join(lines) + "\n"


def _row(parameter: Any, name: str, value: str) -> str:
    default = parameter.default
    if getattr(parameter, "is_flag", False) or default is None or callable(default):
        default = ""
    shown = f"`{default}`" if str(default) else ("required" if parameter.required else "")
    return f"| `{(name + ' ' + value).strip()}` | {shown} | {_cell(parameter.help)} |"


def _value(option: Any) -> str:
    """What an option takes: its metavar, the values of its enumeration, or nothing for a flag."""
    if option.is_flag:
        return ""
    kind = option.type_descriptor.annotation
    if option.metavar is None and isinstance(kind, EnumType):
        return "\\|".join(str(member.value) for member in kind)
    return str(option.metavar or option.name.upper())


def _text(help_text: str | None) -> str:
    return (help_text or "").replace("\f", "").strip() + "\n"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
